"""The norm of a decoding step, against float64: under Triton's interpreter, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels.norm import add_rms_norm_

SHAPES = [(1, 1), (3, 40), (5, 3584), (2, 2055)]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]


def rows_apart(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random [rows, columns] inside a poisoned buffer; (view, buffer)."""
    room = torch.full((rows + 1, columns + 8), float("nan"), dtype=dtype, device=DEVICE)
    room[:rows, :columns] = 4 * torch.randn(rows, columns)
    return room[:rows, :columns], room


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Rounded once from float32: a unit in the last place, and what float32 loses of a term."""
    return bool(((found.double() - exact).abs() <= torch.finfo(found.dtype).eps * exact.abs() + 2**-18).all())


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_kernel_adds_and_normalises_in_place(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    (x, x_room), (residual, residual_room) = rows_apart(rows, columns, dtype), rows_apart(rows, columns, dtype)
    weight = torch.randn(columns, device=DEVICE).to(dtype)
    total = x.double() + residual.double()
    exact = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    add_rms_norm_(x, residual, weight, 1e-6)
    assert close(residual, total) and close(x, exact)
    for room in (x_room, residual_room):
        assert room[rows].isnan().all() and room[:, columns:].isnan().all(), "wrote outside"


@starter
def test_norm_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == len(SHAPES) * 2
