"""The replica router's view of one replica: whether it serves, its adapters, its requests and those that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReplicaGone(Exception):
    """The replica stopped serving before a request was sent to it."""


class Replica:
    """One replica.

    Attributes:
        number: its position in the cluster; stays when it is started again.
        url: its root.
        serving: whether requests may be sent to it.
        loaded: paths of the adapters loaded there, by name.
        running: requests that it has.
        served: requests that it was ever sent.
        loads: adapters that the router loaded there.
        starts: times that it began to serve.
        elsewhere: requests that it has from other fronts, or that wait there for it.

    Args:
        limit: most requests that it gets at a time; the others wait here, where nothing is lost if it ends.
    """

    def __init__(self, number: int, url: str, limit: int) -> None:
        self.number, self.url, self.limit = number, url, limit
        self.serving = False
        self.loaded: dict[str, str] = {}
        self.running = self.served = self.loads = self.starts = self.elsewhere = 0
        self.locks: dict[str, asyncio.Lock] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Requests that it has or that wait for it."""
        return self.running + self.waiting + self.elsewhere

    def holds(self, adapter: str) -> bool:
        """Whether the adapter is loaded there."""
        return adapter in self.loaded

    def lock(self, adapter: str) -> asyncio.Lock:
        """Held while an adapter is loaded there, so that it is loaded once."""
        return self.locks.setdefault(adapter, asyncio.Lock())

    def begin(self, loaded: dict[str, str]) -> None:
        """It serves from now on, with these adapters."""
        self.loaded, self.serving = loaded, True
        self.starts += 1

    def end(self) -> None:
        """It serves no longer, and holds nothing; who waits for it is told."""
        self.serving = False
        self.loaded = {}
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(ReplicaGone())

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold one of its places; wait in line for one where none is free.

        Raises:
            ReplicaGone: it does not serve, or ceased to in the meantime.
        """
        if not self.serving:
            raise ReplicaGone()
        if self.running >= self.limit:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place  # whoever frees a place hands it over: running stays as it is
            except asyncio.CancelledError:
                if place.done() and not place.cancelled() and place.exception() is None:
                    self._leave()
                elif place in self._waiting:
                    self._waiting.remove(place)
                raise
        else:
            self.running += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1
