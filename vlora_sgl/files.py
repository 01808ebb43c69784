"""One way to open a file in a directory that somebody else has made: a regular file, or a refusal by name, at once.

To open a FIFO waits for a writer, to read a device may never end, and a settings file of a gigabyte takes minutes and
the memory of the server.
"""

from __future__ import annotations

import json
import os
import stat
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from vlora_sgl.errors import AdapterError, VLoraError, quoted
from vlora_sgl.names import check_path

MOST_JSON = 16 << 20
"""Bytes of a file of settings; those that exist have some thousand."""
MOST_FILES = 10_000
"""In a directory of an adapter."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name, of whatever kind: if it is not a file, who opens it is told."""
    return os.path.lexists(path)


def open_regular(path: Path, error: type[VLoraError] = AdapterError) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        error: what is raised.

    Raises:
        VLoraError: it is none, or cannot be opened; the message says what it is, or why.
    """
    try:
        _check_kind(path, os.stat(path), error)  # before it is opened, which of a device may do something
        # It may have been exchanged since: opened so, a FIFO does not wait.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))  # noqa: SIM115
    except (OSError, ValueError) as reason:
        if isinstance(reason, VLoraError):
            raise
        raise error(f"{str(path)!r} cannot be opened: {_why(reason)}") from None
    try:
        _check_kind(path, os.fstat(file.fileno()), error)
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: Path, error: type[VLoraError] = AdapterError) -> int:
    """Bytes of a regular file that can be opened, and is not empty.

    Raises:
        VLoraError: as ``open_regular``; it is empty.
    """
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
    if not size:
        raise error(f"{str(path)!r} is empty")
    return size


def read_json(path: Path, error: type[VLoraError] = AdapterError) -> Any:
    """What a file of settings says.

    Raises:
        VLoraError: as ``open_regular``; it is too large, or not JSON.
    """
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_JSON:
            raise error(f"{str(path)!r} has {size} bytes; a file of settings has at most {MOST_JSON}")
        try:
            return json.loads(file.read(MOST_JSON + 1).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as reason:  # of UTF-8, of JSON, of integers of 5,000 digits
            raise error(f"{str(path)!r} is not readable as JSON: {reason}") from None


def resolved_directory(path: str) -> Path:
    """The directory of that name, with every link resolved; it need not exist.

    Raises:
        AdapterError: no directory can have that name.
    """
    try:
        return Path(check_path(path)).resolve()
    except (OSError, RuntimeError, ValueError) as reason:
        if isinstance(reason, AdapterError):
            raise
        raise AdapterError(f"{quoted(path)} names no directory: {_why(reason)}") from None


def files_in(directory: Path) -> list[Path]:
    """What a directory holds.

    Raises:
        AdapterError: it cannot be read, or holds far more than an adapter does.
    """
    try:
        found = list(islice(directory.iterdir(), MOST_FILES + 1))
    except OSError as reason:
        raise AdapterError(f"{str(directory)!r} cannot be read: {_why(reason)}") from None
    if len(found) > MOST_FILES:
        raise AdapterError(f"{str(directory)!r} holds more than {MOST_FILES} files, so it is no adapter's directory")
    return found


def holders_below(directory: Path, name: str) -> list[Path]:
    """Some folders below, no deeper than two, that hold a file of that name: one of them may have been meant."""
    try:
        below = [path for path in islice(directory.iterdir(), MOST_FILES) if path.is_dir()][:100]
        below += [path for one in below for path in islice(one.iterdir(), 100) if path.is_dir()]
        return [path for path in below if (path / name).is_file()][:3]
    except OSError:
        return []


def _check_kind(path: Path, status: os.stat_result, error: type[VLoraError]) -> None:
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), None)
    if kind is not None:
        raise error(f"{str(path)!r} is {kind}, expected a file")


def _why(reason: Exception) -> str:
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
