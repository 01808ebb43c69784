# mypy: disallow-untyped-defs=False
"""Token routing of prefill rows in Triton: ``RouterTables.weights_of`` in one to three launches for a whole batch.

A launch costs more than its work here, so there are few, however many routed adapters the rows belong to; and no size
of a batch is a constant of a kernel (nor the alignment of a batch's columns), or serving would stop to compile when a
new one comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlora_sgl.routed.decode import best_weights, named_members, network_of, votes_of

PROJECT_ROWS, PROJECT_BLOCK = 32, 32  # a program's tile of ``project_kernel``
SPLITS = 8
"""Parts that the hidden size is cut into: 200 rows alone would keep seven of an H200's 132 multiprocessors busy."""
ROWS = 16  # of a program of the other kernels
CHUNK = 256  # rows in front of its own that a program of ``weights_kernel`` adds up at a time

_sized = triton.jit(
    do_not_specialize=["n", "vocabulary", "req_stride"],
    do_not_specialize_on_alignment=[
        "row_routed",
        "modality",
        "first",
        "request",
        "prefix",
        "ids",
        "out_slots",
        "which",
    ],
)


@_sized
def project_kernel(
    low, squares, x, row_routed, which, pointers, n, x_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of one part of the hidden size, ``W1 x`` and the sum of x squared: low [S, n, WIDTH], squares [S, n] float32.

    Grid (blocks of rows, parts, learned routed adapters of the batch); ``which`` names the last. Shapes: x [n,
    HIDDEN]; row_routed [n]. PART: width of a part, a multiple of BLOCK. The parts depend on the hidden size alone, so
    a row's vote is the same in any batch.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    routed = tl.load(which + tl.program_id(2))
    j = tl.arange(0, WIDTH)
    mine = tl.load(row_routed + i, mask=i < n, other=-1) == routed
    if tl.max(mine.to(tl.int32), axis=0) == 0:
        return
    w1 = network_of(pointers, routed)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    square = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for at in range(0, PART, BLOCK):
        h = split * PART + at + tl.arange(0, BLOCK)
        place = x + i.to(tl.int64)[:, None] * x_stride + h[None, :]
        part = tl.load(place, mask=mine[:, None] & (h < HIDDEN)[None, :], other=0.0).to(tl.float32)
        block = tl.load(w1 + h[:, None] * WIDTH + j[None, :], mask=(h < HIDDEN)[:, None], other=0.0)
        total = tl.dot(part, block, total, input_precision="ieee")
        square += part * part
    at = split.to(tl.int64) * n + i
    tl.store(low + at[:, None] * WIDTH + j[None, :], total, mask=mine[:, None])
    tl.store(squares + at, tl.sum(square, axis=1), mask=mine)


@_sized
def vote_kernel(
    votes, low, squares, row_routed, which, pointers, n,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """votes [n, MEMBERS] int32 from the parts of ``project_kernel``. Grid (blocks of rows, learned adapters)."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    routed = tl.load(which + tl.program_id(1))
    j, k = tl.arange(0, WIDTH), tl.arange(0, MEMBERS)
    mine = tl.load(row_routed + i, mask=i < n, other=-1) == routed
    if tl.max(mine.to(tl.int32), axis=0) == 0:
        return
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    square = tl.zeros([ROWS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = tl.full([ROWS], split, dtype=tl.int64) * n + i
        total += tl.load(low + at[:, None] * WIDTH + j[None, :], mask=mine[:, None], other=0.0)
        square += tl.load(squares + at, mask=mine, other=0.0)
    vote = votes_of(total, square, network_of(pointers, routed), HIDDEN, WIDTH, MEMBERS)
    tl.store(votes + i[:, None] * MEMBERS + k[None, :], vote.to(tl.int32), mask=mine[:, None])


@_sized
def weights_kernel(
    weights, votes, ids, row_routed, modality, first, request, prefix, out_slots, pointers, settings, positions,
    totals, req_to_token, n, vocabulary, req_stride,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SETTINGS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """weights [n, MEMBERS] float32 of every row, 0 for those of no routed adapter.

    By rules, by a row's own vote, or by the votes up to and with it; then it writes the totals beside the KV cache.
    Shapes: votes [n, MEMBERS] int32 of learned rows; row_routed, modality, first, request, prefix, ids, out_slots [n];
    totals [slots, MEMBERS] int64. A program adds up by itself what lies in front of its rows: sums of integers, so in
    any order.
    """
    start = tl.program_id(0) * ROWS
    i, k = start + tl.arange(0, ROWS), tl.arange(0, MEMBERS)
    routed = tl.load(row_routed + i, mask=i < n, other=-1)
    own = settings + routed * SETTINGS
    here = routed >= 0
    members = tl.load(own, mask=here, other=0)
    top_k = tl.load(own + 1, mask=here, other=1)
    summed = here & (members > 0) & (tl.load(own + 2, mask=here, other=0) != 0)
    begin = tl.load(first + i, mask=here, other=0)
    before = tl.load(prefix + i, mask=here, other=0)
    place = before + i - begin
    kind = tl.load(modality + i, mask=here, other=0)
    token = tl.load(ids + i, mask=here, other=0).to(tl.int64)
    ruled = here & (members == 0)
    chosen = named_members(
        routed, kind, token, place, ruled, pointers, settings, positions, vocabulary, SETTINGS, POSITIONS
    )
    weight = tl.where(ruled[:, None] & (k[None, :] == chosen[:, None]), 1.0, 0.0)
    if tl.max(members, axis=0) > 0:
        vote = tl.load(votes + i[:, None] * MEMBERS + k[None, :], mask=(members > 0)[:, None], other=0).to(tl.int64)
        # Within the block: rows of the same sequence that are not past this one.
        counted = summed[:, None] & (i[None, :] <= i[:, None]) & (i[None, :] >= begin[:, None])
        total = tl.where(summed[:, None], tl.sum(tl.where(counted[:, :, None], vote[None, :, :], 0), axis=1), vote)
        # In front of it lie rows of one of its sequences at most, the first one's.
        across = tl.min(tl.where(summed & (begin < start), begin, start), axis=0)
        carry = tl.zeros([MEMBERS], dtype=tl.int64)
        for at in range(across, start, CHUNK):
            j = at + tl.arange(0, CHUNK)
            more = tl.load(votes + j[:, None] * MEMBERS + k[None, :], mask=(j < start)[:, None], other=0)
            carry += tl.sum(more.to(tl.int64), axis=0)
        total += tl.where((summed & (begin < start))[:, None], carry[None, :], 0)
        # And before the batch: the total that its last token of then left.
        known = summed & (before > 0)
        spot = tl.load(request + i, mask=known, other=0).to(tl.int64) * req_stride + before - 1
        last = tl.load(req_to_token + spot, mask=known, other=0).to(tl.int64)
        total += tl.load(totals + last[:, None] * MEMBERS + k[None, :], mask=known[:, None], other=0)
        out = tl.load(out_slots + i, mask=summed, other=0).to(tl.int64)
        tl.store(totals + out[:, None] * MEMBERS + k[None, :], total, mask=summed[:, None])
        tokens = tl.where(summed, place + 1, 1).to(tl.int64)
        learned = best_weights(total, tokens, tl.maximum(members, 1), top_k, MEMBERS)
        weight = tl.where((members > 0)[:, None], learned, weight)
    tl.store(weights + i[:, None] * MEMBERS + k[None, :], weight, mask=(i < n)[:, None])
