"""Slots of e4m3 numbers, in every kernel that reads slots: against float64, under the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_atmm import check, make_case, tiles, torch_own
from tests.support.hopper import LINEAR, ptx
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import atmm, atmm_linear, atmm_reference, atmm_silu_and_mul, atmm_silu_reference
from vlora_sgl.kernels.atmm.dense import dense_linear_kernel
from vlora_sgl.kernels.merge import FoldTable, FoldTarget, MergeTable, MergeTarget
from vlora_sgl.scaled import E4M3, Scaled, quantise

DTYPE = torch.bfloat16 if CUDA else torch.float32


def eight_bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """To e4m3, where each NaN stays one."""
    return [tensor.to(E4M3) for tensor in tensors]


def case(shape: str, routing: str, dense: bool) -> Any:
    """As ``make_case``, with slots in e4m3, and the same numbers in the engine's type."""
    x, w, bias, a, b, *rest = make_case(shape, routing, DTYPE, dense)
    a8, b8 = eight_bits(a, b)
    return x, w, bias, a8, b8, a8.to(DTYPE), b8.to(DTYPE), rest


@kernels
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    ("shape", "routing"),
    [
        ("qkv-unequal-odd-ranks", "gates-per-row"),
        ("gate-up-ragged", "two-slots-a-row"),
        ("ranks-of-whole-groups", "base-rows-and-empty-segment"),
        ("more-slots-than-a-step-may-use", "one-row"),
    ],
)
def test_kernel_of_base_and_adapters(shape: str, routing: str, dense: bool) -> None:
    x, w, bias, a8, b8, a, b, (groups, ranks, scalings, offsets, route) = case(shape, routing, dense)
    base = torch.nn.functional.linear(x, w, bias)
    given = base.cpu(), x.cpu(), a.cpu(), b.cpu()
    exact = atmm_reference(*given, groups, ranks, scalings, offsets)
    own = torch_own(base, x, a, b, groups, ranks, scalings, offsets).cpu()
    out = atmm_linear(x, w, bias, a8, b8, route, offsets, tiles(2))
    check(out.cpu(), exact, own)
    check(atmm(base.clone(), x, a8, b8, route, offsets, tiles(1)).cpu(), exact, own)


@kernels
def test_kernel_of_the_activation() -> None:
    x, w, bias, a8, b8, a, b, (groups, ranks, scalings, offsets, route) = case(
        "gate-up-ragged", "two-slots-a-row", False
    )
    y = torch.nn.functional.linear(x, w, bias)
    exact = atmm_silu_reference(y.cpu(), x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets)
    gate, up = torch_own(y, x, a, b, groups, ranks, scalings, offsets).chunk(2, -1)
    own = torch.nn.functional.silu(gate) * up
    check(atmm_silu_and_mul(y.clone(), x, a8, b8, route, offsets, tiles(1)).cpu(), exact, own.cpu())


@kernels
@pytest.mark.parametrize("rank", [16, 5])
def test_kernel_of_a_merge(rank: int) -> None:
    n, k, most = 40, 48, 32
    torch.manual_seed(rank)
    base = torch.randn(n, k, device=DEVICE, dtype=DTYPE)
    a, b = torch.full((2, most, k), torch.nan), torch.full((2, n, most), torch.nan)
    a[1, :rank], b[1, :, :rank] = torch.randn(rank, k), torch.randn(n, rank)
    a8, b8 = (one.to(DEVICE) for one in eight_bits(a, b))
    weight = base.clone()
    table = MergeTable([MergeTarget("m", "g", weight, base.clone(), a8, b8)])
    table.merge(["g"], slot=1, rank=rank, scaling=0.5)
    exact = base.double() + 0.5 * b8[1, :, :rank].double() @ a8[1, :rank].double()
    assert (exact - base.double()).abs().max() > 1
    assert (weight.double() - exact).abs().max() <= 8 * torch.finfo(DTYPE).eps * exact.abs().max()
    table.restore(["g"])
    assert torch.equal(weight, base)


@kernels
@pytest.mark.parametrize("block", [(1, 160), (128, 128)])
def test_kernel_of_a_fold(block: tuple[int, int]) -> None:
    n, k, rank = 192, 160, 24
    torch.manual_seed(0)
    base = quantise(torch.randn(n, k), block, E4M3)
    base = Scaled(base.weight.to(DEVICE), base.scale.to(DEVICE), block)
    a8, b8 = (one.to(DEVICE) for one in eight_bits(torch.randn(2, rank, k), torch.randn(2, n, rank)))
    found = []
    for a, b in ((a8, b8), (a8.to(DTYPE), b8.to(DTYPE))):
        weight = Scaled(base.weight.clone(), base.scale.clone(), block)
        FoldTable([FoldTarget("m", "g", weight, base, a, b)], DTYPE).merge(
            frozenset({"g"}), slot=1, rank=rank, scaling=0.5
        )
        found.append(weight)
    assert not torch.equal(found[0].weight.view(torch.uint8), base.weight.view(torch.uint8))
    assert torch.equal(found[0].weight.view(torch.uint8), found[1].weight.view(torch.uint8))
    assert torch.equal(found[0].scale, found[1].scale)


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) == 13


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_the_weight_of_a_hopper_s_linear_is_loaded_beside_its_products() -> None:
    code = ptx(dense_linear_kernel, {**LINEAR, "x_scale": None, "w_scale": None}, {"b": "*fp8e4nv"})
    assert "wgmma" in code and "e4m3x2" in code and "cp.async.cg.shared.global" in code


@pytest.mark.parametrize("dense", [True, False])
def test_the_operator_on_a_cpu(dense: bool) -> None:
    x, w, bias, a8, b8, a, b, (*_, offsets, route) = case("qkv-unequal-odd-ranks", "two-slots-a-row", dense)
    expected = atmm_linear(x, w, bias, a, b, route, offsets)
    assert torch.equal(atmm_linear(x, w, bias, a8, b8, route, offsets), expected)
    with pytest.raises(ValueError, match=r"b must have dtype torch\.float8_e4m3fn"):
        atmm_linear(x, w, bias, a8, b, route, offsets)
