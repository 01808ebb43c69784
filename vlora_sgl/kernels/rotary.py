# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Rotary positions, applied in place to what a stacked projection leaves.

Of an image encoder: SGLang copies q, k and v out of the projection, rotates the copies and writes two more; on a
recent GPU that takes longer than the attention of a window. Rotating in place reads and writes q and k once, and
attention reads strides.

Of a decoding step: q is rotated on its way out of the projection, which attention would copy it from, k on its way to
the cache, and v goes with it, in one launch.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.devices import early, is_hopper

BLOCK = 32
"""Heads of tokens that a program rotates."""


@triton.jit(do_not_specialize=["pairs"])
def _rotate_kernel(
    qkv,
    cos,
    sin,
    pairs,
    stride_row,
    stride_angle,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the kernel are (token, head) pairs; columns j and j + HALF of a head turn together by one angle."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (pair // HEADS).to(tl.int64), pair % HEADS
    column = tl.arange(0, HALF_P)
    live = (pair < pairs)[:, None] & (column < HALF)[None, :]
    angle = token[:, None] * stride_angle + column[None, :]
    c = tl.load(cos + angle, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=live, other=0.0).to(tl.float32)
    place = qkv + (token * stride_row + head * (2 * HALF))[:, None] + column[None, :]
    low = tl.load(place, mask=live, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=live, other=0.0).to(tl.float32)
    tl.store(place, (low * c - high * s).to(qkv.dtype.element_ty), mask=live)
    tl.store(place + HALF, (high * c + low * s).to(qkv.dtype.element_ty), mask=live)


def rotate_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, width: int) -> None:
    """Rotate the first ``heads`` heads of every row in place: those of q and k; float32 inside, rounded once.

    Args:
        qkv: [S, >= heads * D], rows contiguous, float16, bfloat16 or float32.
        cos, sin: of the angles, [S, D], rows contiguous; both halves of a row are the same, and of [S, D / 2] there is
            one.
        heads: heads of q and k together.
        width: D.
    """
    rows = len(cos)
    half, pairs = width // 2, rows * heads
    _rotate_kernel[(triton.cdiv(pairs, BLOCK),)](
        qkv,
        cos,
        sin,
        pairs,
        qkv.stride(0),
        cos.stride(0),
        HEADS=heads,
        HALF=half,
        HALF_P=1 << (half - 1).bit_length(),
        BLOCK=BLOCK,
        num_warps=4,
    )


def rotate_reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """What ``rotate_`` leaves in qkv, in float64."""
    rows = len(cos)
    cos, sin = (t if t.shape[1] == width else torch.cat((t, t), -1) for t in (cos, sin))
    out = qkv.double()
    turned = out[:, : heads * width].view(rows, heads, width)
    low, high = turned.chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    turned.copy_(turned * cos + torch.cat((-high, low), -1) * sin)
    return out


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    q,
    cos_sin,
    positions,
    places,
    k_cache,
    v_cache,
    stride_row,
    stride_axis,
    stride_k,
    stride_v,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, key heads): a key head, its queries and its values."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    column = tl.arange(0, HALF)
    axis = (column >= FIRST).to(tl.int32) + (column >= FIRST + SECOND).to(tl.int32)
    if PDL:
        # What comes next only fetches before it waits for us.
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + axis * stride_axis + token).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    c = tl.load(cos_sin + position * (2 * HALF) + column).to(tl.float32)[None, :]
    s = tl.load(cos_sin + position * (2 * HALF) + HALF + column).to(tl.float32)[None, :]
    # Rows: the queries of the key head, then the key itself.
    member = tl.arange(0, GROUP_P)
    is_key = (member == GROUP)[:, None]
    head = tl.where(member < GROUP, kv_head * GROUP + member, KV_HEADS * GROUP + kv_head)
    live = (member <= GROUP)[:, None]
    row = qkv + token.to(tl.int64) * stride_row
    source = row + (head * (2 * HALF))[:, None] + column[None, :]
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    value = tl.load(row + ((GROUP + 1) * KV_HEADS + kv_head) * (2 * HALF) + tl.arange(0, 2 * HALF))
    cached = k_cache + place * stride_k + kv_head * (2 * HALF) + column[None, :]
    rotated = q + token.to(tl.int64) * (GROUP * KV_HEADS * 2 * HALF) + (head * (2 * HALF))[:, None] + column[None, :]
    target = tl.where(is_key, cached, rotated)
    tl.store(target, (low * c - high * s).to(qkv.dtype.element_ty), mask=live)
    tl.store(target + HALF, (high * c + low * s).to(qkv.dtype.element_ty), mask=live)
    tl.store(v_cache + place * stride_v + kv_head * (2 * HALF) + tl.arange(0, 2 * HALF), value)


def rotate_and_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sections: tuple[int, int, int],
) -> torch.Tensor:
    """Rotate q, and put the rotated k and v in the cache; float32 inside, rounded once.

    Columns j and j + D / 2 of a head turn together, by the angle of position ``positions[a]``, where a is the section
    that j lies in (Qwen2-VL's multimodal rotary embedding: time, height, width).

    Args:
        qkv: [T, (HEADS + 2 KV_HEADS) * D], rows contiguous: heads of q, of k, of v. D is a power of two.
        cos_sin: [positions, D], contiguous: D / 2 cosines, then sines.
        positions: [3, T], rows contiguous, integers.
        places: [T], slots of the tokens.
        k_cache, v_cache: [slots, KV_HEADS, D], qkv's dtype, a slot's heads contiguous.
        sections: how many of D / 2 columns each axis has.

    Returns:
        q, [T, HEADS * D], contiguous: attention backends copy what is not.
    """
    kv_heads, width = k_cache.shape[1:]
    group = qkv.shape[1] // width // kv_heads - 2
    q = qkv.new_empty(qkv.shape[0], group * kv_heads * width)
    pdl = is_hopper(qkv.device)
    _rotate_and_store_kernel[(qkv.shape[0], kv_heads)](
        qkv,
        q,
        cos_sin,
        positions,
        places,
        k_cache,
        v_cache,
        qkv.stride(0),
        positions.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        GROUP=group,
        GROUP_P=triton.next_power_of_2(group + 1),
        KV_HEADS=kv_heads,
        HALF=width // 2,
        FIRST=sections[0],
        SECOND=sections[1],
        PDL=pdl,
        num_warps=4,
        **early(pdl),
    )
    return q


def rotated_reference(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, sections: tuple[int, int, int]
) -> torch.Tensor:
    """Heads x [T, heads, D] rotated as by ``rotate_and_store``, in float64."""
    half = x.shape[-1] // 2
    axis = torch.arange(3, device=x.device).repeat_interleave(torch.tensor(sections, device=x.device))
    where = positions.long()[axis].T  # [T, D / 2]
    column = torch.arange(half, device=x.device)
    cos, sin = (cos_sin.double()[where, column + start][:, None] for start in (0, half))
    low, high = x.double().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
