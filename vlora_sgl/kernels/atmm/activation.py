# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
"""The expand of gate and up inside the activation behind them: `act = silu(gate + h B_gate^T) * (up + h B_up^T)`.

The letters are those of ``pieces.py``. ``y`` [M, 2 I] is what the base GEMM left, gate's I columns before up's;
``act`` [M, I] is all that is written. The activation reads y anyhow, so the adapters cost no pass over it, and their
part is never rounded on its own: sums, silu and product are float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vlora_sgl.kernels.atmm.grouped import folds
from vlora_sgl.kernels.atmm.pieces import _dot, _load_b, _pick, _to_output, _to_product


@triton.jit
def _silu(x, FAST: tl.constexpr):
    """x / (1 + e^-x). FAST without the care for numbers below 2^-126 that the compiler takes: a third less work."""
    if FAST:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
        part = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, is_pure=True, pack=1
        )
        return x * part
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_tile(
    number,
    y_ptrs,
    act_ptrs,
    b_ptrs,
    gate_lows,
    up_lows,
    words,
    row_live,
    k,
    bias,
    vectors,
    row_words,
    b_slot,
    b_row,
    I: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    V_SLOT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One column tile of one row tile: both halves of y, their products, and the activation."""
    cols = number * BN + tl.arange(0, BN)
    live = row_live & (cols < I)[None, :]
    col_live = (cols < I)[:, None]
    gate = tl.load(y_ptrs + cols[None, :], mask=live, other=0.0).to(tl.float32)  # [BM, BN]
    up = tl.load(y_ptrs + (I + cols)[None, :], mask=live, other=0.0).to(tl.float32)
    if vectors is not None:  # rows without them keep their bits
        marked = row_words != 0
        gate = tl.where(marked, _to_product(gate, bias, vectors, row_words, cols[None, :], live, V_SLOT, 2 * I), gate)
        up = tl.where(marked, _to_product(up, bias, vectors, row_words, (I + cols)[None, :], live, V_SLOT, 2 * I), up)
    gate_rows = b_ptrs + cols.to(tl.int64)[:, None] * b_row  # [BN, RP]
    up_rows = b_ptrs + (I + cols).to(tl.int64)[:, None] * b_row
    for pair in tl.static_range(PAIRS):
        word = _pick(words, pair, PAIRS_P)
        gate = _dot(gate_lows[pair], _load_b(gate_rows, b_slot, word, col_live, k, R, CUT).T, gate)
        up = _dot(up_lows[pair], _load_b(up_rows, b_slot, word, col_live, k, R, CUT).T, up)
    if vectors is not None:
        gate = tl.where(marked, _to_output(gate, bias, vectors, row_words, cols[None, :], live, V_SLOT, 2 * I), gate)
        up = tl.where(marked, _to_output(up, bias, vectors, row_words, (I + cols)[None, :], live, V_SLOT, 2 * I), up)
    act = _silu(gate, FAST) * up
    tl.store(act_ptrs + cols[None, :], act.to(act_ptrs.dtype.element_ty), mask=live)


@triton.jit
def _silu_rows(
    act, y, b, h, tile_rows, all_rows, words, bias, vectors, marks, m, stride_act, stride_y, b_slot, b_row, h_pair,
    I: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_P: tl.constexpr,
    RUN: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr, HEIGHT: tl.constexpr, BN: tl.constexpr,
    V_SLOT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The first HEIGHT rows of the tile that begins at ``tile_rows``, and a program's columns (below)."""
    rows = all_rows if HEIGHT == BM else tl.load(tile_rows + tl.arange(0, HEIGHT))
    rows = rows.to(tl.int64)
    row_live = ((rows >= 0) & (rows < m))[:, None]
    row_words = None
    if vectors is not None:
        row_words = tl.load(marks + rows[:, None], mask=row_live, other=0)
    k = tl.arange(0, RP)
    h_ptrs = h + rows[:, None] * (2 * RP) + k[None, :]
    gate_lows = ()  # of each pair: [HEIGHT, RP]
    up_lows = ()
    for pair in tl.static_range(PAIRS):
        used = row_live & (_pick(words, pair, PAIRS_P) != 0)  # the shrink leaves no h where there is no slot
        gate_lows += (tl.load(h_ptrs + pair * h_pair, mask=used, other=0.0),)
        up_lows += (tl.load(h_ptrs + (pair * h_pair + RP), mask=used, other=0.0),)
    y_ptrs = y + rows[:, None] * stride_y
    act_ptrs = act + rows[:, None] * stride_act
    b_ptrs = b + k[None, :]
    first = tl.program_id(0) * RUN
    last = tl.minimum(first + RUN, (I + BN - 1) // BN)
    if tl.max(words, 0) == 0:  # the base model's rows: no pairs, so that memory alone bounds them
        for number in tl.range(first, last, num_stages=STAGES):
            _silu_tile(
                number, y_ptrs, act_ptrs, b_ptrs, (), (), words, row_live, k, None, None, None, b_slot, b_row,
                I, R, 0, PAIRS_P, BN, False, V_SLOT, FAST,
            )  # fmt: skip
    elif tl.max((words >> 16) % 8, 0) == 0:
        for number in tl.range(first, last, num_stages=STAGES):
            _silu_tile(
                number, y_ptrs, act_ptrs, b_ptrs, gate_lows, up_lows, words, row_live, k, bias, vectors, row_words,
                b_slot, b_row, I, R, PAIRS, PAIRS_P, BN, False, V_SLOT, FAST,
            )  # fmt: skip
    else:
        for number in range(first, last):
            _silu_tile(
                number, y_ptrs, act_ptrs, b_ptrs, gate_lows, up_lows, words, row_live, k, bias, vectors, row_words,
                b_slot, b_row, I, R, PAIRS, PAIRS_P, BN, True, V_SLOT, FAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=["m"])  # rows, only compared with: a count that 16 divides is no other kernel
def grouped_silu_kernel(
    act,
    y,
    b,
    h,
    tile_rows,
    tile_slots,
    n_tiles,
    bias,
    vectors,
    marks,
    m,
    stride_act,
    stride_y,
    b_slot,
    b_row,
    h_pair,
    I: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    FOLDS: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
    V_SLOT: tl.constexpr,
    FAST: tl.constexpr,
):
    """act[row] = silu(y_gate + sum_p h_p B_gate^T) * (y_up + sum_p h_p B_up^T) for every row of every tile.

    Rows without a slot take the plain activation. Grid (runs of RUN column tiles, row tiles): a program holds its rows
    of h and finishes one column tile while it loads the next one's y and B.
    """
    t = tl.program_id(1)
    if PDL:
        gdc_wait()
    tile_rows += t * BM
    order = tl.arange(0, PAIRS_P)
    tiles = tl.load(n_tiles)  # all that the tables say of a tile is asked for at once
    begin = tl.load(tile_rows)
    words = tl.load(tile_slots + t * PAIRS + order, mask=order < PAIRS, other=0)
    all_rows = tl.load(tile_rows + tl.arange(0, BM))
    if t >= tiles:
        return
    if begin >= m:
        return
    fold = 0
    if FOLDS > 0:
        fold = folds(all_rows, m, BM, FOLDS)
    for i in tl.static_range(FOLDS + 1):
        if fold == i:
            _silu_rows(
                act, y, b, h, tile_rows, all_rows, words, bias, vectors, marks, m, stride_act, stride_y, b_slot, b_row,
                h_pair, I, R, RP, PAIRS, PAIRS_P, RUN, STAGES, BM, BM >> i, BN, V_SLOT, FAST,
            )  # fmt: skip
