"""Unloads that wait for the rows that still use the adapter.

The front of the engine asks for an unload when no request of the adapter is left there. A client that hung up has left
the front, while its row runs until the scheduler has carried out the abort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from vlora_sgl._sgl_types import UnloadLoRAAdapterReqInput


class Draining:
    """One per scheduler.

    Args:
        in_use: ids of the adapters whose requests are in the scheduler now.
    """

    def __init__(self, in_use: Callable[[], Collection[str | None]]) -> None:
        self._in_use = in_use
        self._waiting: list[UnloadLoRAAdapterReqInput] = []

    def waits(self, unload: UnloadLoRAAdapterReqInput) -> bool:
        """Whether an unload (SGLang's message) has to wait; then it is kept until ``drained``."""
        waits = unload.lora_id in self._in_use()
        if waits:
            self._waiting.append(unload)
        return waits

    def drained(self) -> list[UnloadLoRAAdapterReqInput]:
        """The unloads whose adapters nobody uses any more; they wait no longer."""
        if not self._waiting:
            return []
        used = self._in_use()
        ready = [unload for unload in self._waiting if unload.lora_id not in used]
        self._waiting = [unload for unload in self._waiting if unload.lora_id in used]
        return ready
