"""Waits for the engine, each of which has an end.

What has been asked of the engine is not taken back: its answer comes without a name, and would be taken for the next
one's. So whoever has waited for too long is told, and the work goes on behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException

from vlora_sgl import _sgl
from vlora_sgl.errors import WaitError
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_WORK = ("Weight", "MemoryOccupation", "Corpus", "HiCache", "Profile")
"""Parts of names of SGLang's messages whose work takes as long as weights or disks take: ten times the limit."""

_behind: set[asyncio.Task[Any]] = set()


class WaitResponse(WaitError, HTTPException, ValueError):
    """The same error as an HTTP 504, for both of SGLang's protocols (one catches ValueError, one HTTPException)."""

    def __init__(self, message: str, begun: bool = True) -> None:
        WaitError.__init__(self, message)
        self.begun = begun
        self.status_code = self.http_status
        self.detail = message
        self.headers = None


def limit_of(message: object = None) -> float:
    """The seconds of ``--vlora-wait-seconds``, for one of SGLang's messages if it is given."""
    kind = type(message).__name__
    return VLoraArgs.from_environment().wait_seconds * (10 if any(part in kind for part in LONG_WORK) else 1)


def behind(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin a work that ends, and tells of its failure, also if nobody waits for it."""
    task = asyncio.get_running_loop().create_task(work)
    _behind.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _behind.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("%s", error)  # whoever waits for it has it; it counts as seen


async def within(seconds: float, why: Callable[[], str], task: asyncio.Task[T]) -> T:
    """The result of a work that goes on if this gives up, or is cancelled.

    Args:
        why: tells what is waited for.

    Raises:
        WaitResponse: it has none after so many seconds.
    """
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        raise WaitResponse(f"after {seconds:g} s (--vlora-wait-seconds): {why()}; it goes on")
    return task.result()


class Turns:
    """Works that are done one after the other.

    Args:
        lock: held while one is done.
    """

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._doing = "something"

    async def take(self, doing: str, work: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Do a work in turn, and give its result.

        Args:
            doing: what it does, for messages.
            seconds: to wait for the turn, and again for the result.

        Raises:
            WaitResponse: the turn did not come, and nothing has been begun; or the work takes longer, and goes on.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError:
            raise WaitResponse(
                f"after {seconds:g} s (--vlora-wait-seconds): {self._doing} is still under way; this was not begun",
                begun=False,
            ) from None
        self._doing = doing
        return await within(seconds, lambda: f"{doing} is still under way", behind(self._then_release(work)))

    async def _then_release(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            self._lock.release()


class BoundedCommunicator(_sgl.FanOutCommunicator):
    """SGLang's questions to the ranks: who asks one is told if the answer does not come."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._turns = Turns(asyncio.Lock())

    async def queueing_call(self, obj: object) -> Any:
        """SGLang's answers of all ranks.

        Raises:
            WaitResponse: some did not answer in time.
        """
        kind, ask = type(obj).__name__, super().queueing_call
        return await self._turns.take(f"the engine's answer to {kind}", lambda: ask(obj), limit_of(obj))

    async def to_the_end(self, obj: object) -> Any:
        """SGLang's answers, whenever they come: for who has to know, and keeps others from waiting."""
        return await super().queueing_call(obj)
