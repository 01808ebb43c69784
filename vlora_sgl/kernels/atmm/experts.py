# mypy: disallow-untyped-defs=False
"""The operator on experts: a token's choices are rows of their own, and every slot holds adapters of all experts.

A token that chose TOPK experts is TOPK rows of what the experts put out, one behind the other. Seen by the operator an
expert of a slot is a slot: those of slot s begin at ``place[s] * E``. So the grouped kernels are those of linears;
only who applies what is told anew in every layer, once its router has chosen. On a GPU the host does not know the
choice and does not wait for it: rows with the same slots and the same expert are gathered into tiles by one launch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl

from vlora_sgl.kernels.atmm.row_routing import TILE_ROWS, Group, Routing

CHUNK = 512
"""Rows that a program looks at together."""


def host_experts(routing: Routing, ids: torch.Tensor, experts: int, share: int) -> Routing:
    """The routing of tokens' choices, for a CPU.

    Args:
        routing: of the tokens.
        ids: [M, TOPK] int, the experts that each token chose; -1 for none.
        experts: how many there are.
        share: of the result: TOPK where the input's rows are tokens, 1 where they are choices.
    """
    chosen = ids.cpu().numpy().reshape(-1)
    groups: list[Group] = []
    for tokens, pairs in routing.groups:
        if not pairs:
            continue
        rows = (tokens[:, None] * ids.shape[1] + np.arange(ids.shape[1])).reshape(-1)
        for expert in np.unique(chosen[rows]):
            if expert >= 0:
                own = rows[chosen[rows] == expert].astype(np.int32)
                groups.append((own, tuple((slot * experts + int(expert), weight) for slot, weight in pairs)))
    return Routing(
        len(chosen),
        routing.slots * experts,
        groups,
        np.repeat(routing.ranks, experts).tolist(),
        (np.asarray(routing.places)[:, None] * experts + np.arange(experts)).reshape(-1).tolist(),
        np.repeat(routing.scalings, experts).tolist(),
        share=share,
    )


def device_experts(
    routing: Routing, ids: torch.Tensor, weights: torch.Tensor, experts: int, block: int | None = None
) -> tuple[Routing, Routing]:
    """The routing of tokens' choices, for the grouped kernels; no wait for the host.

    Args:
        routing: of the tokens; it has ``tuples``.
        ids: [M, TOPK] int32, the experts that each token chose; -1 for none.
        weights: [M, TOPK] float32, of the choices.
        experts: how many there are.
        block: rows per tile; by default what the choices ask for.

    Returns:
        Of inputs that are tokens; and of inputs that are choices, with their weights in the gates.
    """
    assert routing.tuples is not None
    words, top_k, rows = routing.tuples.words, ids.shape[1], ids.numel()
    (tuples, width), keys = words.shape, (words.shape[0] - 1) * experts
    block = block or TILE_ROWS[rows >= 32 * keys]
    count = max(1, min(rows, rows // block + keys))  # each key's last tile may be partly filled
    tile_rows = ids.new_empty((count, block), dtype=torch.int32)
    tile_slots = ids.new_empty((count, width), dtype=torch.int32)
    gates = weights.new_empty((2, count, width, block), dtype=torch.float32)
    n_tiles = ids.new_zeros(1, dtype=torch.int32)
    expert_tiles_kernel[(experts,)](
        tile_rows, tile_slots, gates[0], gates[1], n_tiles, ids, weights, *routing.tuples, rows,
        EXPERTS=experts, TOP_K=top_k, PAIRS=width, TUPLES=triton.next_power_of_2(tuples), BLOCK=block, CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip
    tokens = Routing(
        rows, routing.slots * experts, [], tile_rows=tile_rows, tile_slots=tile_slots, tile_gates=gates[0],
        n_tiles=n_tiles, share=top_k,
    )  # fmt: skip
    return tokens, replace(tokens, tile_gates=gates[1], share=1)


@triton.jit(do_not_specialize=["n"])
def expert_tiles_kernel(
    tile_rows, tile_slots, gates_in, gates_out, n_tiles, ids, weights, row_tuples, words, gates, n,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr, TUPLES: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per expert: it counts each tuple's rows, takes as many tiles and fills them, rows in order.

    Which tiles those are depends on who comes first, and nothing on that: a row is in one tile, no sum crosses rows.
    Shapes: tile_rows [T, BLOCK]; tile_slots [T, PAIRS]; gates_in, gates_out [T, PAIRS, BLOCK] float32; n_tiles int32,
    0 before; ids, weights [n]; row_tuples [n // TOP_K]; words, gates [tuples, PAIRS].
    """
    expert = tl.program_id(0)
    t, c, lanes = tl.arange(0, TUPLES), tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    sizes = tl.zeros([TUPLES], dtype=tl.int32)
    for start in range(0, n, CHUNK):
        i = start + c
        mine = tl.load(ids + i, mask=i < n, other=-1) == expert
        u = tl.load(row_tuples + i // TOP_K, mask=mine, other=0)
        sizes += tl.sum(((u[:, None] == t[None, :]) & (u > 0)[:, None]).to(tl.int32), axis=0)
    tiles = (sizes + BLOCK - 1) // BLOCK
    total = tl.sum(tiles, axis=0)
    if total == 0:
        return
    first = tl.atomic_add(n_tiles, total)
    ends = tl.cumsum(tiles, axis=0)
    begins = first + ends - tiles
    for tile in range(0, total):
        own = tl.sum((ends <= tile).to(tl.int32), axis=0)
        tl.store(tile_rows + (first + tile) * BLOCK + lanes, tl.full([BLOCK], -1, tl.int32))
        for p in tl.static_range(PAIRS):
            word = tl.load(words + own * PAIRS + p)
            place = ((word & 0xFFFF) * EXPERTS + expert) | (word & ~0xFFFF)
            tl.store(tile_slots + (first + tile) * PAIRS + p, tl.where(word == 0, 0, place))
    tl.debug_barrier()  # the rows below go where others of these threads have just stored
    placed = tl.zeros([TUPLES], dtype=tl.int32)
    for start in range(0, n, CHUNK):
        i = start + c
        mine = tl.load(ids + i, mask=i < n, other=-1) == expert
        u = tl.load(row_tuples + i // TOP_K, mask=mine, other=0)
        mine = u > 0
        hits = (mine[:, None] & (u[:, None] == t[None, :])).to(tl.int32)
        at = tl.sum(hits * (placed[None, :] + tl.cumsum(hits, axis=0) - 1), axis=1)
        row_tile, lane = tl.sum(hits * begins[None, :], axis=1) + at // BLOCK, at % BLOCK
        tl.store(tile_rows + row_tile * BLOCK + lane, i, mask=mine)
        chosen = tl.load(weights + i, mask=mine, other=0.0).to(tl.float32)
        for p in tl.static_range(PAIRS):
            gate = tl.load(gates + u * PAIRS + p, mask=mine, other=0.0)
            spot = (row_tile * PAIRS + p) * BLOCK + lane
            tl.store(gates_in + spot, gate, mask=mine)
            tl.store(gates_out + spot, gate * chosen, mask=mine)
        placed += tl.sum(hits, axis=0)
