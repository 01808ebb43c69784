"""Adapters' routes of a cluster: the ones a server has, for all replicas that they concern."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from aiohttp import BodyPartReader, web

from vlora_sgl.cluster.catalogue import Files
from vlora_sgl.cluster.links import ADAPTER_ORDERS, NotSent, Refused, end_to_end
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import BodyTooLargeError, RequestError, UnknownAdapterError
from vlora_sgl.names import split_version, versioned
from vlora_sgl.strict_json import read_json
from vlora_sgl.versions import Versions

UPLOADED = "(sent in a request)"
"""Where an adapter is that came in one."""
FIELD_BYTES = 1 << 16


class AdapterRoutes:
    """Handlers.

    Args:
        router: the cluster's front.
    """

    def __init__(self, router: Router) -> None:
        self.router, self.links, self.catalogue = router, router.links, router.catalogue

    def mount(self, app: web.Application) -> None:
        """Add the routes."""
        orders = (self.load, self.reload, self.pin, self.unload, self.promote, self.roll_back)
        for path, handler in zip(ADAPTER_ORDERS, orders, strict=True):
            app.router.add_post(path, handler)
        app.router.add_get("/lora_adapters", self.list_adapters)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/v1/models/{model:.+}", self.retrieve_model)

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter on one replica; others get it when requests need it there. A further version of one goes
        wherever that is."""
        fields, files = await self._order(request)
        name, number = split_version(str(fields.get("lora_name")))
        path = UPLOADED if files else str(fields.get("lora_path"))
        versions = self.catalogue.versions.get(name)
        if versions is not None:
            answer = await self._load_beside(versions, number, fields, files)
        else:
            serving = await self.router.some()
            replica = serving[self.router.routing.choose(name, None, serving)]
            async with replica.lock(name):
                answer = await self.catalogue.load_on(replica, fields, files)
                replica.loaded[name] = path
        self.catalogue.add(name, number or 1, path, files)
        if fields.get("pinned") in (True, "true"):
            self.catalogue.pinned.add(name)
        return _passed_on(answer)

    async def _load_beside(self, versions: Versions, number: int | None, fields: JsonDict, files: Files) -> bytes:
        """Load a version wherever its name is: everywhere, or nowhere."""
        holders = await self._holders(versions.name)
        loaded: list[Replica] = []
        answers = []
        try:
            for replica in holders:
                answers.append(await self.catalogue.load_on(replica, fields, files))
                loaded.append(replica)
        except (Refused, NotSent):
            for replica in loaded:
                with contextlib.suppress(Refused, NotSent):
                    body = {"lora_name": versioned(versions.name, number or 0)}
                    await self.links.order(replica, "POST", "/unload_lora_adapter", body)
            raise
        return answers[0]

    async def reload(self, request: web.Request) -> web.Response:
        """Replace an adapter wherever it is loaded, everywhere or nowhere: first it is loaded beside the old one, then
        each replica changes over."""
        fields, files = await self._order(request)
        name, number = split_version(str(fields.get("lora_name")))
        await self._holders(name)
        versions = self.catalogue.versions[name]
        key = versions.name
        if not files and not fields.get("lora_path"):
            files = self.catalogue.files.get(key, {})
        path = UPLOADED if files else str(fields.get("lora_path") or self.catalogue.path_of(name))
        number = versions.last + 1 if number is None else number
        order = {"lora_name": versioned(name, number), "lora_path": path}
        answer = await self._load_beside(versions, number, order, files)
        self.catalogue.add(name, number, path, files)
        await self._promote(versions, number, 1.0, drop=True)
        return _passed_on(answer)

    async def promote(self, request: web.Request) -> web.Response:
        """Let a name mean another version, or try one out, wherever the name is.

        Raises:
            UnknownAdapterError: no such version.
            RequestError: no version, or no share.
        """
        body = _object(await request.read())
        name, number = split_version(str(body.get("lora_name")))
        if number is None:
            raise RequestError(f"which version of {name!r} is to be promoted? Name it {versioned(name, 2)}, say")
        self.catalogue.path_of(versioned(name, number))
        share, versions = body.get("share", 1.0), self.catalogue.versions[name]
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise RequestError(f"share must be a number from 0 to 1; got {share!r}")
        return _passed_on(await self._promote(versions, number, share, bool(body.get("drop"))))

    async def roll_back(self, request: web.Request) -> web.Response:
        """End trials wherever a name is; if there are none, let it mean what it meant before.

        Raises:
            UnknownAdapterError: nothing of that name.
            RequestError: it meant nothing else before.
        """
        name = split_version(str(_object(await request.read()).get("lora_name")))[0]
        await self._holders(name)
        versions = self.catalogue.versions[name]
        if versions.shares:
            return _passed_on(await self._promote(versions, versions.current, 1.0, drop=False))
        if versions.before is None:
            raise RequestError(f"no version of {name!r} that was current before is loaded")
        return _passed_on(await self._promote(versions, versions.before, 1.0, drop=False))

    async def _promote(self, versions: Versions, number: int, share: float, drop: bool) -> bytes:
        order = {"lora_name": versioned(versions.name, number), "share": share, "drop": drop}
        answers = []
        for replica in await self._holders(versions.name):
            answers.append(await self.links.order(replica, "POST", "/promote_lora_adapter", order))
        self.catalogue.promote(versions.name, number, share, drop)
        for replica in self.router.replicas:
            if replica.holds(versions.name):
                replica.loaded[versions.name] = self.catalogue.paths[versions.name]
        return answers[0]

    async def pin(self, request: web.Request) -> web.Response:
        """Pin an adapter wherever it is loaded, and wherever it will be; or no longer."""
        body = _object(await request.read())
        name = str(body.get("lora_name"))
        answer = await self.router.tell(request, await self._holders(name))
        (self.catalogue.pinned.add if body.get("pinned", True) else self.catalogue.pinned.discard)(name)
        return answer

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter, or a version, wherever it is loaded; its name is unknown once the first replica has
        agreed."""
        name = str(_object(await request.read()).get("lora_name"))
        holders = await self._holders(name)
        whole = self.catalogue.key(name) == split_version(name)[0]

        def forget(replica: Replica) -> None:
            if whole:
                replica.loaded.pop(split_version(name)[0], None)
            if self.catalogue.key(name) in self.catalogue.paths:
                self.catalogue.remove(name)

        return await self.router.tell(request, holders, forget)

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

    async def _holders(self, name: str) -> Sequence[Replica]:
        """Replicas that hold an adapter; if none does, it is loaded on one, because orders are for those that do.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        serving, plain = await self.router.some(), split_version(name)[0]
        if plain not in self.catalogue.versions and self.catalogue.may_come(plain):
            for replica in serving:  # which have it from a source by themselves
                rows = [row for row in await self.catalogue.adapters_of(replica) if row["adapter"] == plain]
                if rows:
                    self.catalogue.learn(rows)
                    replica.loaded[plain] = self.catalogue.paths[plain]
        self.catalogue.path_of(name)
        holders = [replica for replica in serving if replica.holds(plain)]
        if not holders:
            holders = [min(serving, key=lambda replica: replica.load)]
            await self.catalogue.bring([plain], holders[0])
        return holders

    async def _order(self, request: web.Request) -> tuple[JsonDict, Files]:
        """An order's fields, and the files of an adapter that came with it.

        Raises:
            BodyTooLargeError: they are more than a server takes.
            RequestError: the body is not what an order's is.
        """
        if request.content_type != "multipart/form-data":
            return _object(await request.read()), {}
        most = left = self.router.settings.adapter
        fields: JsonDict = {}
        files: dict[str, bytes] = {}
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or not part.name:
                    raise RequestError("each part of the body must have a name")
                content = bytearray()
                while chunk := await part.read_chunk(1 << 20):
                    content += chunk
                    left -= len(chunk)
                    if left < 0:
                        raise BodyTooLargeError(most, "--vlora-max-adapter-bytes")
                is_file = part.filename is not None or part.name.endswith((".json", ".safetensors"))
                if is_file:
                    files[part.name] = bytes(content)
                else:
                    fields[part.name] = content[:FIELD_BYTES].decode(errors="replace")
        except ValueError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the body is not multipart/form-data: {error}") from None
        return fields, files


def _passed_on(answer: bytes) -> web.Response:
    return web.Response(body=answer, content_type="application/json")


def _object(body: bytes) -> JsonDict:
    """The JSON object in a body; an empty one where there is none, which the replica then refuses.

    Raises:
        RequestError: it is not JSON as a server takes it.
    """
    data = read_json(body) if body else None
    return data if isinstance(data, dict) else {}
