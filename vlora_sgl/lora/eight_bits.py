"""Adapters in eight bits: factors of e4m3 numbers, with their scales where they cost nothing.

An adapter can be written in many ways, and some lose less than others when each number is rounded.

- Rounding each number by a share of itself moves a product B A by that share of ``sqrt(sum_r |A_r|^2 |B_r|^2)``, a sum
  over its rows. That is least where all rows have a part in everything: with the singular values S of B A and an
  orthogonal T of elements that are all about as large, in ``U sqrt(S) T`` and ``T' sqrt(S) V`` it is
  ``sum(S) / sqrt(r)``: of r equal values what the product is, of one large one 1 / sqrt(r) of that. For errors to
  cancel they must differ, so rows of A are stretched by 1 to 2, and the columns of B shrunk by as much.
- A factor's numbers lie around 2^-7, at the lower end of e4m3 (normal numbers from 2^-6 to 448). Scales beside them
  would be one more operand of every kernel. But a row of A times 2^i with the same column of B times 2^j, and the
  adapter's scale times 2^-(i + j), is the same adapter to the bit. So each row gets the powers of two that put its two
  factors into the middle of e4m3, all with one sum i + j, which goes into the adapter's scale.

Then the numbers are rounded, once. What comes out is a plain adapter, whose factors happen to be e4m3 numbers:
unmerged, merged, combined, token routed, everything applies it as any other.

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
        The adapter, and what rounding loses: how far an update moves, in quadratic mean over such errors, over its
        size, Frobenius; of all projections the largest. Every tensor-parallel rank rounds the whole adapter, to the
        same bits.
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


def spread(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [r, K] and [N, r] of ``b @ a``, float32, all of whose rows have a part in everything.

    By the two Gram matrices and products with [r, r] alone: factors are long, and decompositions of them slow.
    """
    gram_a, gram_b = (a @ a.T).double(), (b.T @ b).double()
    lengths, axes = torch.linalg.eigh(gram_a)
    kept = lengths > lengths[-1] * 1e-10
    axes, lengths = axes[:, kept], lengths[kept].sqrt()
    squares, turned = torch.linalg.eigh(lengths[:, None] * (axes.T @ gram_b @ axes) * lengths)
    kept = squares > squares[-1:] * 1e-12  # beside the largest singular value a millionth is nothing
    sizes, turned = squares[kept].pow(0.25).flip(0), turned[:, kept].flip(1)
    turn = _hartley(len(a))[: len(sizes)]
    stretch = torch.exp2(torch.arange(len(a), dtype=torch.float64) / len(a))
    to_a = stretch[:, None] * (turn.T @ (sizes[:, None] * (turned / lengths[:, None]).T @ axes.T))
    to_b = axes @ (lengths[:, None] * turned / sizes) @ turn / stretch
    return to_a.float() @ a, b @ to_b.float()


def _hartley(size: int) -> torch.Tensor:
    """The orthogonal matrix of the discrete Hartley transform, float64: its rows are waves, no element is large."""
    angles = 2 * math.pi / size * torch.outer(*[torch.arange(size, dtype=torch.float64)] * 2)
    return (angles.cos() + angles.sin()) / math.sqrt(size)


class _Linear:
    """The factors of one linear, spread, projections apart: a [parts, r, K] and b [parts], each [N_c, r], float32.

    Attributes:
        largest: largest elements of the rows of A and the columns of B, [parts, r] each.
    """

    def __init__(self, adapter: StackedAdapter, name: str, layout: BaseLayout) -> None:
        widths = [layout.shapes[part][0] for part in layout.parts_of(name)]
        a, b = (adapter.tensors[f"{name}.lora_{side}.weight"] for side in "AB")
        self.dtype, self.shape = a.dtype, a.shape
        parts = zip(a.float().split(adapter.rank), b.float().split(widths), strict=True)
        spread_a, self.b = zip(*(spread(*part) for part in parts), strict=True)
        self.a = torch.stack(spread_a)
        self.largest = self.a.abs().amax(2), torch.stack([part.abs().amax(0) for part in self.b])

    def rounded(self, shared: int) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
        """Both factors, times powers of two that sum up to ``shared`` for every row, in e4m3 numbers; what is lost."""
        (size_a, of_a), (size_b, of_b) = ((size, torch.where(size > 0, size, 1.0).log2()) for size in self.largest)
        # Where one of the two is zero there is nothing to balance: the other must fit all the same.
        powers_a = torch.where(size_b > 0, ((shared + of_b - of_a) / 2).round(), HALF - of_a.ceil()).int()
        powers_b = torch.where(size_a > 0, shared - powers_a, HALF - of_b.ceil().int())
        a, error_a = _rounded(torch.ldexp(self.a, powers_a[..., None]))
        found, lost = [], 0.0
        for part, whole, powers in zip(range(len(self.b)), self.b, powers_b, strict=True):
            b, error_b = _rounded(torch.ldexp(whole, powers).T)
            squares = (error_a[part] * b.norm(dim=1)).square() + (a[part].norm(dim=1) * error_b).square()
            size = float(((a[part] @ a[part].T).double() * (b @ b.T).double()).sum().clamp(min=0).sqrt())
            lost = max(lost, float(squares.sum().sqrt()) / size if size else 0.0)
            found.append(b.T)
        return (a.reshape(self.shape).to(self.dtype), torch.cat(found).to(self.dtype)), lost


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., r, n] of e4m3 numbers, and how far each row, [..., r], was from them."""
    found = rows.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3).float()
    return found, (found - rows).norm(dim=-1)
