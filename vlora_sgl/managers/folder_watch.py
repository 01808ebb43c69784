"""Adapters of watched folders that are loaded: one whose files have changed is replaced, one that is gone unloaded.

What comes to a folder needs no watching: it is found when a request names it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.errors import VLoraError
from vlora_sgl.managers.waits import behind
from vlora_sgl.sources import CONFIG

logger = logging.getLogger(__name__)

POLL_S = 1.0
Look = tuple[tuple[str, int, int, int], ...]
"""Of every file its name, inode, size and time."""


class FolderWatch:
    """Looks at the folders once a second, while an adapter of theirs is loaded.

    Args:
        adapters: the ``AdapterLifecycle``.
    """

    def __init__(self, adapters: Any) -> None:
        self._adapters = adapters
        self._seen: dict[str, Look] = {}  # of what is loaded, or was refused
        self._last: dict[str, Look] = {}  # at the last look
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Watch what has been loaded from folders."""
        for name, place in self._loaded().items():
            self._seen.setdefault(name, look(place))
        if self._seen and (self._task is None or self._task.done()):
            self._task = behind(self._run())

    def _loaded(self) -> dict[str, Path]:
        """Adapters that are loaded from watched folders, and where they are."""
        folders = [Path(source.place) for source in self._adapters.sources.sources if source.is_folder]
        loaded = {name: Path(ref.lora_path) for name, ref in self._adapters.known.items()}
        return {name: path for name, path in loaded.items() if any(path.is_relative_to(one) for one in folders)}

    async def _run(self) -> None:
        while loaded := self._loaded():
            await asyncio.sleep(POLL_S)
            now = await asyncio.to_thread(lambda: {name: look(place) for name, place in loaded.items()})
            for name, found in now.items():
                # What is still being written differs from the last look.
                if found != self._seen.setdefault(name, found) and found == self._last.get(name):
                    self._seen[name] = found
                    await self._follow(name, loaded[name])
            self._last = now
            self._seen = {name: seen for name, seen in self._seen.items() if name in now}
        self._seen, self._last = {}, {}

    async def _follow(self, name: str, place: Path) -> None:
        if name not in self._adapters.known:
            return
        gone = not (place / CONFIG).is_file()
        try:
            if gone:
                self._seen.pop(name)
                result = await self._adapters.unload(_sgl.UnloadLoRAAdapterReqInput(lora_name=name))
            else:
                result = await self._adapters.reload(name)
        except VLoraError as error:
            logger.warning("adapter %r in %s: %s", name, place, error)
        else:
            what = "is gone" if gone else "has changed"
            logger.info("adapter %r in %s %s: %s", name, place, what, result.error_message or "done")


def look(directory: Path) -> Look:
    """What can be seen of a directory's files without reading them; nothing, if it is not there."""
    try:
        stats = [(file.name, file.stat()) for file in sorted(directory.iterdir())]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
