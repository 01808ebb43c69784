"""One address for all replicas: requests go where their adapter is, adapters go where requests need them.

A request is sent on byte for byte and its answer comes back as it is produced. Until a byte of the answer has been
passed on, a request whose replica ends is sent to another one: without limit if it had not reached the replica, once
if it had (a request that ends replicas must not end them all).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from vlora_sgl.cluster.placement import Affinity, Routing
from vlora_sgl.cluster.replica import Replica, ReplicaGone
from vlora_sgl.cluster.requests import Wanted, read
from vlora_sgl.errors import AdapterError, ClusterError, ReplicaLostError, UnknownAdapterError, VLoraError

MAX_BODY = 2**30
CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 2.0
"""Less than the replicas' own (uvicorn's 5 s), so that a request never meets a connection that is being closed."""
RETRY_AFTER_S = 5
MOST_LOST = 1
"""How often a request that a replica had is sent to another."""

REPLICA_HEADER = "X-VLora-Replica"
"""Which replica answered."""
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect"}
)
ROUTED = (
    *("/generate", "/encode", "/classify", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
    *("/v1/classify", "/v1/vision/classify", "/v1/vision/count", "/v1/vision/detect"),
)
"""Requests, which go to one replica each."""
ANY = ("/model_info", "/get_model_info", "/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize")
"""Questions that every replica answers alike."""
ADAPTER_ORDERS = tuple(f"/{verb}_lora_adapter" for verb in ("load", "reload", "pin", "unload"))
ALL = ("/flush_cache", "/set_internal_state", "/abort_request", "/pause_generation", "/continue_generation")
"""Orders for every replica, which also check the key."""
OPEN = ("/health", "/health_generate", "/metrics")
"""What needs no key."""


@dataclass(frozen=True)
class Settings:
    """How a router works.

    Attributes:
        queue: most requests that wait for a replica's turn, all replicas together.
        patience: seconds that a request waits while no replica serves.
        api_key: the replicas'.
        admin_key: the replicas'.
    """

    queue: int = 4096
    patience: float = 60.0
    api_key: str | None = None
    admin_key: str | None = None

    def key_of(self, path: str) -> str | None:
        """The key that a route takes, as SGLang has it: the admin key does not open what is no administrator's."""
        return (self.admin_key or self.api_key) if path in ADAPTER_ORDERS else self.api_key


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A replica's own refusal of an order, to be passed on.

    Args:
        status: of its answer.
        body: of its answer.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body.decode(errors="replace")[:500])
        self.status, self.body = status, body


class NotSent(Exception):
    """The request did not reach the replica."""


class Lost(Exception):
    """The replica had the request, and ended before a byte of its answer came."""


