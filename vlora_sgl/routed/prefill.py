# mypy: disallow-untyped-defs=False
"""Token routing of prefill rows in Triton: ``RouterTables.weights_of`` in one to three launches an adapter.

A launch costs more than its work here, so there are few; and no size of a batch is a constant of a kernel (nor the
alignment of a batch's columns), or serving would stop to compile when a new one comes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlora_sgl.routed.decode import best_weights, votes_of

PROJECT_ROWS, PROJECT_BLOCK = 32, 32  # a program's tile of ``project_kernel``
SPLITS = 8
"""Parts that the hidden size is cut into: 200 rows alone would keep seven of an H200's 132 multiprocessors busy."""
ROWS = 16  # of a program of the other kernels
CHUNK = 256  # rows in front of its own that a program of ``prefix_kernel`` adds up at a time

_sized = triton.jit(
    do_not_specialize=["n", "routed", "members", "vocabulary", "req_stride"],
    do_not_specialize_on_alignment=["rows", "modality", "first", "request", "prefix", "ids", "out_slots"],
)


@_sized
def table_kernel(
    weights, rows, modality, ids, by_token, by_modality, n, routed, members, vocabulary,
    MODALITIES: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """weights [n, members] float32: one for the member that the table names, zero for the rest.

    Shapes: rows, modality [n]; ids [M]; by_token [X, vocabulary], by_modality [X, MODALITIES] int8.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, MEMBERS)
    inside = i < n
    kind = tl.load(modality + i, mask=inside, other=0)
    token = tl.load(ids + tl.load(rows + i, mask=inside, other=0), mask=inside, other=0).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    text = tl.load(by_token + routed.to(tl.int64) * vocabulary + token, mask=inside, other=0).to(tl.int32)
    rest = tl.load(by_modality + routed * MODALITIES + kind, mask=inside, other=0).to(tl.int32)
    chosen = tl.where(kind == 0, text, rest)
    weight = tl.where(k[None, :] == chosen[:, None], 1.0, 0.0)
    tl.store(weights + i[:, None] * members + k[None, :], weight, mask=inside[:, None] & (k < members)[None, :])


@_sized
def project_kernel(
    low, squares, x, rows, w1, n, routed, x_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of one part of the hidden size, ``W1 x`` and the sum of x squared: low [S, n, WIDTH], squares [S, n] float32.

    Shapes: x [M, HIDDEN]; rows [n]; w1 [X, HIDDEN, WIDTH]. PART: width of a part, a multiple of BLOCK. The parts
    depend on the hidden size alone, so a row's vote is the same in any batch.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    j = tl.arange(0, WIDTH)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    square = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for at in range(0, PART, BLOCK):
        h = split * PART + at + tl.arange(0, BLOCK)
        place = x + row[:, None] * x_stride + h[None, :]
        part = tl.load(place, mask=inside[:, None] & (h < HIDDEN)[None, :], other=0.0).to(tl.float32)
        place = w1 + routed.to(tl.int64) * HIDDEN * WIDTH + h[:, None] * WIDTH + j[None, :]
        block = tl.load(place, mask=(h < HIDDEN)[:, None], other=0.0)
        total = tl.dot(part, block, total, input_precision="ieee")
        square += part * part
    at = split.to(tl.int64) * n + i
    tl.store(low + at[:, None] * WIDTH + j[None, :], total, mask=inside[:, None])
    tl.store(squares + at, tl.sum(square, axis=1), mask=inside)


@_sized
def vote_kernel(
    out, low, squares, b1, w2, b2, settings, n, routed,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BY_PREFIX: tl.constexpr,
):  # fmt: skip
    """From the parts of ``project_kernel``: votes [n, MEMBERS] int32 by prefix, else weights [n, members] float32."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j, k = tl.arange(0, WIDTH), tl.arange(0, MEMBERS)
    inside = i < n
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    square = tl.zeros([ROWS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = tl.full([ROWS], split, dtype=tl.int64) * n + i
        total += tl.load(low + at[:, None] * WIDTH + j[None, :], mask=inside[:, None], other=0.0)
        square += tl.load(squares + at, mask=inside, other=0.0)
    vote = votes_of(total, square, routed, b1, w2, b2, HIDDEN, WIDTH, MEMBERS)
    if BY_PREFIX:
        tl.store(out + i[:, None] * MEMBERS + k[None, :], vote.to(tl.int32), mask=inside[:, None])
    else:
        members, top_k = tl.load(settings + routed * 4), tl.load(settings + routed * 4 + 1)
        weight = best_weights(vote, tl.full([ROWS], 1, dtype=tl.int64), members, top_k, MEMBERS)
        tl.store(out + i[:, None] * members + k[None, :], weight, mask=inside[:, None] & (k < members)[None, :])


@_sized
def prefix_kernel(
    weights, votes, rows, first, request, prefix, out_slots, settings, totals, req_to_token, n, routed, req_stride,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """weights [n, members] float32 by the votes up to and with each row; writes the totals beside the KV cache.

    Shapes: votes [n, MEMBERS] int32; rows, first, request, prefix [n]; out_slots [M]; totals [slots, MEMBERS] int64. A
    program adds up by itself what lies in front of its rows: sums of integers, so in any order.
    """
    start = tl.program_id(0) * ROWS
    i, k = start + tl.arange(0, ROWS), tl.arange(0, MEMBERS)
    inside = i < n
    begin = tl.load(first + i, mask=inside, other=0).to(tl.int32)
    vote = tl.load(votes + i[:, None] * MEMBERS + k[None, :], mask=inside[:, None], other=0).to(tl.int64)
    # Within the block: rows of the same sequence that are not past this one.
    counted = (i[None, :] <= i[:, None]) & (i[None, :] >= begin[:, None])
    total = tl.sum(tl.where(counted[:, :, None], vote[None, :, :], 0), axis=1)
    # In front of it lie rows of one of its sequences at most, the first one's.
    carry = tl.zeros([MEMBERS], dtype=tl.int64)
    for at in range(tl.load(first + start).to(tl.int32), start, CHUNK):
        j = at + tl.arange(0, CHUNK)
        more = tl.load(votes + j[:, None] * MEMBERS + k[None, :], mask=(j < start)[:, None], other=0)
        carry += tl.sum(more.to(tl.int64), axis=0)
    total += tl.where((begin < start)[:, None], carry[None, :], 0)
    # And before the batch: the total that its last token of then left.
    before = tl.load(prefix + i, mask=inside, other=0)
    known = inside & (before > 0)
    place = tl.load(request + i, mask=inside, other=0).to(tl.int64) * req_stride + before - 1
    last = tl.load(req_to_token + place, mask=known, other=0).to(tl.int64)
    total += tl.load(totals + last[:, None] * MEMBERS + k[None, :], mask=known[:, None], other=0)
    out = tl.load(out_slots + tl.load(rows + i, mask=inside, other=0), mask=inside, other=0).to(tl.int64)
    tl.store(totals + out[:, None] * MEMBERS + k[None, :], total, mask=inside[:, None])
    members, top_k = tl.load(settings + routed * 4), tl.load(settings + routed * 4 + 1)
    tokens = tl.where(inside, before + i - begin + 1, 1)
    weight = best_weights(total, tokens, members, top_k, MEMBERS)
    tl.store(weights + i[:, None] * members + k[None, :], weight, mask=inside[:, None] & (k < members)[None, :])
