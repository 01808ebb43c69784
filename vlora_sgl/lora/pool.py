"""A memory pool whose slots have ranks of their own, at fixed addresses.

SGLang's pool gives every slot the largest rank, the base model's too: room for one adapter of rank 64 and six of rank
16 takes 2.6 GB beside a 7B model, where 0.8 would do. Here all slots of a module lie behind each other in one tensor,

    A [sum of ranks * parts, K]    and    B [N, sum of ranks],

and what the layers see are overlapping views of it, ``[places, parts * R, K]`` and ``[places, N, R]``: the index of a
slot is where it begins, in units of 16 ranks, and only its own part of what the view shows there is ever read. So the
kernels, which multiply a slot's index with a stride, need not know. The largest slot comes last, so that no view ends
behind its tensor.

An adapter goes to the smallest slot that holds it. It may take a larger one when those are in use, and moves when a
larger adapter needs that: so a set of adapters fits whenever each, by rank, finds a slot of its own (``fits``).
Everything is copied on the stream that asks, behind the steps that read the slots before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import LoRAAdapter, LoRARef
from vlora_sgl.core import AdapterId
from vlora_sgl.errors import ConfigError
from vlora_sgl.lora.packed import PackedPool
from vlora_sgl.server_args import SLOT_UNIT


def fits(ranks: Iterable[int], capacities: Sequence[int]) -> bool:
    """Whether adapters of these ranks find a slot each. The largest takes the largest, and so on down."""
    wanted, offered = sorted(ranks, reverse=True), sorted(capacities, reverse=True)
    return len(wanted) <= len(offered) and all(r <= c for r, c in zip(wanted, offered, strict=False))


def place(
    wanted: Mapping[AdapterId, int],
    held: Mapping[int, AdapterId],
    capacities: Sequence[int],
    victim: Callable[[set[AdapterId]], AdapterId],
) -> dict[AdapterId, int]:
    """Where the adapters go that have no slot yet, or have to leave theirs.

    Args:
        wanted: rank of every adapter that needs a slot now, those that hold one included.
        held: adapter by slot; slots not named are empty.
        capacities: rank of every slot.
        victim: picks, of adapters that may be evicted, the one that is.

    Returns:
        New slot by adapter; whoever else holds one of these slots loses it.

    Raises:
        ValueError: they do not fit together.
    """
    if not fits(wanted.values(), capacities):
        raise ValueError(f"adapters of ranks {sorted(wanted.values())} do not fit slots of ranks {sorted(capacities)}")
    order = sorted(wanted, key=lambda uid: (-wanted[uid], str(uid)))
    slot_of = {uid: slot for slot, uid in held.items()}
    taken = {slot_of[uid] for uid in order if uid in slot_of}
    found: dict[AdapterId, int] = {}
    for uid in order:
        if uid in slot_of:
            continue
        free = [slot for slot, rank in enumerate(capacities) if rank >= wanted[uid] and slot not in taken]
        if not free:
            return _place_all(order[::-1], wanted, slot_of, capacities)
        free = [slot for slot in free if slot not in held] or free
        least = min(capacities[slot] for slot in free)
        free = [slot for slot in free if capacities[slot] == least]
        found[uid] = free[0] if free[0] not in held else slot_of[victim({held[slot] for slot in free})]
        taken.add(found[uid])
    return found


def _place_all(
    order: Sequence[AdapterId],
    wanted: Mapping[AdapterId, int],
    slot_of: Mapping[AdapterId, int],
    capacities: Sequence[int],
) -> dict[AdapterId, int]:
    """Everybody anew, the smallest first and into the smallest slots: this finds a place for all whenever there is."""
    found: dict[AdapterId, int] = {}
    left = set(range(len(capacities)))
    for uid in order:
        here = slot_of.get(uid)
        found[uid] = min(
            (slot for slot in left if capacities[slot] >= wanted[uid]),
            key=lambda slot: (capacities[slot], slot != here, slot),
        )
        left.remove(found[uid])
    return {uid: slot for uid, slot in found.items() if slot_of.get(uid) != slot}


class SizedPool(PackedPool):
    """SGLang's pool with slots of the ranks given. Slot 0 is the base model's, has rank 0 and takes no memory.

    Args:
        slot_ranks: rank of every slot but the base model's, multiples of ``SLOT_UNIT``.
        options: SGLang's.
    """

    buffer_id_to_uid: list[object]
    uid_to_buffer_id: dict[AdapterId, int]

    def __init__(self, slot_ranks: Sequence[int], **options: Any) -> None:
        ranks = (0, *sorted(slot_ranks))
        self.total_rank = sum(ranks)
        places = [sum(ranks[:slot]) // SLOT_UNIT for slot in range(len(ranks))]
        super().__init__(**{**options, "max_lora_rank": ranks[-1], "ranks": ranks, "places": places})

    def init_buffers(self, base_model: nn.Module) -> None:
        """One tensor per module, and the overlapping views that the layers see."""
        super().init_buffers(base_model)
        if self.embedding_A_buffer or self.lm_head_A_buffer or any(t[0].ndim != 3 for t in self.A_buffer.values()):
            raise ConfigError("--vlora-slot-ranks is for linear layers, not for embeddings, lm_head or MoE experts")
        largest, count = self.ranks[-1], self.places[-1] + 1
        for name, layers in self.A_buffer.items():
            rows = layers[0].shape[1] // self.total_rank  # stacked projections
            for layer, a in enumerate(layers):
                shape = (count, rows * largest, a.shape[2])
                layers[layer] = a.as_strided(shape, (rows * SLOT_UNIT * a.shape[2], a.shape[2], 1))
            self.B_buffer[name] = [
                b.as_strided((count, b.shape[1], largest), (SLOT_UNIT, self.total_rank, 1))
                for b in self.B_buffer[name]
            ]

    def get_lora_A_shape(
        self, module_name: str, base_model: nn.Module, max_lora_dim: int, layer_idx: int
    ) -> tuple[int, ...]:
        """All slots behind each other, as if one slot had all their ranks."""
        shape = super().get_lora_A_shape(module_name, base_model, self.total_rank, layer_idx)
        return (1, *shape[1:])

    def get_lora_B_shape(
        self, module_name: str, base_model: nn.Module, max_lora_dim: int, layer_idx: int
    ) -> tuple[int, ...]:
        """All slots beside each other, as if one slot had all their ranks."""
        shape = super().get_lora_B_shape(module_name, base_model, self.total_rank, layer_idx)
        return (1, *shape[1:])

    def prepare_lora_batch(
        self,
        cur_uids: set[AdapterId],
        lora_adapters: Mapping[str, LoRAAdapter],
        lora_modules: Sequence[Mapping[str, object]],
        lora_refs: Mapping[str, LoRARef],
        lora_embed_tokens_module: object,
        lora_lm_head_module: object,
    ) -> None:
        """Give every adapter of ``cur_uids`` a slot. Pinned ones keep theirs, or move."""
        # Sorted: all tensor-parallel ranks must do the same.
        for uid in sorted(cur_uids, key=lambda uid: (uid is not None, uid or "")):
            self.eviction_policy.mark_used(uid)
        pinned = {uid for uid in self.uid_to_buffer_id if uid is not None and lora_refs[uid].pinned}
        wanted = {uid: 0 if uid is None else int(lora_adapters[uid].config.r) for uid in cur_uids | pinned}
        held = {slot: uid for uid, slot in self.uid_to_buffer_id.items()}
        moves = place(wanted, held, self.ranks, self.eviction_policy.select_victim)
        for uid in [*(held[slot] for slot in moves.values() if slot in held), *moves]:
            if uid in self.uid_to_buffer_id:
                self.buffer_id_to_uid[self.uid_to_buffer_id.pop(uid)] = _sgl.EMPTY_SLOT
                if uid not in wanted:
                    self.eviction_policy.remove(uid)
        for uid, slot in moves.items():
            adapter = None if uid is None else lora_adapters[uid]
            self.load_lora_weight_to_buffer(
                uid, slot, adapter, lora_modules, lora_embed_tokens_module, lora_lm_head_module
            )
            self.uid_to_buffer_id[uid], self.buffer_id_to_uid[slot] = slot, uid

    def load_lora_weight_to_buffer(self, uid: AdapterId, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        """The base class's, which writes an adapter's own rank at the index that it is given."""
        if uid is not None:
            super().load_lora_weight_to_buffer(uid, self.places[buffer_id], *args, **kwargs)

    def _clear_buffer_slot_for_base(self, buffer_id: int) -> None:
        place, rank = self.places[buffer_id], self.ranks[buffer_id]
        for name, layers in self.A_buffer.items():
            for a, b in zip(layers, self.B_buffer[name], strict=True):
                a[place, : rank * (a.shape[1] // self.ranks[-1])].zero_()
                b[place, :, :rank].zero_()
