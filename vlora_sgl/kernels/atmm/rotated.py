# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
"""q, k and v of a decoding step from one launch behind the shrink: projection, adapters, rotary positions, the cache.

The dense linear of ``dense.py`` with another end. A tile of its columns is half of columns that turn together: BN / 2
of a head's first half and those of its second half that belong to them. A program needs no other's sums to turn them,
and W's rows are read as whole as ever. What is stored is, to the last bit, what the linear and ``rotate_and_store``
behind it leave: sums are rounded to the output's type before they turn. Slots with vectors are left to those two. The
letters are those of ``pieces.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlora_sgl.kernels.atmm.dense import dense_sums
from vlora_sgl.kernels.atmm.pieces import _leave_split, _sum_splits

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Rotation:
    """What ``rotate_and_store`` takes beside qkv; it says what each is.

    Attributes:
        cos_sin, positions, places, k_cache, v_cache, sections: in its order.
    """

    cos_sin: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    sections: tuple[int, int, int]

    @property
    def operands(self) -> Operands:
        """In the order of ``rotate_and_store``."""
        return self.cos_sin, self.positions, self.places, self.k_cache, self.v_cache, self.sections


@triton.jit
def dense_rotated_kernel(
    x,
    w,
    bias,
    q,
    b,
    h,
    active,
    partials,
    counters,
    cos_sin,
    positions,
    places,
    k_cache,
    v_cache,
    m,
    stride_x,
    stride_w,
    b_slot,
    b_row,
    stride_axis,
    stride_k,
    stride_v,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
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
):
    """Grid (tiles x splits): 2 HALF / BN tiles of each head of q, of k, of v."""
    TURNS: tl.constexpr = 2 * HALF // BN
    pid = tl.program_id(0)
    tile = pid // SPLIT
    split = pid % SPLIT
    head = tile // TURNS
    part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    turn = (tile % TURNS) * (BN // 2) + tl.arange(0, BN // 2)  # columns of a half
    lane = tl.arange(0, BN)
    cols = head * (2 * HALF) + (lane // (BN // 2)) * HALF + (tile % TURNS) * (BN // 2) + lane % (BN // 2)
    N: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    acc = dense_sums(
        x, w, b, h, active, None, None, None, None, m, stride_x, stride_w, b_slot, b_row, cols, N, part, split,
        K, N, 3, R, RP, ACTIVE, ACTIVE_P, GROUP, SPLIT, STAGES, BM, BN, BK, PDL, 0,
    )  # fmt: skip
    rows = tl.arange(0, BM)
    row_live = rows < m
    if SPLIT > 1:
        spot = lane[:, None] * BM + rows[None, :]
        own = partials + tile.to(tl.int64) * (SPLIT * BM * BN)
        if _leave_split(acc, own, spot, split, counters + tile, BM * BN) != SPLIT - 1:
            return
        acc = _sum_splits(own, spot, counters + tile, BM * BN, SPLIT)
    if HAS_BIAS:
        acc += tl.load(bias + cols).to(tl.float32)[:, None]
    value = acc.to(q.dtype.element_ty).to(tl.float32)
    low, high = tl.split(tl.permute(tl.reshape(value, (2, BN // 2, BM)), (1, 2, 0)))  # [BN / 2, BM]
    live = row_live[None, :]
    axis = (turn >= FIRST).to(tl.int32) + (turn >= FIRST + SECOND).to(tl.int32)
    position = tl.load(positions + axis[:, None] * stride_axis + rows[None, :], mask=live, other=0).to(tl.int64)
    angle = cos_sin + position * (2 * HALF) + turn[:, None]
    turns = live & (part < 2)  # values keep their place
    c = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)
    place = tl.load(places + rows, mask=row_live, other=0).to(tl.int64)
    to_q = q + rows.to(tl.int64) * (HEADS * 2 * HALF) + head * (2 * HALF)
    to_k = k_cache + place * stride_k + (head - HEADS) * (2 * HALF)
    to_v = v_cache + place * stride_v + (head - HEADS - KV_HEADS) * (2 * HALF)
    target = tl.where(part == 0, to_q, tl.where(part == 1, to_k, to_v))[None, :] + turn[:, None]
    tl.store(target, tl.where(turns, low * c - high * s, low).to(q.dtype.element_ty), mask=live)
    tl.store(target + HALF, tl.where(turns, high * c + low * s, high).to(q.dtype.element_ty), mask=live)
