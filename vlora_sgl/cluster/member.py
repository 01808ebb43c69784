"""A replica's side of a fleet: it tells the directory that it lives, from where it runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from vlora_sgl.cluster.directory_link import BEAT_S, DirectoryLink
from vlora_sgl.cluster.links import NotSent, Refused
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.errors import ClusterError

ACCEPTED_S = 300.0
"""How long the directory may take to bring a replica's adapters in line."""


class Member(Replica):
    """What a supervisor watches, known to the directory while it serves.

    Attributes:
        requests: those that it has from all fronts, as the directory last said.

    Args:
        url: its root.
        directory: to be told.
    """

    def __init__(self, url: str, directory: DirectoryLink) -> None:
        super().__init__(0, url, limit=0)
        self.directory, self.requests = directory, 0
        self._key, self._number = "", None
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    async def ready(self, replica: Replica) -> None:
        """Its server answers: join. Returns when requests may come.

        Raises:
            ClusterError: the directory does not let it in.
        """
        self._key = secrets.token_hex(4)
        accepted = asyncio.Event()
        self._beating = asyncio.create_task(self._beat(accepted))
        try:
            async with asyncio.timeout(ACCEPTED_S):
                await accepted.wait()
        except TimeoutError:
            raise ClusterError(f"the directory did not let {self.url} serve within {ACCEPTED_S:g} s") from None
        self.begin({})

    async def _beat(self, accepted: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(NotSent, Refused):
                told = {"key": self._key, "url": self.url, "number": self._number}
                answer = await self.directory.ask("join", told)
                self._number, self.requests = answer["number"], answer["load"]
                self.number = self._number or 0
                if answer["serving"]:
                    accepted.set()
            await asyncio.sleep(BEAT_S)

    def end(self) -> None:
        """It serves no longer: the directory is told."""
        super().end()
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
            task = asyncio.create_task(self.leave())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def leave(self, for_good: bool = False) -> None:
        """Have no more requests sent here; for good, if no server is to be here again."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(NotSent, Refused):
            await self.directory.ask("leave", {"key": self._key, "for_good": for_good})
