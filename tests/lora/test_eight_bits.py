"""Rounding an adapter to e4m3: what comes out is the same adapter but for one rounding of each number."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlora_sgl.lora.eight_bits import in_eight_bits, spread
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.stacking import StackedAdapter
from vlora_sgl.scaled import E4M3

LAYOUT = BaseLayout.from_modules(
    [("layers.0.q.qkv_proj", (24, 16), (8, 8, 8)), ("layers.0.o_proj", (16, 16), ())], {"embed_tokens": (16, 40)}
)
WIDTHS = {"layers.0.q.qkv_proj": (8, 8, 8), "layers.0.o_proj": (16,)}


def adapter(rank: int, scale: float, sizes: tuple[float, ...], seed: int, alike: float = 0.0) -> StackedAdapter:
    """One whose rows have sizes of their own; ``alike`` of each row of A is the first's."""
    torch.manual_seed(seed)
    tensors = {}
    for name, widths in WIDTHS.items():
        rows = torch.tensor([sizes[i % len(sizes)] for i in range(len(widths) * rank)])
        a = torch.randn(len(rows), 16)
        tensors[f"{name}.lora_A.weight"] = ((alike * a[:1] + (1 - alike) * a) * rows[:, None]).bfloat16()
        tensors[f"{name}.lora_B.weight"] = (torch.randn(sum(widths), rank) * sizes[-1]).bfloat16()
    return StackedAdapter(rank, scale, tensors)


def updates(found: StackedAdapter) -> list[torch.Tensor]:
    """Of every projection, [N, K] float64."""
    whole = []
    for name, widths in WIDTHS.items():
        factors = (found.tensors[f"{name}.lora_{side}.weight"].double() for side in "AB")
        a, b = next(factors).split(found.rank), next(factors).split(widths)
        whole += [found.scale * right @ left for left, right in zip(a, b, strict=True)]
    return whole


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 20),
    st.floats(2.0**-8, 16.0) | st.floats(-16.0, -(2.0**-8)),
    st.lists(st.sampled_from([0.0, 1e-4, 3e-3, 0.02, 0.3, 1.0, 7.0]), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
    st.integers(0, 10**6),
)
def test_an_update_moves_by_the_rounding_of_its_own_numbers(
    rank: int, scale: float, sizes: list[float], alike: float, seed: int
) -> None:
    """Also where rows are alike, and what they add up to is small beside them."""
    given = adapter(rank, scale, tuple(sizes), seed, alike)
    found, lost = in_eight_bits(given, LAYOUT)
    assert found.rank == rank and math.frexp(found.scale)[0] == math.frexp(scale)[0], "a power of two"
    for key, tensor in found.tensors.items():
        assert tensor.dtype == given.tensors[key].dtype and tensor.shape == given.tensors[key].shape
        assert torch.equal(tensor.to(E4M3).to(tensor.dtype), tensor), "e4m3 numbers"
    before, after = updates(given), updates(found)
    for one, other in zip(after, before, strict=True):
        # Each number is off by at most a sixteenth of itself, in quadratic mean by 2.6 %.
        assert (one - other).norm() <= 0.1 * other.norm() + 1e-6 * max(update.norm() for update in before)
    assert 0 <= lost < 0.1 and (lost > 0) == any(bool(update.any()) for update in before)


@pytest.mark.parametrize("rank", [1, 5, 12, 64])
def test_factors_are_spread_over_all_rows(rank: int) -> None:
    """An update of one direction is rounded as often as there are rows, and loses that much less."""
    torch.manual_seed(rank)
    a, b = torch.zeros(rank, 96), torch.zeros(80, rank)
    a[0], b[:, 0] = torch.randn(96), torch.randn(80)
    update = b.double() @ a.double()
    new_a, new_b = spread(a, b)
    assert (new_b.double() @ new_a.double() - update).norm() <= 1e-5 * update.norm()
    terms = (new_a.norm(dim=1) * new_b.norm(dim=0)).norm()
    assert terms <= 1.3 * update.norm() / math.sqrt(rank)
    stacked = StackedAdapter(rank, 1.0, {"o.lora_A.weight": a, "o.lora_B.weight": b})
    found, lost = in_eight_bits(stacked, BaseLayout({"o": (80, 96)}, {}, 1))
    moved = (found.scale * (found.tensors["o.lora_B.weight"] @ found.tensors["o.lora_A.weight"]) - update).norm()
    assert moved <= 0.05 / math.sqrt(rank) * update.norm()
    assert moved / update.norm() < 2 * lost < 0.1 / math.sqrt(rank)


class Largest(TorchDispatchMode):
    """The most elements that any operation puts out."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor))])
        return out


def test_no_update_is_made() -> None:
    """Of a 7B model's linears each is half a gigabyte."""
    rank, n, k = 4, 600, 800
    factors = {"o.lora_A.weight": torch.randn(rank, k), "o.lora_B.weight": torch.randn(n, rank)}
    with Largest() as largest:
        _, lost = in_eight_bits(StackedAdapter(rank, 1.0, factors), BaseLayout({"o": (n, k)}, {}, 1))
    assert lost > 0.01 and rank * k <= largest.found < n * k // 10


def test_what_belongs_to_the_vocabulary_keeps_its_bits_and_has_the_new_scale() -> None:
    given = adapter(8, 2.0, (0.02,), 2)
    a, b = torch.randn(8, 40, dtype=torch.bfloat16), torch.randn(16, 8, dtype=torch.bfloat16)
    given = replace(given, tensors={**given.tensors, "embed_tokens.lora_A.weight": a, "embed_tokens.lora_B.weight": b})
    found, _ = in_eight_bits(given, LAYOUT)
    assert torch.equal(found.tensors["embed_tokens.lora_A.weight"], a)
    assert torch.equal(found.tensors["embed_tokens.lora_B.weight"].double() * found.scale, b.double() * given.scale)


@pytest.mark.parametrize("side", "AB")
def test_rows_with_one_factor_of_zeros_are_left_finite(side: str) -> None:
    given = adapter(4, 1.0, (0.02,), 3)
    key = f"layers.0.o_proj.lora_{side}.weight"
    given.tensors[key] = torch.zeros_like(given.tensors[key])
    found, _ = in_eight_bits(given, LAYOUT)
    assert all(tensor.isfinite().all() for tensor in found.tensors.values())
    assert not updates(found)[3].any() and updates(found)[0].any()
