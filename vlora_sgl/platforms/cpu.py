"""Whether this machine is a plain CPU, and the entry point that claims it for SGLang.

Kept apart from the platform itself: SGLang asks here while it is itself half imported.
"""

from __future__ import annotations

import os


def has_accelerator() -> bool:
    """Whether a driver's device file exists; told without importing torch, so before anything heavy is."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128"))


def is_plain_cpu() -> bool:
    """Whether torch sees no accelerator on this machine."""
    import torch

    return not torch.cuda.is_available() and not torch.xpu.is_available()


def activate() -> str | None:
    """Entry point of the group in which SGLang looks for platforms: the class's path, or ``None`` to stand aside."""
    return "vlora_sgl.platforms.torch_cpu.TorchCpuPlatform" if is_plain_cpu() else None
