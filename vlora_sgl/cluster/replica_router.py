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
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from vlora_sgl import page
from vlora_sgl.cluster import status
from vlora_sgl.cluster.catalogue import Catalogue
from vlora_sgl.cluster.links import Links, Lost, NotSent, Refused, end_to_end
from vlora_sgl.cluster.placement import Routing
from vlora_sgl.cluster.replica import Replica, ReplicaGone
from vlora_sgl.cluster.routing_keys import Wanted, read
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import (
    AdapterError,
    BodyTooLargeError,
    ClusterError,
    ReplicaLostError,
    StoppingError,
    VLoraError,
)
from vlora_sgl.sources import Source

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_S = 5
MOST_LOST = 1
"""How often a request that a replica had is sent to another."""

REPLICA_HEADER = "X-VLora-Replica"
"""Which replica answered."""
ROUTED = (
    *("/generate", "/encode", "/classify", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
    *("/v1/classify", "/v1/vision/classify", "/v1/vision/count", "/v1/vision/detect", "/v1/vision/ask"),
    *("/v1/responses", "/v1/score"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/rerank", "/invocations"),
    *("/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize"),
)
"""Requests, which go to one replica each."""
ANY = ("/model_info", "/get_model_info")
"""Questions that every replica answers alike."""
ALL = ("/flush_cache", "/set_internal_state", "/abort_request", "/pause_generation", "/continue_generation")
"""Orders for every replica, which also check the key."""
OPEN = ("/health", "/health_generate", "/metrics", *page.FILES)
"""What needs no key."""


@dataclass(frozen=True)
class Settings:
    """How long a router's lines are.

    Attributes:
        queue: most requests that wait, all replicas together.
        patience: seconds that a request waits while no replica serves.
        body: most bytes of a request's body.
        adapter: most bytes of an adapter in a request's body.
    """

    queue: int = 4096
    patience: float = 60.0
    body: int = 128 * 2**20
    adapter: int = 2**30


class Router:
    """The front of a cluster.

    Attributes:
        catalogue: the cluster's adapters.
        sent_again: requests that were sent to a second replica.
        lost: requests that were answered by an error because replicas ended.

    Args:
        replicas: all of them, serving or not.
        routing: picks among those that serve.
        links: to replicas.
        settings: see there.
        known: paths of adapters by name, to be loaded when asked for.
        on_trouble: called with a replica that did not answer.
        sources: where replicas have other adapters from.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        routing: Routing,
        links: Links,
        settings: Settings,
        known: Mapping[str, str] | None = None,
        on_trouble: Callable[[Replica], None] = lambda replica: None,
        sources: Sequence[Source] = (),
    ) -> None:
        self.routing, self.links, self.settings = routing, links, settings
        self.replicas: Sequence[Replica] = [*replicas]
        self.catalogue = Catalogue(links, known or {}, sources)
        self.on_trouble = on_trouble
        self.sent_again = self.lost = 0
        self._stopping = False
        self._patient = 0  # requests that wait for any replica to serve
        self._change = asyncio.Event()

    def application(self, *mounts: Callable[[web.Application], None]) -> web.Application:
        """The routes; each of ``mounts`` adds more (``AdapterRoutes.mount``, ``PageRoutes.mount``)."""
        around = [_errors, self.check_key, self.refuse_at_the_end]
        app = web.Application(client_max_size=self.settings.body, middlewares=around)
        for path in ROUTED:
            app.router.add_route("*", path, self.serve)
        for path in ANY:
            app.router.add_route("*", path, self.ask_any)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health)
        for mount in (self.mount, *mounts):
            mount(app)
        app.router.add_route("*", "/{rest:.*}", self.no_such_route)
        return app

    def mount(self, app: web.Application) -> None:
        """Add the routes about the cluster as a whole."""
        for path in ALL:
            app.router.add_route("*", path, self.tell_all)
        app.router.add_get("/cluster", self.state)
        app.router.add_get("/metrics", self.metrics)

    @web.middleware
    async def check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Do nothing for whom the replicas would turn away."""
        key = self.links.keys.of(request.path)
        if key is not None and request.path not in (*OPEN, *ALL):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), key.encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @property
    def stopping(self) -> bool:
        """Whether the cluster has been told to stop."""
        return self._stopping

    def stop(self) -> None:
        """Take no more requests, and send none that wait; those that replicas have go on."""
        self._stopping = True
        self._change.set()

    @web.middleware
    async def refuse_at_the_end(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A cluster that has been told to stop answers what only looks, but for health checks."""
        looks = request.method in ("GET", "HEAD", "OPTIONS") and not request.path.startswith("/health")
        if self._stopping and not looks and request.path != "/abort_request":
            raise StoppingError()
        return await handler(request)

    # Replicas

    @property
    def serving(self) -> list[Replica]:
        """Replicas that serve now."""
        return [replica for replica in self.replicas if replica.serving]

    async def ready(self, replica: Replica) -> None:
        """A replica answers: bring its adapters in line with the cluster's, and let it serve.

        Raises:
            ClusterError: it does not do what it is told.
        """
        try:
            replica.begin(await self.catalogue.align(replica))
        except (AdapterError, NotSent, Refused) as error:
            raise ClusterError(
                f"replica {replica.number} at {replica.url} does not do as it is told: {error}"
            ) from error
        self._change.set()

    async def some(self) -> list[Replica]:
        """Replicas that serve, once there is one.

        Raises:
            ClusterError: none did for too long.
            StoppingError: the cluster has been told to stop.
        """
        self._patient += 1
        try:
            async with asyncio.timeout(self.settings.patience):
                while not self.serving or self._stopping:
                    if self._stopping:
                        raise StoppingError()
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            raise ClusterError(
                f"none of {len(self.replicas)} replicas serves; waited {self.settings.patience:g} s"
            ) from None
        finally:
            self._patient -= 1
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
        wanted = await self.wanted(body)
        if self._patient + sum(replica.waiting for replica in self.replicas) >= self.settings.queue:
            raise ClusterError(f"{self.settings.queue} requests are waiting already")
        losses = 0
        avoid: set[int] = set()
        while True:
            serving = await self.some()
            candidates = [r for r in serving if r.number not in avoid]
            if not candidates:  # all that serve have just failed: their supervisors will tell
                avoid.clear()
                await asyncio.sleep(0.1)
                continue
            lead = wanted.adapters[0] if wanted.adapters else None
            replica = candidates[self.routing.choose(lead, wanted.content, candidates)]
            try:
                async with replica.turn():
                    await self.catalogue.bring(wanted.adapters, replica)
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

    async def wanted(self, body: bytes) -> Wanted:
        """What a request needs.

        Raises:
            UnknownAdapterError: an adapter that the cluster does not know.
            RequestError: it is not JSON as a server takes it.
        """
        return read(body, self.catalogue, self.catalogue.bases)

    async def _forward(self, request: web.Request, replica: Replica, body: bytes) -> web.StreamResponse:
        async with self.links.send(
            replica, request.method, request.path_qs, body, end_to_end(request.headers)
        ) as answer:
            replica.served += 1
            headers = {**end_to_end(answer.headers), REPLICA_HEADER: str(replica.number)}
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

    # Questions and orders

    async def ask_any(self, request: web.Request) -> web.StreamResponse:
        """Answer from the least loaded replica."""
        body = await request.read()
        for replica in sorted(await self.some(), key=lambda r: r.load):
            try:
                return await self._forward(request, replica, body)
            except (NotSent, Lost):
                self.on_trouble(replica)
        raise ClusterError("no replica answers")

    async def tell_all(self, request: web.Request) -> web.Response:
        """Pass an order on to every replica; the first refusal, else the first answer."""
        return await self.tell(request, await self.some())

    async def tell(
        self,
        request: web.Request,
        replicas: Sequence[Replica],
        done: Callable[[Replica], object] = lambda replica: None,
    ) -> web.Response:
        """Pass an order on to some replicas, one after the other. The first answer.

        Args:
            request: the order.
            replicas: who gets it.
            done: called with each that has carried it out.

        Raises:
            Refused: one refuses; the rest do not get it.
        """
        body, headers = await request.read(), end_to_end(request.headers)
        answers = []
        for replica in replicas:
            answers.append(await self.links.order(replica, request.method, request.path_qs, body or None, headers))
            done(replica)
        return web.Response(
            body=answers[0], content_type="application/json" if answers[0][:1] in (b"{", b"[") else "text/plain"
        )

    async def health(self, request: web.Request) -> web.Response:
        """200 while a replica serves."""
        return web.Response(status=200 if self.serving else 503)

    async def no_such_route(self, request: web.Request) -> web.StreamResponse:
        """What concerns one replica is asked of that replica.

        Raises:
            web.HTTPNotFound: always.
        """
        urls = ", ".join(replica.url for replica in self.replicas)
        raise web.HTTPNotFound(text=f"a cluster does not serve {request.path}; its replicas may: {urls}")

    async def state(self, request: web.Request) -> web.Response:
        """See ``status.state``."""
        return web.json_response(self.status())

    async def metrics(self, request: web.Request) -> web.Response:
        """See ``status.metrics``."""
        return web.Response(text=status.metrics(self.replicas, self._counts()), content_type="text/plain")

    def status(self) -> JsonDict:
        """See ``status.state``."""
        return status.state(self.replicas, self.routing, self._counts())

    def _counts(self) -> dict[str, int]:
        return {"sent_again": self.sent_again, "lost": self.lost}


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Our errors as OpenAI's clients expect them; a replica's refusals as they are."""
    try:
        return await handler(request)
    except Refused as refusal:
        return web.Response(status=refusal.status, body=refusal.body, content_type="application/json")
    except web.HTTPRequestEntityTooLarge:
        error: VLoraError = BodyTooLargeError(request.client_max_size)
    except NotSent:
        error = ClusterError("a replica ended while it was asked; ask again")
    except VLoraError as ours:
        error = ours
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.http_status == 503 else {}
    return web.json_response(_error(error), status=error.http_status, headers=headers)


def _error(error: VLoraError) -> JsonDict:
    return {
        "error": {"message": str(error), "type": type(error).__name__, "param": None, "code": error.http_status},
    }
