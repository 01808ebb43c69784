# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Triton kernels of ATMM: `y[t] += sum_j g[t, j] * (x[t] A_j^T) B_j^T` over adapters j that differ per row t.

Letters, everywhere in this package: ``x`` [M, K] input rows, ``w`` [N, K] base weight, ``y`` [M, N] output rows,
``a`` [S, C * R, K] and ``b`` [S, N, R] the S pool slots of adapter weights, ``h`` the low-rank intermediate, C stacked
projections (qkv: 3, gate_up: 2) whose output columns are ``[o[c], o[c + 1])``. A slot of rank r <= R keeps its C parts
at ``a[s, c * r : (c + 1) * r]`` and ``b[s, :, :r]``; whatever lies beyond is never read. RP is R rounded up to a power
of two that ``tl.dot`` takes (16 or more).

Two families, chosen by the number of rows:

- *dense* (decode): every active slot is applied to all rows of the batch and a gate table [M, S] of weight x scaling
  zeroes what does not apply. The rows are few and the weights must be read once anyhow, so this costs no bytes, needs
  no sorting, and every routing (two slots a row, k gates a row) is the same launch. The shrink's programs and the base
  GEMM's share one grid, because A rows are just more weight rows for the same x; the expand either follows in a second
  launch that loads B before it waits, or runs in the GEMM programs' epilogue once the shrink programs are through.
- *grouped* (prefill): rows with the same slots are gathered into tiles; a program works on one tile.

Split-K partials are summed by the last program to arrive, in a fixed order: results are repeatable bit for bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _locate(t, BN: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr, O4: tl.constexpr):
    """Tile number -> (projection, first column, end column): no tile straddles two projections."""
    n0 = t * BN
    part = 0
    end = O1
    T1: tl.constexpr = (O1 + BN - 1) // BN
    if O2 > O1:
        T2: tl.constexpr = T1 + (O2 - O1 + BN - 1) // BN
        if t >= T1:
            n0 = O1 + (t - T1) * BN
            part = 1
            end = O2
        if O3 > O2:
            T3: tl.constexpr = T2 + (O3 - O2 + BN - 1) // BN
            if t >= T2:
                n0 = O2 + (t - T2) * BN
                part = 2
                end = O3
            if O4 > O3 and t >= T3:
                n0 = O3 + (t - T3) * BN
                part = 3
                end = O4
    return part, n0, end


