"""Attention and norms between the linears, faster than SGLang's Triton path; nothing here knows adapters."""

from __future__ import annotations

from vlora_sgl.kernels.devices import on_hopper
from vlora_sgl.server_args import VLoraArgs


def switched_off() -> str | None:
    """Why no fast path is to be taken; ``None`` if they may be."""
    return "--vlora-fast-paths off" if VLoraArgs.from_environment().fast_paths == "off" else None


def unmeasured() -> str | None:
    """Why no kernel is to take the place of SGLang's; ``None`` on the GPU that ours were measured on."""
    return switched_off() or (None if on_hopper() else "the GPU is no Hopper")
