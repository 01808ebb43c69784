# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Gathering tokens' choices of experts into row tiles, on the device.

Few choices (decode) take one launch, in which every expert looks at all of them. For many (prefill) that would be a
long loop in few programs, so they are sorted by counting, in three launches whose work grows with the choices alone:
each chunk of them counts its keys, each expert turns the counts into places, and each chunk puts its own there.

A choice's key is its expert and the tuple of slots that its token applies: what shares a key shares tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlora_sgl.kernels.atmm.row_routing import RowTuples

CHUNK = 512
"""Choices that a program of the one launch looks at together."""
ONE_LAUNCH = 4 * CHUNK
"""Choices up to which one launch gathers them: eight loops at most, and no table of counts to clear."""
CHUNKS = (256, 1024)
FEW_KEYS = 4096
"""Choices of a chunk that is sorted by counting, with so few keys and with more. A chunk compares its own with each
other, so it is short; it has a count of every key, so it is longer where those would outgrow the choices."""
COMPARED = 32
"""Choices that those of a chunk are compared with at a time."""
MANY_TUPLES = 16
"""Tuples that experts look at together, at least: one kernel for all batches of so few."""
AHEAD = 4
"""Of the buffer of counts, words before them, as they begin at 16 bytes: the first is how many tiles there are."""


def are_many(ids: torch.Tensor) -> bool:
    """Whether choices [M, TOPK] take more than one launch, and so do better in fewer passes over what they put out."""
    return ids.numel() > ONE_LAUNCH


