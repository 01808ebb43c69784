# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Kernels for few rows (decode); ``pieces.py`` has the letters.

Every active slot, ACTIVE of the pool's SLOTS at most, is applied to all rows of the batch, and a gate table [M, S] of
weight x scaling zeroes what does not apply. The rows are few and the weights must be read once anyhow, so this costs
no bytes, needs no sorting, and every routing (two slots a row, k gates a row) is the same launch. A small launch
shrinks; the base GEMM runs beside it, and goes on with h and B as further steps of its reduction when it is through
with W.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.atmm.pieces import (
    _dot,
    _leave_split,
    _load_b,
    _locate,
    _pick,
    _sum_splits,
    _to_output,
    _to_product,
    _with_vectors,
)
from vlora_sgl.kernels.devices import to_l2


@triton.jit
def _low_step(
    b_ptrs, h_ptrs, b_slot, words, i, col_live, row_live,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """B [BN, GROUP * RP] and h [BM, GROUP * RP] of step i over the slots in use: GROUP of them side by side.

    The pointers are the first slot's, and repeat it GROUP times; ``col_live`` [BN, 1] and ``row_live`` [BM, 1].
    """
    k = tl.arange(0, GROUP * RP)
    # .cg: another multiprocessor has just written h.
    if GROUP == 1:
        b_tile = _load_b(b_ptrs, b_slot, _pick(words, i, LENGTH), col_live, k, R, CUT)
        low = tl.load(h_ptrs + i * (C * RP), mask=row_live, other=0.0, cache_modifier=".cg")
    else:
        at = i * GROUP + k // RP
        word = tl.sum(tl.where(tl.arange(0, LENGTH)[None, :] == at[:, None], words[None, :], 0), 1)
        # What is behind a sum is unknown to the compiler, which would load number by number.
        offset = tl.max_constancy((word & 0xFFFF).to(tl.int64) * b_slot, [RP])
        rank = tl.max_constancy(word >> 16, [RP])
        column = k % RP
        ptrs = b_ptrs + offset[None, :]
        lane = tl.max_constancy(column // 8 * 8 < rank, [8]) & (column < R)
        EIGHT_BITS: tl.constexpr = b_ptrs.dtype.element_ty.primitive_bitwidth == 8
        if CUT and EIGHT_BITS:
            lane = column < rank
        b_tile = tl.load(ptrs, mask=col_live & lane[None, :], other=0.0)
        if CUT and not EIGHT_BITS:
            b_tile = tl.where((column < rank)[None, :], b_tile, 0.0).to(b_ptrs.dtype.element_ty)
        low = tl.load(
            h_ptrs + (at * (C * RP))[None, :], mask=row_live & (rank != 0)[None, :], other=0.0, cache_modifier=".cg"
        )
    return b_tile, low


@triton.jit
def dense_shrink_kernel(
    x,
    a,
    h,
    gates,
    active,
    partials,
    counters,
    m,
    stride_x,
    a_slot,
    K: tl.constexpr,
    C: tl.constexpr,
    RP: tl.constexpr,
    SLOTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[t, s] = gates[t, s] * x[t] A_s^T for every active slot s, in the order of ``active``. Grid (tiles x splits).

    ``counters``: [tile] splits arrived; zero before and after.
    """
    H: tl.constexpr = C * RP
    H_TILES: tl.constexpr = (H + BN - 1) // BN
    pid = tl.program_id(0)
    tile = pid // SPLIT
    split = pid % SPLIT
    index = tile // H_TILES
    if index >= tl.load(active):
        if PDL:
            gdc_wait()  # every program must reach it
        return
    word = tl.load(active + 2 + index)
    place = word & 0xFFFF
    rank = word >> 16
    rows = tl.arange(0, BM)
    row_live = rows < m
    lane = tl.arange(0, BN)
    n0 = (tile % H_TILES) * BN
    cols = n0 + lane
    within = cols % RP
    col_live = (within < rank) & (cols < H)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    first = split * SPAN
    last = tl.minimum(first + SPAN, STEPS)
    if BN <= RP and n0 % RP >= rank:
        last = first  # only padding here: no bytes to read
    a_ptrs = a + place.to(tl.int64) * a_slot + ((cols // RP) * rank + within).to(tl.int64) * K
    if PDL:
        # The weights do not depend on the launch before: fetch the first steps' while it finishes.
        LINES: tl.constexpr = max(1, min(SPAN, 2) * BK // 64)
        near = tl.minimum(first * BK + tl.arange(0, LINES) * 64, K - 1)
        to_l2(tl.where(col_live, a_ptrs, a)[:, None] + near[None, :])
        gdc_wait()
        gdc_launch_dependents()
    x_ptrs = x + rows.to(tl.int64) * stride_x
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if K % BK == 0:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None], other=0.0, eviction_policy="evict_last")
            ak = tl.load(
                a_ptrs[:, None] + k[None, :], mask=col_live[:, None], other=0.0, eviction_policy="evict_first"
            )
        else:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None] & (k < K)[None, :], other=0.0)
            ak = tl.load(a_ptrs[:, None] + k[None, :], mask=col_live[:, None] & (k < K)[None, :], other=0.0)
        acc = _dot(xk, ak.T, acc)
    if SPLIT > 1:
        spot = rows[:, None] * BN + lane[None, :]
        own = partials + tile.to(tl.int64) * (SPLIT * BM * BN)
        if _leave_split(acc, own, spot, split, counters + tile, BM * BN) != SPLIT - 1:
            return
        acc = _sum_splits(own, spot, counters + tile, BM * BN, SPLIT)
    slot = tl.load(active + 2 + SLOTS + index)
    gate = tl.load(gates + rows * SLOTS + slot, mask=row_live, other=0.0)
    low = tl.where((gate != 0.0)[:, None], acc * gate[:, None], 0.0)
    ptrs = h + rows.to(tl.int64)[:, None] * (ACTIVE * H) + (index * H + cols)[None, :]
    tl.store(ptrs, low.to(h.dtype.element_ty), mask=row_live[:, None] & (cols < H)[None, :])


@triton.jit
def dense_sums(
    x,
    w,
    b,
    h,
    active,
    vectors,
    marks,
    x_scale,
    w_scale,
    m,
    stride_x,
    stride_w,
    b_slot,
    b_row,
    cols,
    end,
    part,
    split,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ACTIVE: tl.constexpr,
    ACTIVE_P: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
    V_SLOT: tl.constexpr,
):
    """A split's share of (x W^T + h B^T)^T for the columns ``cols`` < ``end`` of projection ``part``: [BN, BM].

    With PDL W is streamed while the shrink runs, and h is waited for only then. So x must be complete when the
    *shrink* starts its work: the shrink passes ``gdc_wait`` before it lets this kernel start. Split-K programs share
    out the slots as they share out K. Products are W x^T, whose wide side is the weights' (``wgmma`` takes 64 and
    more).

    With ``vectors`` a row's product is divided by a merged adapter's factor before the slots' part joins it, in every
    split alike; ``_to_output`` is left to the caller, behind the sum of the splits.

    With ``w_scale`` [N] and ``x_scale`` [M] x and w are e4m3 numbers that those scale, row by row; h and b are not.
    """
    col_live = (cols < end)[:, None]
    rows = tl.arange(0, BM)
    row_live = rows < m
    n_active = tl.load(active)
    ragged = tl.load(active + 1)
    order = tl.arange(0, ACTIVE_P)
    words = tl.load(active + 2 + order, mask=order < ACTIVE, other=0)
    k_low = tl.arange(0, GROUP * RP) % RP
    b_ptrs = b + cols.to(tl.int64)[:, None] * b_row + k_low[None, :]  # [BN, GROUP * RP]
    h_ptrs = h + rows.to(tl.int64)[:, None] * (ACTIVE * C * RP) + (part * RP + k_low)[None, :]  # [BM, GROUP * RP]
    if PDL:
        # B lies in L2 by the time W is through.
        starts = b + tl.minimum(cols, end - 1).to(tl.int64)[:, None] * b_row
        starts += tl.minimum(tl.arange(0, (RP + 63) // 64) * 64, R - 1)[None, :]
        for i in range(split, n_active, SPLIT):
            to_l2(starts + (_pick(words, i, ACTIVE_P) & 0xFFFF).to(tl.int64) * b_slot)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    first = split * SPAN
    last = tl.minimum(first + SPAN, STEPS)
    x_ptrs = x + rows.to(tl.int64)[:, None] * stride_x
    w_ptrs = w + cols.to(tl.int64)[:, None] * stride_w
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if K % BK == 0:
            xk = tl.load(x_ptrs + k[None, :], mask=row_live[:, None], other=0.0, eviction_policy="evict_last")
            wk = tl.load(w_ptrs + k[None, :], mask=col_live, other=0.0, eviction_policy="evict_first")
        else:
            xk = tl.load(x_ptrs + k[None, :], mask=row_live[:, None] & (k < K)[None, :], other=0.0)
            wk = tl.load(w_ptrs + k[None, :], mask=col_live & (k < K)[None, :], other=0.0)
        acc = _dot(wk, xk.T, acc)
    if w_scale is not None:
        of_columns = tl.load(w_scale + cols, mask=cols < end, other=0.0)[:, None]
        acc *= of_columns * tl.load(x_scale + rows, mask=row_live, other=0.0)[None, :]
    if vectors is not None:
        row_words = tl.load(marks + rows, mask=row_live, other=0)[None, :]
        if tl.max(row_words) != 0:
            live = row_live[None, :] & col_live
            acc = _to_product(acc, None, vectors, row_words, cols[:, None], live, V_SLOT, N)
    if PDL:
        gdc_wait()
    steps = (n_active + GROUP - 1) // GROUP
    if ragged == 0:
        for i in tl.range(split, steps, SPLIT, num_stages=STAGES):
            b_tile, low = _low_step(
                b_ptrs, h_ptrs, b_slot, words, i, col_live, row_live[:, None], C, R, RP, ACTIVE_P, GROUP, False
            )
            acc = _dot(b_tile, low.T, acc)
    else:
        for i in tl.range(split, steps, SPLIT, num_stages=STAGES):
            b_tile, low = _low_step(
                b_ptrs, h_ptrs, b_slot, words, i, col_live, row_live[:, None], C, R, RP, ACTIVE_P, GROUP, True
            )
            acc = _dot(b_tile, low.T, acc)
    return acc


@triton.jit
def dense_linear_kernel(
    x,
    w,
    bias,
    y,
    b,
    h,
    active,
    partials,
    counters,
    vectors,
    marks,
    x_scale,
    w_scale,
    m,
    stride_x,
    stride_y,
    stride_w,
    b_slot,
    b_row,
    K: tl.constexpr,
    O1: tl.constexpr,
    O2: tl.constexpr,
    O3: tl.constexpr,
    O4: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ACTIVE: tl.constexpr,
    ACTIVE_P: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
    V_SLOT: tl.constexpr,
):
    """y = x W^T + bias + h B^T: the base GEMM with the expand as further reduction steps, behind a shrink.

    With ``vectors`` a row's output is multiplied by its own factor when the splits are summed. With scales x and w are
    e4m3 numbers (``dense_sums``).
    """
    pid = tl.program_id(0)
    tile = pid // SPLIT
    split = pid % SPLIT
    part, n0, end = _locate(tile, BN, O1, O2, O3, O4)
    lane = tl.arange(0, BN)
    cols = n0 + lane
    col_live = (cols < end)[:, None]
    rows = tl.arange(0, BM)
    row_live = rows < m
    acc = dense_sums(
        x, w, b, h, active, vectors, marks, x_scale, w_scale, m, stride_x, stride_w, b_slot, b_row, cols, end, part,
        split, K, O4, C, R, RP, ACTIVE, ACTIVE_P, GROUP, SPLIT, STAGES, BM, BN, BK, PDL, V_SLOT,
    )  # fmt: skip
    if SPLIT > 1:
        spot = lane[:, None] * BM + rows[None, :]
        own = partials + tile.to(tl.int64) * (SPLIT * BM * BN)
        if _leave_split(acc, own, spot, split, counters + tile, BM * BN) != SPLIT - 1:
            return
        acc = _sum_splits(own, spot, counters + tile, BM * BN, SPLIT)
    if vectors is not None:
        row_words = tl.load(marks + rows, mask=row_live, other=0)[None, :]
        if tl.max(row_words) != 0:
            live = row_live[None, :] & col_live
            acc = _to_output(acc, None, vectors, row_words, cols[:, None], live, V_SLOT, O4)
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < end, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y + rows.to(tl.int64)[None, :] * stride_y + cols[:, None]
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=row_live[None, :] & col_live)


@triton.jit
def dense_expand_kernel(
    y,
    b,
    h,
    active,
    bias,
    vectors,
    marks,
    m,
    stride_y,
    b_slot,
    b_row,
    O1: tl.constexpr,
    O2: tl.constexpr,
    O3: tl.constexpr,
    O4: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ACTIVE: tl.constexpr,
    ACTIVE_P: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
    V_SLOT: tl.constexpr,
):
    """y += h B^T for all rows and every active slot: one program per tile of columns, slots in a pipelined loop.

    ``bias``, what y holds of it, is there with ``vectors`` only.
    """
    part, n0, end = _locate(tl.program_id(0), BN, O1, O2, O3, O4)
    cols = n0 + tl.arange(0, BN)
    col_live = (cols < end)[:, None]
    rows = tl.arange(0, BM)
    row_live = (rows < m)[:, None]
    k = tl.arange(0, GROUP * RP) % RP
    n_active = tl.load(active)
    ragged = tl.load(active + 1)
    order = tl.arange(0, ACTIVE_P)
    words = tl.load(active + 2 + order, mask=order < ACTIVE, other=0)
    b_ptrs = b + cols.to(tl.int64)[:, None] * b_row + k[None, :]  # [BN, GROUP * RP]
    h_ptrs = h + rows.to(tl.int64)[:, None] * (ACTIVE * C * RP) + (part * RP + k)[None, :]  # [BM, GROUP * RP]
    if PDL:
        # The weights do not depend on the launch before: fetch them while it finishes.
        starts = b + tl.minimum(cols, end - 1).to(tl.int64)[:, None] * b_row
        starts += tl.minimum(tl.arange(0, (RP + 63) // 64) * 64, R - 1)[None, :]
        for i in range(n_active):
            to_l2(starts + (_pick(words, i, ACTIVE_P) & 0xFFFF).to(tl.int64) * b_slot)
        # No gdc_launch_dependents: programs of the next launch that come while some of ours still hold shared memory
        # would crowd on the multiprocessors that are through, and stay there.
        gdc_wait()
    if n_active == 0:
        return
    # .cg: another multiprocessor has just written h and y. y first, so that its latency hides behind the products.
    y_ptrs = y + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    live = row_live & (cols < end)[None, :]
    before = tl.load(y_ptrs, mask=live, other=0.0, cache_modifier=".cg")
    acc = tl.zeros((BM, BN), tl.float32)
    steps = (n_active + GROUP - 1) // GROUP
    if ragged == 0:
        for i in tl.range(0, steps, num_stages=STAGES):
            b_tile, low = _low_step(
                b_ptrs, h_ptrs, b_slot, words, i, col_live, row_live, C, R, RP, ACTIVE_P, GROUP, False
            )
            acc = _dot(low, b_tile.T, acc)
    else:
        for i in range(steps):
            b_tile, low = _low_step(
                b_ptrs, h_ptrs, b_slot, words, i, col_live, row_live, C, R, RP, ACTIVE_P, GROUP, True
            )
            acc = _dot(low, b_tile.T, acc)
    if vectors is not None:
        row_words = tl.load(marks + rows, mask=rows < m, other=0)[:, None]
        acc = _with_vectors(acc, before.to(tl.float32), bias, vectors, row_words, cols[None, :], live, V_SLOT, O4)
    else:
        acc += before.to(tl.float32)
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=live)
