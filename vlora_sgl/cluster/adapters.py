"""Adapters' routes of a cluster: the ones a server has, for all replicas that they concern."""

from __future__ import annotations

import json

from aiohttp import web

from vlora_sgl.cluster.links import ADAPTER_ORDERS, end_to_end
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.strict_json import read_json


class AdapterRoutes:
    """Handlers.

    Args:
        router: the cluster's front.
    """

    def __init__(self, router: Router) -> None:
        self.router, self.links, self.catalogue = router, router.links, router.catalogue

    def mount(self, app: web.Application) -> None:
        """Add the routes."""
        orders = (self.load, self.reload, self.pin, self.unload)
        for path, handler in zip(ADAPTER_ORDERS, orders, strict=True):
            app.router.add_post(path, handler)
        app.router.add_get("/lora_adapters", self.list_adapters)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/v1/models/{model:.+}", self.retrieve_model)

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter on one replica; others get it when requests need it there."""
        body = _object(await request.read())
        name, path = str(body.get("lora_name")), str(body.get("lora_path"))
        serving = await self.router.some()
        # A replica that has it gives the refusal that it deserves.
        holder = next((replica for replica in serving if replica.holds(name)), None)
        replica = holder or serving[self.router.routing.choose(name, None, serving)]
        async with replica.lock(name):
            answer = await self.router.tell(request, [replica])
            replica.loaded[name] = path
        self.catalogue.add(name, path, bool(body.get("pinned")))
        return answer

    async def reload(self, request: web.Request) -> web.Response:
        """Replace an adapter wherever it is loaded."""
        body = _object(await request.read())
        name = str(body.get("lora_name"))
        path = str(body.get("lora_path") or self.catalogue.path_of(name))
        holders = await self._holders(name)
        answer = await self.router.tell(request, holders, lambda replica: replica.loaded.update({name: path}))
        self.catalogue.paths[name] = path
        return answer

    async def pin(self, request: web.Request) -> web.Response:
        """Pin an adapter wherever it is loaded, and wherever it will be; or no longer."""
        body = _object(await request.read())
        name = str(body.get("lora_name"))
        answer = await self.router.tell(request, await self._holders(name))
        (self.catalogue.pinned.add if body.get("pinned", True) else self.catalogue.pinned.discard)(name)
        return answer

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter wherever it is loaded; its name is unknown once the first replica has agreed."""
        name = str(_object(await request.read()).get("lora_name"))

        def forget(replica: Replica) -> None:
            replica.loaded.pop(name, None)
            self.catalogue.remove(name)

        return await self.router.tell(request, await self._holders(name), forget)

    async def list_adapters(self, request: web.Request) -> web.Response:
        """Every adapter on every replica that holds it, and those that none holds."""
        rows: list[JsonDict] = []
        for replica in await self.router.some():
            answer = await self.links.order(replica, "GET", "/lora_adapters", headers=end_to_end(request.headers))
            rows += [{**row, "replica": replica.number} for row in json.loads(answer)["adapters"]]
        held = {row["name"] for row in rows}
        for name, path in self.catalogue.paths.items():
            if name not in held:
                rows.append({"name": name, "path": path, "residency": "disk", "replica": None})
        return web.json_response({"adapters": rows})

    async def list_models(self, request: web.Request) -> web.Response:
        """A replica's list, with the adapters that are loaded elsewhere or nowhere."""
        return web.json_response(await self._models(request))

    async def retrieve_model(self, request: web.Request) -> web.Response:
        """The entry of that list.

        Raises:
            UnknownAdapterError: there is none.
        """
        name = request.match_info["model"]
        card = next((card for card in (await self._models(request))["data"] if card["id"] == name), None)
        if card is None:
            raise UnknownAdapterError(name, self.catalogue.paths)
        return web.json_response(card)

    async def _models(self, request: web.Request) -> JsonDict:
        (replica, *_) = await self.router.some()
        answer = await self.links.order(replica, "GET", "/v1/models", headers=end_to_end(request.headers))
        models = json.loads(answer)
        listed = {card["id"] for card in models["data"]}
        parent = next((card["id"] for card in models["data"] if not card.get("parent")), None)
        for name, path in self.catalogue.paths.items():
            if name not in listed:
                card = {"id": name, "object": "model", "owned_by": "sglang", "root": path, "parent": parent}
                models["data"].append(card)
        return models

    async def _holders(self, name: str) -> list[Replica]:
        """Replicas that hold an adapter; if none does, it is loaded on one, because orders are for those that do.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        self.catalogue.path_of(name)
        serving = await self.router.some()
        holders = [replica for replica in serving if replica.holds(name)]
        if not holders:
            holders = [min(serving, key=lambda replica: replica.load)]
            await self.catalogue.bring([name], holders[0])
        return holders


def _object(body: bytes) -> JsonDict:
    """The JSON object in a body; an empty one where there is none, which the replica then refuses.

    Raises:
        RequestError: it is not JSON as a server takes it.
    """
    data = read_json(body) if body else None
    return data if isinstance(data, dict) else {}