class ExpertTiles(NamedTuple):
    """Row tiles of choices, as the grouped kernels read them (``row_routing.Routing``).

    Attributes:
        rows: [T, BLOCK] int32, numbers of choices, -1 past a tile's end.
        slots: [T, P] int32, words of the slots' experts.
        gates_in: [T, P, BLOCK] float32, weight x scaling of the slots; gates_out: times that of the choice.
        used: [1] int32, tiles in use.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    gates_in: torch.Tensor
    gates_out: torch.Tensor
    used: torch.Tensor


def gather(
    tuples: RowTuples, ids: torch.Tensor, weights: torch.Tensor, experts: int, block: int, base: bool
) -> ExpertTiles:
    """The tiles of choices; in a tile their numbers rise, which tile is whose is not said.

    Args:
        tuples: of the tokens.
        ids: [M, TOPK] int32, the experts that each token chose; -1 for none.
        weights: [M, TOPK] float32, of the choices.
        experts: how many there are.
        block: rows per tile.
        base: whether choices that apply nothing have tiles too, without slots.
    """
    top_k, n = ids.shape[1], ids.numel()
    known, width = tuples.words.shape
    keys = (known - 1) * experts + base
    count = max(1, min(n, n // block + keys))  # each key's last tile may be partly filled
    rows = ids.new_empty((count, block), dtype=torch.int32)
    slots = ids.new_empty((count, width), dtype=torch.int32)
    gates_in, gates_out = weights.new_empty((2, count, width, block), dtype=torch.float32)
    if not are_many(ids) and not base:
        used = ids.new_zeros(1, dtype=torch.int32)
        expert_tiles_kernel[(experts,)](
            rows, slots, gates_in, gates_out, used, ids, weights, *tuples, n,
            EXPERTS=experts, TOP_K=top_k, PAIRS=width, TUPLES=triton.next_power_of_2(known), BLOCK=block, CHUNK=CHUNK,
            num_warps=8,
        )  # fmt: skip
        return ExpertTiles(rows, slots, gates_in, gates_out, used)
    chunk = CHUNKS[known * experts > FEW_KEYS]
    chunks = triton.cdiv(n, chunk)
    words = ids.new_zeros(AHEAD + chunks * known * experts, dtype=torch.int32)
    used, counts = words[:1], words[AHEAD:]
    begins = ids.new_empty(known * experts, dtype=torch.int32)
    count_keys_kernel[(chunks,)](
        counts, ids, tuples.rows, n, known, EXPERTS=experts, TOP_K=top_k, BASE=base, CHUNK=chunk, num_warps=4
    )
    up_to = max(MANY_TUPLES, triton.next_power_of_2(known))
    step = max(16, 16 * 256 // up_to)
    place_keys_kernel[(experts,)](
        rows, slots, begins, used, counts, tuples.words, chunks, known,
        EXPERTS=experts, PAIRS=width, TUPLES=up_to, BLOCK=block, STEP=step, BASE=base, num_warps=8,
    )  # fmt: skip
    fill_tiles_kernel[(chunks,)](
        rows, gates_in, gates_out, begins, counts, ids, weights, tuples.rows, tuples.gates, n, known,
        EXPERTS=experts, TOP_K=top_k, PAIRS=width, BLOCK=block, BASE=base, CHUNK=chunk, COMPARED=COMPARED, num_warps=8,
    )  # fmt: skip
    return ExpertTiles(rows, slots, gates_in, gates_out, used)


@triton.jit
def _of_expert(word, expert, EXPERTS: tl.constexpr):
    """The word of a slot as that of its expert; 0, of none, stays."""
    return tl.where(word == 0, 0, ((word & 0xFFFF) * EXPERTS + expert) | (word & ~0xFFFF))


@triton.jit
def _put(
    tile_rows, gates_in, gates_out, weights, gates, i, u, at, mine, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Choices ``i``, of tokens with the tuples ``u``, become the rows ``at`` of the tiles."""
    tl.store(tile_rows + at, i, mask=mine)
    chosen = tl.load(weights + i, mask=mine, other=0.0).to(tl.float32)
    for p in tl.static_range(PAIRS):
        gate = tl.load(gates + u * PAIRS + p, mask=mine, other=0.0)
        spot = (at // BLOCK * PAIRS + p) * BLOCK + at % BLOCK
        tl.store(gates_in + spot, gate, mask=mine)
        tl.store(gates_out + spot, gate * chosen, mask=mine)


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
            tl.store(tile_slots + (first + tile) * PAIRS + p, _of_expert(word, expert, EXPERTS))
    tl.debug_barrier()  # the rows below go where others of these threads have just stored
    placed = tl.zeros([TUPLES], dtype=tl.int32)
    for start in range(0, n, CHUNK):
        i = start + c
        mine = tl.load(ids + i, mask=i < n, other=-1) == expert
        u = tl.load(row_tuples + i // TOP_K, mask=mine, other=0)
        mine = u > 0
        hits = (mine[:, None] & (u[:, None] == t[None, :])).to(tl.int32)
        at = tl.sum(hits * ((begins * BLOCK + placed)[None, :] + tl.cumsum(hits, axis=0) - 1), axis=1)
        _put(tile_rows, gates_in, gates_out, weights, gates, i, u, at, mine, PAIRS, BLOCK)
        placed += tl.sum(hits, axis=0)


@triton.jit
def _keys(ids, row_tuples, i, n, tuples, TOP_K: tl.constexpr, BASE: tl.constexpr):
    """Of the choices ``i``, with their tokens' tuples: expert * tuples + tuple, or -1 for those without a tile.

    No expert's tuple 0 has slots: with BASE the first one's is the key of all that apply nothing.
    """
    expert = tl.load(ids + i, mask=i < n, other=-1)
    u = tl.load(row_tuples + i // TOP_K, mask=i < n, other=0)
    applies = (u > 0) & (expert >= 0)
    key = tl.where(applies, expert * tuples + u, -1)
    if BASE:
        key = tl.where((i < n) & (key < 0), 0, key)
    return key, tl.where(applies, u, 0)


@triton.jit(do_not_specialize=["n", "tuples"])
def count_keys_kernel(
    counts, ids, row_tuples, n, tuples,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BASE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts[chunk, key] of the choices of each chunk; 0 before. Grid (chunks).

    Shapes: counts [chunks, EXPERTS * tuples]; ids [n]; row_tuples [n // TOP_K].
    """
    chunk = tl.program_id(0)
    key, _ = _keys(ids, row_tuples, chunk * CHUNK + tl.arange(0, CHUNK), n, tuples, TOP_K, BASE)
    own = counts + chunk.to(tl.int64) * (EXPERTS * tuples)
    tl.atomic_add(own + key, 1, mask=key >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["chunks", "tuples"])
def place_keys_kernel(
    tile_rows, tile_slots, begins, n_tiles, counts, words, chunks, tuples,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, TUPLES: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    """Grid (experts): takes tiles for an expert's keys, and says of each where it begins and what its slots are.

    A chunk's counts become how many of the same key are in chunks before it. What is past a key's rows is marked here.
    Which tiles it takes depends on who comes first, and nothing on that: a row is in one tile, no sum crosses rows.
    Shapes: tile_rows [T, BLOCK]; tile_slots [T, PAIRS]; begins [EXPERTS * tuples], numbers of rows in tiles; n_tiles
    int32, 0 before; counts [chunks, EXPERTS * tuples]; words [tuples, PAIRS].
    """
    expert = tl.program_id(0)
    t, c, lanes = tl.arange(0, TUPLES), tl.arange(0, STEP), tl.arange(0, BLOCK)
    key = expert * tuples + t
    own = (t < tuples) & ((t > 0) | ((expert == 0) & BASE))
    sizes = tl.zeros([TUPLES], dtype=tl.int32)
    for start in range(0, chunks, STEP):
        spots = counts + (start + c).to(tl.int64)[:, None] * (EXPERTS * tuples) + key[None, :]  # [STEP, TUPLES]
        live = (start + c < chunks)[:, None] & own[None, :]
        found = tl.load(spots, mask=live, other=0)
        tl.store(spots, sizes[None, :] + tl.cumsum(found, axis=0) - found, mask=live)
        sizes += tl.sum(found, axis=0)
    tiles = (sizes + BLOCK - 1) // BLOCK
    total = tl.sum(tiles, axis=0)
    if total == 0:
        return
    first = tl.atomic_add(n_tiles, total)
    ends = tl.cumsum(tiles, axis=0)
    last = first + ends - 1
    tl.store(begins + key, (last + 1 - tiles) * BLOCK, mask=own)
    past = ((tiles - 1) * BLOCK)[:, None] + lanes[None, :] >= sizes[:, None]  # [TUPLES, BLOCK] of each key's last tile
    tl.store(tile_rows + (last * BLOCK)[:, None] + lanes[None, :], -1, mask=(tiles > 0)[:, None] & past)
    for start in range(0, total, STEP):
        tile = start + c
        u = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)  # whose it is: [STEP]
        for p in tl.static_range(PAIRS):
            word = _of_expert(tl.load(words + u * PAIRS + p, mask=tile < total, other=0), expert, EXPERTS)
            tl.store(tile_slots + (first + tile) * PAIRS + p, word, mask=tile < total)


@triton.jit(do_not_specialize=["n", "tuples"])
def fill_tiles_kernel(
    tile_rows, gates_in, gates_out, begins, counts, ids, weights, row_tuples, gates, n, tuples,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, BASE: tl.constexpr,
    CHUNK: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Each choice goes behind those of its key in the chunks before, and before it in its own. Grid (chunks).

    Shapes: tile_rows [T, BLOCK]; gates_in, gates_out [T, PAIRS, BLOCK] float32; gates [tuples, PAIRS]; ids, weights
    [n]; counts as ``place_keys_kernel`` leaves them.
    """
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    key, u = _keys(ids, row_tuples, i, n, tuples, TOP_K, BASE)
    before = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, CHUNK, COMPARED):
        j = chunk * CHUNK + start + tl.arange(0, COMPARED)
        other, _ = _keys(ids, row_tuples, j, n, tuples, TOP_K, BASE)
        earlier = (other[:, None] == key[None, :]) & (j[:, None] < i[None, :])  # [COMPARED, CHUNK]
        before += tl.sum(earlier.to(tl.int32), axis=0)  # a thread sums its own
    mine = key >= 0
    own = counts + chunk.to(tl.int64) * (EXPERTS * tuples)
    at = tl.load(begins + key, mask=mine, other=0) + tl.load(own + key, mask=mine, other=0) + before
    _put(tile_rows, gates_in, gates_out, weights, gates, i, u, at, mine, PAIRS, BLOCK)
