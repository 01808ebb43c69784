"""The rotation in place, against float64: under Triton's interpreter, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels.rotary import rotate_, rotate_and_store, rotate_reference, rotated_reference

# tokens, heads of q and k together, width of a head
SHAPES = [(1, 1, 2), (5, 3, 6), (33, 4, 20), (64, 32, 80), (9, 4, 72), (7, 2, 128)]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [2, 1], ids=["both-halves", "one-half"])
@pytest.mark.parametrize("tokens, heads, width", SHAPES)
def test_kernel_rotates_q_and_k_and_nothing_else(
    tokens: int, heads: int, width: int, halves: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    buffer = torch.full((tokens + 1, (heads + 2) * width + 3), float("nan"), dtype=dtype, device=DEVICE)
    qkv = buffer[:tokens, : (heads + 1) * width]  # rows apart, and v behind q and k
    qkv.copy_(torch.randn(qkv.shape))
    angles = 6.0 * torch.rand(tokens, width // 2, device=DEVICE)
    cos, sin = (torch.cat((half, half), -1).to(dtype) for half in (angles.cos(), angles.sin()))
    given = [t[:, : halves * width // 2].contiguous() for t in (cos, sin)]
    before, exact = buffer.clone(), rotate_reference(qkv, *given, heads, width)
    own = qkv[:, : heads * width].view(tokens, heads, width).float()
    low, high = own.chunk(2, -1)
    own = (own * cos[:, None].float() + torch.cat((-high, low), -1) * sin[:, None].float()).to(dtype).flatten(1)
    floor = (own.double() - exact[:, : heads * width]).abs().max()
    rotate_(qkv, *given, heads=heads, width=width)
    error = (qkv.double() - exact).abs().max()
    assert error <= 1.5 * floor + 1e-12
    assert not torch.equal(qkv[:, : heads * width], before[:tokens, : heads * width])
    before[:tokens, : heads * width] = buffer[:tokens, : heads * width]
    assert torch.equal(buffer.nan_to_num(1e4), before.nan_to_num(1e4)), "wrote outside q and k"


# tokens, heads of q, of k, width of a head, columns of each axis
DECODING = [(1, 28, 4, 128, (16, 24, 24)), (5, 4, 4, 32, (4, 6, 6)), (3, 16, 1, 64, (32, 0, 0))]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, heads, kv_heads, width, sections", DECODING)
def test_kernel_rotates_q_and_puts_k_and_v_in_the_cache(
    tokens: int, heads: int, kv_heads: int, width: int, sections: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    room = torch.full((tokens + 1, (heads + 2 * kv_heads) * width + 8), float("nan"), dtype=dtype, device=DEVICE)
    qkv = room[:tokens, :-8]
    qkv.copy_(torch.randn(qkv.shape))
    angles = 6.0 * torch.rand(50, width // 2, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randint(50, (3, tokens), device=DEVICE)
    places = torch.randperm(20)[:tokens].to(DEVICE)
    k_cache, v_cache = torch.full((2, 20, kv_heads, width), float("nan"), dtype=dtype, device=DEVICE)
    q, k, v = (
        part.unflatten(1, (-1, width)).clone()
        for part in qkv.split([h * width for h in (heads, kv_heads, kv_heads)], 1)
    )
    rotated = rotate_and_store(qkv, cos_sin, positions, places, k_cache, v_cache, sections)
    eps = torch.finfo(dtype).eps
    assert rotated.shape == (tokens, heads * width) and rotated.is_contiguous()
    for found, given in ((rotated.unflatten(1, (-1, width)), q), (k_cache[places], k)):
        exact = rotated_reference(given, cos_sin, positions, sections)
        assert ((found.double() - exact).abs() <= eps * exact.abs() + 2**-20).all(), "float32 inside, rounded once"
        assert not torch.equal(found, given)
    assert torch.equal(v_cache[places], v)
    assert torch.equal(qkv.unflatten(1, (-1, width)), torch.cat((q, k, v), 1)), "the projection's output stays"
    others = torch.ones(20, dtype=torch.bool, device=DEVICE).index_fill(0, places, False)
    for outside in (room[-1], room[:, -8:], k_cache[others], v_cache[others]):
        assert outside.isnan().all()


@starter
def test_rotation_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == (2 * len(SHAPES) + len(DECODING)) * 2
