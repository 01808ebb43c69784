"""The table of adapters' names, and the answers where a name is not in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from fastapi import HTTPException

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import LoRARef
from vlora_sgl.combined import canonical, is_combined, members, parts
from vlora_sgl.core import Version
from vlora_sgl.errors import UnknownAdapterError, listed, quoted
from vlora_sgl.names import split_version


class UnknownAdapterResponse(UnknownAdapterError, HTTPException, ValueError):
    """The same error as an HTTP 404, for both of SGLang's protocols (one catches ValueError, one HTTPException)."""

    def __init__(self, name: str, loaded: Iterable[str]) -> None:
        UnknownAdapterError.__init__(self, name, loaded)
        self.status_code = self.http_status
        self.detail = str(self)
        self.headers = None


class UnknownModelResponse(UnknownAdapterResponse):
    """A base model that this server does not serve, before the name of an adapter that it does.

    Args:
        name: the base model asked for.
        served: the base model's name.
        loaded: names of adapters.
    """

    def __init__(self, name: str, served: str, loaded: Iterable[str]) -> None:
        super().__init__(name, loaded)
        self.detail = (
            f"no model named {quoted(name)}; the base model is {served!r}, adapters (alone or as {served}:ADAPTER) "
            f"are: {listed(self.loaded)}"
        )
        self.args = (self.detail,)


class AdapterRegistry(_sgl.LoRARegistry):
    """SGLang's table of names, with users counted by request.

    SGLang 0.5.17 counts a user per row on entry and takes one off per finished row. Requests that are refused after
    their names were resolved, or aborted in the queue, are never taken off, and ``n > 1`` takes off one too many; an
    unload of such an adapter waits for ever, and every load behind it. Here a request gives back what it took, once,
    when it ends (``let_go``). Counting awaits nothing, so that no request can be cancelled between two counts.

    Attributes:
        served: the name and the version of every adapter in memory, by id; as long as a request uses it.
    """

    def __init__(self, lora_paths: list[LoRARef] | None = None) -> None:
        self._users: Counter[str] = Counter()
        self._idle: dict[str, asyncio.Event] = {}
        self.served: dict[str, Version] = {}
        super().__init__(lora_paths)

    async def acquire(self, lora_name: str | Sequence[str | None]) -> str | list[str | None] | None:
        """SGLang's ids of names, whose users the caller is one of until it calls ``let_go``."""
        names: Sequence[str | None] = [lora_name] if isinstance(lora_name, str) else lora_name
        ids = [None if name is None else self._id_of(name) for name in names]
        self._users.update(one for one in members(ids) if one is not None)
        return ids[0] if isinstance(lora_name, str) else ids

    async def get_unregistered_loras(self, lora_name: Iterable[str | None]) -> list[str | None]:
        """SGLang's names that are not in memory; of several adapters as one, those of them."""
        return list(await super().get_unregistered_loras(set(members(lora_name))))

    def _id_of(self, name: str) -> str | None:
        """The engine's id of an adapter, or of several as one; ``None`` where their sum is the base model."""
        if not is_combined(name):
            return self._looked_up(name)
        return canonical([(self._looked_up(one), scale) for one, scale in parts(name)])

    def _looked_up(self, name: str) -> str:
        ref = self._registry.get(name)
        if ref is None:
            raise UnknownAdapterResponse(name, self._registry)
        self._registry.move_to_end(name)  # SGLang's order of last use
        return ref.lora_id

    async def release(self, lora_id: object) -> None:
        """Called by SGLang per finished row, and on some of its ways out: nothing to do."""

    def let_go(self, lora_id: str | Sequence[str | None] | None) -> None:
        """Give back what ``acquire`` counted for a request."""
        for one in members([lora_id] if lora_id is None or isinstance(lora_id, str) else lora_id):
            if one is None or not self._users[one]:
                continue
            self._users[one] -= 1
            if not self._users[one]:
                del self._users[one]
                if one in self._idle:
                    self._idle.pop(one).set()

    async def wait_for_unload(self, lora_id: str) -> None:
        """Wait until an adapter that has lost its name has no users."""
        if self._users[lora_id]:
            await self._idle.setdefault(lora_id, asyncio.Event()).wait()
        self._counters.pop(lora_id, None)
        self.served.pop(lora_id, None)

    def users(self, lora_id: str) -> int:
        """Rows of requests that use this adapter now."""
        return self._users[lora_id]

    def get(self, name: str) -> LoRARef | None:
        """The adapter of that name in memory, or ``None``."""
        return self._registry.get(name)

    def touch(self, names: Iterable[str]) -> None:
        """Count adapters in memory as used now: what a request needs beside them is not put in their place."""
        for name in names:
            if name in self._registry:
                self._registry.move_to_end(name)

    def put(self, ref: LoRARef, version: int) -> None:
        """Let a name mean this adapter, which is that version of it, from now on."""
        self._registry.pop(ref.lora_name, None)
        self._register_adapter(ref)
        self.served[ref.lora_id] = split_version(ref.lora_name)[0], version

    def change(self, ref: LoRARef) -> None:
        """Let a name mean an adapter that is in memory, under another name or with another pin so far."""
        self._registry[ref.lora_name] = ref

    def versions(self, lora_id: str | None) -> list[Version]:
        """The name and version of an adapter, or of those that one row combines, by ids that are in use."""
        return [self.served[one] for one in members([lora_id]) if one is not None and one in self.served]

    def take(self, name: str) -> None:
        """Let a name mean nothing; requests of it go on."""
        del self._registry[name]

    def least_needed(self, keep: Collection[str]) -> LoRARef | None:
        """What leaves memory first: neither pinned nor kept, without users if there is one such, the least recent."""
        loose = [ref for ref in self._registry.values() if not ref.pinned and ref.lora_name not in keep]
        return next((ref for ref in loose if not self.users(ref.lora_id)), loose[0] if loose else None)
