# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Triton kernels of ATMM: `y[t] += sum_j g[t, j] * (x[t] A_j^T) B_j^T` over adapters j that differ per row t.

Letters, everywhere in this package: ``x`` [M, K] input rows, ``w`` [N, K] base weight, ``y`` [M, N] output rows,
``a`` [S, C * R, K] and ``b`` [S, N, R] the S pool slots of adapter weights, ``h`` the low-rank intermediate, C stacked
projections (qkv: 3, gate_up: 2) whose output columns are ``[o[c], o[c + 1])``. A slot of rank r <= R keeps its C parts
at ``a[s, c * r : (c + 1) * r]`` and ``b[s, :, :r]``; whatever lies beyond is never read. RP is R rounded up to a power
of two that ``tl.dot`` takes (16 or more).

Two families, chosen by the number of rows:

- *dense* (decode): every active slot, ACTIVE of the pool's SLOTS at most, is applied to all rows of the batch, and a
  gate table [M, S] of weight x scaling zeroes what does not apply. The rows are few and the weights must be read once
  anyhow, so this costs no bytes, needs no sorting, and every routing (two slots a row, k gates a row) is the same
  launch. A small launch shrinks; the base GEMM runs beside it, and goes on with h and B as further steps of its
  reduction when it is through with W.
