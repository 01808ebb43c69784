"""Which adapters hold device slots: who is evicted, who is counted as a hit, and whether the slots thrash.

SGLang's pool loads and evicts; it asks an eviction policy for a victim. Ours knows the plan: an adapter that a planned
or waiting request needs is evicted only when every other is gone, the one needed last first. It reads no clock, so
that all tensor-parallel ranks evict alike.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from vlora_sgl.core import AdapterId, JsonDict


class SlotResidency:
    """SGLang's eviction policy interface (``mark_used``, ``select_victim``, ``remove``), and the counts of what it
    did.

    Attributes:
        hits: uses of an adapter by a batch that found it in its slot, or on its way there.
        misses: uses that had to load it first.
        ahead: loads that no batch waited for: they began before one needed the adapter.
        evictions: adapters that lost their slot to another.
        loads: the same by adapter, of those that are loaded.
        reloads: loads of an adapter evicted within the last ``memory`` evictions: thrash, once it nears all loads.

    Args:
        memory: how many evictions are remembered to recognise thrash; the number of slots is a good choice.
    """

    def __init__(self, memory: int) -> None:
        self.hits = self.misses = self.ahead = self.evictions = self.reloads = 0
        self._ahead = False
        self.loads: Counter[str] = Counter()
        self._memory = memory
        self._resident: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._wanted: dict[AdapterId, int] = {}

    @property
    def resident(self) -> Collection[str]:
        """Adapters in device slots, least recently used first."""
        return self._resident.keys()

    def want(self, adapters: Iterable[AdapterId]) -> None:
        """Say which adapters the plan and the waiting requests need, soonest first."""
        self._wanted = {}
        for adapter in adapters:
            self._wanted.setdefault(adapter, len(self._wanted))

    def mark_used(self, uid: AdapterId) -> None:
        """A batch is about to use this adapter; the pool loads it if it is not there."""
        if uid is None or (self._ahead and uid in self._resident):
            return
        if uid in self._resident:
            self.hits += 1
            self._resident.move_to_end(uid)
            return
        self.misses += not self._ahead
        self.ahead += self._ahead
        self.loads[uid] += 1
        self.reloads += uid in self._evicted
        self._evicted.pop(uid, None)
        self._resident[uid] = None

    @contextmanager
    def before_use(self) -> Iterator[None]:
        """While this lasts, no batch uses what the pool loads, nor what it is told to keep."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def select_victim(self, candidates: Collection[AdapterId]) -> AdapterId:
        """The adapter whose slot is given away: nobody's need first, then the last needed; the base model at last."""
        named = [uid for uid in self._resident if uid in candidates]
        if not named:
            return None
        last = len(self._wanted)
        victim = max(named, key=lambda uid: self._wanted.get(uid, last))  # the first of equals: least recently used
        self.evictions += 1
        self._evicted[victim] = None
        if len(self._evicted) > self._memory:
            self._evicted.popitem(last=False)
        return victim

    def remove(self, uid: AdapterId) -> None:
        """Forget an adapter that lost its slot or was unloaded."""
        if uid is not None:
            self._resident.pop(uid, None)

    def unloaded(self, uid: str) -> None:
        """An adapter has left memory: forget how often it was loaded."""
        self.loads.pop(uid, None)

    def state(self) -> JsonDict:
        """Figures for ``/server_info`` and the metrics."""
        return {
            "resident": len(self._resident),
            "hits": self.hits,
            "misses": self.misses,
            "ahead": self.ahead,
            "evictions": self.evictions,
            "reloads": self.reloads,
        }
