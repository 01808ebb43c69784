"""Adapters that came in requests: their files, each adapter's in a directory of its own, as long as it is known.

They lie in shared memory where there is some, so that every rank of the engine reads the same pages, and nothing of
them reaches a disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from vlora_sgl.errors import AdapterUnavailableError
from vlora_sgl.server_args import uploads_directory


class Uploads:
    """Those of this server."""

    def __init__(self) -> None:
        self._kept: set[str] = set()

    def begin(self) -> str:
        """A new directory, for an adapter's files; its path.

        Raises:
            AdapterUnavailableError: there is no room.
        """
        root = uploads_directory()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = tempfile.mkdtemp(dir=root)
        except OSError as reason:
            raise no_room(0, reason) from None
        self._kept.add(directory)
        return directory

    def drop(self, directory: str) -> None:
        """Remove an adapter's files, if they came in a request."""
        if directory in self._kept:
            self._kept.discard(directory)
            shutil.rmtree(directory, ignore_errors=True)


def new_file(directory: str, name: str) -> BinaryIO:
    """A new file of an adapter; without a buffer, so that to close it never fails.

    Raises:
        AdapterUnavailableError: there is no room.
    """
    try:
        return Path(directory, name).open("xb", buffering=0)
    except OSError as reason:
        raise no_room(0, reason) from None


def write(file: BinaryIO, pieces: Iterable[bytes]) -> None:
    """Write some more of such a file.

    Raises:
        AdapterUnavailableError: there is no room.
    """
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
    except OSError as reason:
        raise no_room(file.tell(), reason) from None


def no_room(size: int, reason: OSError) -> AdapterUnavailableError:
    """What to tell where no more than so many bytes of a file could be written."""
    return AdapterUnavailableError(f"an adapter cannot be kept in {uploads_directory()}: {reason.strerror} at {size}")
