"""A front of a fleet: takes requests, and sends each to a replica itself. Any number of them share a directory.

What others do it knows from the directory, a fifth of a second late; what it does itself it knows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp
from aiohttp import web

from vlora_sgl.cluster import uploads
from vlora_sgl.cluster.catalogue import Catalogue
from vlora_sgl.cluster.directory_link import AGAIN_S, PATIENCE_S, QUICK_S, SYNC_S, DirectoryLink
from vlora_sgl.cluster.links import Links, Lost, NotSent, Refused, end_to_end
from vlora_sgl.cluster.placement import Routing, Shared
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router, Settings
from vlora_sgl.cluster.routing_keys import Wanted
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ClusterError, UnknownAdapterError
from vlora_sgl.sources import Source


class Front(Router):
    """A router whose replicas, adapters and homes are the directory's.

    Args:
        routing: ``Shared``, if adapters have homes.
        links: to replicas and the directory.
        settings: of this front.
        limit: most requests that a replica has at a time, from all fronts together.
        find: tells the directory's address.
        url: of this front.
        sources: where replicas have adapters from that nobody named.
    """

    def __init__(
        self,
        routing: Routing,
        links: Links,
        settings: Settings,
        limit: int,
        find: Callable[[], Awaitable[str]],
        url: str = "",
        sources: Sequence[Source] = (),
    ) -> None:
        super().__init__([], routing, links, settings)
        self.directory, self.limit, self.url = DirectoryLink(links, find), limit, url
        self.catalogue = _Copy(links, sources, self._ask)
        self.key, self._version = secrets.token_hex(4), ["", 0]
        self._known: JsonDict = {}
        self._syncing = asyncio.Lock()

    # The directory's part

    def mount(self, app: web.Application) -> None:
        """Nothing: what is not for one replica is for the directory."""

    async def no_such_route(self, request: web.Request) -> web.StreamResponse:
        """Have the directory answer.

        Raises:
            ClusterError: it does not.
        """
        async with self._at_the_directory(request) as answer:
            out = web.StreamResponse(status=answer.status, headers=end_to_end(answer.headers))
            with contextlib.suppress(NotSent, Refused):
                await self.sync()  # who gave an order may rely on it here
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                await out.write(chunk)
            await out.write_eof()
            return out

    @contextlib.asynccontextmanager
    async def _at_the_directory(self, request: web.Request) -> AsyncIterator[aiohttp.ClientResponse]:
        deadline = time.monotonic() + self.settings.patience
        async with contextlib.AsyncExitStack() as stack:
            while True:
                try:
                    sent = self.links.send(
                        await self.directory.found(), request.method, request.path_qs,
                        request.content if request.body_exists else None, end_to_end(request.headers),
                    )  # fmt: skip
                    answer = await stack.enter_async_context(sent)
                    break
                except NotSent:  # so the body has not been read
                    self.directory.where = None
                    if time.monotonic() > deadline:
                        raise ClusterError("the fleet's directory does not answer; ask again") from None
                    await asyncio.sleep(AGAIN_S)
                except Lost:
                    raise ClusterError("the fleet's directory ended while it was asked; ask again") from None
            yield answer

    async def _ask(self, what: str, body: JsonDict, patience: float = QUICK_S) -> JsonDict:
        try:
            return await self.directory.ask(what, body, patience)
        except Refused as refusal:
            if refusal.status == ClusterError.http_status:  # of a replica that is gone
                raise NotSent() from None
            raise

    # Requests

    async def wanted(self, body: bytes) -> Wanted:
        """As a router's; before a name is refused, or chosen a replica for the first time, the directory is asked."""
        try:
            wanted = await super().wanted(body)
        except UnknownAdapterError:
            await self.sync()
            wanted = await super().wanted(body)
        for lead in wanted.adapters[:1]:
            if isinstance(self.routing, Shared) and lead not in self.routing.homes:
                with contextlib.suppress(NotSent, Refused):
                    answer = await self._ask("home", {"adapter": lead})
                    self.routing.homes.setdefault(lead, tuple(answer["homes"]))
        return wanted

    # What all know

    async def run(self) -> None:
        """Tell and be told, until cancelled."""
        while True:
            with contextlib.suppress(NotSent, Refused):
                await self.sync()
            await asyncio.sleep(SYNC_S)

    async def sync(self) -> None:
        """Tell the directory what was done here, and take what it knows.

        Raises:
            NotSent: it does not answer.
            Refused: it refuses.
        """
        async with self._syncing:
            counts = self.routing.take() if isinstance(self.routing, Shared) else {}
            served = {replica: replica.served for replica in self.replicas}
            totals = self._counts()
            told = {
                "front": self.key, "url": self.url, "version": self._version, "counts": counts, **totals,
                "served": {replica.number: count for replica, count in served.items()},
                "loads": {replica.number: (replica.running, replica.waiting) for replica in self.replicas},
            }  # fmt: skip
            try:
                answer = await self.directory.ask("sync", told)
            except BaseException:
                if isinstance(self.routing, Shared):
                    self.routing.counts.update(counts)
                raise
            for replica, count in served.items():
                replica.served -= count
            self.sent_again, self.lost = self.sent_again - totals["sent_again"], self.lost - totals["lost"]
            if answer["refill"]:
                await self._refill()
            elif answer["known"]:
                self._known = answer["known"]
                await self._take(self._known)
                self._version = answer["version"]
            for replica in self.replicas:
                replica.limit = max(1, math.ceil(self.limit / max(1, answer["fronts"])))
                replica.elsewhere = answer["elsewhere"].get(str(replica.number), 0)

    async def _take(self, known: JsonDict) -> None:
        before = {(replica.number, replica.url, replica.starts): replica for replica in self.replicas}
        self.catalogue.take(known["catalogue"])
        if isinstance(self.routing, Shared):
            self.routing.homes = {name: tuple(homes) for name, homes in known["homes"].items()}
        for key in uploads.missing(known["catalogue"], self.catalogue):
            where = await self.directory.found()
            self.catalogue.files[key] = uploads.unpacked(await self.links.order(where, "GET", uploads.path(key)))
        replicas = []
        for one in known["replicas"]:
            replica = before.pop((one["number"], one["url"], one["starts"]), None)
            if replica is None:
                replica = Replica(one["number"], one["url"], self.limit)
                replica.starts = one["starts"] - 1
                replica.begin({})
            replica.loaded = dict(one["loaded"])
            replicas.append(replica)
        # Of two replicas with the same load the first is taken: not by all fronts the same.
        random.Random(self.key).shuffle(replicas)
        self.replicas = replicas
        for replica in before.values():
            replica.end()
        self._change.set()

    async def _refill(self) -> None:
        """Tell a new directory what the last one knew."""
        answer = await self.directory.ask("refill", {"version": self._version, "known": self._known})
        for key in answer.get("files", ()):
            body, where = uploads.packed(self.catalogue.files[key]), await self.directory.found()
            await self.links.order(where, "POST", uploads.path(key), body)


class _Copy(Catalogue):
    """The directory's catalogue, as it was last told; it alone has adapters loaded."""

    def __init__(
        self, links: Links, sources: Sequence[Source], ask: Callable[[str, JsonDict, float], Awaitable[JsonDict]]
    ) -> None:
        super().__init__(links, {}, sources)
        self.ask = ask

    async def _load(self, name: str, replica: Replica) -> None:
        await self.ask("bring", {"adapter": name, "number": replica.number}, PATIENCE_S)
