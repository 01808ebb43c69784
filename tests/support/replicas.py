"""Replicas without an engine: real HTTP servers that count what they get, and a replica router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from vlora_sgl.cluster.adapters import AdapterRoutes
from vlora_sgl.cluster.links import Keys, Links, new_session
from vlora_sgl.cluster.live import PageRoutes
from vlora_sgl.cluster.placement import Affinity, Routing
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router, Settings
from vlora_sgl.names import split_version
from vlora_sgl.sources import Source
from vlora_sgl.versions import Versions

ADMIN = "secret"
SETTINGS, KEYS = Settings(patience=0.5), Keys(admin=ADMIN)


class FakeReplica:
    """Speaks as much of a server's HTTP as the replica router uses.

    Attributes:
        adapters: loaded ones, path by name; versions that are not current by name and number.
        versions: by name.
        bodies: of the requests it got.
        orders: paths of the orders it got.
        hold: while unset, no request is answered.
        broken: path of an adapter that it refuses.
        chunks: events of a stream, before the last.
        watchers: of its live events.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.versions: dict[str, Versions] = {}
        self.bodies: list[Any] = []
        self.orders: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.chunks, self.stop_after = 3, 99
        self.watchers = 0
        self.broken = "broken"
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0, host: str = "127.0.0.1", patience: float = 0.1) -> None:
        app = web.Application()
        app.router.add_get("/health", self._fine)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/lora_adapters", self._rows)
        app.router.add_get("/v1/tokenize", self._fine)
        app.router.add_get("/vlora/live", self._live)
        app.router.add_post("/flush_cache", self._order)
        for verb in ("load", "unload", "reload", "pin", "promote", "roll_back"):
            app.router.add_post(f"/{verb}_lora_adapter", self._order)
        for path in ("/generate", "/v1/chat/completions", "/v1/vision/classify"):
            app.router.add_post(path, self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=patience)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End in order: what it was asked is answered first."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def kill(self) -> None:
        """End as a killed process does: every connection breaks, and no new one is taken."""
        if self._runner is None or self._runner.server is None:
            return
        for site in list(self._runner.sites):
            site._server.close()  # type: ignore[attr-defined]
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def _fine(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        adapters = "".join(f'sglang:held{{adapter="{name}"}} 1\n' for name in self.adapters)
        text = f"# HELP sglang:asked Requests.\n# TYPE sglang:asked counter\nsglang:asked {len(self.bodies)}\n"
        return web.Response(text=f"{text}# HELP sglang:held Adapters.\n# TYPE sglang:held gauge\n{adapters}")

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/base"})

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": [{"id": "base", "root": "base"}, *cards]})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        self.watchers += 1
        try:
            for number in range(1_000):
                event = json.dumps({"steps": [[number, 0, "merged", "A", False, False, {"A": 1}]]}).encode()
                # As a network may: not in one piece.
                await out.write(b"data: " + event[:9])
                await out.write(event[9:] + b"\n\n")
                await asyncio.sleep(0.02)
        finally:
            self.watchers -= 1
        return out

    async def _order(self, request: web.Request) -> web.Response:
        self.orders.append(request.path)
        if request.path == "/flush_cache":
            return web.Response(text="Cache flushed.")
        if request.headers.get("Authorization") != f"Bearer {ADMIN}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.content_type == "multipart/form-data":
            form = await request.post()
            body = {name: value for name, value in form.items() if isinstance(value, str)}
            sent = {name: value.file.read() for name, value in form.items() if not isinstance(value, str)}
            body["lora_path"] = repr(sorted(sent.items()))
        else:
            body = json.loads(await request.text())
        refusal = self._done(request.path, body)
        if refusal is not None:
            return web.json_response({"success": False, "error_message": refusal}, status=400)
        return web.json_response({"success": True, "report": "all matched"})

    def _versions(self, name: str) -> Versions:
        return self.versions.setdefault(name, Versions(name))

    def _done(self, order: str, body: Any) -> str | None:
        """Carry out an order as a server does; the refusal."""
        name, number = split_version(body["lora_name"])
        path, known = body.get("lora_path"), name in self.adapters
        versions = self._versions(name) if known else Versions(name, current=number or 1)
        if path == self.broken:
            return f"no {name} from {path}"
        if order == "/load_lora_adapter":
            if known and (number is None or number <= versions.last):
                return f"{body['lora_name']} is loaded already"
            versions.add(number or 1, "", in_place=False)
            self.versions[name] = versions
            self.adapters[versions.key(number or 1)] = str(path)
        elif order == "/promote_lora_adapter":
            assert number in versions.numbers()
            if number == versions.current:
                versions.shares = {}
            elif body["share"] < 1:
                versions.try_out(number, body["share"])
            else:
                names = versions.promote(number)
                self.adapters |= {names[key]: self.adapters.pop(key) for key in names}
                if body.get("drop"):
                    self._done("/unload_lora_adapter", {"lora_name": f"{name}@{versions.before}"})
        elif order == "/unload_lora_adapter":
            whole = number is None or versions.key(number) == name
            for one in versions.numbers() if whole else [int(number or 0)]:
                self.adapters.pop(versions.key(one))
                versions.forget(one)
            if whole:
                self.versions.pop(name, None)
        return None

    async def _rows(self, request: web.Request) -> web.Response:
        rows = []
        for key, path in self.adapters.items():
            name, number = split_version(key)
            versions = self._versions(name)
            number = number or versions.current
            row = {"name": key, "adapter": name, "version": number, "share": versions.share_of(number), "path": path}
            rows.append({**row, "residency": "host"})
        return web.json_response({"adapters": rows})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.bodies.append(body)
        await self.hold.wait()
        if not body.get("stream"):
            return web.json_response({"by": self.url, "has": sorted(self.adapters)}, headers={"X-Kept": "yes"})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number in range(body.get("events", self.chunks)):
            await out.write(f'data: {{"n": {number}}}\n\n'.encode())
            if number == self.stop_after:
                await asyncio.Event().wait()
            await asyncio.sleep(body.get("every", 0.05))
        await out.write(b"data: [DONE]\n\n")
        return out


class FakeCluster:
    """Fake replicas behind a real router.

    Attributes:
        fakes: the replicas.
        router: in front of them.
        url: of the router.
        client: a session of a user.
        troubles: numbers of replicas that the replica router reported as not serving.
    """

    def __init__(self, fakes: list[FakeReplica], router: Router, url: str, client: aiohttp.ClientSession) -> None:
        self.fakes, self.router, self.url, self.client = fakes, router, url, client
        self.troubles: list[int] = []

    async def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        """Status and parsed answer."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.text())

    async def ask(self, adapter: str | None = None, **more: Any) -> tuple[int, Any]:
        """One request."""
        return await self.post("/generate", {"text": "x", "lora_path": adapter, **more})

    async def get(self, path: str) -> Any:
        """Parsed answer of a GET that must succeed."""
        async with self.client.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return json.loads(await answer.text())


@contextlib.asynccontextmanager
async def cluster(
    replicas: int = 2,
    routing: Routing | None = None,
    limit: int = 64,
    known: dict[str, str] | None = None,
    settings: Settings = SETTINGS,
    keys: Keys = KEYS,
    sources: Sequence[Source] = (),
) -> AsyncIterator[FakeCluster]:
    """Start everything; every replica serves when this returns."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeReplica() for _ in range(replicas)]
        for fake in fakes:
            await fake.start()
        session = await stack.enter_async_context(new_session())
        views = [Replica(number, fake.url, limit) for number, fake in enumerate(fakes)]
        router = Router(views, routing or Affinity(slots=4), Links(session, keys), settings, known, sources=sources)
        runner = web.AppRunner(
            router.application(AdapterRoutes(router).mount, PageRoutes(router).mount),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = FakeCluster(fakes, router, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
        router.on_trouble = lambda replica: made.troubles.append(replica.number)
        for view in views:
            await router.ready(view)
        try:
            yield made
        finally:
            for fake in fakes:
                fake.hold.set()
                await fake.kill()
