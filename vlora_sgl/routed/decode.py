# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""What ``router`` says, in Triton: the parts that decode and prefill share, and decode rows as one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from vlora_sgl.routed.token_router import LIMIT as _LIMIT
from vlora_sgl.routed.token_router import UNIT as _UNIT

LIMIT = tl.constexpr(_LIMIT)
UNIT = tl.constexpr(_UNIT)


@triton.jit
def votes_of(low, square, routed, b1, w2, b2, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr):
    """[R, MEMBERS] int64, the rounded votes of rows with ``W1 x`` (low [R, WIDTH]) and the sum of x squared ([R])."""
    k, j = tl.arange(0, MEMBERS), tl.arange(0, WIDTH)
    low = low * tl.rsqrt(square / HIDDEN + 1e-6)[:, None] + tl.load(b1 + routed * WIDTH + j)[None, :]
    low = 0.5 * low * (1.0 + tl.erf(low * 0.7071067811865476))
    second = tl.load(w2 + routed * MEMBERS * WIDTH + k[:, None] * WIDTH + j[None, :])
    vote = tl.sum(second[None, :, :] * low[:, None, :], axis=2) + tl.load(b2 + routed * MEMBERS + k)[None, :]
    vote = tl.minimum(tl.maximum(vote, -LIMIT), LIMIT) * UNIT
    # Half to even, as torch rounds.
    down = tl.floor(vote)
    odd = down - 2.0 * tl.floor(down * 0.5)
    up = (vote - down > 0.5) | ((vote - down == 0.5) & (odd == 1.0))
    return (down + tl.where(up, 1.0, 0.0)).to(tl.int64)


@triton.jit
def best_weights(total, tokens, count, top_k, MEMBERS: tl.constexpr):
    """``router.top_weights`` of rows with total [R, MEMBERS] int64 over tokens [R] int64; [R, MEMBERS] float32."""
    k = tl.arange(0, MEMBERS)
    mean = (total.to(tl.float64) / (tokens.to(tl.float64) * UNIT)[:, None]).to(tl.float32)
    mean = tl.where((k < count)[None, :], mean, -float("inf"))
    # A member is among the best where fewer than top_k come before it; ties go to the first.
    mine, other = mean[:, :, None], mean[:, None, :]
    ahead = (other > mine) | ((other == mine) & (k[None, :] < k[:, None])[None, :, :])
    best = (tl.sum(ahead.to(tl.int32), axis=2) < top_k) & (k < count)[None, :]
    weight = tl.where(best, tl.exp(mean - tl.max(mean, axis=1)[:, None]), 0.0)
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def route_decode_kernel(
    gates, x, ids, requests, seq_lens, out_slots, row_routed, member_slots, member_scales,
    w1, b1, w2, b2, by_token, settings, totals, req_to_token,
    vocabulary, gates_stride, x_stride, req_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row; rows of no routed adapter return at once.

    Shapes: gates [M, S]; x [M, HIDDEN]; row_routed [M]; member_slots, member_scales [X, MEMBERS]; w1 [X, HIDDEN,
    WIDTH]; w2 [X, MEMBERS, WIDTH]; by_token [X, vocabulary]; settings [X, 4]; totals [slots, MEMBERS].
    """
    row = tl.program_id(0)
    routed = tl.load(row_routed + row)
    if routed < 0:
        return
    k = tl.arange(0, MEMBERS)
    count = tl.load(settings + routed * 4)
    if count == 0:
        token = tl.minimum(tl.maximum(tl.load(ids + row), 0), vocabulary - 1)
        chosen = tl.load(by_token + routed.to(tl.int64) * vocabulary + token).to(tl.int32)
        weight = tl.where(k == chosen, 1.0, 0.0)
    else:
        top_k = tl.load(settings + routed * 4 + 1)
        by_prefix = tl.load(settings + routed * 4 + 2)
        j = tl.arange(0, WIDTH)
        low = tl.zeros([WIDTH], dtype=tl.float32)
        square = tl.zeros([BLOCK], dtype=tl.float32)
        weights = w1 + routed.to(tl.int64) * HIDDEN * WIDTH
        for start in range(0, HIDDEN, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < HIDDEN
            part = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            square += part * part
            block = tl.load(weights + at[:, None] * WIDTH + j[None, :], mask=inside[:, None], other=0.0)
            low += tl.sum(block * part[:, None], axis=0)
        # One row, as the block of rows that the helpers expect.
        square = tl.sum(square[None, :], axis=1)
        total = votes_of(low[None, :], square, routed, b1, w2, b2, HIDDEN, WIDTH, MEMBERS)
        tokens = tl.full([1], 1, dtype=tl.int64)
        if by_prefix != 0:
            length = tl.load(seq_lens + row).to(tl.int64)
            tokens += length - 1
            if length > 1:
                request = tl.load(requests + row).to(tl.int64)
                last = tl.load(req_to_token + request * req_stride + length - 2).to(tl.int64)
                total += tl.load(totals + last * MEMBERS + k)[None, :]
            out = tl.load(out_slots + row).to(tl.int64)
            tl.store(totals + out * MEMBERS + k[None, :], total)
        weight = tl.sum(best_weights(total, tokens, count, top_k, MEMBERS), axis=0)
    slot = tl.load(member_slots + routed * MEMBERS + k)
    used = slot >= 0
    place = gates + row.to(tl.int64) * gates_stride + slot
    old = tl.load(place, mask=used, other=0.0)
    tl.store(place, old + weight * tl.load(member_scales + routed * MEMBERS + k), mask=used)
