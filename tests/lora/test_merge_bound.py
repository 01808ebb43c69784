"""What may be merged: sizes against products that are made, the verdict against what rounding does to other rows."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from vlora_sgl.kernels.merge import MergeTable, MergeTarget
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.merge_bound import LIMIT, BaseSize, UpdateSize, base_sizes, merge_refusal, update_sizes
from vlora_sgl.lora.stacking import StackedAdapter

NAME, K, N, RANK = "layers.0.self_attn.qkv_proj", 96, (40, 24, 16), 8
NAN, INF = float("nan"), float("inf")


def tensors(a: float = 0.1, b: float = 0.1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        f"{NAME}.lora_A.weight": (torch.randn(3 * RANK, K) * a).to(dtype),
        f"{NAME}.lora_B.weight": (torch.randn(sum(N), RANK) * b).to(dtype),
    }


LAYOUT = BaseLayout.from_modules([(f"model.{NAME}", (sum(N), K), N)], {})


def sizes_of(found: dict[str, torch.Tensor], scale: float) -> tuple[UpdateSize, ...]:
    return update_sizes(StackedAdapter(RANK, scale, found), LAYOUT)[NAME]


def targets(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[MergeTarget]:
    torch.manual_seed(4)
    weight = (torch.randn(sum(N), K) * scale).to(dtype)
    a, b = torch.zeros(2, 3 * RANK, K, dtype=dtype), torch.zeros(2, sum(N), RANK, dtype=dtype)
    rows = torch.arange(sum(N)).split(list(N))
    return [
        MergeTarget(f"model.{NAME}[{i}]", "qkv_proj", weight[r[0] : r[-1] + 1], weight[r[0] : r[-1] + 1].clone(), a,
                    b[:, r[0] : r[-1] + 1], i)
        for i, r in enumerate(rows)
    ]  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, -2.5, 1e-30, 1e30])
@pytest.mark.parametrize(("a", "b"), [(0.1, 0.1), (1e30, 1e-30), (1e37, 1e37), (1e-30, 1e-8)])
def test_sizes_are_those_of_the_products_in_float64(scale: float, a: float, b: float) -> None:
    found = tensors(a, b)
    wide_a, wide_b = (tensor.double() for tensor in found.values())
    for i, (size, part) in enumerate(zip(sizes_of(found, scale), wide_b.split(list(N)), strict=True)):
        rows = wide_a[i * RANK : (i + 1) * RANK]
        exact = abs(scale) * float(torch.linalg.norm(part @ rows))
        assert size.product == pytest.approx(exact, rel=1e-4)
        terms = rows.norm(dim=1) * part.norm(dim=0)
        assert size.terms == pytest.approx(abs(scale) * float(terms.norm()), rel=1e-5)
        assert float((part.abs() @ rows.abs()).max()) <= size.partial * (1 + 1e-6)
        assert size.low == pytest.approx(max(1.0, abs(scale)) * float(rows.norm(dim=1).max()), rel=1e-5)


def test_terms_that_cancel_are_seen_though_their_sum_is_small() -> None:
    found = tensors()
    for part in (found[f"{NAME}.lora_A.weight"].view(3, RANK, K), found[f"{NAME}.lora_B.weight"].T[None]):
        part[:, 1] = part[:, 0]
    found[f"{NAME}.lora_B.weight"][:, 1] *= -1
    found[f"{NAME}.lora_B.weight"][:, :2] *= 1e4
    size, base = sizes_of(found, 1.0)[0], base_sizes(targets())
    assert size.product < 10 < 1e3 < size.terms
    said = merge_refusal({NAME: sizes_of(found, 1.0)}, base, 1.0, torch.float32)
    assert said is not None and "times the base weights" in said


def test_base_sizes_are_the_weights() -> None:
    all_targets = targets()
    for size, target in zip(base_sizes(all_targets)[NAME], all_targets, strict=True):
        weight = target.base_weights.double()
        exact = BaseSize(float(weight.norm()), float(weight.abs().max()), float(weight.norm(dim=1).max()))
        assert (size.norm, size.largest, size.row) == pytest.approx((exact.norm, exact.largest, exact.row), rel=1e-6)
    doubled = base_sizes(all_targets, lambda sizes: 2 * sizes)[NAME]
    assert doubled[0].norm == 2 * base_sizes(all_targets)[NAME][0].norm, "ranks agree on what they reduce to"


# name: (tensors, scale, weights' type, what is said)
VERDICTS: dict[str, tuple[dict[str, Any], float, torch.dtype, str | None]] = {
    "ordinary": ({}, 2.0, torch.bfloat16, None),
    "nothing": ({"b": 0.0}, 2.0, torch.bfloat16, None),
    "balanced-otherwise": ({"a": 1e-6, "b": 1e4}, 2.0, torch.bfloat16, None),
    "scale-nan": ({}, NAN, torch.bfloat16, "its scale is nan"),
    "scale-infinite": ({}, -INF, torch.bfloat16, "its scale is -inf"),
    "scale-past-float32": ({}, 1e39, torch.bfloat16, "its scale is 1e\\+39"),
    "a-nan": ({"a": NAN}, 1.0, torch.bfloat16, f"{NAME}: its update is not finite"),
    "b-infinite": ({"b": INF}, 1.0, torch.bfloat16, f"{NAME}: its update is not finite"),
    "weights-overflow": ({"a": 1e18, "b": 1e18}, 1e3, torch.bfloat16, "overflow torch.bfloat16"),
    "products-overflow": ({"a": 1e20, "b": 1e20}, 1e-38, torch.bfloat16, "overflow torch.bfloat16"),
    "half-overflows": ({"a": 10.0, "b": 1e3}, 1.0, torch.float16, "overflow torch.float16"),
    "low-overflows": ({"a": 1e35, "b": 1e-36}, 1.0, torch.bfloat16, "a row of A"),
    "too-large": ({"a": 10.0, "b": 10.0}, 1.0, torch.bfloat16, "times the base weights"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_names_module_and_reason(case: str) -> None:
    options, scale, dtype, named = VERDICTS[case]
    found = {name: tensor.float() for name, tensor in tensors(**options).items()}
    said = merge_refusal({NAME: sizes_of(found, scale)}, base_sizes(targets(dtype=dtype)), scale, dtype)
    if named is None:
        assert said is None
    else:
        assert said is not None and re.search(named, said), said


def test_one_value_that_is_not_finite_is_enough() -> None:
    base = base_sizes(targets())
    for key in tensors():
        for value in (NAN, INF, -INF):
            found = tensors()
            found[key][-1, -1] = value
            assert merge_refusal({NAME: sizes_of(found, 1.0)}, base, 1.0, torch.float32) is not None


def test_modules_that_are_not_merged_are_not_looked_at() -> None:
    update = sizes_of(tensors(), 1.0)
    assert merge_refusal({"layers.0.mlp.experts": update}, base_sizes(targets()), 1.0, torch.float32) is None


# Not float32: its products are summed in itself, and the sums' own roundings come on top.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strength", [0.1, 0.5, 1.0])
def test_other_rows_of_a_mixture_keep_the_bound(strength: float, dtype: torch.dtype) -> None:
    """A row of others on merged weights is off by at most 1 + rho times what rounding the base weights costs."""
    torch.manual_seed(0)
    k, n, rank, unit = 512, 768, 16, torch.finfo(dtype).eps / 2
    w0 = (torch.randn(n, k) * 0.02).to(dtype)
    a, b = (torch.randn(rank, k) * k**-0.5).to(dtype), (torch.randn(n, rank)).to(dtype)
    down = "layers.0.mlp.down_proj"
    layout = BaseLayout.from_modules([(f"model.{down}", (n, k), ())], {})
    adapter = StackedAdapter(rank, 1.0, {f"{down}.lora_A.weight": a, f"{down}.lora_B.weight": b})
    size = update_sizes(adapter, layout)[down][0]
    norm = float(w0.double().norm())
    scale = LIMIT * strength * norm / math.hypot(size.product, size.terms)
    target = MergeTarget(f"model.{down}[0]", "down", w0.clone(), w0, a[None].clone(), b[None].clone())
    table = MergeTable([target])
    table.merge(["down"], slot=0, rank=rank, scaling=scale)
    x = torch.randn(64, k).to(dtype)
    low = (scale * (x.float() @ a.float().T)).to(dtype)  # h, as the kernels round it
    got = x.double() @ target.weight.double().T - low.double() @ b.double().T
    error = (got - x.double() @ w0.double().T).pow(2).mean().sqrt()
    # One rounding of every weight of the base, u |w| at most, in the mean over the outputs.
    expected = unit * norm * float(x.double().norm(dim=1).mean()) / math.sqrt(n * k)
    assert 0 < float(error) <= (1 + LIMIT * strength) * expected
