# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Rotary positions of an image encoder, applied in place to what its stacked projection leaves.

SGLang copies q, k and v out of the projection, rotates the copies and writes two more; on a recent GPU that takes
longer than the attention of a window. Rotating in place reads and writes q and k once, and attention reads strides.
"""

import torch
import triton
import triton.language as tl

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


def rotate_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    """Rotate the first ``heads`` heads of every row in place: those of q and k; float32 inside, rounded once.

    Args:
        qkv: [S, >= heads * D], rows contiguous, float16, bfloat16 or float32.
        cos, sin: of the angles, [S, D], rows contiguous; both halves of a row are the same.
        heads: heads of q and k together.
    """
    rows, width = cos.shape
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


def rotate_reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """What ``rotate_`` leaves in qkv, in float64."""
    rows, width = cos.shape
    out = qkv.double()
    turned = out[:, : heads * width].view(rows, heads, width)
    low, high = turned.chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    turned.copy_(turned * cos + torch.cat((-high, low), -1) * sin)
    return out
