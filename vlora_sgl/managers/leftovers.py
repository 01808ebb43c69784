"""What an engine leaves on this machine when its processes are killed, and that goes when it ends.

SGLang makes a file in the temporary directory for each of its links, a table of loads in shared memory, and a segment
of shared memory for the pixels of a request. It removes none of them. We keep there adapters that came in requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.server_args import SHARED_MEMORY, uploads_directory

IPC = "ipc://"

_links: list[Any] = []


def remember(original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Wraps ``PortArgs.init_new``: the same links, which ``remove`` knows."""
    links = original(*args, **kwargs)
    _links.append(links)
    return links


def remove(*links: Any) -> None:
    """Remove what engines of this process have left; their own processes have ended.

    Args:
        links: SGLang's ``PortArgs`` of these engines; of all, if left out.
    """
    for one in links or tuple(_links):
        if one in _links:
            _links.remove(one)
        for path in files_of(one):
            with contextlib.suppress(OSError):
                path.unlink()
    if not _links:
        for path in pixels():
            with contextlib.suppress(OSError):
                path.unlink()
        shutil.rmtree(uploads_directory(), ignore_errors=True)


def files_of(links: Any) -> Iterator[Path]:
    """The files of an engine's links, and of its table of loads."""
    for item in dataclasses.fields(links):
        value = getattr(links, item.name)
        if isinstance(value, str) and value.startswith(IPC):
            yield Path(value.removeprefix(IPC))
    if links.instance_id:
        yield Path(_sgl.shm_path_for(links.instance_id))


def pixels() -> Iterator[Path]:
    """Segments that this process has made for requests' pixels, and that no scheduler has fetched."""
    # SGLang names a segment after its kind and the process that made it.
    return SHARED_MEMORY.glob(f"{_sgl.SHM_PREFIX}_*_{os.getpid()}_*")
