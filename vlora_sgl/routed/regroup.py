"""From the weights of routed rows to the operator's row groups, after their token router has decided.

On a GPU the host does not know the decision and does not wait for it: rows are sorted by member tuple on the device,
into as many tiles as could be needed at most (``tiles``). Grouping by tuple lets the grouped kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch

from vlora_sgl.kernels.atmm import Group, Pairs, Routing
from vlora_sgl.kernels.atmm.row_routing import grouped_tables, slot_word
from vlora_sgl.routed.tiles import BLOCK, CHUNK, MAX_TUPLES, NEXT_USED, tiles_kernel
from vlora_sgl.routed.token_router import MAX_MEMBERS

ALIGN = 128
"""Bytes, of a table in a buffer of several: a kernel is compiled anew for a pointer that 16 does not divide."""


@dataclass(frozen=True)
class Routed:
    """Rows that a routed adapter has routed.

    Attributes:
        rows: [n] int64, on the device.
        weights: [n, K] float32, at most ``top_k`` of each row not zero.
        slots: [K] pool slot of each member.
        top_k: members per row at most.
        always: pairs that every one of these rows applies besides (a merged adapter, taken out).
    """

    rows: torch.Tensor
    weights: torch.Tensor
    slots: Sequence[int]
    top_k: int
    always: Pairs = ()


def others(groups: Sequence[Group], rows: int, routed: np.ndarray) -> list[Group]:
    """The groups without the rows named in ``routed``."""
    taken = np.zeros(rows, dtype=bool)
    taken[routed] = True
    left = ((numbers[~taken[numbers]], pairs) for numbers, pairs in groups)
    return [(numbers, pairs) for numbers, pairs in left if len(numbers)]


def host_groups(parts: Sequence[Routed], others: Sequence[Group]) -> list[Group]:
    """A CPU's row groups: those of all other rows, and one group per member of every routed adapter.

    A row may then lie in several groups, and a pair's weight may be a column, one per row: ``atmm_torch`` adds up.
    """
    found = list(others)
    for part in parts:
        rows = part.rows.numpy().astype(np.int32)
        if part.always:
            found.append((rows, part.always))
        for k, slot in enumerate(part.slots):
            chosen = part.weights[:, k] != 0
            if bool(chosen.any()):
                weight = part.weights[chosen, k]
                gate: Any = 1.0 if bool((weight == 1).all()) else weight[:, None]
                found.append((rows[chosen.numpy()], ((slot, gate),)))
    return found


def device_tiles(routing: Routing, parts: Sequence[Routed], others: Sequence[Group]) -> Routing:
    """The grouped kernels' tables, with the routed rows in tiles made on the device; no wait for the host.

    The host writes the tables as far as it knows them and sends them in one copy; a kernel per part does the rest.

    Args:
        routing: the batch's, as the host knows it.
        parts: the routed rows.
        others: the groups of all other rows.
    """
    tuples = [_tuples_of(part, routing) for part in parts]
    known = grouped_tables(others, routing.ranks, routing.scalings, routing.places, BLOCK)
    first, width = len(known[0]), max(known[1].shape[1], *(words.shape[1] for words in tuples))
    # A tuple's last tile may be partly filled; one without rows has no tile.
    count = first + sum(
        len(part.rows) // BLOCK + min(len(words), len(part.rows)) for part, words in zip(parts, tuples, strict=True)
    )
    rows = np.full((count, BLOCK), -1, dtype=np.int32)
    slots = np.zeros((count, width), dtype=np.int32)
    gates = np.zeros((count, width, BLOCK), dtype=np.float32)
    for table, values in zip((rows, slots[:, : known[1].shape[1]], gates[:, : known[2].shape[1]]), known, strict=True):
        table[:first] = values
    used = np.full(NEXT_USED * len(parts) + 1, first, dtype=np.int32)
    scales = [np.asarray([routing.scalings[slot] for slot in part.slots], dtype=np.float32) for part in parts]
    always = [np.asarray([w * routing.scalings[slot] for slot, w in part.always], dtype=np.float32) for part in parts]
    tile_rows, tile_gates, tile_slots, n_tiles, *own = put(
        [rows, gates, slots, used, *tuples, *scales, *always], parts[0].rows.device
    )
    k = len(parts)
    for p, part in enumerate(parts):
        tiles_kernel[(len(tuples[p]),)](
            tile_rows, tile_gates, tile_slots, n_tiles[NEXT_USED * p :],
            part.weights, part.rows, own[p], own[k + p], own[2 * k + p],
            len(part.rows), len(part.slots), part.top_k, len(part.always), width,
            MEMBERS=MAX_MEMBERS, TUPLES=MAX_TUPLES, BLOCK=BLOCK, CHUNK=CHUNK, NEXT_USED=NEXT_USED, num_warps=8,
        )  # fmt: skip
    return replace(
        routing, tile_rows=tile_rows, tile_slots=tile_slots, tile_gates=tile_gates, n_tiles=n_tiles[NEXT_USED * k :]
    )


def _tuples_of(part: Routed, routing: Routing) -> np.ndarray:
    """[tuples, P] int32: the slot words that a row with each tuple of members applies, 0 for none."""
    members = range(len(part.slots))
    chosen = combinations(members, 2) if part.top_k > 1 else [(), *((k,) for k in members)]

    def words(slots: Sequence[int]) -> list[int]:
        return [slot_word(routing.places[slot], routing.ranks[slot]) for slot in slots]

    always = words([slot for slot, _ in part.always])
    named = [words([part.slots[k] for k in one]) for one in chosen]
    return np.asarray([always + one + [0] * (part.top_k - len(one)) for one in named], dtype=np.int32)


def add_gates(routing: Routing, part: Routed) -> None:
    """Add the members' gates to ATMM's dense tables, in place."""
    assert routing.gates is not None
    device = part.weights.device
    scales = np.asarray([routing.scalings[slot] for slot in part.slots], dtype=np.float32)
    slots, scale = put([np.asarray(part.slots, dtype=np.int64), scales], device)
    routing.gates.index_put_((part.rows[:, None], slots[None]), part.weights * scale, accumulate=True)


def put(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Host arrays on a device, in one copy that nobody waits for; each aligned to ``ALIGN``."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
