"""What a device offers to a kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

HOPPER_SHARED = 227 << 10


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
