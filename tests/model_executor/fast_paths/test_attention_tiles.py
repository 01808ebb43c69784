"""The attention kernel gets the other tile where it was launched with SGLang's, and computes the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.kernels.devices import on_hopper
from vlora_sgl.model_executor.fast_paths.attention_tiles import OURS, THEIRS, Retiled

KERNEL = _sgl.NAMES["extend_attention_kernel"].partition(":")[2]
SGLANGS = {**THEIRS, "BLOCK_DMODEL": 128, "num_warps": 8, "num_stages": 1}


class Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: (grid, args, options)


@pytest.mark.parametrize(
    "change", [{"BLOCK_M": 64}, {"BLOCK_N": 32}, {"BLOCK_DMODEL": 256}, {"BLOCK_DPE": 64}], ids=str
)
def test_other_launches_stay_as_they_are(change: dict[str, int]) -> None:
    options = {**SGLANGS, **change}
    assert Retiled(Kernel())[3, 4, 5]("q", **options) == ((3, 4, 5), ("q",), options)


def test_the_grid_covers_as_many_queries() -> None:
    grid, args, options = Retiled(Kernel())[3, 4, 5]("q", **SGLANGS)
    assert grid[:2] == (3, 4) and grid[2] * options["BLOCK_M"] == 5 * SGLANGS["BLOCK_M"]
    assert args == ("q",) and options == {**SGLANGS, **OURS}


def test_sglang_launches_what_is_replaced() -> None:
    """Its kernel is a global of that module, launched with these options: what ``install`` builds on."""
    import inspect

    source = inspect.getsource(_sgl.extend_attention.extend_attention_fwd)
    assert f"{KERNEL}[grid](" in source
    assert all(f"{name}={name}," in source for name in (*SGLANGS, "num_warps", "num_stages"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("new, cached", [([1057], [0]), ([29, 1, 130, 64], [1028, 5, 0, 64]), ([1], [3])], ids=str)
def test_on_a_gpu_the_bits_are_the_same(new: list[int], cached: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = _sgl.extend_attention
    if not on_hopper():
        pytest.skip("the tile is Hopper's")
    torch.manual_seed(0)

    def rand(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, 128, device="cuda", dtype=torch.bfloat16)

    def bounds(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    q, k, v = (rand(sum(new), heads) for heads in (28, 4, 4))
    pool_k, pool_v = rand(4096, 4), rand(4096, 4)
    places = torch.randperm(4096, device="cuda")[: max(sum(cached), 1)]

    def run(kernel: Any) -> torch.Tensor:
        monkeypatch.setattr(attention, KERNEL, kernel)
        out = torch.full_like(q, float("nan"))
        attention.extend_attention_fwd(
            q, k, v, out, pool_k, pool_v, bounds(new), bounds(cached), places, None, True, None, max(new), 1.0, 1.0
        )
        return out

    plain = _sgl.extend_attention_kernel
    expected = run(plain)
    assert not expected.isnan().any()
    assert torch.equal(run(Retiled(plain)), expected)