class Router:
    """The front of a cluster.

    Attributes:
        adapters: paths of all adapters that the cluster knows, by name, wherever they are loaded.
        sent_again: requests that were sent to a second replica.
        lost: requests that were answered by an error because replicas ended.

    Args:
        replicas: all of them, serving or not.
        routing: picks among those that serve.
        session: to replicas.
        settings: see there.
        adapters: known from the start and loaded when asked for.
        on_trouble: called with a replica that did not answer.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        routing: Routing,
        session: aiohttp.ClientSession,
        settings: Settings,
        adapters: Mapping[str, str] | None = None,
        on_trouble: Callable[[Replica], None] = lambda replica: None,
    ) -> None:
        self.replicas, self.routing, self.session, self.settings = replicas, routing, session, settings
        self.adapters: dict[str, str] = dict(adapters or {})
        self.pinned: set[str] = set()
        self.bases: set[str] = {"default"}
        self.on_trouble = on_trouble
        self.sent_again = self.lost = 0
        self._unloaded: set[str] = set()
        self._change = asyncio.Event()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors, self.check_key])
        for path in ROUTED:
            app.router.add_post(path, self.serve)
        for path in ANY:
            app.router.add_route("*", path, self.ask_any)
        for path in ALL:
            app.router.add_route("*", path, self.tell_all)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health)
        app.router.add_get("/cluster", self.state)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/lora_adapters", self.list_adapters)
        orders = (self.load_adapter, self.reload_adapter, self.pin_adapter, self.unload_adapter)
        for path, handler in zip(ADAPTER_ORDERS, orders, strict=True):
            app.router.add_post(path, handler)
        app.router.add_route("*", "/{rest:.*}", self.no_such_route)
        return app

    @web.middleware
    async def check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Do nothing for whom the replicas would turn away."""
        key = self.settings.key_of(request.path)
        if key is not None and request.path not in (*OPEN, *ALL):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), key.encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # Replicas

    @property
    def serving(self) -> list[Replica]:
        """Replicas that serve now."""
        return [replica for replica in self.replicas if replica.serving]

    async def ready(self, replica: Replica) -> None:
        """A replica answers: bring its adapters in line with the cluster's, and let it serve.

        Adapters that it came with are the cluster's from now on, unless they were replaced or unloaded meanwhile.

        Raises:
            ClusterError: it does not do what it is told.
        """
        try:
            replica.begin(await self._align(replica))
        except (NotSent, Refused) as error:
            raise ClusterError(
                f"replica {replica.number} at {replica.url} does not do as it is told: {error}"
            ) from error
        self._change.set()

    async def _align(self, replica: Replica) -> dict[str, str]:
        loaded: dict[str, str] = {}
        self.bases.add(json.loads(await self._order(replica, "GET", "/model_info"))["model_path"])
        for card in json.loads(await self._order(replica, "GET", "/v1/models"))["data"]:
            name, path = card["id"], card.get("root") or card["id"]
            if not card.get("parent"):
                self.bases.add(name)
            elif name in self._unloaded:
                await self._order(replica, "POST", "/unload_lora_adapter", {"lora_name": name})
            else:
                loaded[name] = self.adapters.setdefault(name, path)
                if loaded[name] != path:
                    body = {"lora_name": name, "lora_path": loaded[name]}
                    await self._order(replica, "POST", "/reload_lora_adapter", body)
        return loaded

    async def _some(self) -> list[Replica]:
        """Replicas that serve, once there is one.

        Raises:
            ClusterError: none did for too long.
        """
        try:
            async with asyncio.timeout(self.settings.patience):
                while not self.serving:
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            raise ClusterError(
                f"none of {len(self.replicas)} replicas serves; waited {self.settings.patience:g} s"
            ) from None
        return self.serving

    # Requests

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request from one replica, or from another if that ends.

        Raises:
            UnknownAdapterError: an adapter that the cluster does not know.
            ReplicaLostError: the replicas that had it ended.
            ClusterError: too many requests wait, or nobody serves.
        """
        body = await request.read()
        wanted = read(body, self.adapters, self.bases)
        if sum(replica.waiting for replica in self.replicas) >= self.settings.queue:
            raise ClusterError(f"{self.settings.queue} requests are waiting already")
        losses = 0
        avoid: set[int] = set()
        while True:
            serving = await self._some()
            candidates = [r for r in serving if r.number not in avoid]
            if not candidates:  # all that serve have just failed: their supervisors will tell
                avoid.clear()
                await asyncio.sleep(0.1)
                continue
            lead = wanted.adapters[0] if wanted.adapters else None
            replica = candidates[self.routing.choose(lead, wanted.content, candidates)]
            try:
                async with replica.turn():
                    await self.bring(replica, wanted)
                    return await self._forward(request, replica, body)
            except ReplicaGone:
                continue
            except NotSent:
                avoid.add(replica.number)
                self.on_trouble(replica)
            except Lost:
                avoid.add(replica.number)
                self.on_trouble(replica)
                losses += 1
                if losses > MOST_LOST:
                    self.lost += 1
                    raise ReplicaLostError(
                        f"{losses} replicas ended while they had this request; it is not sent to another"
                    ) from None
                self.sent_again += 1

    async def bring(self, replica: Replica, wanted: Wanted) -> None:
        """Load what a request needs on a replica, unless it is there.

        Raises:
            AdapterError: the replica refuses one.
            NotSent: the replica does not answer.
        """
        for name in wanted.adapters:
            if replica.holds(name):
                continue
            async with replica.lock(name):
                if replica.holds(name):
                    continue
                path = self.adapters.get(name)
                if path is None:
                    raise UnknownAdapterError(name, self.adapters)
                await self.bring(replica, Wanted(_members(path, name)))
                body = {"lora_name": name, "lora_path": path, "pinned": name in self.pinned}
                try:
                    await self._order(replica, "POST", "/load_lora_adapter", body)
                except Refused as refusal:
                    raise AdapterError(f"adapter {name!r} cannot be loaded: {_reason(refusal.body)}") from None
                replica.loaded[name] = path
                replica.loads += 1

    async def _forward(self, request: web.Request, replica: Replica, body: bytes) -> web.StreamResponse:
        async with self._send(replica, request.method, request.path_qs, body, _end_to_end(request.headers)) as answer:
            replica.served += 1
            headers = {**_end_to_end(answer.headers), REPLICA_HEADER: str(replica.number)}
            try:
                if answer.content_type != "text/event-stream":
                    return web.Response(status=answer.status, headers=headers, body=await answer.read())
                first = await answer.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise Lost() from error
            out = web.StreamResponse(status=answer.status, headers=headers)
            await out.prepare(request)
            await out.write(first)
            async for chunk in self._rest(replica, answer):
                await out.write(chunk)
            await out.write_eof()
            return out

    async def _rest(self, replica: Replica, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The rest of a stream. Where it breaks off, its reader has a part already: all that is left is to say so."""
        try:
            while chunk := await answer.content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError):
            self.on_trouble(replica)
            self.lost += 1
            broken = ReplicaLostError("the replica ended in the middle of this answer")
            yield b"\n\ndata: " + json.dumps(_error(broken)).encode() + b"\n\ndata: [DONE]\n\n"

    @asynccontextmanager
    async def _send(
        self, replica: Replica, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A replica's answer, as far as its headers.

        Raises:
            NotSent: no connection.
            Lost: it broke before the headers came.
        """
        try:
            answer = await self.session.request(method, replica.url + path, data=body, headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise NotSent() from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost() from error
        async with answer:
            yield answer

    async def _order(
        self,
        replica: Replica,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Ask something of a replica; by default in the router's own name.

        Raises:
            Refused: any status but 200.
            NotSent: no answer; orders may be repeated.
        """
        if headers is None:
            key = self.settings.key_of(path)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**headers, "Content-Type": "application/json"} if data else headers
        try:
            async with self._send(replica, method, path, data, sent) as answer:
                text = await answer.read()
        except (Lost, aiohttp.ClientError, OSError) as error:
            raise NotSent() from error
        if answer.status != 200:
            raise Refused(answer.status, text)
        return text

    # Questions and orders

    async def ask_any(self, request: web.Request) -> web.StreamResponse:
        """Answer from the least loaded replica."""
        body = await request.read()
        for replica in sorted(await self._some(), key=lambda r: r.load):
            try:
                return await self._forward(request, replica, body)
            except (NotSent, Lost):
                self.on_trouble(replica)
        raise ClusterError("no replica answers")

    async def tell_all(self, request: web.Request) -> web.Response:
        """Pass an order on to every replica; the first refusal, else the first answer."""
        return await self._tell(request, await self._some())

    async def _tell(
        self, request: web.Request, replicas: Sequence[Replica], done: Callable[[Replica], Any] = lambda replica: None
    ) -> web.Response:
        body, headers = await request.read(), _end_to_end(request.headers)
        answers = []
        for replica in replicas:
            answers.append(await self._order(replica, request.method, request.path_qs, body or None, headers))
            done(replica)
        return web.Response(
            body=answers[0], content_type="application/json" if answers[0][:1] in b"{[" else "text/plain"
        )

    async def health(self, request: web.Request) -> web.Response:
        """200 while a replica serves."""
        return web.Response(status=200 if self.serving else 503)

    async def models(self, request: web.Request) -> web.Response:
        """A replica's list, with the adapters that are loaded elsewhere."""
        return web.json_response(await self._models(request))

    async def model(self, request: web.Request) -> web.Response:
        """The entry of that list."""
        name = request.match_info["model"]
        cards = (await self._models(request))["data"]
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            raise UnknownAdapterError(name, self.adapters)
        return web.json_response(card)

    async def _models(self, request: web.Request) -> Any:
        (replica, *_) = await self._some()
        models = json.loads(await self._order(replica, "GET", "/v1/models", headers=_end_to_end(request.headers)))
        listed = {card["id"] for card in models["data"]}
        parent = next((card["id"] for card in models["data"] if not card.get("parent")), None)
        for name, path in self.adapters.items():
            if name not in listed:
                models["data"].append(
                    {"id": name, "object": "model", "owned_by": "sglang", "root": path, "parent": parent}
                )
        return models

    async def no_such_route(self, request: web.Request) -> web.Response:
        """What concerns one replica is asked of that replica.

        Raises:
            web.HTTPNotFound: always.
        """
        urls = ", ".join(replica.url for replica in self.replicas)
        raise web.HTTPNotFound(text=f"a cluster does not serve {request.path}; its replicas may: {urls}")

    async def state(self, request: web.Request) -> web.Response:
        """Replicas, homes of the adapters and requests by adapter; the last can be given to the next start."""
        routing = self.routing
        shares = dict(routing.requests) if isinstance(routing, Affinity) else {}
        return web.json_response(
            {
                "replicas": [
                    {
                        **{name: getattr(r, name) for name in ("number", "url", "serving", "running", "waiting")},
                        **{name: getattr(r, name) for name in ("served", "loads", "starts")},
                        "adapters": sorted(r.loaded),
                    }
                    for r in self.replicas
                ],
                "adapters": self.adapters,
                "homes": routing.homes if isinstance(routing, Affinity) else {},
                "shares": {name: round(count, 3) for name, count in shares.items()},
                "sent_again": self.sent_again,
                "lost": self.lost,
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """The router's own, for Prometheus; every replica has more at its own ``/metrics``."""
        lines = []
        for name, kind, text in (
            ("serving", "gauge", "Whether the replica serves."),
            ("running", "gauge", "Requests that the replica has."),
            ("waiting", "gauge", "Requests that wait for the replica."),
            ("served", "counter", "Requests sent to the replica."),
            ("loads", "counter", "Adapters that the router loaded on the replica."),
            ("starts", "counter", "Times the replica began to serve."),
        ):
            lines += [f"# HELP vlora_cluster:{name} {text}", f"# TYPE vlora_cluster:{name} {kind}"]
            lines += [f'vlora_cluster:{name}{{replica="{r.number}"}} {int(getattr(r, name))}' for r in self.replicas]
        for name, value, text in (
            ("sent_again", self.sent_again, "Requests sent to a second replica because the first ended."),
            ("lost", self.lost, "Requests answered by an error because replicas ended."),
        ):
            lines += [f"# HELP vlora_cluster:{name} {text}", f"# TYPE vlora_cluster:{name} counter"]
            lines.append(f"vlora_cluster:{name} {value}")
        return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")

    # Adapters

    async def list_adapters(self, request: web.Request) -> web.Response:
        """Every adapter on every replica that holds it, and those that none holds."""
        rows: list[dict[str, Any]] = []
        for replica in await self._some():
            answer = await self._order(replica, "GET", "/lora_adapters", headers=_end_to_end(request.headers))
            rows += [{**row, "replica": replica.number} for row in json.loads(answer)["adapters"]]
        nowhere = self.adapters.keys() - {row["name"] for row in rows}
        rows += [{"name": n, "path": self.adapters[n], "residency": "disk", "replica": None} for n in sorted(nowhere)]
        return web.json_response({"adapters": rows})

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter on one replica; others get it when requests need it there."""
        body = _object(await request.read())
        name, path = str(body.get("lora_name")), str(body.get("lora_path"))
        serving = await self._some()
        # A replica that has it gives the refusal that it deserves.
        holder = next((r for r in serving if r.holds(name)), None)
        replica = holder or serving[self.routing.choose(name, None, serving)]
        async with replica.lock(name):
            answer = await self._tell(request, [replica])
            replica.loaded[name] = self.adapters[name] = path
        self._unloaded.discard(name)
        if body.get("pinned"):
            self.pinned.add(name)
        return answer

    async def reload_adapter(self, request: web.Request) -> web.Response:
        """Replace an adapter wherever it is loaded."""
        body = _object(await request.read())
        name = self._known(body)
        path = str(body.get("lora_path") or self.adapters[name])
        holders = await self._holders(name)
        answer = await self._tell(request, holders, lambda replica: replica.loaded.update({name: path}))
        self.adapters[name] = path
        return answer

    async def pin_adapter(self, request: web.Request) -> web.Response:
        """Pin an adapter wherever it is loaded, and wherever it will be; or no longer."""
        body = _object(await request.read())
        name = self._known(body)
        answer = await self._tell(request, await self._holders(name))
        (self.pinned.add if body.get("pinned", True) else self.pinned.discard)(name)
        return answer

    async def unload_adapter(self, request: web.Request) -> web.Response:
        """Unload an adapter wherever it is loaded; its name is unknown once the first replica has agreed."""
        name = self._known(_object(await request.read()))

        def forget(replica: Replica) -> None:
            replica.loaded.pop(name, None)
            self.adapters.pop(name, None)
            self.pinned.discard(name)
            self._unloaded.add(name)

        return await self._tell(request, await self._holders(name), forget)

    def _known(self, body: dict[str, Any]) -> str:
        name = str(body.get("lora_name"))
        if name not in self.adapters:
            raise UnknownAdapterError(name, self.adapters)
        return name

    async def _holders(self, name: str) -> list[Replica]:
        """Replicas that hold an adapter; if none does, it is loaded on one, because orders are for those that do."""
        serving = await self._some()
        holders = [replica for replica in serving if replica.holds(name)]
        if not holders:
            holders = [min(serving, key=lambda r: r.load)]
            await self.bring(holders[0], Wanted((name,)))
        return holders


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Our errors as OpenAI's clients expect them; a replica's refusals as they are."""
    try:
        return await handler(request)
    except Refused as refusal:
        return web.Response(status=refusal.status, body=refusal.body, content_type="application/json")
    except NotSent:
        error: VLoraError = ClusterError("a replica ended while it was asked; ask again")
    except VLoraError as ours:
        error = ours
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.http_status == 503 else {}
    return web.json_response(_error(error), status=error.http_status, headers=headers)


def _error(error: VLoraError) -> dict[str, Any]:
    return {
        "error": {"message": str(error), "type": type(error).__name__, "param": None, "code": error.http_status},
    }


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that are for the other end, not for the next hop."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty one where there is none, which the replica then refuses."""
    try:
        data = json.loads(body)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _reason(body: bytes) -> str:
    return str(_object(body).get("error_message") or body.decode(errors="replace")[:500])


def _members(path: str, name: str) -> tuple[str, ...]:
    """Adapters that must be loaded before this one: a mix's members."""
    if not (Path(path) / "vlora_mix.json").is_file():
        return ()
    from vlora_sgl.mixes.spec import member_names

    return member_names(path, name)
