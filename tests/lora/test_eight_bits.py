"""Rounding an adapter to e4m3: what comes out is the same adapter but for one rounding of each number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora_sgl.lora.eight_bits import in_eight_bits
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.stacking import StackedAdapter
from vlora_sgl.scaled import E4M3

LAYOUT = BaseLayout.from_modules(
    [("layers.0.q.qkv_proj", (24, 16), (8, 8, 8)), ("layers.0.o_proj", (16, 16), ())], {"embed_tokens": (16, 40)}
)
WIDTHS = {"layers.0.q.qkv_proj": (8, 8, 8), "layers.0.o_proj": (16,)}


def adapter(
    rank: int, scale: float, sizes: tuple[float, ...], seed: int, dtype: torch.dtype = torch.bfloat16
) -> StackedAdapter:
    """One whose rows have sizes of their own."""
    torch.manual_seed(seed)
    tensors = {}
    for name, widths in WIDTHS.items():
        rows = torch.tensor([sizes[i % len(sizes)] for i in range(len(widths) * rank)])
        tensors[f"{name}.lora_A.weight"] = (torch.randn(len(rows), 16) * rows[:, None]).to(dtype)
        tensors[f"{name}.lora_B.weight"] = (torch.randn(sum(widths), rank) * sizes[-1]).to(dtype)
    return StackedAdapter(rank, scale, tensors)


def products(found: StackedAdapter, rank: int) -> list[torch.Tensor]:
    """The update of every projection, rank by rank: [r, N, K] float64."""
    whole = []
    for name, widths in WIDTHS.items():
        a = found.tensors[f"{name}.lora_A.weight"].double().view(len(widths), rank, 16)
        for part, b in zip(a, found.tensors[f"{name}.lora_B.weight"].double().split(widths), strict=True):
            whole.append(found.scale * torch.einsum("nr,rk->rnk", b, part))
    return whole


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 20),
    st.floats(2.0**-8, 16.0) | st.floats(-16.0, -(2.0**-8)),
    st.lists(st.sampled_from([0.0, 1e-4, 3e-3, 0.02, 0.3, 1.0, 7.0]), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_every_number_is_rounded_once(rank: int, scale: float, sizes: list[float], seed: int) -> None:
    given = adapter(rank, scale, tuple(sizes), seed)
    found, lost = in_eight_bits(given, LAYOUT)
    assert found.rank == rank and math.frexp(found.scale)[0] == math.frexp(scale)[0], "a power of two"
    for key, tensor in found.tensors.items():
        assert tensor.dtype == given.tensors[key].dtype and tensor.shape == given.tensors[key].shape
        assert torch.equal(tensor.to(E4M3).to(tensor.dtype), tensor), "e4m3 numbers"
    for one, other in zip(products(found, rank), products(given, rank), strict=True):
        error = (one - other).abs()
        # Of a product of two numbers with three bits behind the leading one; and what falls below 2^-6.
        largest = other.abs().amax((1, 2), keepdim=True)
        assert (error <= (2.0**-4 * 2 + 2.0**-8) * other.abs() + 2.0**-9 * largest).all()
    assert 0 <= lost < 0.06 and (lost > 0) == any(float(p.abs().max()) > 0 for p in given.tensors.values())


def test_what_is_e4m3_already_keeps_its_value() -> None:
    given = adapter(8, 2.0, (0.02, 0.3), 1)
    once, lost = in_eight_bits(given, LAYOUT)
    twice, again = in_eight_bits(once, LAYOUT)
    assert lost > 0.01 and again == 0
    assert all(map(torch.equal, products(once, 8), products(twice, 8)))


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
    assert not products(found, 4)[3].any() and products(found, 4)[0].any()
