"""The mode switch: which adapter, if any, is merged into the base weights right now (V-LoRA, section 4.4.1).

Weights have two states, the base model's or merged with one adapter. Every merge starts from the copy of the base
weights, ``W = round(W0 + s B A)``, and unmerging copies ``W0`` back, so a switch from A to B is one pass and no
sequence of switches can drift. Everything is enqueued on the stream that is current, which is the forward stream in
the engine: a switch is ordered after the step before it and before the step that needs it, with no synchronisation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.kernels.merge import MergeTable


@dataclass(frozen=True, slots=True)
class MergeOperand:
    """An adapter as the switcher needs it.

    Attributes:
        adapter: its identity.
        slot: its index in the pools.
        rank: rank r of its A and B in the slot.
        scaling: its s.
        groups: the groups of merge targets it has weights for; the others keep the base weights.
        vectors: the number of its slot, if it has vectors.
    """

    adapter: str
    slot: int
    rank: int
    scaling: float
    groups: frozenset[str]
    vectors: int | None = None


@dataclass(slots=True)
class SwitchCounter:
    """How often one kind of switch ran, and the time it took on the device (on the host, where that is the device)."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Timer:
    """Times work on a stream without waiting for it: events, read once they are done."""

    device: torch.device
    pending: deque[tuple[SwitchCounter, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    def run(self, counter: SwitchCounter, work: Callable[[], None]) -> None:
        counter.count += 1
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            counter.seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        self.pending.append((counter, begin, end))
        self.collect()

    def collect(self) -> None:
        while self.pending and self.pending[0][2].query():
            counter, begin, end = self.pending.popleft()
            counter.seconds += begin.elapsed_time(end) / 1e3


class ModeSwitcher:
    """State machine over one model shard's merge targets.

    Args:
        table: all merge targets; their copies of the base weights must equal the weights now.
    """

    def __init__(self, table: MergeTable) -> None:
        self.table = table
        self.counters = {kind: SwitchCounter() for kind in ("merge", "direct", "unmerge")}
        self._timer = _Timer(table.device)
        self._merged: MergeOperand | None = None

    @property
    def merged(self) -> AdapterId:
        """The adapter merged into the weights, or ``None`` while they are the base model's."""
        return None if self._merged is None else self._merged.adapter

    def merge(self, operand: MergeOperand) -> bool:
        """Make ``operand`` the merged adapter: one pass over what it targets, whatever was merged before.

        Returns:
            Whether anything had to be done.
        """
        before = self._merged
        if before is not None and before.adapter == operand.adapter:
            return False
        stale = frozenset() if before is None else before.groups - operand.groups

        def work() -> None:
            # Not merged with a zero delta: -0.0 + 0.0 is 0.0, and a fresh merge would have left -0.0 alone.
            if stale:
                self.table.restore(stale)
            self.table.merge(
                operand.groups,
                slot=operand.slot,
                rank=operand.rank,
                scaling=operand.scaling,
                vectors=operand.vectors,
            )

        self._timer.run(self.counters["merge" if before is None else "direct"], work)
        self._merged = operand
        return True

    def restore(self) -> bool:
        """Bring the base weights back.

        Returns:
            Whether anything had to be done.
        """
        if self._merged is None:
            return False
        groups = self._merged.groups
        self._timer.run(self.counters["unmerge"], lambda: self.table.restore(groups))
        self._merged = None
        return True

    def rebase(self) -> None:
        """Take the present weights as the base model's, after the base model was updated.

        Raises:
            RuntimeError: an adapter is merged, so the weights are not the base model's.
        """
        if self._merged is not None:
            raise RuntimeError(f"cannot take weights as the base model's while {self._merged.adapter} is merged")
        self.table.refresh_base()

    def state(self) -> JsonDict:
        """Merged adapter and counters, as JSON values. Times of switches still running are not in yet."""
        self._timer.collect()
        return {
            "merged": self.merged,
            "switches": {kind: {"count": c.count, "seconds": c.seconds} for kind, c in self.counters.items()},
        }


def base_copies(weights: Sequence[torch.Tensor], where: str) -> list[torch.Tensor]:
    """Contiguous copies of the weights in one allocation.

    Args:
        weights: tensors of one type.
        where: ``"device"``: beside the weights, so that a switch runs at memory speed; ``"host"``: in pinned host
            memory, which the kernel reads over the bus (tens of GB/s), for models that would not fit twice.
    """
    first = weights[0]
    on_host = where == "host" and first.device.type == "cuda"
    arena = torch.empty(
        sum(w.numel() for w in weights),
        dtype=first.dtype,
        device="cpu" if on_host else first.device,
        pin_memory=on_host,
    )
    copies = []
    for w, piece in zip(weights, arena.split([w.numel() for w in weights]), strict=True):
        copies.append(piece.view(w.shape))
        copies[-1].copy_(w)
    return copies
