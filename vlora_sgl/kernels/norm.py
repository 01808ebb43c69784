# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""The norm before a linear of a decoding step, with the sum before it.

It takes two microseconds, in which the linear could ask for its weights: so it lets the next launch start at once, by
programmatic dependent launch, which waits where it needs what the norm writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vlora_sgl.kernels.devices import early, is_hopper


@triton.jit(do_not_specialize=["eps"])
def _add_rms_norm_kernel(
    x, residual, weight, stride_x, stride_residual, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < N
    gain = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_ptrs = x + row * stride_x + column
    residual_ptrs = residual + row * stride_residual + column
    total = tl.load(x_ptrs, mask=live, other=0.0).to(tl.float32)
    total += tl.load(residual_ptrs, mask=live, other=0.0).to(tl.float32)
    tl.store(residual_ptrs, total.to(residual.dtype.element_ty), mask=live)
    scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
    tl.store(x_ptrs, (total * scale * gain).to(x.dtype.element_ty), mask=live)


def add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x, and x = residual / rms(residual) * weight, in place; the norm of the sum before it is rounded.

    Args:
        x, residual: [T, N], rows contiguous, one dtype.
        weight: [N].
        eps: added to the mean square.
    """
    rows, columns = x.shape
    pdl = is_hopper(x.device)
    _add_rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        x.stride(0),
        residual.stride(0),
        eps,
        N=columns,
        BLOCK=triton.next_power_of_2(columns),
        PDL=pdl,
        num_warps=8,
        **early(pdl),
    )
