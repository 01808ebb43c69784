"""Adapters that were fetched, in a directory of bounded size: what was used the longest time ago leaves it first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from vlora_sgl.errors import AdapterUnavailableError
from vlora_sgl.managers.downloads import SUMS
from vlora_sgl.sources import Source

COMING = "coming-"
"""Begins the names of directories that are not whole."""


class AdapterCache:
    """A directory with one of each adapter, called by where it is from and what it holds.

    Args:
        root: may be shared by servers, and outlives them.
        most: bytes of all adapters, beside those that are coming.
        in_use: directories that must stay.
    """

    def __init__(self, root: Path, most: int, in_use: Callable[[], Collection[str]] = tuple) -> None:
        self.root, self.most, self._in_use = root, most, in_use
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def coming(self) -> Path:
        """An empty directory for an adapter.

        Raises:
            AdapterUnavailableError: there cannot be one.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=COMING, dir=self.root))
        except OSError as error:
            raise AdapterUnavailableError(f"{self.root} cannot hold adapters: {error.strerror}") from None

    def put(self, place: str, directory: Path) -> Path:
        """Keep an adapter that has come to ``coming``; where it is now, and stays until ``release``.

        Raises:
            AdapterUnavailableError: there is no room for it beside what must stay.
        """
        kept = self.root / f"{_called(place)}-{_content(directory)}"
        with self._lock:
            if not kept.is_dir():
                self._make_room(_size(directory))
                with contextlib.suppress(FileExistsError):  # another server was first
                    directory.rename(kept)
            self._held[str(kept)] += 1
        return kept

    def hold(self, directory: Path) -> None:
        """An adapter is used now, and stays until ``release``."""
        with self._lock:
            self._held[str(directory)] += 1
        if directory.is_dir():
            os.utime(directory)

    def release(self, directory: str) -> None:
        """An adapter need not stay for having just come, or been found."""
        with self._lock:
            self._held -= Counter([directory])

    def find(self, source: Source, place: str) -> Path | None:
        """An adapter of a place that is here; of a source that has a digest, only if it is that."""
        found = sorted(self.root.glob(f"{_called(place)}-*"), key=_used)
        for directory in reversed(found):
            sums = directory / SUMS
            if source.digest is None or (sums.is_file() and _digest_of([sums]) == source.digest):
                return directory
        return None

    def _make_room(self, size: int) -> None:
        entries = sorted(self._entries(), key=_used)
        left, stays = self.most - size - sum(map(_size, entries)), {*self._in_use(), *self._held}
        for directory in [one for one in entries if str(one) not in stays]:
            if left >= 0:
                return
            left += _size(directory)
            shutil.rmtree(directory, ignore_errors=True)
        if left < 0:
            raise AdapterUnavailableError(
                f"no room for {size} bytes beside the adapters in memory: --vlora-source-cache-bytes={self.most}"
            )

    def _entries(self) -> Iterable[Path]:
        return (one for one in self.root.iterdir() if one.is_dir() and not one.name.startswith(COMING))


def _called(place: str) -> str:
    return hashlib.blake2b(place.encode(), digest_size=10).hexdigest()


def _content(directory: Path) -> str:
    return _digest_of(sorted(directory.iterdir()))[:20]


def _digest_of(files: Iterable[Path]) -> str:
    """SHA-256 of a file, or of several by name and digest."""
    digests = {}
    for file in files:
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    only = next(iter(digests.values())) if len(digests) == 1 else None
    return only or hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _size(directory: Path) -> int:
    try:
        return sum(file.stat().st_size for file in directory.iterdir())
    except OSError:  # another server has removed it
        return 0


def _used(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except OSError:
        return 0.0
