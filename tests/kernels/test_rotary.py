"""The rotation in place, against float64: under Triton's interpreter, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels.rotary import rotate_, rotate_reference

# tokens, heads of q and k together, width of a head
SHAPES = [(1, 1, 2), (5, 3, 6), (33, 4, 20), (64, 32, 80), (7, 2, 128)]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, heads, width", SHAPES)
def test_kernel_rotates_q_and_k_and_nothing_else(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    buffer = torch.full((tokens + 1, (heads + 2) * width + 3), float("nan"), dtype=dtype, device=DEVICE)
    qkv = buffer[:tokens, : (heads + 1) * width]  # rows apart, and v behind q and k
    qkv.copy_(torch.randn(qkv.shape))
    angles = 6.0 * torch.rand(tokens, width // 2, device=DEVICE)
    cos, sin = (torch.cat((half, half), -1).to(dtype) for half in (angles.cos(), angles.sin()))
    before, exact = buffer.clone(), rotate_reference(qkv, cos, sin, heads)
    own = qkv[:, : heads * width].view(tokens, heads, width).float()
    low, high = own.chunk(2, -1)
    own = (own * cos[:, None].float() + torch.cat((-high, low), -1) * sin[:, None].float()).to(dtype).flatten(1)
    floor = (own.double() - exact[:, : heads * width]).abs().max()
    rotate_(qkv, cos, sin, heads)
    error = (qkv.double() - exact).abs().max()
    assert error <= 1.5 * floor + 1e-12
    assert not torch.equal(qkv[:, : heads * width], before[:tokens, : heads * width])
    before[:tokens, : heads * width] = buffer[:tokens, : heads * width]
    assert torch.equal(buffer.nan_to_num(1e4), before.nan_to_num(1e4)), "wrote outside q and k"


@starter
def test_rotation_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == len(SHAPES) * 2