@triton.jit
def _dot(left, right, acc):
    """float32 accumulation; float32 operands are multiplied as such, not rounded to tf32."""
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _load_b(
    b,
    active,
    ranks,
    n_active,
    first,
    cols,
    end,
    stride_slot,
    stride_row,
    R: tl.constexpr,
    RP: tl.constexpr,
    KC: tl.constexpr,
):
    """B of the active slots from number ``first`` on, side by side: [BN, KC], zero past each slot's own rank."""
    k = tl.arange(0, KC)
    index = first + k // RP
    lane = k % RP
    live = index < n_active
    slot = tl.load(active + 1 + index, mask=live, other=0)
    rank = tl.load(ranks + slot, mask=live, other=0)
    # Whole groups of 8 keep the loads wide; the exact rank is cut in registers (the tail may hold anything).
    wide = (lane // 8 * 8 < rank) & (lane < R) & live
    ptrs = b + slot.to(tl.int64)[None, :] * stride_slot + cols.to(tl.int64)[:, None] * stride_row + lane[None, :]
    tile = tl.load(ptrs, mask=(cols < end)[:, None] & wide[None, :], other=0.0, eviction_policy="evict_first")
    return tl.where((lane < rank)[None, :], tile, 0.0).to(b.dtype.element_ty)


@triton.jit
def _load_h(h, rows, m, n_active, first, part, stride_h, C: tl.constexpr, RP: tl.constexpr, KC: tl.constexpr):
    """The matching columns of h: [BM, KC]."""
    k = tl.arange(0, KC)
    index = first + k // RP
    ptrs = h + rows.to(tl.int64)[:, None] * stride_h + (index * (C * RP) + part * RP + k % RP)[None, :]
    # .cg: another multiprocessor has just written it.
    return tl.load(ptrs, mask=(rows < m)[:, None] & (index < n_active)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def dense_kernel(
    x,
    w,
    bias,
    y,
    a,
    b,
    h,
    gates,
    active,
    ranks,
    partials,
    counters,
    m,
    stride_x,
    stride_y,
    stride_w,
    a_slot,
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
    SLOTS: tl.constexpr,
    GEMM_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FUSE: tl.constexpr,
    KC: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Base GEMM and shrink in one grid; with FUSE the expand too. GEMM_TILES = 0 leaves the shrink alone.

    Programs of the lowest numbers shrink. With FUSE a GEMM program waits for them in its epilogue: it cannot wait in
    vain, because programs are dispatched in the order of their numbers, so whatever it waits for runs already.
    ``counters``: [0] shrink tiles ready, [1] GEMM tiles through, [2 + tile] splits arrived; zero before and after.
    """
    H_TILES: tl.constexpr = (C * RP + BN - 1) // BN
    SHRINK_TILES: tl.constexpr = SLOTS * H_TILES
    pid = tl.program_id(0)
    tile = pid // SPLIT
    split = pid % SPLIT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n_active = tl.load(active)
    rows = tl.arange(0, BM)
    row_live = rows < m
    lane = tl.arange(0, BN)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    first = split * SPAN
    last = tl.minimum(first + SPAN, STEPS)

    is_shrink = tile < SHRINK_TILES
    index = tile // H_TILES
    if is_shrink and index >= n_active:
        return

    # Selected, not branched over: a pointer that comes out of a branch would lose its alignment, and with it the async
    # copies; a loop in each branch would double the shared memory. So A rows are addressed relative to w.
    slot = tl.load(active + 1 + index, mask=is_shrink, other=0)
    rank = tl.load(ranks + slot, mask=is_shrink, other=0)
    part, n0, end = _locate(tile - SHRINK_TILES, BN, O1, O2, O3, O4)
    cols = tl.where(is_shrink, (tile % H_TILES) * BN, n0) + lane
    within = cols % RP
    col_live = tl.where(is_shrink, (within < rank) & (cols < C * RP), cols < end)
    BYTES: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    to_a = tl.multiple_of((a.to(tl.int64) - w.to(tl.int64)) // BYTES, 8) + slot.to(tl.int64) * a_slot
    row = tl.where(is_shrink, (cols // RP) * rank + within, cols).to(tl.int64)
    w_ptrs = w + tl.where(is_shrink, to_a, 0) + row * tl.where(is_shrink, K, stride_w)
    if is_shrink and BN <= RP and ((tile % H_TILES) * BN) % RP >= rank:
        last = first  # only padding here: no bytes to read
    x_ptrs = x + rows.to(tl.int64) * stride_x
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if K % BK == 0:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None], other=0.0, eviction_policy="evict_last")
            wk = tl.load(
                w_ptrs[:, None] + k[None, :], mask=col_live[:, None], other=0.0, eviction_policy="evict_first"
            )
        else:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None] & (k < K)[None, :], other=0.0)
            wk = tl.load(w_ptrs[:, None] + k[None, :], mask=col_live[:, None] & (k < K)[None, :], other=0.0)
        acc = _dot(xk, wk.T, acc)

    if SPLIT > 1:
        spot = tl.arange(0, BM)[:, None] * BN + lane[None, :]
        own = partials + tile.to(tl.int64) * (SPLIT * BM * BN)
        tl.store(own + split * (BM * BN) + spot, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + 2 + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(counters + 2 + tile, 0)
        acc = tl.zeros((BM, BN), tl.float32)
        for s in tl.static_range(SPLIT):
            acc += tl.load(own + s * (BM * BN) + spot, cache_modifier=".cg")

    if is_shrink:
        gate = tl.load(gates + rows * SLOTS + slot, mask=row_live, other=0.0)
        low = tl.where((gate != 0.0)[:, None], acc * gate[:, None], 0.0)
        ptrs = h + rows.to(tl.int64)[:, None] * (SLOTS * C * RP) + (index * (C * RP) + cols)[None, :]
        tl.store(ptrs, low.to(h.dtype.element_ty), mask=row_live[:, None] & (cols < C * RP)[None, :])
        if FUSE:
            tl.debug_barrier()
            tl.atomic_add(counters, 1, sem="release")
        return

    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=col_live, other=0.0).to(tl.float32)[None, :]
    if FUSE and n_active > 0:
        b_tile = _load_b(b, active, ranks, n_active, 0, cols, end, b_slot, b_row, R, RP, KC)
        while tl.atomic_add(counters, 0, sem="acquire") < n_active * H_TILES:
            pass
        low = _load_h(h, rows, m, n_active, 0, part, SLOTS * C * RP, C, RP, KC)
        acc = _dot(low, b_tile.T, acc)
        for first_slot in range(KC // RP, n_active, KC // RP):
            b_tile = _load_b(b, active, ranks, n_active, first_slot, cols, end, b_slot, b_row, R, RP, KC)
            low = _load_h(h, rows, m, n_active, first_slot, part, SLOTS * C * RP, C, RP, KC)
            acc = _dot(low, b_tile.T, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + 1, 1, sem="acq_rel") == GEMM_TILES - 1:
            tl.store(counters, 0)
            tl.store(counters + 1, 0)
    y_ptrs = y + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=row_live[:, None] & col_live[None, :])


@triton.jit
def dense_expand_kernel(
    y,
    b,
    h,
    active,
    ranks,
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
    SLOTS: tl.constexpr,
    KC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += h B^T for all rows and every active slot: one program per tile of columns."""
    part, n0, end = _locate(tl.program_id(0), BN, O1, O2, O3, O4)
    cols = n0 + tl.arange(0, BN)
    rows = tl.arange(0, BM)
    n_active = tl.load(active)
    # The weights do not depend on the launch before: fetch them while it finishes.
    b_tile = _load_b(b, active, ranks, n_active, 0, cols, end, b_slot, b_row, R, RP, KC)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n_active == 0:
        return
    y_ptrs = y + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    live = (rows < m)[:, None] & (cols < end)[None, :]
    base = tl.load(y_ptrs, mask=live, other=0.0)
    low = _load_h(h, rows, m, n_active, 0, part, SLOTS * C * RP, C, RP, KC)
    acc = _dot(low, b_tile.T, tl.zeros((BM, BN), tl.float32))
    for first in range(KC // RP, n_active, KC // RP):
        b_tile = _load_b(b, active, ranks, n_active, first, cols, end, b_slot, b_row, R, RP, KC)
        low = _load_h(h, rows, m, n_active, first, part, SLOTS * C * RP, C, RP, KC)
        acc = _dot(low, b_tile.T, acc)
    tl.store(y_ptrs, (acc + base.to(tl.float32)).to(y.dtype.element_ty), mask=live)


@triton.jit
def grouped_shrink_kernel(
    x,
    a,
    h,
    tile_rows,
    tile_slots,
    tile_gates,
    n_tiles,
    ranks,
    partials,
    counters,
    stride_x,
    a_slot,
    h_pair,
    K: tl.constexpr,
    C: tl.constexpr,
    RP: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[p, row] = gate * x[row] A^T for the p-th slot of each row tile. Grid (columns x pairs x splits, tiles)."""
    H_TILES: tl.constexpr = (C * RP + BN - 1) // BN
    pid = tl.program_id(0)
    t = tl.program_id(1)
    split = pid % SPLIT
    n_tile = pid // SPLIT % H_TILES
    pair = pid // SPLIT // H_TILES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if t >= tl.load(n_tiles):
        return
    slot = tl.load(tile_slots + t * PAIRS + pair)
    if slot < 0:
        return
    rank = tl.load(ranks + slot)
    lane_m = tl.arange(0, BM)
    rows = tl.load(tile_rows + t * BM + lane_m).to(tl.int64)
    row_live = rows >= 0
    cols = n_tile * BN + tl.arange(0, BN)
    within = cols % RP
    col_live = (within < rank) & (cols < C * RP)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    first = split * SPAN
    last = tl.minimum(first + SPAN, STEPS)
    if (n_tile * BN) % RP >= rank and BN <= RP:
        last = first  # only padding here: no bytes to read
    x_ptrs = x + rows * stride_x
    a_ptrs = a + slot.to(tl.int64) * a_slot + ((cols // RP) * rank + within).to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if K % BK == 0:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None], other=0.0)
            ak = tl.load(a_ptrs[:, None] + k[None, :], mask=col_live[:, None], other=0.0)
        else:
            xk = tl.load(x_ptrs[:, None] + k[None, :], mask=row_live[:, None] & (k < K)[None, :], other=0.0)
            ak = tl.load(a_ptrs[:, None] + k[None, :], mask=col_live[:, None] & (k < K)[None, :], other=0.0)
        acc = _dot(xk, ak.T, acc)
    if SPLIT > 1:
        spot = lane_m[:, None] * BN + tl.arange(0, BN)[None, :]
        number = (t * PAIRS + pair) * H_TILES + n_tile
        own = partials + number.to(tl.int64) * (SPLIT * BM * BN)
        tl.store(own + split * (BM * BN) + spot, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + 2 + number, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(counters + 2 + number, 0)
        acc = tl.zeros((BM, BN), tl.float32)
        for s in tl.static_range(SPLIT):
            acc += tl.load(own + s * (BM * BN) + spot, cache_modifier=".cg")
    gate = tl.load(tile_gates + (t * PAIRS + pair) * BM + lane_m)
    ptrs = h + pair.to(tl.int64) * h_pair + rows[:, None] * (C * RP) + cols[None, :]
    tl.store(ptrs, (acc * gate[:, None]).to(h.dtype.element_ty), mask=row_live[:, None] & (cols < C * RP)[None, :])


@triton.jit
def grouped_expand_kernel(
    y,
    bias,
    b,
    h,
    tile_rows,
    tile_slots,
    n_tiles,
    ranks,
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
    ACCUMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row] (+)= sum_p h[p, row] B^T. Without ACCUMULATE every row of every tile is written, base rows with zeros
    or the bias, so that the base GEMM can accumulate onto it. Grid (columns, tiles)."""
    t = tl.program_id(1)
    part, n0, end = _locate(tl.program_id(0), BN, O1, O2, O3, O4)
    if t >= tl.load(n_tiles):
        if PDL:
            gdc_wait()
        return
    cols = n0 + tl.arange(0, BN)
    k = tl.arange(0, RP)
    slot = tl.load(tile_slots + t * PAIRS)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    lane = (k // 8 * 8 < rank) & (k < R) & (slot >= 0)
    b_ptrs = b + cols.to(tl.int64)[:, None] * b_row + k[None, :]
    b_tile = tl.load(b_ptrs + slot.to(tl.int64) * b_slot, mask=(cols < end)[:, None] & lane[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ACCUMULATE and slot < 0:
        return
    rows = tl.load(tile_rows + t * BM + tl.arange(0, BM)).to(tl.int64)
    row_live = rows >= 0
    h_ptrs = h + rows[:, None] * (C * RP) + (part * RP + k)[None, :]
    b_tile = tl.where((k < rank)[None, :], b_tile, 0.0).to(b.dtype.element_ty)
    low = tl.load(h_ptrs, mask=row_live[:, None] & (slot >= 0), other=0.0)
    acc = _dot(low, b_tile.T, tl.zeros((BM, BN), tl.float32))
    for pair in tl.static_range(1, PAIRS):
        slot = tl.load(tile_slots + t * PAIRS + pair)
        if slot >= 0:
            rank = tl.load(ranks + slot)
            lane = (k // 8 * 8 < rank) & (k < R)
            b_tile = tl.load(
                b_ptrs + slot.to(tl.int64) * b_slot, mask=(cols < end)[:, None] & lane[None, :], other=0.0
            )
            b_tile = tl.where((k < rank)[None, :], b_tile, 0.0).to(b.dtype.element_ty)
            low = tl.load(h_ptrs + pair * h_pair, mask=row_live[:, None], other=0.0)
            acc = _dot(low, b_tile.T, acc)
    y_ptrs = y + rows[:, None] * stride_y + cols[None, :]
    live = row_live[:, None] & (cols < end)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < end, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        acc += tl.load(y_ptrs, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptrs, acc.to(y.dtype.element_ty), mask=live)
