"""What the kernels need to know of a batch: which slots apply to which rows, with what gate.

Built on the host from row groups (rows that apply the same slots), copied to the device in one transfer, and read by
the kernels only there: a captured CUDA graph sees the next batch by refreshing the same tensors in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

DENSE_MAX_ROWS = 64
DENSE_MAX_SLOTS = 16
"""Up to here the dense kernels run (see dense.py); more rows, or slots in use, go to the grouped ones."""
DENSE_MAX_LOW, LOW_RANK = 32, 32
"""In a pool of at most that rank they take so many slots: of several at once, in steps as wide as one of rank 64."""
TILE_ROWS = (16, 64)
"""Rows per tile of the grouped kernels: few for groups of a few rows, many for the rest."""

Pairs = tuple[tuple[int, float], ...]
Group = tuple[np.ndarray, Pairs]
"""Row numbers (int32, 1-D) and the (slot, weight) pairs all of them apply."""
Run = tuple[Pairs, int]
"""``(pairs, n_rows)``: the next ``n_rows`` rows of the batch apply these (slot, weight) pairs."""


class Vectors(NamedTuple):
    """What adapters do to a linear's output beside adding to it, and the bias that a row's own part does not contain.

    A row that applies slot s becomes ``factor[s] * (x W^T + its pairs) + bias + shift[s]`` (DoRA's m / |W + s B A|,
    and trained biases). A row that takes slot m out has had its ``x W^T`` multiplied by ``factor[m]`` and ``shift[m]``
    added, by a merge, and gets them taken out.

    Attributes:
        slots: [S, 2, N] float32, factor and shift of every slot; unread where a slot's adapter has none.
        bias: [N], what the base layer adds, or ``None``.
    """

    slots: torch.Tensor
    bias: torch.Tensor | None = None


class RowTuples(NamedTuple):
    """The slots that rows apply, for rows that are to be gathered on the device (``experts``).

    Attributes:
        rows: [M] int32, which tuple of slots each row applies, 0 for none.
        words: [U, P] int32, the slot words of every tuple, 0 past its last; tuple 0 has none.
        gates: [U, P] float32, weight x scaling.
    """

    rows: torch.Tensor
    words: torch.Tensor
    gates: torch.Tensor


@dataclass(slots=True)
class Routing:
    """The routing of one batch on its device.

    Attributes:
        rows: number of rows M of the batch.
        slots: number of pool slots S.
        groups: the host's view; the CPU path works from it.
        ranks: rank of the adapter in each slot, 0 if empty (the CPU path; kernels read it from slot words).
        places: index of each slot in the pool tensors, its own number where all slots have one size.
        scalings: LoRA scaling of each slot (the CPU path).
        gates: [M, S] float32, weight x scaling, 0 where a slot does not apply (dense kernels).
        active: [2 + 2 S] int32: the number of slots in use, whether any of their ranks is no multiple of 8, a word for
            each (see ``slot_word``), and from 2 + S on its column of ``gates`` (dense kernels).
        tile_rows: [T, BM] int32, the rows of each tile, -1 past its end (grouped kernels).
        tile_slots: [T, P] int32, the slot words of each tile, 0 past its last (grouped kernels).
        tile_gates: [T, P, BM] float32, weight x scaling per row (grouped kernels).
        n_tiles: [1] int32, tiles in use; T may be larger in a captured graph (grouped kernels).
        touched: rows that apply any slot; ``None`` in a captured graph, which must serve any number.
        vectored: slots whose adapters have vectors (``Vectors``).
        marks: [M] int32, which slots' vectors each row applies and takes out (``mark``); ``None`` where none can.
        share: rows of the output for each row of the input: a token's choices of experts.
        tuples: the slots that each row applies, where layers gather rows anew.
        most_dense: slots in use up to which the dense kernels run in this pool (``dense_slots``).
        folds: how often a tile with few rows may be halved, for which its kernels are compiled (grouped kernels).
        more: what the same rows apply besides, one after the other: of each the grouped kernels' tables.
    """

    rows: int
    slots: int
    groups: list[Group]
    ranks: Sequence[int] = ()
    places: Sequence[int] = ()
    scalings: Sequence[float] = ()
    gates: torch.Tensor | None = None
    active: torch.Tensor | None = None
    tile_rows: torch.Tensor | None = None
    tile_slots: torch.Tensor | None = None
    tile_gates: torch.Tensor | None = None
    n_tiles: torch.Tensor | None = None
    touched: int | None = None
    vectored: Collection[int] = ()
    marks: torch.Tensor | None = None
    share: int = 1
    tuples: RowTuples | None = None
    most_dense: int = DENSE_MAX_SLOTS
    folds: int = 0
    more: tuple[Routing, ...] = ()

    @property
    def active_most(self) -> int:
        """Slots in use that the dense kernels have room for, however many the pool has."""
        return min(self.slots, self.most_dense)

    @property
    def has_adapters(self) -> bool:
        """Whether any row applies any slot."""
        return any(pairs and len(rows) for rows, pairs in self.groups)


def groups_of(runs: Iterable[Run]) -> tuple[list[Group], int]:
    """Rows that apply the same pairs, gathered from all over the batch; and the number of rows."""
    parts: dict[Pairs, list[np.ndarray]] = {}
    at = 0
    for pairs, count in runs:
        parts.setdefault(tuple(pairs), []).append(np.arange(at, at + count, dtype=np.int32))
        at += count
    return [(np.concatenate(rows), pairs) for pairs, rows in parts.items()], at


def dense_slots(rank: int) -> int:
    """Slots in use up to which the dense kernels run in a pool whose largest slots are of this rank."""
    return DENSE_MAX_LOW if rank <= LOW_RANK else DENSE_MAX_SLOTS


def is_dense(rows: int, active: int, most: int = DENSE_MAX_SLOTS) -> bool:
    """Which kernels serve a batch: every slot in use, ``most`` of them, applied to all rows, or rows gathered by
    slot."""
    return rows <= DENSE_MAX_ROWS and active <= most


def active_slots(groups: Iterable[tuple[object, Pairs]]) -> set[int]:
    """The slots that groups, or runs turned around, apply."""
    return {slot for _, pairs in groups for slot, _ in pairs}


def slot_word(place: int, rank: int) -> int:
    """Where a slot in use begins and its adapter's rank in one int32; never 0."""
    return place | rank << 16


