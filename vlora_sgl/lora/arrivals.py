"""Copies of adapters into device slots, beside the steps: on a stream of their own, where there is a GPU.

Two orders make that safe. A copy begins behind everything that was launched when it was asked for, so what a step
still reads is not overwritten; what is launched later does not read that slot, or asks for it. And whoever is about to
read a slot asks ``RowRouting.slot_of`` where it is, which has the reading stream wait for a copy on its way. The host
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch


class Arrivals:
    """One per LoRA manager.

    Args:
        device: of the slots; without a stream of its own, what is loaded is there at once.
        pending: by adapter, what stands behind its copy, until a reader waits for that. It is SGLang's
            (``LoRAManager.pending_lora_load_events``), which looks there before it unloads an adapter.
    """

    def __init__(self, device: torch.device, pending: MutableMapping[str, torch.cuda.Event]) -> None:
        self.pending = pending
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reader: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self, adapter: str) -> Iterator[None]:
        """What is launched inside, which fills the adapter's slot, runs beside the steps that are launched later."""
        if self._stream is None:
            yield
            return
        for earlier in filter(None, (torch.cuda.current_stream(), self._reader)):
            self._stream.wait_stream(earlier)
        with torch.cuda.stream(self._stream):
            yield
            self.pending[adapter] = self._stream.record_event()

    def wait_for(self, adapter: str) -> None:
        """What is launched next on the current stream reads the adapter's slot."""
        event = self.pending.pop(adapter, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def read_here(self) -> None:
        """Steps are launched on the current stream."""
        if self._stream is not None:
            self._reader = torch.cuda.current_stream()

    def wait_for_all(self) -> None:
        """What is launched next on the current stream writes slots."""
        for adapter in list(self.pending):
            self.wait_for(adapter)
