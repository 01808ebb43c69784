"""What a device offers to a kernel."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import torch
import triton
import triton.language as tl

HOPPER_SHARED = 227 << 10
ARRIVALS = 1 << 16


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; a Hopper card's for anything but a GPU.

    Remembered: the driver takes 0.6 ms to answer.
    """
    if device.type != "cuda":
        return HOPPER_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0 or more: programmatic dependent launch, bulk prefetch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def on_hopper() -> bool:
    """Whether this process computes on a Hopper GPU, which what stands in for SGLang's kernels was measured on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@lru_cache
def arrivals(device: torch.device, user: Hashable) -> torch.Tensor:
    """Counters for ``arrive``, int32 [65536]: zero between launches.

    Two streams, or two launches that overlap, must not share them: each ``user`` has its own.
    """
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


def early(pdl: bool) -> dict[str, bool]:
    """The option of a launch that starts before the one before it is through."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def arrive(counter):
    """Say that what this program stored is there; how many programs had said so before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def to_l2(pointers):
    """Ask for the cache lines behind ``pointers``; safe before ``gdc_wait``, for L2 is coherent."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
