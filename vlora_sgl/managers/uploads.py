"""Adapters that came in requests: their files, each adapter's in a directory of its own, as long as it is known.

They lie in shared memory where there is some, so that every rank of the engine reads the same pages, and nothing of
them reaches a disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from vlora_sgl.errors import AdapterUnavailableError
from vlora_sgl.server_args import uploads_directory

COPIED_AT_ONCE = 1 << 20


class Uploads:
    """Those of this server."""

    def __init__(self) -> None:
        self._kept: set[str] = set()

    def keep(self, files: Mapping[str, BinaryIO]) -> str:
        """Copy an adapter's files, by their names, to a new directory; its path.

        Raises:
            AdapterUnavailableError: there is no room.
        """
        root, directory = uploads_directory(), ""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = tempfile.mkdtemp(dir=root)
            self._kept.add(directory)
            for name, content in files.items():
                with Path(directory, name).open("wb") as file:
                    shutil.copyfileobj(content, file, COPIED_AT_ONCE)
        except OSError as reason:
            self.drop(directory)
            size = sum(content.seek(0, os.SEEK_END) for content in files.values())
            raise AdapterUnavailableError(f"{size} bytes cannot be kept in {root}: {reason.strerror}") from None
        return directory

    def drop(self, directory: str) -> None:
        """Remove an adapter's files, if they came in a request."""
        if directory in self._kept:
            self._kept.discard(directory)
            shutil.rmtree(directory, ignore_errors=True)
