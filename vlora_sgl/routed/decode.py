# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""What ``token_router`` says, in Triton: the parts that decode and prefill share, and decode rows as one kernel.

What differs from one routed adapter to the next lies where ``pointers`` says (``router_tables``): the members of token
ids (int8), and a network: W1 [HIDDEN, WIDTH], b1 [WIDTH], W2 [MEMBERS, WIDTH] and b2 [MEMBERS], float32, in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlora_sgl.routed.token_router import LIMIT as _LIMIT
from vlora_sgl.routed.token_router import UNIT as _UNIT

LIMIT = tl.constexpr(_LIMIT)
UNIT = tl.constexpr(_UNIT)
SETTINGS: tl.constexpr = tl.constexpr(8)
"""int32 words of a routed adapter: members that its network votes for (0: it has none), members per token, whether by
prefix, ranges of positions, the member of each modality (-1: the base model), whether it has ranges of token ids."""


@triton.jit
def network_of(pointers, routed):
    """Where the network of a routed adapter begins."""
    return tl.multiple_of(tl.load(pointers + routed * 2 + 1).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def votes_of(low, square, network, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr):
    """[R, MEMBERS] int64, the rounded votes of rows with ``W1 x`` (low [R, WIDTH]) and the sum of x squared ([R])."""
    k, j = tl.arange(0, MEMBERS), tl.arange(0, WIDTH)
    rest = network + HIDDEN * WIDTH
    low = low * tl.rsqrt(square / HIDDEN + 1e-6)[:, None] + tl.load(rest + j)[None, :]
    low = 0.5 * low * (1.0 + tl.erf(low * 0.7071067811865476))
    second = tl.load(rest + WIDTH + k[:, None] * WIDTH + j[None, :])
    vote = tl.sum(second[None, :, :] * low[:, None, :], axis=2) + tl.load(rest + WIDTH + MEMBERS * WIDTH + k)[None, :]
    vote = tl.minimum(tl.maximum(vote, -LIMIT), LIMIT) * UNIT
    # Half to even, as torch rounds.
    down = tl.floor(vote)
    odd = down - 2.0 * tl.floor(down * 0.5)
    up = (vote - down > 0.5) | ((vote - down == 0.5) & (odd == 1.0))
    return (down + tl.where(up, 1.0, 0.0)).to(tl.int64)


@triton.jit
def best_weights(total, tokens, count, top_k, MEMBERS: tl.constexpr):
    """``top_weights`` of rows with total [R, MEMBERS] int64 over tokens [R] int64; [R, MEMBERS] float32.

    Shapes: count, top_k [R]: members that there are, and that a row gets, of its routed adapter.
    """
    k = tl.arange(0, MEMBERS)
    mean = (total.to(tl.float64) / (tokens.to(tl.float64) * UNIT)[:, None]).to(tl.float32)
    mean = tl.where(k[None, :] < count[:, None], mean, -float("inf"))
    # A member is among the best where fewer than top_k come before it; ties go to the first.
    mine, other = mean[:, :, None], mean[:, None, :]
    ahead = (other > mine) | ((other == mine) & (k[None, :] < k[:, None])[None, :, :])
    best = (tl.sum(ahead.to(tl.int32), axis=2) < top_k[:, None]) & (k[None, :] < count[:, None])
    weight = tl.where(best, tl.exp(mean - tl.max(mean, axis=1)[:, None]), 0.0)
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def named_members(
    routed, kind, token, place, inside, pointers, settings, positions, vocabulary,
    SETTINGS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """[R] the member that rules name for rows ``inside``, -1 for none.

    Shapes: routed, kind (into ``MODALITIES``), token (its id), place (in its sequence) [R]; positions [X, POSITIONS,
    3].
    """
    own = settings + routed * SETTINGS
    chosen = tl.load(own + 4 + kind, mask=inside, other=-1)
    by_id = inside & (kind == 0) & (tl.load(own + 7, mask=inside, other=0) != 0)
    table = tl.load(pointers + routed * 2, mask=by_id, other=0).to(tl.pointer_type(tl.int8))
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    chosen = tl.where(by_id, tl.load(table + token, mask=by_id, other=0).to(tl.int32), chosen)
    ranges = tl.load(own + 3, mask=inside, other=0)
    for p in range(0, tl.max(ranges, axis=0)):
        rule = positions + (routed * POSITIONS + p) * 3
        there = inside & (p < ranges)
        first, end = tl.load(rule, mask=there, other=0), tl.load(rule + 1, mask=there, other=0)
        named = there & (place >= first) & (place < end)
        chosen = tl.where(named, tl.load(rule + 2, mask=there, other=0), chosen)
    return chosen


@triton.jit
def route_decode_kernel(
    gates, weights, x, ids, requests, seq_lens, out_slots, row_routed, member_slots, member_scales,
    pointers, settings, positions, totals, req_to_token,
    vocabulary, gates_stride, x_stride, req_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr, SETTINGS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program per row; rows of no routed adapter return at once.

    Adds to gates [M, S] (dense kernels), or where those are None writes weights [M, MEMBERS] (``tiles``).
    Shapes: x [M, HIDDEN]; row_routed [M]; member_slots, member_scales [X, MEMBERS]; pointers [X, 2]; settings [X,
    SETTINGS]; positions [X, POSITIONS, 3]; totals [slots, MEMBERS].
    """
    row = tl.program_id(0)
    routed = tl.load(row_routed + row)
    if routed < 0:
        return
    k, one = tl.arange(0, MEMBERS), tl.zeros([1], dtype=tl.int32)
    count = tl.load(settings + routed * SETTINGS)
    length = tl.load(seq_lens + row).to(tl.int64)
    if count == 0:
        token = tl.load(ids + row + one).to(tl.int64)
        chosen = named_members(
            routed + one, one, token, length - 1 + one, one == 0, pointers, settings, positions, vocabulary,
            SETTINGS, POSITIONS,
        )  # fmt: skip
        weight = tl.sum(tl.where(k[None, :] == chosen[:, None], 1.0, 0.0), axis=0)
    else:
        top_k = tl.load(settings + routed * SETTINGS + 1)
        by_prefix = tl.load(settings + routed * SETTINGS + 2)
        network = network_of(pointers, routed)
        j = tl.arange(0, WIDTH)
        low = tl.zeros([WIDTH], dtype=tl.float32)
        square = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < HIDDEN
            part = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            square += part * part
            block = tl.load(network + at[:, None] * WIDTH + j[None, :], mask=inside[:, None], other=0.0)
            low += tl.sum(block * part[:, None], axis=0)
        # One row, as the block of rows that the helpers expect.
        square = tl.sum(square[None, :], axis=1)
        total = votes_of(low[None, :], square, network, HIDDEN, WIDTH, MEMBERS)
        tokens = tl.full([1], 1, dtype=tl.int64)
        if by_prefix != 0:
            tokens += length - 1
            if length > 1:
                request = tl.load(requests + row).to(tl.int64)
                last = tl.load(req_to_token + request * req_stride + length - 2).to(tl.int64)
                total += tl.load(totals + last * MEMBERS + k)[None, :]
            out = tl.load(out_slots + row).to(tl.int64)
            tl.store(totals + out * MEMBERS + k[None, :], total)
        weight = tl.sum(best_weights(total, tokens, count + one, top_k + one, MEMBERS), axis=0)
    if gates is None:
        tl.store(weights + row * MEMBERS + k, weight)
    else:
        slot = tl.load(member_slots + routed * MEMBERS + k)
        used = slot >= 0
        place = gates + row.to(tl.int64) * gates_stride + slot
        old = tl.load(place, mask=used, other=0.0)
        tl.store(place, old + weight * tl.load(member_scales + routed * MEMBERS + k), mask=used)
