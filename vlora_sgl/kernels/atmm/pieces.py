# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""What the Triton kernels of ATMM share: the letters, and steps of a tile.

They compute `y[t] += sum_j g[t, j] * (x[t] A_j^T) B_j^T` over adapters j that differ per row t: ``dense.py`` for few
rows, ``grouped.py`` for many rows or many slots.

Letters, everywhere in this package: ``x`` [M, K] input rows, ``w`` [N, K] base weight, ``y`` [M, N] output rows,
``a`` [S, C * R, K] and ``b`` [S, N, R] the S pool slots of adapter weights (x's type, or e4m3), ``h`` the low-rank
intermediate, C stacked projections (qkv: 3, gate_up: 2) whose output columns are ``[o[c], o[c + 1])``. A slot of rank
r <= R keeps its C parts at ``a[s, c * r : (c + 1) * r]`` and ``b[s, :, :r]``; whatever lies beyond is never read. RP
is R rounded up to a power of two that ``tl.dot`` takes (16 or more).

Split-K partials are summed by the last program to arrive, in a fixed order: results are repeatable bit for bit.
"""

import triton
import triton.language as tl

from vlora_sgl.kernels.devices import arrive


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
    """float32 accumulation; float32 operands are multiplied as such, not rounded to tf32.

    Factors in e4m3 are multiplied in the type of what they meet, which has all their numbers.
    """
    if left.dtype.primitive_bitwidth < right.dtype.primitive_bitwidth:
        left = left.to(right.dtype)
    elif right.dtype.primitive_bitwidth < left.dtype.primitive_bitwidth:
        right = right.to(left.dtype)
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
    EIGHT_BITS: tl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth == 8  # there is no select of such numbers
    if CUT and EIGHT_BITS:
        lane = k < rank
    tile = tl.load(ptrs, mask=col_live & lane[None, :], other=0.0)
    if CUT and not EIGHT_BITS:
        tile = tl.where((k < rank)[None, :], tile, 0.0).to(ptrs.dtype.element_ty)
    return tile


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
