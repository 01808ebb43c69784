"""Adapters in eight bits: factors of e4m3 numbers, with their scales where they cost nothing.

A factor's numbers lie around 2^-7, at the lower end of e4m3 (normal numbers from 2^-6 to 448), so they need scales.
Scales beside the numbers would be one more operand of every kernel. But an adapter can be written in many ways: a row
of A times 2^i with the same column of B times 2^j, and its scale times 2^-(i + j), is the same adapter to the bit. So
each row gets the powers of two that put its two factors into the middle of e4m3, all with one sum i + j, which goes
into the adapter's scale. Then the numbers are rounded, once. What comes out is a plain adapter, whose factors happen
to be e4m3 numbers: unmerged, merged, combined, token routed, everything applies it as any other.

With P the largest of |A_r| |B_r| over all rows r of an adapter (the largest elements of a row of A and of a column of
B), a row whose own is p P has both largest elements at 256 sqrt(p), within a factor of two. E4m3 keeps its three bits
down to 2^-6: so of a row a millionth as large as the largest, numbers down to an eighth of its largest have them all.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.stacking import StackedAdapter, is_embedding
from vlora_sgl.scaled import E4M3, LARGEST

HALF = math.floor(math.log2(LARGEST[E4M3]))
"""Powers of two are shared out to the bit, so a factor's largest element may come to 2^(HALF + 1/2), and fits."""


def in_eight_bits(adapter: StackedAdapter, layout: BaseLayout) -> tuple[StackedAdapter, float]:
    """The same adapter with the factors of its linears rounded to e4m3, in the type that they have.

    Args:
        adapter: whose numbers are finite.
        layout: of the engine that it was stacked for.

    Returns:
        The adapter, and what rounding loses: of the linears, the largest ``sqrt(a^2 + b^2)`` with a and b the relative
        errors of A and B in Frobenius norms, which is how far an update moves in quadratic mean.
    """
    names = [key.removesuffix(".lora_A.weight") for key in adapter.tensors if key.endswith(".lora_A.weight")]
    linears = {name: _Linear(adapter, name, layout) for name in names if not is_embedding(name)}
    top = max((float((a * b).max()) for one in linears.values() for a, b in [one.largest]), default=0.0)
    shared = 2 * HALF - math.ceil(math.log2(top)) if top else 0
    tensors, lost = dict(adapter.tensors), 0.0
    for name, linear in linears.items():
        (a, b), error = linear.rounded(shared)
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        lost = max(lost, error)
    for key in tensors:
        if is_embedding(key) and key.endswith(".lora_B.weight"):
            tensors[key] = torch.ldexp(tensors[key], torch.tensor(shared))  # they have the adapter's scale too
    return replace(adapter, scale=math.ldexp(adapter.scale, -shared), tensors=tensors), lost


class _Linear:
    """The factors of one linear, projections apart: a [parts, r, K] and b [parts], each [N_c, r], float32.

    Attributes:
        largest: largest elements of the rows of A and the columns of B, [parts, r] each.
    """

    def __init__(self, adapter: StackedAdapter, name: str, layout: BaseLayout) -> None:
        widths = [layout.shapes[part][0] for part in layout.parts_of(name)]
        a, b = (adapter.tensors[f"{name}.lora_{side}.weight"] for side in "AB")
        self.dtype, self.shape = a.dtype, a.shape
        self.a = a.float().view(len(widths), adapter.rank, -1)
        self.b = b.float().split(widths)
        self.largest = self.a.abs().amax(2), torch.stack([part.abs().amax(0) for part in self.b])

    def rounded(self, shared: int) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
        """Both factors, times powers of two that sum up to ``shared`` for every row, in e4m3 numbers; what is lost."""
        (size_a, of_a), (size_b, of_b) = ((size, torch.where(size > 0, size, 1.0).log2()) for size in self.largest)
        # Where one of the two is zero there is nothing to balance: the other must fit all the same.
        powers_a = torch.where(size_b > 0, ((shared + of_b - of_a) / 2).round(), HALF - of_a.ceil()).int()
        powers_b = torch.where(size_a > 0, shared - powers_a, HALF - of_b.ceil().int())
        whole_a = torch.ldexp(self.a, powers_a[..., None])
        whole_b = torch.cat([torch.ldexp(part, power) for part, power in zip(self.b, powers_b, strict=True)])
        a, b = (whole.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3).float() for whole in (whole_a, whole_b))
        lost = math.hypot(_error(a, whole_a), _error(b, whole_b))
        return (a.view(self.shape).to(self.dtype), b.to(self.dtype)), lost


def _error(rounded: torch.Tensor, whole: torch.Tensor) -> float:
    size = float(torch.linalg.vector_norm(whole, dtype=torch.float64))
    return float(torch.linalg.vector_norm(rounded - whole, dtype=torch.float64)) / size if size else 0.0
