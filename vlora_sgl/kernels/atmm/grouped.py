# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Kernels for many rows (prefill), and for decode with many slots; ``pieces.py`` has the letters.

Rows with the same slots are gathered into tiles; a program works on one tile. Tiles may name rows past the batch (a
graph's tables serve every batch size): they are left alone. A tile with few rows may be computed as one of half or a
quarter of the rows (FOLDS): which, its program sees.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.atmm.pieces import _dot, _leave_split, _load_b, _locate, _pick, _sum_splits, _with_vectors


@triton.jit
def folds(rows, m, BM: tl.constexpr, FOLDS: tl.constexpr):
    """How often a tile can be halved before it is too low for its rows, FOLDS times at most; they come first."""
    count = tl.sum(((rows >= 0) & (rows < m)).to(tl.int32), axis=0)
    found = 0
    for i in tl.static_range(FOLDS):
        found += (count <= (BM >> (i + 1))).to(tl.int32)
    return found


@triton.jit
def _shrink_rows(
    x, h, tile_rows, all_rows, tile_gates, partials, counters, a_ptrs, words, pair, cols, col_live, number, split,
    first, last, m, stride_x, h_pair,
    K: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, HEIGHT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first HEIGHT rows of a tile of ``grouped_shrink_kernel``, and its columns ``cols``.

    ``tile_rows`` and ``tile_gates`` begin with the tile's; its partial sums with those of the tile ``number``.
    ``all_rows`` are the tile's.
    """
    lane_m = tl.arange(0, HEIGHT)
    rows = all_rows if HEIGHT == BM else tl.load(tile_rows + lane_m)
    rows = rows.to(tl.int64)
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
    cols = n_tile * BN + tl.arange(0, BN)
    pair = cols // H
    tile_rows += t * BM
    tiles = tl.load(n_tiles)  # all that the tables say of a tile is asked for at once
    words = tl.load(tile_slots + t * PAIRS + pair, mask=pair < PAIRS, other=0)
    all_rows = tl.load(tile_rows + tl.arange(0, BM))
    if t >= tiles:
        return
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
    tile_gates += t * PAIRS * BM
    fold = 0
    if FOLDS > 0:
        fold = folds(all_rows, m, BM, FOLDS)
    for i in tl.static_range(FOLDS + 1):
        if fold == i:
            _shrink_rows(
                x, h, tile_rows, all_rows, tile_gates, partials, counters, a_ptrs, words, pair, cols, col_live, number,
                split, first, last, m, stride_x, h_pair, K, H, SHARE, SPLIT, BM, BM >> i, BN, BK,
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
    y, bias, b, h, tile_rows, all_rows, words, vectors, marks, m, stride_y, b_slot, b_row, h_pair,
    O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr, O4: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_P: tl.constexpr, N_TILES: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr, ACCUMULATE: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, HEIGHT: tl.constexpr,
    BN: tl.constexpr, V_SLOT: tl.constexpr,
):  # fmt: skip
    """The first HEIGHT rows of the tile that begins at ``tile_rows``, and a program's columns (below)."""
    rows = all_rows if HEIGHT == BM else tl.load(tile_rows + tl.arange(0, HEIGHT))
    rows = rows.to(tl.int64)
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
    tile_rows += t * BM
    order = tl.arange(0, PAIRS_P)
    tiles = tl.load(n_tiles)  # all that the tables say of a tile is asked for at once
    word = tl.load(tile_slots + t * PAIRS)
    begin = tl.load(tile_rows)
    words = tl.load(tile_slots + t * PAIRS + order, mask=order < PAIRS, other=0)
    all_rows = tl.load(tile_rows + tl.arange(0, BM))
    if t >= tiles:
        return
    if ACCUMULATE and word == 0:
        return
    if begin >= m:
        return
    fold = 0
    if FOLDS > 0:
        fold = folds(all_rows, m, BM, FOLDS)
    for i in tl.static_range(FOLDS + 1):
        if fold == i:
            _expand_rows(
                y, bias, b, h, tile_rows, all_rows, words, vectors, marks, m, stride_y, b_slot, b_row, h_pair,
                O1, O2, O3, O4, C, R, RP, PAIRS, PAIRS_P, N_TILES, RUN, STAGES, ACCUMULATE, HAS_BIAS, BM, BM >> i, BN,
                V_SLOT,
            )  # fmt: skip
