"""From the weights of routed rows to the operator's row groups, after the rows' router has spoken.

On a GPU the host does not know the decision and does not wait for it: rows are sorted by member tuple on the device,
into as many tiles as could be needed at most. Grouping by tuple lets the grouped kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from vlora_sgl.kernels.atmm import Group, Pairs, Routing
from vlora_sgl.kernels.atmm.routing import grouped_tables, slot_word

BLOCK = 64  # rows per tile


@dataclass(frozen=True)
class Routed:
    """Rows that a mix has routed.

    Attributes:
        rows: [n] int64, on the device.
        weights: [n, K] float32, at most ``top_k`` of each row not zero.
        slots: [K] pool slot of each member.
        top_k: members per row at most.
        always: pairs that every one of these rows applies besides (a folded adapter, taken out).
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
    """A CPU's row groups: those of all other rows, and one group per member of every mix.

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

    Args:
        routing: the batch's, as the host knows it.
        parts: the routed rows.
        others: the groups of all other rows.
    """
    device = parts[0].rows.device
    keys: list[torch.Tensor] = []
    gates: list[torch.Tensor] = []
    tuples: list[tuple[int, ...]] = []
    for part in parts:
        key, gate, named = _tuples_of(part, routing)
        keys.append(key + len(tuples))
        gates.append(gate)
        tuples += named
    host_rows, host_slots, host_gates = grouped_tables(others, routing.ranks, routing.scalings, routing.places, BLOCK)
    width = max(host_slots.shape[1], *(len(named) for named in tuples))
    words = np.zeros((len(tuples), width), dtype=np.int32)
    for u, one in enumerate(tuples):
        words[u, : len(one)] = one
    wide = [torch.nn.functional.pad(gate, (0, width - gate.shape[1])) for gate in gates]
    rows, key = torch.cat([part.rows for part in parts]), torch.cat(keys)
    tile_rows, tile_tuple, tile_gates, used = _tiles(rows, key, torch.cat(wide), len(tuples))
    pad = width - host_slots.shape[1]
    to = partial(put, device=device)
    return replace(
        routing,
        tile_rows=torch.cat([to(host_rows), tile_rows]),
        tile_slots=torch.cat([to(np.pad(host_slots, ((0, 0), (0, pad)))), to(words)[tile_tuple]]),
        tile_gates=torch.cat([to(np.pad(host_gates, ((0, 0), (0, pad), (0, 0)))), tile_gates]),
        n_tiles=(used + len(host_rows)).to(torch.int32).reshape(1),
    )


def _tuples_of(part: Routed, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, ...]]]:
    """(tuple of every row [n], gate of every slot of its tuple [n, P], the slot words of each tuple)."""
    members, device, scalings = len(part.slots), part.weights.device, routing.scalings
    chosen: list[tuple[int, ...]] = [(), *((k,) for k in range(members))]
    if part.top_k > 1:
        chosen = list(combinations(range(members), 2))
    index = np.zeros((members, members), dtype=np.int64)
    for u, named in enumerate(chosen):
        if named:
            index[named[0], named[-1]] = u
    held = part.weights != 0
    place = torch.arange(members, device=device)
    lowest = torch.where(held, place, members).amin(1)
    highest = torch.where(held, place, -1).amax(1)
    found = put(index, device)[lowest.clamp(max=members - 1), highest.clamp(min=0)]
    key = torch.where(highest < 0, 0, found)
    scales = put(np.asarray([scalings[slot] for slot in part.slots], dtype=np.float32), device)
    scaled = torch.nn.functional.pad(part.weights * scales, (0, 1))  # a last column of zeros, for "no member"
    first = torch.where(highest < 0, members, lowest)
    columns = [first] if part.top_k == 1 else [first, highest]
    gate = scaled.gather(1, torch.stack(columns, 1))
    extra = [torch.full((len(key), 1), weight * scalings[slot], device=device) for slot, weight in part.always]

    def words(slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(slot_word(routing.places[slot], routing.ranks[slot]) for slot in slots)

    always = words([slot for slot, _ in part.always])
    tuples = [always + words([part.slots[k] for k in named]) for named in chosen]
    return key, torch.cat([*extra, gate], 1), tuples


def _tiles(
    rows: torch.Tensor, key: torch.Tensor, gates: torch.Tensor, tuples: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by key into tiles: (rows [T, BLOCK], key [T], gates [T, P, BLOCK], tiles in use); T is a bound."""
    count, device = len(rows), rows.device
    bound = count // BLOCK + min(tuples, count)
    order = key.argsort(stable=True)
    ordered = key[order]
    sizes = torch.zeros(tuples, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    tiles = (sizes + BLOCK - 1) // BLOCK
    ends, row_ends = tiles.cumsum(0), sizes.cumsum(0)
    offset = torch.arange(count, device=device) - (row_ends - sizes)[ordered]
    tile, lane = (ends - tiles)[ordered] + offset // BLOCK, offset % BLOCK
    tile_rows = torch.full((bound, BLOCK), -1, dtype=torch.int32, device=device)
    tile_rows[tile, lane] = rows[order].to(torch.int32)
    tile_gates = torch.zeros(bound, gates.shape[1], BLOCK, device=device)
    tile_gates[tile, :, lane] = gates[order]
    owner = torch.searchsorted(ends, torch.arange(bound, device=device), right=True).clamp(max=tuples - 1)
    return tile_rows, owner, tile_gates, ends[-1]


def add_gates(routing: Routing, part: Routed) -> None:
    """Add the members' gates to ATMM's dense tables, in place."""
    assert routing.gates is not None
    device = part.weights.device
    slots = put(np.asarray(part.slots, dtype=np.int64), device)
    scales = put(np.asarray([routing.scalings[slot] for slot in part.slots], dtype=np.float32), device)
    routing.gates.index_put_((part.rows[:, None], slots[None]), part.weights * scales, accumulate=True)


def put(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on a device, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
