"""The CPU platform: chosen without being asked, absent where an accelerator is, and pinning nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vlora_sgl.platforms import cpu


@pytest.mark.parametrize(("cuda", "xpu"), [(True, False), (False, True)])
def test_it_stands_aside_for_an_accelerator(monkeypatch: pytest.MonkeyPatch, cuda: bool, xpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    assert cpu.activate() is None


@pytest.mark.skipif(not cpu.is_plain_cpu(), reason="an accelerator is here, so the platform stands aside")
def test_sglang_finds_it_without_an_environment_variable() -> None:
    code = """
import torch
from sglang.srt.platforms import current_platform as platform
assert type(platform).__name__ == "TorchCpuPlatform", platform
assert platform.is_out_of_tree() and not platform.is_cpu()
assert platform.get_default_attention_backend() == "torch_native"
assert platform.get_mha_kv_pool_cls().__name__ == "MHATokenToKVPool"
assert platform.get_paged_allocator_cls().__name__ == "PagedTokenToKVPoolAllocator"
platform.init_backend()
tensor = torch.empty(2, pin_memory=True)
assert tensor.pin_memory() is tensor and not tensor.is_pinned()
assert torch.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu").tolist() == [1, 2]
with torch.device("meta"):
    made = [torch.arange(2), torch.empty(2), torch.ones(2), torch.tensor([1]), torch.zeros(2)]
assert all(tensor.is_meta for tensor in made), "a model built inside would keep buffers that nobody fills"
import transformers.models.deberta.modeling_deberta  # TorchScript that calls torch.arange
print("fine")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert result.stdout.endswith("fine\n"), result.stderr
