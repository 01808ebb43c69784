"""From the weights of routed rows to the operator's row groups, after their token router has decided.

On a GPU the host does not know the decision and does not wait for it: rows are sorted by the slots they apply on the
device, into as many tiles as could be needed at most (``tiles``). A row that gets several members applies them
together where its routed adapter has few sets of so many; else one after the other, in a pass of the operator each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from math import comb
from typing import Any

import numpy as np
import torch
import triton

from vlora_sgl.kernels.atmm import Group, Pairs, Routing
from vlora_sgl.kernels.atmm.row_routing import grouped_tables, slot_word
from vlora_sgl.routed.spec import MAX_TOP_K
from vlora_sgl.routed.tiles import BLOCK, MAX_TUPLES, tiles_kernel
from vlora_sgl.routed.token_router import MAX_MEMBERS

CELLS = 1 << 14
"""Rows times targets that a program of ``tiles_kernel`` compares at once."""
FOLDS = 2
"""Random shares leave each target a tile with few rows: it is computed as one of 16 or 32 rows (appendix B.1)."""
ALIGN = 128
"""Bytes, of a table in a buffer of several: a kernel is compiled anew for a pointer that 16 does not divide."""

BINOMIALS = np.asarray([[comb(k, rank + 1) for rank in range(MAX_TOP_K)] for k in range(MAX_MEMBERS)], dtype=np.int32)


@dataclass(frozen=True)
class Routed:
    """A routed adapter that rows of a batch belong to.

    Attributes:
        index: its number, as rows name it.
        slots: [K] pool slot of each member.
        top_k: members per row at most.
    """

    index: int
    slots: tuple[int, ...]
    top_k: int

    @property
    def width(self) -> int:
        """Members that a row applies in one pass: as many as leave few enough sets to sort rows by."""
        sizes = range(self.top_k, 1, -1)
        few = (w for w in sizes if self.top_k % w == 0 and comb(len(self.slots), w) <= MAX_TUPLES)
        return next(few, 1)

    @property
    def passes(self) -> int:
        """Passes of the operator."""
        return self.top_k // self.width


def others(groups: Sequence[Group], rows: int, routed: np.ndarray | Sequence[int]) -> list[Group]:
    """The groups without the rows named in ``routed``."""
    taken = np.zeros(rows, dtype=bool)
    taken[np.asarray(routed)] = True
    left = ((numbers[~taken[numbers]], pairs) for numbers, pairs in groups)
    return [(numbers, pairs) for numbers, pairs in left if len(numbers)]


def host_groups(
    weights: torch.Tensor, routed: torch.Tensor, parts: Sequence[Routed], always: Pairs, others: Sequence[Group]
) -> list[Group]:
    """A CPU's row groups: those of all other rows, and one group per member of every routed adapter.

    A row may then lie in several groups, and a pair's weight may be a column, one per row: ``atmm_torch`` adds up.

    Args:
        weights: [M, MAX_MEMBERS] float32; routed: [M], the number of each row's routed adapter, or -1.
        always: pairs that every routed row applies besides (a merged adapter, taken out).
    """
    found = list(others)
    for part in parts:
        mine = routed == part.index
        if always:
            found.append((torch.nonzero(mine)[:, 0].numpy().astype(np.int32), always))
        for k, slot in enumerate(part.slots):
            chosen = torch.nonzero(mine & (weights[:, k] != 0))[:, 0]
            if len(chosen):
                weight = weights[chosen, k]
                gate: Any = 1.0 if bool((weight == 1).all()) else weight[:, None]
                found.append((chosen.numpy().astype(np.int32), ((slot, gate),)))
    return found


class Dispatch:
    """What the host knows of the targets of routed rows: sets of slots, shared by all routed adapters of a batch.

    Args:
        routing: the batch's, for the slots' places, ranks and scalings.
        always: pairs that every routed row applies besides.
        capacity: routed adapters that rows may name.

    Attributes:
        passes: of the operator.
        words: [targets, P] int32, the slot words of every target; the first one's rows have no member.
    """

    def __init__(self, routing: Routing, parts: Sequence[Routed], always: Pairs, capacity: int) -> None:
        self.passes, self.always = max(part.passes for part in parts), always
        self.widths = np.ones(capacity, dtype=np.int32)
        self.targets = np.full((capacity, MAX_TUPLES), -1, dtype=np.int32)
        self.scales = np.zeros((capacity, MAX_MEMBERS), dtype=np.float32)
        numbers: dict[tuple[int, ...], int] = {(): 0}
        for part in parts:
            self.widths[part.index] = part.width
            self.scales[part.index, : len(part.slots)] = [routing.scalings[slot] for slot in part.slots]
            for chosen in combinations(range(len(part.slots)), part.width):
                words = tuple(slot_word(routing.places[part.slots[k]], routing.ranks[part.slots[k]]) for k in chosen)
                at = sum(int(BINOMIALS[k, rank]) for rank, k in enumerate(chosen))
                self.targets[part.index, at] = numbers.setdefault(words, len(numbers))
        first = [slot_word(routing.places[slot], routing.ranks[slot]) for slot, _ in always]
        width = len(first) + max(map(len, numbers))
        self.words = np.zeros((len(numbers), width), dtype=np.int32)
        for words, at in numbers.items():
            self.words[at, : len(first) + len(words)] = [*first, *words]
        self.always_gates = np.asarray([w * routing.scalings[slot] for slot, w in always], dtype=np.float32)

    @staticmethod
    def room(capacity: int, targets: int, width: int) -> list[np.ndarray]:
        """``shared`` and ``words_of`` of the largest dispatch, with at most one slot that rows always apply."""
        found = [np.ones(capacity, np.int32), np.full((capacity, MAX_TUPLES), -1, np.int32)]
        found += [np.zeros((capacity, MAX_MEMBERS), np.float32), BINOMIALS, np.zeros(1, np.float32)]
        return [*found, np.zeros((targets, width), np.int32)]

    def shared(self) -> list[np.ndarray]:
        """What the kernel reads in every pass: widths, targets, scales, binomials, gates of what rows always apply."""
        gates = self.always_gates if len(self.always) else np.zeros(1, dtype=np.float32)
        return [self.widths, self.targets, self.scales, BINOMIALS, gates]

    def words_of(self, number: int, width: int) -> np.ndarray:
        """[targets, width]: the words of a pass. What rows always apply, they apply in the first."""
        own = self.words if number == 0 else self.words[:, len(self.always) :]
        words = np.zeros((len(own), width), dtype=np.int32)
        words[:, : own.shape[1]] = own
        return words


def device_tiles(
    routing: Routing, weights: torch.Tensor, routed: torch.Tensor, dispatch: Dispatch, others: Sequence[Group]
) -> Routing:
    """The grouped kernels' tables, with the routed rows in tiles made on the device; no wait for the host.

    The host writes the tables as far as it knows them and sends them in one copy; a kernel a pass does the rest.

    Args:
        routing: the batch's, as the host knows it.
        weights: [M, MAX_MEMBERS] float32; routed: [M] int32, the number of each row's routed adapter, or -1.
        others: the groups of all other rows.
    """
    shared = dispatch.shared()
    taken = len(routed) - sum(len(numbers) for numbers, _ in others)
    # A target's last tile may be partly filled; one without rows has no tile.
    most = taken // BLOCK + min(len(dispatch.words), taken)
    arrays: list[np.ndarray] = []
    for number in range(dispatch.passes):
        groups = others if number == 0 else []
        known = grouped_tables(groups, routing.ranks, routing.scalings, routing.places, BLOCK)
        tables = _with_room(known, most, dispatch.words.shape[1] - len(dispatch.always) * (number > 0))
        counts = np.asarray([len(known[0]), len(dispatch.always) * (number == 0)], dtype=np.int32)
        arrays += [*tables, counts, counts[:1], dispatch.words_of(number, tables[1].shape[1])]
    placed = put([*shared, *arrays], weights.device)
    made = []
    for number in range(dispatch.passes):
        tile_rows, tile_slots, tile_gates, counted, n_tiles, words = placed[len(shared) + 6 * number :][:6]
        view = replace(
            routing,
            folds=FOLDS,
            tile_rows=tile_rows,
            tile_slots=tile_slots,
            tile_gates=tile_gates,
            n_tiles=n_tiles,
        )
        fill_tiles(view, counted, weights, routed, placed[: len(shared)], words, number)
        made.append(view)
    return replace(made[0], more=tuple(made[1:]))


def fill_tiles(
    view: Routing,
    counts: torch.Tensor,
    weights: torch.Tensor,
    routed: torch.Tensor,
    shared: Sequence[torch.Tensor],
    words: torch.Tensor,
    number: int = 0,
) -> None:
    """Put routed rows into the tiles of ``view`` behind those that are there; one launch, nothing allocated.

    Args:
        counts: [2] int32: tiles that are there, and slots that every row applies. The number of all tiles goes to
            ``view.n_tiles``.
        shared, words: of the ``Dispatch``.
        number: of the pass.
    """
    assert view.tile_rows is not None and view.tile_slots is not None
    widths, targets, scales, binomials, gates = shared
    size = triton.next_power_of_2(max(len(words), 16))
    tiles_kernel[(len(words),)](
        view.tile_rows, view.tile_gates, view.tile_slots, counts, view.n_tiles, weights, routed, widths, targets,
        scales, words, gates, binomials, len(routed), number, view.tile_slots.shape[1],
        MEMBERS=MAX_MEMBERS, TUPLES=MAX_TUPLES, TARGETS=size, BLOCK=view.tile_rows.shape[1],
        CHUNK=max(64, min(512, CELLS // size)), num_warps=8,
    )  # fmt: skip


def _with_room(known: Sequence[np.ndarray], more: int, width: int) -> list[np.ndarray]:
    """Tables of these tiles and room for ``more``, with ``width`` slots a row at least."""
    rows, slots, gates = known
    count, width = len(rows) + more, max(width, slots.shape[1])
    found = [np.empty((count, BLOCK), np.int32), np.zeros((count, width), np.int32)]
    found.append(np.zeros((count, width, BLOCK), np.float32))
    found[0][: len(rows)], found[1][: len(rows), : slots.shape[1]], found[2][: len(rows), : gates.shape[1]] = known
    return found


def add_gates(
    gates: torch.Tensor, weights: torch.Tensor, routed: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor
) -> None:
    """Add the members' gates to ATMM's dense table, in place.

    Args:
        gates: [M, S] float32.
        weights: [M, MAX_MEMBERS] float32; routed: [M] int32, the number of each row's routed adapter, or -1.
        slots: [X, MAX_MEMBERS] int64, any where there is no member; scales: [X, MAX_MEMBERS] float32.
    """
    of_rows = routed.long().clamp(min=0)
    gates.scatter_add_(1, slots[of_rows], weights * scales[of_rows])


class FixedTables:
    """Arrays at fixed addresses of a device, for captured graphs: written anew by one copy that nobody waits for.

    Args:
        arrays: the first contents, which say shapes and types.

    Attributes:
        tensors: the arrays on the device.
    """

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        self._starts = np.cumsum([0, *(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)]).tolist()
        pinned = device.type == "cuda"
        # In turn: the copy from one may be under way while the scheduler, a step ahead, writes the next.
        self._hosts = cycle([torch.zeros(self._starts[-1], dtype=torch.uint8, pin_memory=pinned) for _ in range(3)])
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        self.tensors = _views(self._buffer, arrays, self._starts)
        self.write(arrays)

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """Take new contents, each no larger than the first and in its rows."""
        host = next(self._hosts)
        for start, array in zip(self._starts, arrays, strict=False):
            host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._buffer.copy_(host, non_blocking=True)


def _views(buffer: torch.Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> list[torch.Tensor]:
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def put(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Host arrays on a device, in one copy that nobody waits for; each aligned to ``ALIGN``."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return _views(there, arrays, starts)
