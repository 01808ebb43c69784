"""From the rows of a batch to the operator's routing: which slots each row applies, with which weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ForwardBatch, LoRAAdapter
from vlora_sgl.core import AdapterId, row_pairs
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.kernels.atmm import Pairs
from vlora_sgl.kernels.atmm.row_routing import Run
from vlora_sgl.lora.arrivals import Arrivals
from vlora_sgl.routed.rows import LoadedRouted, row_lengths


def size_of(adapter: LoRAAdapter) -> tuple[int, float, bool]:
    """Rank and scaling of an adapter in the language model, and whether it has vectors."""
    return adapter.config.r, float(adapter.scaling), getattr(adapter, "vectors", None) is not None


class RowRouting:
    """The routing of one batch after the other.

    Args:
        pool: SGLang's, which knows every adapter's slot.
        adapters: SGLang's adapters by id, for their ranks and scalings.
        routed: routed adapters by id.
        arrivals: whose copy to a slot may be under way, if any can be.
    """

    def __init__(
        self,
        pool: _sgl.LoRAMemoryPool,
        adapters: Mapping[str, LoRAAdapter],
        routed: Mapping[str, LoadedRouted],
        arrivals: Arrivals | None = None,
    ) -> None:
        self._pool, self._adapters, self._routed, self._arrivals = pool, adapters, routed, arrivals

    @property
    def slots(self) -> int:
        """How many slots there are, the base model's included."""
        return int(self._pool.max_loras_per_batch)

    def slot_of(self, adapter: AdapterId) -> int:
        """The pool slot of an adapter, for what is launched next on the current stream.

        Raises:
            UnknownAdapterError: it holds none; SGLang would answer with whatever adapter holds slot 0.
        """
        slots = self._pool.uid_to_buffer_id
        if adapter not in slots:
            raise UnknownAdapterError(str(adapter), map(str, slots))
        if self._arrivals is not None and adapter is not None:
            self._arrivals.wait_for(adapter)
        return int(slots[adapter])

    def pairs_of(self, adapter: AdapterId, merged: AdapterId) -> Pairs:
        """The (slot, weight) pairs of a row of ``adapter`` while ``merged`` is merged.

        One that has weights for the vision tower only has none here. A routed adapter's row has its members with
        weight zero: its router decides before the first layer.
        """
        routed = self._routed.get(adapter) if adapter is not None else None
        if routed is not None:
            return (*((self.slot_of(uid), 0.0) for uid in routed.members), *self.pairs_of(None, merged))
        pairs = [(uid, self.slot_of(uid), weight) for uid, weight in row_pairs(adapter, merged)]
        return tuple((slot, weight) for uid, slot, weight in pairs if self._adapters[uid].config.target_modules)

    def runs_of(self, forward_batch: ForwardBatch, merged: AdapterId) -> list[Run]:
        """One run for each row of a batch (SGLang's ``ForwardBatch``, split at invocation starts)."""
        pairs = {adapter: self.pairs_of(adapter, merged) for adapter in dict.fromkeys(forward_batch.lora_ids)}
        return [(pairs[a], n) for a, n in zip(forward_batch.lora_ids, row_lengths(forward_batch), strict=True)]

    def tables_of(
        self, rows: Sequence[Run], size_of: Callable[[LoRAAdapter], tuple[int, float, bool]] = size_of
    ) -> tuple[list[Run], list[int], list[float], set[int]]:
        """What ``AtmmBackend.route`` takes: runs as long as can be, the rank and scaling of each slot in use, and the
        slots whose adapters have vectors."""
        runs = [(pairs, sum(n for _, n in same)) for pairs, same in groupby(rows, key=lambda run: run[0])]
        ranks, scalings, vectored = [0] * self.slots, [0.0] * self.slots, set()
        for slot in {slot for pairs, _ in runs for slot, _ in pairs}:
            ranks[slot], scalings[slot], has_vectors = size_of(self._adapters[self._pool.buffer_id_to_uid[slot]])
            if has_vectors:
                vectored.add(slot)
        return runs, ranks, scalings, vectored
