"""The page of a cluster, and ``GET /vlora/live``: what its replicas do, as one stream of events.

Each replica is watched as a page watches a single server, and only while somebody watches here: its events are passed
on with its number. Between them the cluster's own state (``status.state``) comes as ``{"cluster": …}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping

import aiohttp
from aiohttp import web

from vlora_sgl import page
from vlora_sgl.cluster.links import Lost, NotSent, end_to_end
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router

PERIOD_S = 1.0
LIVE = "/vlora/live"
WAITING = 256
"""Events that wait for a slow reader; then the newest of a replica are dropped."""
_FIRST = b"data: {"


class PageRoutes:
    """Handlers.

    Args:
        router: the cluster's front.
    """

    def __init__(self, router: Router) -> None:
        self.router = router

    def mount(self, app: web.Application) -> None:
        """Add the routes."""
        for path in page.FILES:
            app.router.add_get(path, self.file)
        app.router.add_get(LIVE, self.live)

    async def file(self, request: web.Request) -> web.Response:
        """One of the page's files."""
        headers = {**page.HEADERS, "Content-Type": page.FILES[request.path][1]}
        return web.Response(body=page.content(request.path), headers=headers)

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Events, until the client leaves or the cluster stops."""
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await out.prepare(request)
        came: asyncio.Queue[bytes] = asyncio.Queue(WAITING)
        headers = end_to_end(request.headers)
        watches: dict[Replica, asyncio.Task[None]] = {}
        try:
            while not self.router.stopping:
                for replica in self.router.replicas:
                    if replica not in watches:
                        watches[replica] = asyncio.create_task(self._watch(replica, headers, came))
                await out.write(b"data: " + json.dumps({"cluster": self.router.status()}).encode() + b"\n\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        while True:
                            await out.write(await came.get())
        finally:
            for watch in watches.values():
                watch.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)
        return out

    async def _watch(self, replica: Replica, headers: Mapping[str, str], came: asyncio.Queue[bytes]) -> None:
        """Hand a replica's events on, whenever it serves."""
        while True:
            if replica.serving:
                with contextlib.suppress(NotSent, Lost, aiohttp.ClientError, OSError):
                    async for event in self._events(replica, headers):
                        with contextlib.suppress(asyncio.QueueFull):
                            came.put_nowait(event)
            await asyncio.sleep(PERIOD_S)

    async def _events(self, replica: Replica, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        async with self.router.links.send(replica, "GET", LIVE, None, headers) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n\n")
                for event in whole:
                    if event.startswith(_FIRST):
                        yield _FIRST + b'"replica": %d, ' % replica.number + event.removeprefix(_FIRST) + b"\n\n"
