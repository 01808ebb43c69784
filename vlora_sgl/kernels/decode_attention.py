# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Attention of one new token per sequence over its cached keys and values, in one launch.

The keys of a sequence are split into chunks, a program each, so that a few sequences fill a GPU (Flash-Decoding). The
last program of a sequence and key head to finish adds the chunks up, in their order, where a second launch would
otherwise. Chunks depend on the sequence's own length alone, so a token's bits do not depend on which others are in the
batch.
"""

from __future__ import annotations

from itertools import pairwise
from math import e, log2

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.devices import arrivals, arrive, early, is_hopper, to_l2

CHUNK = 128
"""Keys of a chunk at least."""
BLOCK_N = 128
MAX_GROUP = 16
"""Query heads of a key head: the rows of a matrix instruction."""
STAGES = 2
WARPS = 4
WIDTHS = (32, 64, 128)
"""Of a head."""
LOG2_E = log2(e)


@triton.jit(do_not_specialize=["scale", "v_scale"])
def decode_attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    starts,
    places,
    partials,
    weights,
    counters,
    scale,
    v_scale,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_out,
    stride_out_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (key heads, sequences, splits). ``counters``: [sequence, key head] chunks done; zero before and after."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(starts + row)
    length = tl.load(starts + row + 1) - begin
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N, CHUNK)
    first = split * chunk
    last = tl.minimum(first + chunk, length)
    d = tl.arange(0, D)
    lane = tl.arange(0, BLOCK_N)
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head
    if PDL:
        # All but the newest keys have long been there: fetch them while the launch before is at that one.
        for n0 in range(first, last, BLOCK_N):
            place = tl.load(places + begin + n0 + lane, mask=n0 + lane < last, other=0).to(tl.int64)
            line = tl.arange(0, (D + 63) // 64) * 64
            to_l2(k_head + (place * stride_k)[:, None] + line[None, :])
            to_l2(v_head + (place * stride_v)[:, None] + line[None, :])
        gdc_wait()
    if first >= length:
        return
    member = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    live_head = member < GROUP
    q_ptrs = q + row.to(tl.int64) * stride_q + (head * stride_q_head)[:, None] + d[None, :]
    query = tl.load(q_ptrs, mask=live_head[:, None], other=0.0)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, D), tl.float32)
    for n0 in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        live = n0 + lane < last
        place = tl.load(places + begin + n0 + lane, mask=live, other=0).to(tl.int64)
        key = tl.load(k_head + (place * stride_k)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        value = tl.load(v_head + (place * stride_v)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        score = tl.where(live[None, :], tl.dot(query, key.T) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        fade = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None])
        top = higher
    if PDL:
        gdc_launch_dependents()  # it may fetch its weights meanwhile
    acc = acc / total[:, None]
    if length > chunk:
        # Of every chunk its mean of the values, and the logarithm of its weight.
        heads = row.to(tl.int64) * HEADS + head
        spot = heads[:, None] * (SPLITS * D) + d[None, :]
        tl.store(partials + spot + split * D, acc, mask=live_head[:, None])
        tl.store(weights + heads * SPLITS + split, top + tl.log2(total), mask=live_head)
        chunks = tl.cdiv(length, chunk)
        counter = counters + row * (HEADS // GROUP) + kv_head
        if arrive(counter) != chunks - 1:
            return
        tl.store(counter, 0)
        s = tl.arange(0, SPLITS)
        present = live_head[:, None] & (s < chunks)[None, :]
        # .cg: other multiprocessors have just written them.
        w = tl.load(
            weights + heads[:, None] * SPLITS + s[None, :], mask=present, other=float("-inf"), cache_modifier=".cg"
        )
        peak = tl.where(live_head, tl.max(w, 1), 0.0)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, D), tl.float32)
        for i in tl.static_range(SPLITS):
            part = tl.load(
                partials + spot + i * D, mask=live_head[:, None] & (i < chunks), other=0.0, cache_modifier=".cg"
            )
            share = tl.exp2(tl.sum(tl.where((s == i)[None, :], w, 0.0), 1) - peak)
            share = tl.where(live_head & (i < chunks), share, 0.0)
            acc += share[:, None] * part
            total += share
        acc = acc / total[:, None]
    out_ptrs = out + row.to(tl.int64) * stride_out + (head * stride_out_head)[:, None] + d[None, :]
    tl.store(out_ptrs, (acc * v_scale).to(out.dtype.element_ty), mask=live_head[:, None])


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    partials: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
) -> None:
    """out[t] = softmax(scale * q[t] K^T) V * v_scale over the cached tokens of sequence t, its newest among them.

    Args:
        q: [T, HEADS, D], float16 or bfloat16; one token of each of T sequences. D is one of ``WIDTHS``.
        k_cache, v_cache: [slots, KV_HEADS, D], q's dtype; at most ``MAX_GROUP`` heads of q read one of theirs.
        out: [T, HEADS, D], q's dtype, written.
        starts: [>= T + 1], int32: tokens of sequence t are ``places[starts[t] : starts[t + 1]]``, one at least.
        places: slots of the tokens, int32 or int64.
        partials: [>= T, HEADS, SPLITS, D], float32, contiguous; room for the chunks' sums.
        weights: [>= T, HEADS, SPLITS], float32, contiguous; room for their weights.
        scale, v_scale: of the scores, and of the values.
    """
    tokens, heads, width = q.shape
    kv_heads, splits = k_cache.shape[1], partials.shape[2]
    pdl = is_hopper(q.device)
    decode_attention_kernel[(kv_heads, tokens, splits)](
        q,
        k_cache,
        v_cache,
        out,
        starts,
        places,
        partials,
        weights,
        arrivals(q.device, "attention"),
        scale * LOG2_E,
        v_scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        out.stride(0),
        out.stride(1),
        GROUP=heads // kv_heads,
        HEADS=heads,
        D=width,
        SPLITS=splits,
        CHUNK=CHUNK,
        BLOCK_H=MAX_GROUP,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        PDL=pdl,
        num_warps=WARPS,
        **early(pdl),
    )


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """What ``decode_attention`` writes, in float64: [T, HEADS, D]."""
    group = q.shape[1] // k_cache.shape[1]
    answers = []
    for t, (first, last) in enumerate(pairwise(starts[: len(q) + 1].tolist())):
        keys, values = (
            cache[places[first:last].long()].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        share = (torch.einsum("hd,nhd->hn", q[t].double(), keys) * scale).softmax(-1)
        answers.append(torch.einsum("hn,nhd->hd", share, values) * v_scale)
    return torch.stack(answers)