def mark(pairs: Pairs, vectored: Collection[int]) -> int:
    """Of a row: 1 + the slot whose vectors it applies, and from bit 16 on 1 + the one whose it takes out; 0 for none.

    Raises:
        ValueError: a slot's vectors are to be applied by parts, or those of two slots to one row.
    """
    own = out = 0
    for slot, weight in pairs if vectored else ():
        if slot not in vectored:
            continue
        if abs(weight) != 1 or (own if weight > 0 else out):
            raise ValueError(f"slot {slot} has vectors, which a row applies whole and alone; got {pairs}")
        own, out = (slot + 1, out) if weight > 0 else (own, slot + 1)
    return own | out << 16


def check_slot(slot: int, ranks: Sequence[int]) -> None:
    """Refuse a slot that is out of range or holds no adapter.

    Raises:
        ValueError: says which.
    """
    if not 0 <= slot < len(ranks):
        raise ValueError(f"slot {slot} is out of range, the pool has {len(ranks)}")
    if ranks[slot] <= 0:
        raise ValueError(f"slot {slot} is routed to but holds no adapter (rank {ranks[slot]})")


def check_groups(groups: Sequence[Group], rows: int, ranks: Sequence[int]) -> None:
    """Refuse a routing that would read an empty slot or miss a row.

    Raises:
        ValueError: a slot that is out of range or holds no adapter, or groups that do not cover every row once.
    """
    named = [numbers for numbers, _ in groups]
    covered = np.bincount(np.concatenate(named) if named else [], minlength=rows)
    for _, pairs in groups:
        for slot, _ in pairs:
            check_slot(slot, ranks)
    if rows and not (covered == 1).all():
        bad = int(np.flatnonzero(covered != 1)[0])
        raise ValueError(f"every row belongs to one group; row {bad} of {rows} belongs to {int(covered[bad])}")


def active_table(used: Collection[int], ranks: Sequence[int], places: Sequence[int]) -> list[int]:
    """``Routing.active`` for the slots in use, without the zeros past them."""
    columns = sorted(used)
    words = [slot_word(places[slot], ranks[slot]) for slot in columns]
    rest = [0] * (len(ranks) - len(words))
    return [len(words), int(any(ranks[slot] % 8 for slot in used)), *words, *rest, *columns]


