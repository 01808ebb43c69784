"""Adapters that come when somebody names them: found in their source, fetched once, loaded; failures are remembered.

A fetch runs in a thread of its own pool, before the loads of adapters are in turn: nobody waits for it but those who
name the adapter.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import HTTPException

from vlora_sgl.errors import AdapterSourceError, AdapterUnavailableError, VLoraError, WaitError, quoted
from vlora_sgl.managers.adapter_cache import AdapterCache
from vlora_sgl.managers.downloads import Download, NotThere, download
from vlora_sgl.managers.waits import behind, limit_of
from vlora_sgl.names import DEFAULT
from vlora_sgl.sources import Source

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Fetches."""
FETCH_LIMITS = 10
"""A fetch may take so many times as long as a request waits for it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, {404: 30.0, 502: 300.0, 503: 120.0}
"""After a failure an adapter is not asked for again for so long; twice as long after each further one."""
MOST_FAILURES = 4096


class SourceResponse(AdapterSourceError, HTTPException, ValueError):
    """What kept an adapter from coming, as an HTTP error for both of SGLang's protocols."""

    def __init__(self, message: str, status: int) -> None:
        AdapterSourceError.__init__(self, message)
        self.http_status = self.status_code = status
        self.detail = message
        self.headers = None


@dataclass(frozen=True)
class Failure:
    """Why an adapter did not come.

    Attributes:
        status: 404, 502 or 503.
        until: by the monotonic clock, before which nobody tries again.
        times: in a row.
    """

    message: str
    status: int
    until: float
    times: int


