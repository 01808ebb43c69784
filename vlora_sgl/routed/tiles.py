# mypy: disallow-untyped-defs=False
"""Routed rows into tiles of the grouped kernels, sorted by member tuple; one launch a routed adapter."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64  # rows per tile
MAX_TUPLES = 32  # at least the pairs of eight members
CHUNK = 1024  # rows that a program looks at together
NEXT_USED = 4
"""int32 from a part's count of tiles to the next one's: all aligned alike, or kernels would compile again for one."""


@triton.jit
def _key_of(weight, k, members, top_k):
    """(tuple [C], lowest [C] and highest [C] member) of weights [C, MEMBERS]; tuple 0, or members, -1 for none."""
    held = weight != 0
    lowest = tl.min(tl.where(held, k[None, :], members), axis=1)
    highest = tl.max(tl.where(held, k[None, :], -1), axis=1)
    pair = lowest * (2 * members - lowest - 1) // 2 + highest - lowest - 1
    key = tl.where(top_k == 1, lowest + 1, pair)
    return tl.where(highest < 0, 0, key), lowest, highest


@triton.jit(
    do_not_specialize=["n", "members", "top_k", "always", "width"], do_not_specialize_on_alignment=["rows", "weights"]
)
def tiles_kernel(
    tile_rows, tile_gates, tile_slots, used, weights, rows, words, scales, always_gates,
    n, members, top_k, always, width,
    MEMBERS: tl.constexpr, TUPLES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, NEXT_USED: tl.constexpr,
):  # fmt: skip
    """One program per tuple: it counts all tuples' rows, which says where its tiles begin, then fills them in order.

    Tuples: top_k 1: none, then each member; top_k 2: the pairs of members in lexicographic order.
    Shapes: tile_rows [T, BLOCK], -1 before; tile_gates [T, width, BLOCK] and tile_slots [T, width], 0 before; used
    int32, its first the tiles in use before, at NEXT_USED those after; weights [n, members] float32; rows [n]; words
    [tuples, always + top_k]; scales [members]; always_gates [always].
    """
    u = tl.program_id(0)
    k, t, c = tl.arange(0, MEMBERS), tl.arange(0, TUPLES), tl.arange(0, CHUNK)
    scale = tl.load(scales + k, mask=k < members, other=0.0)
    sizes = tl.zeros([TUPLES], dtype=tl.int32)
    for start in range(0, n, CHUNK):
        i = start + c
        inside = (i < n)[:, None] & (k < members)[None, :]
        weight = tl.load(weights + i[:, None] * members + k[None, :], mask=inside, other=0.0)
        key, _, _ = _key_of(weight, k, members, top_k)
        key = tl.where(i < n, key, -1)
        sizes += tl.sum((key[:, None] == t[None, :]).to(tl.int32), axis=0)
    tiles = (sizes + BLOCK - 1) // BLOCK
    begin = tl.load(used)
    if u == 0:
        tl.store(used + NEXT_USED, begin + tl.sum(tiles, axis=0))
    begin += tl.sum(tl.where(t < u, tiles, 0), axis=0)
    placed = 0
    for start in range(0, n, CHUNK):
        i = start + c
        inside = (i < n)[:, None] & (k < members)[None, :]
        weight = tl.load(weights + i[:, None] * members + k[None, :], mask=inside, other=0.0)
        key, lowest, highest = _key_of(weight, k, members, top_k)
        mine = (i < n) & (key == u)
        at = placed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tile, lane = begin + at // BLOCK, at % BLOCK
        row = tl.load(rows + i, mask=mine, other=0)
        tl.store(tile_rows + tile * BLOCK + lane, row.to(tl.int32), mask=mine)
        place = tile_gates + tile * width * BLOCK + lane
        for p in range(0, always):
            tl.store(place + p * BLOCK, tl.zeros([CHUNK], dtype=tl.float32) + tl.load(always_gates + p), mask=mine)
        weight *= scale[None, :]
        gate = tl.sum(tl.where(k[None, :] == lowest[:, None], weight, 0.0), axis=1)
        tl.store(place + always * BLOCK, gate, mask=mine)
        if top_k > 1:
            gate = tl.sum(tl.where(k[None, :] == highest[:, None], weight, 0.0), axis=1)
            tl.store(place + (always + 1) * BLOCK, gate, mask=mine)
        placed += tl.sum(mine.to(tl.int32), axis=0)
    for start in range(0, (placed + BLOCK - 1) // BLOCK, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        own = tile < (placed + BLOCK - 1) // BLOCK
        for p in range(0, always + top_k):
            word = tl.load(words + u * (always + top_k) + p)
            place = tile_slots + (begin + tile) * width + p
            tl.store(place, tl.zeros([BLOCK], dtype=tl.int32) + word, mask=own)
