# mypy: disallow-untyped-defs=False
"""Routed rows into tiles of the grouped kernels, sorted by the slots they apply: one launch for a whole batch.

The histogram of rows over targets, their places and the rows' pointers of MoLoRA (section 3.3), where a target is a
set of slots; rows of different routed adapters that apply the same slots share one (``regroup.Dispatch``).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64  # rows per tile
MAX_TUPLES = 32  # sets of members of one routed adapter that rows of a pass are sorted by: the pairs of eight


@triton.jit
def _targets_of(
    i, n, number, weights, row_routed, widths, targets, binomials, MEMBERS: tl.constexpr, TUPLES: tl.constexpr
):
    """Of rows i [C], the target in pass ``number`` (-1: none), and which members it is: weight, whether the pass
    applies it, and its rank there, [C, MEMBERS]; and the routed adapter."""
    k = tl.arange(0, MEMBERS)
    routed = tl.load(row_routed + i, mask=i < n, other=-1)
    live = routed >= 0
    weight = tl.load(weights + i[:, None] * MEMBERS + k[None, :], mask=live[:, None], other=0.0)
    width = tl.load(widths + routed, mask=live, other=1)
    held = weight != 0
    rank = tl.cumsum(held.to(tl.int32), axis=1) - 1 - (number * width)[:, None]
    held = held & (rank >= 0) & (rank < width[:, None])
    # The number of a set among all of its size: the sum of the binomials of its members, in ascending order.
    part = tl.load(binomials + k[None, :] * 4 + rank, mask=held, other=0)
    some = tl.sum(held.to(tl.int32), axis=1) > 0
    target = tl.load(targets + routed * TUPLES + tl.sum(part, axis=1), mask=some, other=-1)
    target = tl.where(live & (some == 0) & (number == 0), 0, target)
    return target, weight, held, rank, routed


@triton.jit(
    do_not_specialize=["n", "number", "width"],
    do_not_specialize_on_alignment=["counts", "total", "weights", "row_routed", "widths", "targets", "scales"],
)
def tiles_kernel(
    tile_rows, tile_gates, tile_slots, counts, total, weights, row_routed, widths, targets, scales, words,
    always_gates, binomials, n, number, width,
    MEMBERS: tl.constexpr, TUPLES: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per target: it counts all targets' rows, which says where its tiles begin, then fills them in order.

    Target 0 is that of routed rows without a member. Shapes: tile_rows [T, BLOCK]; tile_gates [T, width, BLOCK];
    tile_slots [T, width]; counts: int32, tiles in use before, and slots that every row applies; total: tiles in use
    after; weights [n, MEMBERS] float32; row_routed [n]; of every routed adapter widths (members of a row in a pass),
    targets [X, TUPLES] and scales [X, MEMBERS]; words [targets, width], those that every row applies first,
    always_gates theirs.
    """
    u = tl.program_id(0)
    k, t, c = tl.arange(0, MEMBERS), tl.arange(0, TARGETS), tl.arange(0, CHUNK)
    sizes = tl.zeros([TARGETS], dtype=tl.int32)
    for start in range(0, n, CHUNK):
        target, _, _, _, _ = _targets_of(
            start + c, n, number, weights, row_routed, widths, targets, binomials, MEMBERS, TUPLES
        )
        sizes += tl.sum((target[:, None] == t[None, :]).to(tl.int32), axis=0)
    tiles = (sizes + BLOCK - 1) // BLOCK
    begin, always = tl.load(counts), tl.load(counts + 1)
    if u == 0:
        tl.store(total, begin + tl.sum(tiles, axis=0))
    begin += tl.sum(tl.where(t < u, tiles, 0), axis=0)
    own = tl.sum(tl.where(t == u, tiles, 0), axis=0)
    placed = 0
    for start in range(0, n, CHUNK):
        i = start + c
        target, weight, held, rank, routed = _targets_of(
            i, n, number, weights, row_routed, widths, targets, binomials, MEMBERS, TUPLES
        )
        mine = target == u
        at = placed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tile, lane = begin + at // BLOCK, at % BLOCK
        tl.store(tile_rows + tile * BLOCK + lane, i.to(tl.int32), mask=mine)
        place = tile_gates + tile * width * BLOCK + lane
        for p in range(0, always):
            tl.store(place + p * BLOCK, tl.zeros([CHUNK], dtype=tl.float32) + tl.load(always_gates + p), mask=mine)
        some = mine[:, None] & held
        weight *= tl.load(scales + routed[:, None] * MEMBERS + k[None, :], mask=some, other=0.0)
        for p in range(always, width):
            gate = tl.sum(tl.where(some & (rank == p - always), weight, 0.0), axis=1)
            tl.store(place + p * BLOCK, gate, mask=mine)
        placed += tl.sum(mine.to(tl.int32), axis=0)
    lanes = tl.arange(0, BLOCK)
    rest = placed + lanes < own * BLOCK  # of the last tile
    tl.store(tile_rows + begin * BLOCK + placed + lanes, tl.full([BLOCK], -1, dtype=tl.int32), mask=rest)
    for start in range(0, own, BLOCK):
        tile = start + lanes
        for p in range(0, width):
            word = tl.load(words + u * width + p)
            place = tile_slots + (begin + tile) * width + p
            tl.store(place, tl.zeros([BLOCK], dtype=tl.int32) + word, mask=tile < own)
