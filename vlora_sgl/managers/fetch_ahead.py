"""Adapters brought to device slots before a plan needs them, and which requests wait until theirs is there.

What is brought follows the order in which requests are to run. An adapter that the plan needs takes the slot of one
that is needed later; one that is needed after the plan takes the slot of one that nobody needs. When a copy is
complete is reckoned by the planner's clock and the cost table, not asked of the device, so that all tensor-parallel
ranks hold the same view; a reckoning that is wrong costs a wait on the device, never an answer (``lora.arrivals``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from vlora_sgl.core import AdapterId


class Slots(Protocol):
    """Device slots for adapters (``lora.manager``)."""

    @property
    def resident(self) -> Collection[AdapterId]: ...
    def fetch_ahead(self, adapter: str, keep: Collection[AdapterId]) -> bool: ...


class FetchAhead:
    """One per planner.

    Args:
        slots: where adapters go.
        depth: most copies under way at once: more would only keep an urgent one waiting behind them.
        seconds_of: how long the copy of an adapter takes.

    Attributes:
        coming: by adapter, the planner's clock when its copy will be complete.
    """

    def __init__(self, slots: Slots, depth: int, seconds_of: Callable[[str], float]) -> None:
        self.slots, self.depth, self.seconds_of = slots, depth, seconds_of
        self.coming: dict[str, float] = {}
        self._free = 0.0  # when the link to the device is free again

    def begin(self, clock: float, wanted: Mapping[AdapterId, Collection[str]], planned: int) -> Sequence[AdapterId]:
        """Start copies before an iteration.

        Args:
            clock: the planner's, when the iteration will begin.
            wanted: what has to be in slots for each adapter of a request: those that run first, then in the order in
                which they are to run.
            planned: so many of them, the first ones, are the plan's.

        Returns:
            Those of ``wanted`` that are not there yet, but will be, in that order.
        """
        resident = self.slots.resident
        self.coming = {uid: at for uid, at in self.coming.items() if at > clock and uid in resident}
        absent: list[AdapterId] = []
        keep: set[AdapterId] = {*self.coming}
        for number, (adapter, holders) in enumerate(wanted.items()):
            if number == planned:
                keep.update(uid for one in wanted.values() for uid in one)
            keep.update(holders)
            late = [uid for uid in holders if uid not in resident and not self._start(uid, clock, keep)]
            # Where there is no slot for it, it does not come by waiting; its batch will make room.
            if any(uid in self.coming for uid in holders) or (late and len(self.coming) >= self.depth):
                absent.append(adapter)
        return absent

    def _start(self, adapter: str, clock: float, keep: Collection[AdapterId]) -> bool:
        if len(self.coming) >= self.depth or not self.slots.fetch_ahead(adapter, keep):
            return False
        self._free = max(self._free, clock) + self.seconds_of(adapter)
        self.coming[adapter] = self._free
        return True