- *grouped* (prefill, and decode with many slots): rows with the same slots are gathered into tiles; a program works on
  one tile. Tiles may name rows past the batch (a graph's tables serve every batch size): they are left alone. A tile
  with few rows may be computed as one of half or a quarter of the rows (FOLDS): which, its program sees.

Split-K partials are summed by the last program to arrive, in a fixed order: results are repeatable bit for bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.devices import arrive, to_l2


@triton.jit
def _locate(t, BN: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr, O4: tl.constexpr):
    """Tile number -> (projection, first column, end column): no tile straddles two projections.

    Selects, not branches: they may stand in a pipelined loop, and the first column keeps its known divisibility.
    """
    n0 = t * BN
    part = 0
    end = O1
    T1: tl.constexpr = (O1 + BN - 1) // BN
    if O2 > O1:
        T2: tl.constexpr = T1 + (O2 - O1 + BN - 1) // BN
        n0 = tl.where(t >= T1, O1 + (t - T1) * BN, n0)
        part = tl.where(t >= T1, 1, part)
        end = tl.where(t >= T1, O2, end)
        if O3 > O2:
            T3: tl.constexpr = T2 + (O3 - O2 + BN - 1) // BN
            n0 = tl.where(t >= T2, O2 + (t - T2) * BN, n0)
            part = tl.where(t >= T2, 2, part)
            end = tl.where(t >= T2, O3, end)
            if O4 > O3:
                n0 = tl.where(t >= T3, O3 + (t - T3) * BN, n0)
                part = tl.where(t >= T3, 3, part)
                end = tl.where(t >= T3, O4, end)
    return part, n0, end


@triton.jit
def _dot(left, right, acc):
    """float32 accumulation; float32 operands are multiplied as such, not rounded to tf32."""
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _pick(words, i, LENGTH: tl.constexpr):
    """words[i] of a loaded tensor: a load in a pipelined loop would be a stage of its own."""
    return tl.sum(tl.where(tl.arange(0, LENGTH) == i, words, 0), 0)


@triton.jit
def _leave_split(acc, own, spot, split, counter, SIZE: tl.constexpr):
    """Leave a split's sums beside those of its tile's others; how many had come before it."""
    tl.store(own + split * SIZE + spot, acc)
    return arrive(counter)


@triton.jit
def _sum_splits(own, spot, counter, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """All splits' sums, in their order, by the last to come; its counter is zero again."""
    tl.store(counter, 0)
    acc = tl.zeros(spot.shape, tl.float32)
    for s in tl.static_range(SPLIT):
        acc += tl.load(own + s * SIZE + spot, cache_modifier=".cg")
    return acc


@triton.jit
def _load_b(b_ptrs, b_slot, word, col_live, k, R: tl.constexpr, CUT: tl.constexpr):
    """B of the slot in ``word`` (place | rank << 16): [BN, RP], zero past its rank, all zero for no slot.

    Whole groups of 8 keep the loads wide. With CUT the exact rank is cut in registers, which a rank that is no
    multiple of 8 needs and which keeps the loads from being asynchronous.
    """
    rank = word >> 16
    lane = (k // 8 * 8 < rank) & (k < R)
    ptrs = b_ptrs + (word & 0xFFFF).to(tl.int64) * b_slot
    tile = tl.load(ptrs, mask=col_live & lane[None, :], other=0.0)
    if CUT:
        tile = tl.where((k < rank)[None, :], tile, 0.0).to(ptrs.dtype.element_ty)
    return tile


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
        b_tile = tl.load(ptrs, mask=col_live & lane[None, :], other=0.0)
        if CUT:
            b_tile = tl.where((column < rank)[None, :], b_tile, 0.0).to(b_ptrs.dtype.element_ty)
        low = tl.load(
            h_ptrs + (at * (C * RP))[None, :], mask=row_live & (rank != 0)[None, :], other=0.0, cache_modifier=".cg"
        )
    return b_tile, low


@triton.jit
def _vector(vectors, slots, cols, live, WHICH: tl.constexpr, V_SLOT: tl.constexpr, N: tl.constexpr):
    """Factor (WHICH 0) or shift (1) of a slot in each of ``slots`` (1 + its number), where they broadcast with cols.

    Where there is none, 0, it is what changes nothing.
    """
    ptrs = vectors + (slots - 1).to(tl.int64) * V_SLOT + WHICH * N + cols
    return tl.load(ptrs, mask=live & (slots != 0), other=1.0 - WHICH)


@triton.jit
def _to_product(y, bias, vectors, words, cols, live, V_SLOT: tl.constexpr, N: tl.constexpr):
    """The base model's product of outputs y (see ``row_routing.Vectors``); words and cols broadcast to y's shape."""
    if bias is not None:
        y -= tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
    return y / _vector(vectors, words >> 16, cols, live, 0, V_SLOT, N)


@triton.jit
def _to_output(acc, bias, vectors, words, cols, live, V_SLOT: tl.constexpr, N: tl.constexpr):
    """Outputs of the base model's product and what the slots added to it; bias and shifts are added here."""
    own = words & 0xFFFF
    acc *= _vector(vectors, own, cols, live, 0, V_SLOT, N)
    if bias is not None:
        acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
    shift = _vector(vectors, own, cols, live, 1, V_SLOT, N)
    return acc + (shift - _vector(vectors, words >> 16, cols, live, 1, V_SLOT, N))


@triton.jit
def _with_vectors(acc, before, bias, vectors, words, cols, live, V_SLOT: tl.constexpr, N: tl.constexpr):
    """What the slots add, ``acc``, and the base layer's output ``before``, to the output of rows some of which have
    vectors; the others are the sum."""
    total = acc + before
    if tl.max(words) != 0:
        product = _to_product(before, bias, vectors, words, cols, live, V_SLOT, N) + acc
        total = tl.where(words != 0, _to_output(product, bias, vectors, words, cols, live, V_SLOT, N), total)
    return total


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

    With ``vectors`` a row's output is multiplied by its own factor when the splits are summed.
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
        x, w, b, h, active, vectors, marks, m, stride_x, stride_w, b_slot, b_row, cols, end, part, split,
        K, O4, C, R, RP, ACTIVE, ACTIVE_P, GROUP, SPLIT, STAGES, BM, BN, BK, PDL, V_SLOT,
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


@triton.jit
def folds(tile_rows, m, BM: tl.constexpr, FOLDS: tl.constexpr):
    """How often a tile can be halved before it is too low for its rows, FOLDS times at most; they come first."""
    rows = tl.load(tile_rows + tl.arange(0, BM))
    count = tl.sum(((rows >= 0) & (rows < m)).to(tl.int32), axis=0)
    found = 0
    for i in tl.static_range(FOLDS):
        found += (count <= (BM >> (i + 1))).to(tl.int32)
    return found


@triton.jit
def _shrink_rows(
    x, h, tile_rows, tile_gates, partials, counters, a_ptrs, words, pair, cols, col_live, number, split, first, last,
    m, stride_x, h_pair,
    K: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, HEIGHT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first HEIGHT rows of a tile of ``grouped_shrink_kernel``, and its columns ``cols``.

    ``tile_rows`` and ``tile_gates`` begin with the tile's; its partial sums with those of the tile ``number``.
    """
    lane_m = tl.arange(0, HEIGHT)
    rows = tl.load(tile_rows + lane_m).to(tl.int64)
    row_live = (rows >= 0) & (rows < m)
    x_ptrs = x + (rows // SHARE) * stride_x
    acc = tl.zeros((HEIGHT, BN), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if K % BK == 0:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None], other=0.0)
            ak = tl.load(a_ptrs[:, None] + k[None, :], mask=col_live[:, None], other=0.0)
        else:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None] & (k < K)[None, :], other=0.0)
            ak = tl.load(a_ptrs[:, None] + k[None, :], mask=col_live[:, None] & (k < K)[None, :], other=0.0)
        acc = _dot(xk, ak.T, acc)
    wanted = row_live[:, None] & (words != 0)[None, :]
    if SPLIT > 1:
        spot = lane_m[:, None] * BN + tl.arange(0, BN)[None, :]
        own = partials + number.to(tl.int64) * (SPLIT * BM * BN)
        came = _leave_split(acc, own, spot, split, counters + number, BM * BN)
        wanted &= came == SPLIT - 1
        if came == SPLIT - 1:
            acc = _sum_splits(own, spot, counters + number, BM * BN, SPLIT)
    gate = tl.load(tile_gates + pair[None, :] * BM + lane_m[:, None], mask=wanted, other=0.0)
    ptrs = h + pair.to(tl.int64)[None, :] * h_pair + rows[:, None] * H + (cols % H)[None, :]
    tl.store(ptrs, (acc * gate).to(h.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["m"])  # rows, only compared with: a count that 16 divides is no other kernel
def grouped_shrink_kernel(
    x,
    a,
    h,
    tile_rows,
    tile_slots,
    tile_gates,
    n_tiles,
    partials,
    counters,
    m,
    stride_x,
    a_slot,
    h_pair,
    K: tl.constexpr,
    C: tl.constexpr,
    RP: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    FOLDS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[p, row] = gate * x[row // SHARE] A^T for the p-th slot of each row tile. Grid (columns x splits, tiles).

    The columns are those of all pairs, one pair's after the other's, so that a wide tile reads x once for two slots.
    """
    H: tl.constexpr = C * RP
    H_TILES: tl.constexpr = (PAIRS * H + BN - 1) // BN
    pid = tl.program_id(0)
    t = tl.program_id(1)
    split = pid % SPLIT
    n_tile = pid // SPLIT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if t >= tl.load(n_tiles):
        return
    cols = n_tile * BN + tl.arange(0, BN)
    pair = cols // H
    words = tl.load(tile_slots + t * PAIRS + pair, mask=pair < PAIRS, other=0)
    places = words & 0xFFFF
    ranks = words >> 16
    if tl.max(ranks, 0) == 0:
        return
    within = cols % RP
    col_live = within < ranks
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    first = split * SPAN
    last = tl.minimum(first + SPAN, STEPS)
    if tl.max(col_live.to(tl.int32), 0) == 0:
        last = first  # only padding here: no bytes to read
    a_ptrs = a + places.to(tl.int64) * a_slot + ((cols % H // RP) * ranks + within).to(tl.int64) * K
    number = t * H_TILES + n_tile
    tile_rows += t * BM
    tile_gates += t * PAIRS * BM
    fold = 0
    if FOLDS > 0:
        fold = folds(tile_rows, m, BM, FOLDS)
    for i in tl.static_range(FOLDS + 1):
        if fold == i:
            _shrink_rows(
                x, h, tile_rows, tile_gates, partials, counters, a_ptrs, words, pair, cols, col_live, number, split,
                first, last, m, stride_x, h_pair, K, H, SHARE, SPLIT, BM, BM >> i, BN, BK,
            )  # fmt: skip


@triton.jit
def _expand_tile(
    number,
    y_ptrs,
    bias,
    b_ptrs,
    h_ptrs,
    words,
    row_live,
    k,
    vectors,
    row_words,
    b_slot,
    b_row,
    h_pair,
    O1: tl.constexpr,
    O2: tl.constexpr,
    O3: tl.constexpr,
    O4: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    V_SLOT: tl.constexpr,
):
    """One column tile of one row tile: y (+)= sum_p h_p B_p^T (+ bias)."""
    part, n0, end = _locate(number, BN, O1, O2, O3, O4)
    cols = n0 + tl.arange(0, BN)
    live = row_live & (cols < end)[None, :]
    if ACCUMULATE:  # asked for first, so that its latency hides behind the products
        before = tl.load(y_ptrs + cols[None, :], mask=live, other=0.0)
    acc = tl.zeros((BM, BN), tl.float32)
    for pair in tl.static_range(PAIRS):
        word = _pick(words, pair, PAIRS_P)
        rows_of_b = b_ptrs + cols.to(tl.int64)[:, None] * b_row
        b_tile = _load_b(rows_of_b, b_slot, word, (cols < end)[:, None], k, R, CUT)
        low = tl.load(h_ptrs + (pair * h_pair + part * RP), mask=row_live & (word != 0), other=0.0)
        acc = _dot(low, b_tile.T, acc)
    if vectors is not None:
        acc = _with_vectors(acc, before.to(tl.float32), bias, vectors, row_words, cols[None, :], live, V_SLOT, O4)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + cols, mask=cols < end, other=0.0).to(tl.float32)[None, :]
        if ACCUMULATE:
            acc += before.to(tl.float32)
    tl.store(y_ptrs + cols[None, :], acc.to(y_ptrs.dtype.element_ty), mask=live)


@triton.jit
def _expand_rows(
    y, bias, b, h, tile_rows, words, vectors, marks, m, stride_y, b_slot, b_row, h_pair,
    O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr, O4: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_P: tl.constexpr, N_TILES: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr, ACCUMULATE: tl.constexpr, HAS_BIAS: tl.constexpr, HEIGHT: tl.constexpr, BN: tl.constexpr,
    V_SLOT: tl.constexpr,
):  # fmt: skip
    """The first HEIGHT rows of the tile that begins at ``tile_rows``, and a program's columns (below)."""
    rows = tl.load(tile_rows + tl.arange(0, HEIGHT)).to(tl.int64)
    row_live = ((rows >= 0) & (rows < m))[:, None]
    row_words = None
    if vectors is not None:
        row_words = tl.load(marks + rows[:, None], mask=row_live, other=0)
    k = tl.arange(0, RP)
    first = tl.program_id(0) * RUN
    last = tl.minimum(first + RUN, N_TILES)
    h_ptrs = h + rows[:, None] * (C * RP) + k[None, :]
    y_ptrs = y + rows[:, None] * stride_y
    b_ptrs = b + k[None, :]
    if tl.max((words >> 16) % 8, 0) == 0:
        for number in tl.range(first, last, num_stages=STAGES):
            _expand_tile(
                number, y_ptrs, bias, b_ptrs, h_ptrs, words, row_live, k, vectors, row_words, b_slot, b_row, h_pair,
                O1, O2, O3, O4, R, RP, PAIRS, PAIRS_P, ACCUMULATE, HAS_BIAS, HEIGHT, BN, False, V_SLOT,
            )  # fmt: skip
    else:
        for number in range(first, last):
            _expand_tile(
                number, y_ptrs, bias, b_ptrs, h_ptrs, words, row_live, k, vectors, row_words, b_slot, b_row, h_pair,
                O1, O2, O3, O4, R, RP, PAIRS, PAIRS_P, ACCUMULATE, HAS_BIAS, HEIGHT, BN, True, V_SLOT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["m"])  # rows, only compared with: a count that 16 divides is no other kernel
def grouped_expand_kernel(
    y,
    bias,
    b,
    h,
    tile_rows,
    tile_slots,
    n_tiles,
    vectors,
    marks,
    m,
    stride_y,
    b_slot,
    b_row,
    h_pair,
    O1: tl.constexpr,
    O2: tl.constexpr,
    O3: tl.constexpr,
    O4: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr,
    N_TILES: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    FOLDS: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
    V_SLOT: tl.constexpr,
):
    """y[row] (+)= sum_p h[p, row] B^T. Without ACCUMULATE every row of every tile is written, base rows with zeros
    or the bias, so that the base GEMM can accumulate onto it. ``vectors`` come with ACCUMULATE, and with the bias
    that y holds already. Grid (runs of RUN column tiles, row tiles): a program writes one column tile while it loads
    the next one's B."""
    t = tl.program_id(1)
    if PDL:
        gdc_wait()
    if t >= tl.load(n_tiles):
        return
    if ACCUMULATE and tl.load(tile_slots + t * PAIRS) == 0:
        return
    if tl.load(tile_rows + t * BM) >= m:
        return
    order = tl.arange(0, PAIRS_P)
    words = tl.load(tile_slots + t * PAIRS + order, mask=order < PAIRS, other=0)
    tile_rows += t * BM
    fold = 0
    if FOLDS > 0:
        fold = folds(tile_rows, m, BM, FOLDS)
    for i in tl.static_range(FOLDS + 1):
        if fold == i:
            _expand_rows(
                y, bias, b, h, tile_rows, words, vectors, marks, m, stride_y, b_slot, b_row, h_pair,
                O1, O2, O3, O4, C, R, RP, PAIRS, PAIRS_P, N_TILES, RUN, STAGES, ACCUMULATE, HAS_BIAS, BM >> i, BN,
                V_SLOT,
            )  # fmt: skip
