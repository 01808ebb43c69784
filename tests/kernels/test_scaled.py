"""The dense operator on a weight in e4m3 against float64, under Triton's interpreter (here) and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_atmm import check, make_case, tiles, torch_own
from tests.support.hopper import LINEAR, ptx
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import ScaledInput, atmm_reference, atmm_scaled, make_routing
from vlora_sgl.kernels.atmm.dense import dense_linear_kernel
from vlora_sgl.scaled import E4M3, quantise


@kernels
@pytest.mark.parametrize(("split", "bias"), [*((1, True), (3, False)), *(((1, False), (3, True)) if CUDA else ())])
@pytest.mark.parametrize("routing", ["two-slots-a-row", "base-only", "one-row"])
@pytest.mark.parametrize("shape", ["one-part", "gate-up-ragged"])
def test_kernel_on_a_weight_in_e4m3(shape: str, routing: str, split: int, bias: bool) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, w, added, a, b, groups, ranks, scalings, offsets, route = make_case(shape, routing, dtype, True)
    weight, numbers = (quantise(one.cpu(), (1, one.shape[1]), E4M3) for one in (w, x))
    base = numbers.wide().double() @ weight.wide().double().T + (added.cpu().double() if bias else 0)
    exact = atmm_reference(base, x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets)
    own = torch_own(base.to(DEVICE, dtype), x, a, b, groups, ranks, scalings, offsets)
    scaled = ScaledInput(*(one.to(DEVICE) for one in (numbers.weight, numbers.scale.view(-1), weight.scale.view(-1))))
    given = added if bias else None
    out = atmm_scaled(x, scaled, weight.weight.to(DEVICE), given, a, b, route, offsets, tiles(split))
    assert out.dtype == dtype
    check(out.cpu(), exact, own.cpu())


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) == 12


def test_what_does_not_fit_is_refused() -> None:
    x, w, bias, a, b, groups, ranks, scalings, offsets, route = make_case("one-part", "one-row", torch.float32, True)
    numbers, weight = (quantise(one, (1, one.shape[1]), E4M3) for one in (x, w))
    scaled = ScaledInput(numbers.weight, numbers.scale.view(-1), weight.scale.view(-1)[1:])
    with pytest.raises(ValueError, match="must fit"):
        atmm_scaled(x, scaled, weight.weight, bias, a, b, route, offsets)
    many = make_routing(groups, len(x), ranks, scalings, "cpu", dense=False)
    scaled = scaled._replace(weight_scale=weight.scale.view(-1))
    with pytest.raises(ValueError, match="few rows alone"):
        atmm_scaled(x, scaled, weight.weight, bias, a, b, many, offsets)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_it_compiles_for_a_hopper() -> None:
    """To matrix products of e4m3 numbers, with a weight that is loaded beside them."""
    code = ptx(dense_linear_kernel, LINEAR, {"x": "*fp8e4nv", "w": "*fp8e4nv"})
    assert "wgmma" in code and "e4m3.e4m3" in code and "cp.async.cg.shared.global" in code