class AdapterSources:
    """What ``--vlora-adapter-source`` gives.

    Args:
        sources: in the order in which they are asked.
        cache: of what was fetched.
        load: loads an adapter, by name and directory, or raises an ``AdapterError``.
        fetch: see ``downloads.download``.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        cache: AdapterCache,
        load: Callable[[str, str], Awaitable[None]],
        fetch: Download = download,
    ) -> None:
        self.sources, self.cache, self._load, self._fetch = tuple(sources), cache, load, fetch
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._failures: OrderedDict[str, Failure] = OrderedDict()
        self._from: dict[str, tuple[Source, str]] = {}  # where directories in the cache are from
        self._pool = ThreadPoolExecutor(AT_ONCE, "adapter-source") if sources else None

    def may_have(self, name: str) -> bool:
        """Whether an adapter of that name could come; in a folder, whether it is there."""
        return name != DEFAULT and next(self._places(name), None) is not None

    def covers(self, path: str) -> bool:
        """Whether a path is of a source that has to be fetched."""
        return any(source.covers(path) for source in self.sources if not source.is_folder)

    def offered(self) -> Iterator[tuple[str, str]]:
        """Names and places of what there is, as far as that is known without asking anybody."""
        for source in self.sources:
            if source.name is not None:
                yield source.name, source.place
            elif source.is_folder:
                below = sorted(Path(source.place).iterdir())
                yield from ((one.name, str(one)) for one in below if source.may_have(one.name))

    async def want(self, name: str, now: bool = False) -> None:
        """Have an adapter loaded that is not; whoever comes while it is on its way waits for the same.

        Args:
            now: even if it has just failed to come.

        Raises:
            SourceResponse: it does not come, or has not come within ``--vlora-wait-seconds``.
        """
        failure = self._failures.get(name)
        if failure is not None and not now and time.monotonic() < failure.until:
            raise SourceResponse(failure.message, failure.status)
        if name not in self._coming:
            self._coming[name] = behind(self._come(name))
        done, _ = await asyncio.wait({self._coming[name]}, timeout=limit_of())
        if not done:
            raise SourceResponse(f"adapter {quoted(name)} is still on its way from its source; ask again", 503)
        failure = self._failures.get(name)
        if failure is not None:
            raise SourceResponse(failure.message, failure.status)

    def came(self, directory: str) -> bool:
        """Whether this directory was fetched."""
        return directory in self._from

    @asynccontextmanager
    async def at(self, path: str, anew: bool = False) -> AsyncIterator[str]:
        """The directory of an adapter at a place that a source covers, or of one that came to this directory before;
        it stays there for as long as the block runs.

        Args:
            anew: what the source has now.

        Raises:
            SourceResponse: it cannot be had.
        """
        source, place = self._from.get(path) or next((one, path) for one in self.sources if one.covers(path))
        try:
            directory = await self._fetched(source, place, anew)
        except (VLoraError, NotThere) as error:
            raise SourceResponse(_why(error, place), _status(error)) from None
        try:
            yield directory
        finally:
            self.cache.release(directory)

    async def _come(self, name: str) -> None:
        directory = ""
        try:
            directory = await self._found(name)
            await self._load(name, directory)
            self._failures.pop(name, None)
        except Exception as error:  # whatever it is, it is told, and nobody asks again at once
            self._failed(name, error)
        finally:
            self.cache.release(directory)
            del self._coming[name]

    async def _found(self, name: str) -> str:
        """The directory of the first source that has it."""
        for source, place in self._places(name):
            try:
                return place if source.is_folder else await self._fetched(source, place, anew=False)
            except NotThere:
                continue
        raise NotThere()

    async def _fetched(self, source: Source, place: str, anew: bool) -> str:
        known = [one for one, (_, where) in self._from.items() if where == place and Path(one).is_dir()]
        kept = Path(known[-1]) if known else self.cache.find(source, place) if source.is_fixed else None
        if kept is None or (anew and not source.is_fixed):
            try:
                kept = await self._download(source, place)
            except AdapterUnavailableError:
                kept = None if anew else self.cache.find(source, place)  # what an earlier server has fetched
                if kept is None:
                    raise
                self.cache.hold(kept)
                logger.warning("%s is not to be had: what was fetched before is served", place)
        else:
            self.cache.hold(kept)
        self._from.pop(str(kept), None)
        self._from[str(kept)] = source, place
        return str(kept)

    async def _download(self, source: Source, place: str) -> Path:
        assert self._pool is not None
        into, seconds = self.cache.coming(), FETCH_LIMITS * limit_of()
        try:
            job = partial(self._fetch, place, source.digest, into, self.cache.most, seconds)
            await asyncio.get_running_loop().run_in_executor(self._pool, job)
            return await asyncio.to_thread(self.cache.put, place, into)
        except (VLoraError, NotThere) as error:
            told = f"{place}: {error}"
            raise error if isinstance(error, NotThere) else type(error)(told) from None
        finally:
            shutil.rmtree(into, ignore_errors=True)

    def _failed(self, name: str, error: Exception) -> None:
        before = self._failures.pop(name, None)
        times = 1 if before is None else before.times + 1
        status = _status(error)
        message = f"adapter {quoted(name)} does not come from its source: {_why(error)}"
        pause = min(LONGEST_PAUSE_S[status], FIRST_PAUSE_S * 2 ** min(times - 1, 10))
        self._failures[name] = Failure(message, status, time.monotonic() + pause, times)
        if len(self._failures) > MOST_FAILURES:
            self._failures.popitem(last=False)
        logger.warning("%s (%d; not tried again for %g s)", message, status, pause)

    def _places(self, name: str) -> Iterator[tuple[Source, str]]:
        for source in self.sources:
            if source.may_have(name):
                yield source, str(source.place_of(name))


def _status(error: Exception) -> int:
    if isinstance(error, NotThere):
        return 404
    return 503 if isinstance(error, AdapterUnavailableError | WaitError | OSError) else 502


def _why(error: Exception, place: str = "") -> str:
    where = f" at {place}" if place else ""
    if isinstance(error, NotThere):
        return f"no source has it{where}"
    return str(error) if isinstance(error, VLoraError) else type(error).__name__
