"""A plain CPU as an out-of-tree SGLang platform, so that everything runs on a laptop.

SGLang 0.5.17 serves on a CPU only with AMX and its own compiled kernels. Through its platform interface the same
engine runs on torch's own operators. The platform steps aside wherever an accelerator exists (``platforms.cpu``).
"""

from __future__ import annotations

import functools
import os

import torch
from torch.jit._builtins import _find_builtin, _get_builtin_table
from torch.utils._device import _device_constructors

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl import CpuSRTPlatform, PlatformEnum
from vlora_sgl.seams import Place


class TorchCpuPlatform(CpuSRTPlatform):
    """The answers SGLang asks its platform for, on a CPU with torch alone."""

    # Not PlatformEnum.CPU: that means "use the AMX kernels" throughout SGLang.
    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """Make pinning a no-op: the LoRA layers pin host memory without asking, and torch refuses without a GPU.

        And hide NCCL, which torch's wheels for CUDA bring: two ranks would take it for theirs.
        """
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none-on-a-cpu")
        seams.own("torch.Tensor.pin_memory", torch.Tensor, lambda self, device=None: self)
        # `with torch.device(...)` knows torch's factories by identity, from its first use on. It has to know the true
        # ones: behind unknown ones transformers takes its empty buffers for filled.
        _device_constructors()
        factories = ("arange", "empty", "ones", "tensor", "zeros")
        seams.place("torch.tensor", [place for name in factories for place in without_pinning(name)])

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        # Asked for late: its module imports this platform.
        return _sgl.MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        return _sgl.PagedTokenToKVPoolAllocator

    def get_quantization_config(self, quantization: str) -> type:
        from vlora_sgl.platforms.quantised import config_for  # late: it imports SGLang's formats

        return config_for(quantization)

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"


def without_pinning(name: str) -> list[Place]:
    """A function of torch that makes tensors, without its option ``pin_memory``, and where it goes."""
    factory = getattr(torch, name)

    @functools.wraps(factory)
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    # TorchScript knows torch's functions by identity; SGLang's LLaVA imports all models of transformers, scripted ones
    # among them.
    operator = _find_builtin(factory)
    scripted = [] if operator is None else [Place(_get_builtin_table(), id(call), operator)]
    return [Place(torch, name, call), *scripted]
