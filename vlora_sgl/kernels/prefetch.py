# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""Asking for memory before it is read: Hopper's bulk prefetch into the L2 cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 8192
"""Bytes that one thread asks for."""

THREADS = 32


@triton.jit
def prefetch_kernel(start, chunks, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Thread i asks for bytes [i CHUNK, (i + 1) CHUNK) behind ``start``, an int8 pointer, or for the last of them."""
    index = tl.minimum(tl.program_id(0) * THREADS + tl.arange(0, THREADS), chunks - 1)
    address = (start + index.to(tl.int64) * CHUNK).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [address, tl.full([THREADS], CHUNK, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_to_l2(tensor: torch.Tensor, limit: int) -> None:
    """Ask for the first ``limit`` bytes of a tensor, rounded down to whole chunks, on the current stream.

    Args:
        tensor: contiguous, on a device of compute capability 9.0 or more; its contents are not read.
    """
    chunks = min(tensor.numel() * tensor.element_size(), limit) // CHUNK
    if chunks:
        grid = (triton.cdiv(chunks, THREADS),)
        prefetch_kernel[grid](tensor.view(torch.int8), chunks, CHUNK=CHUNK, THREADS=THREADS, num_warps=1)