def dense_tables(
    groups: Sequence[Group], rows: int, ranks: Sequence[int], scalings: Sequence[float], places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(gates [rows, S] float32, active [2 + 2 S] int32) of these groups. A slot named twice for a row adds up."""
    gates = np.zeros((rows, len(scalings)), dtype=np.float32)
    used = set()
    for numbers, pairs in groups:
        for slot, weight in pairs:
            gates[numbers, slot] += weight * scalings[slot]
            if len(numbers):
                used.add(slot)
    active = np.zeros(2 + 2 * len(scalings), dtype=np.int32)
    table = active_table(used, ranks, places)
    active[: len(table)] = table
    return gates, active


def grouped_tables(
    groups: Sequence[Group], ranks: Sequence[int], scalings: Sequence[float], places: Sequence[int], block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tile_rows [T, block], tile_slots [T, P], tile_gates [T, P, block]): groups cut into tiles."""
    width = max([1, *(len(pairs) for numbers, pairs in groups if len(numbers))])
    total = sum(-(-len(numbers) // block) for numbers, _ in groups)
    tile_rows = np.full((total, block), -1, dtype=np.int32)
    tile_slots = np.zeros((total, width), dtype=np.int32)
    tile_gates = np.zeros((total, width, block), dtype=np.float32)
    at = 0
    for numbers, pairs in groups:
        count = -(-len(numbers) // block)
        tile_rows[at : at + count].reshape(-1)[: len(numbers)] = numbers
        for j, (slot, weight) in enumerate(pairs):
            tile_slots[at : at + count, j] = slot_word(places[slot], ranks[slot])
            tile_gates[at : at + count, j] = weight * scalings[slot]
        at += count
    return tile_rows, tile_slots, tile_gates


def tuple_tables(
    groups: Sequence[Group], rows: int, ranks: Sequence[int], scalings: Sequence[float], places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``RowTuples`` of these groups, as arrays."""
    named = [(numbers, pairs) for numbers, pairs in groups if pairs and len(numbers)]
    width = max([1, *(len(pairs) for _, pairs in named)])
    of_rows = np.zeros(rows, dtype=np.int32)
    words = np.zeros((len(named) + 1, width), dtype=np.int32)
    gates = np.zeros((len(named) + 1, width), dtype=np.float32)
    for u, (numbers, pairs) in enumerate(named, start=1):
        of_rows[numbers] = u
        for p, (slot, weight) in enumerate(pairs):
            words[u, p], gates[u, p] = slot_word(places[slot], ranks[slot]), weight * scalings[slot]
    return of_rows, words, gates


def make_routing(
    groups: Sequence[Group],
    rows: int,
    ranks: Sequence[int],
    scalings: Sequence[float],
    device: torch.device | str,
    *,
    places: Sequence[int] | None = None,
    block: int | None = None,
    dense: bool | None = None,
    vectored: Collection[int] = (),
    tuples: bool = False,
    most_dense: int = DENSE_MAX_SLOTS,
) -> Routing:
    """Routing of one batch in fresh tensors.

    Args:
        groups: row numbers and pairs; every row belongs to exactly one group, base-only rows to one without pairs.
        rows: number of rows M.
        ranks: rank of the adapter in each slot, 0 if empty.
        scalings: LoRA scaling of each slot.
        device: where the tables go.
        places: index of each slot in the pool tensors, where that is not its number.
        block: rows per tile of the grouped kernels; by default what the groups' mean size asks for.
        dense: build the dense tables, or the grouped ones; by default what the rows and the slots in use ask for.
        vectored: slots whose adapters have vectors.
        tuples: whether layers gather rows anew on the device.
        most_dense: slots in use up to which the dense kernels run in this pool.

    Raises:
        ValueError: as ``check_groups``.
    """
    check_groups(groups, rows, ranks)
    device = torch.device(device)
    places = tuple(range(len(ranks)) if places is None else places)

    def put(array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    routing = Routing(rows, len(ranks), list(groups), tuple(ranks), places, tuple(scalings), most_dense=most_dense)
    if is_dense(rows, len(active_slots(groups)), most_dense) if dense is None else dense:
        gates, active = dense_tables(groups, rows, ranks, scalings, places)
        routing.gates, routing.active = put(gates), put(active)
    else:
        block = block or TILE_ROWS[rows >= 32 * len(groups)]
        tile_rows, tile_slots, tile_gates = grouped_tables(groups, ranks, scalings, places, block)
        routing.tile_rows, routing.tile_slots, routing.tile_gates = put(tile_rows), put(tile_slots), put(tile_gates)
        routing.n_tiles = put(np.asarray([len(tile_rows)], dtype=np.int32))
    if tuples:
        routing.tuples = RowTuples(*map(put, tuple_tables(groups, rows, ranks, scalings, places)))
    routing.touched = sum(len(rows) for rows, pairs in groups if pairs)
    marks = [mark(pairs, vectored) for _, pairs in groups]
    if any(marks):
        words = np.zeros(rows, dtype=np.int32)
        for (numbers, _), word in zip(groups, marks, strict=True):
            words[numbers] = word
        routing.vectored, routing.marks = frozenset(vectored), put(words)
    return routing
