"""A fleet in one process: a directory, fronts and fake replicas, over real HTTP and without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.replicas import KEYS, SETTINGS, FakeReplica
from vlora_sgl.cluster.adapters import AdapterRoutes
from vlora_sgl.cluster.directory import Directory
from vlora_sgl.cluster.directory_link import DirectoryLink
from vlora_sgl.cluster.front import Front
from vlora_sgl.cluster.links import Links, NotSent, new_session
from vlora_sgl.cluster.live import PageRoutes
from vlora_sgl.cluster.member import Member
from vlora_sgl.cluster.placement import Affinity, Shared
from vlora_sgl.cluster.replica_router import Router


class Listening:
    """A router's address, and how to kill it."""

    def __init__(self, runner: web.AppRunner, task: asyncio.Task[None]) -> None:
        self.runner, self.task = runner, task
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def kill(self) -> None:
        """End as a killed process does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for connection in self.runner.server.connections if self.runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()


class Fleet:
    """Parts that may be killed and started.

    Attributes:
        directory: the one there is now.
        fronts: all that were started.
        fakes: the replicas' servers, by member.
        client: a session of a user.
    """

    def __init__(self, links: Links, client: aiohttp.ClientSession, known: dict[str, str]) -> None:
        self.links, self.client, self.known = links, client, known
        self.directory: Directory | None = None
        self.at: Listening | None = None
        self.fronts: list[Front] = []
        self.fronts_at: list[Listening] = []
        self.fakes: dict[Member, FakeReplica] = {}

    async def find(self) -> str:
        if self.at is None:
            raise NotSent()
        return self.at.url

    async def start_directory(self) -> None:
        self.directory = Directory(Affinity(slots=4), self.links, SETTINGS, self.known)
        mounts = AdapterRoutes(self.directory).mount, PageRoutes(self.directory).mount
        self.at = await self._listen(self.directory, self.directory.watch, *mounts)

    async def kill_directory(self) -> None:
        at, self.at, self.directory = self.at, None, None
        await at.kill()

    async def start_front(self) -> Front:
        front = Front(Shared(), self.links, SETTINGS, 64, self.find, f"front-{len(self.fronts)}")
        self.fronts.append(front)
        self.fronts_at.append(await self._listen(front, front.run))
        return front

    async def _listen(self, router: Router, run: Callable[[], Any], *mounts: Any) -> Listening:
        runner = web.AppRunner(
            router.application(*mounts), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return Listening(runner, asyncio.create_task(run()))

    async def start_replica(self) -> Member:
        fake = FakeReplica()
        await fake.start()
        member = Member(fake.url, DirectoryLink(self.links, self.find))
        self.fakes[member] = fake
        await member.ready(member)
        return member

    async def kill_replica(self, member: Member) -> None:
        """With its actor: nobody says that it has gone."""
        if member._beating is not None:
            member._beating.cancel()
        await self.fakes.pop(member).kill()

    async def post(self, front: int, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        """Status and parsed answer."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.client.post(self.fronts_at[front].url + path, json=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.text())

    async def ask(self, front: int, adapter: str | None = None, **more: Any) -> tuple[int, Any]:
        """One request."""
        return await self.post(front, "/generate", {"text": "x", "lora_path": adapter, **more})

    async def get(self, path: str, front: int = 0) -> Any:
        """Parsed answer of a GET that must succeed."""
        async with self.client.get(self.fronts_at[front].url + path) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
            return json.loads(text) if text[:1] in "{[" else text


@contextlib.asynccontextmanager
async def fleet(replicas: int = 2, fronts: int = 2, known: dict[str, str] | None = None) -> AsyncIterator[Fleet]:
    """Start everything; every replica serves, and every front knows it."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = Fleet(Links(session, KEYS), client, known or {})
        await made.start_directory()
        for _ in range(fronts):
            await made.start_front()
        for _ in range(replicas):
            await made.start_replica()
        while not all(len(front.serving) == replicas for front in made.fronts):
            await asyncio.sleep(0.02)
        try:
            yield made
        finally:
            for fake in made.fakes.values():
                fake.hold.set()
            for member in [*made.fakes]:
                await made.kill_replica(member)
            for at in [*made.fronts_at, *([made.at] if made.at else [])]:
                await at.kill()
