"""Whether an adapter may be merged: whether the other rows of a mixture keep the bound of docs/design/modes.md.

A row of another adapter runs on ``W = round(W0 + s B A)`` and takes ``s B (A x)`` out again. Two roundings are left
that the row would not have unmerged: of the weights, ``u |W0 + s B A|``, and of ``h = s A x``, whose error ``u |h|`` B
carries on. In quadratic mean over a matrix they are at most ``1 + rho`` times the ``u |W0|`` that the bound counts,
with

    rho^2 = s^2 (|B A|^2 + sum_r |A_r|^2 |B_r|^2) / |W0|^2        (Frobenius norms; A_r a row of A, B_r a column of B)

so V grows to ``(1 + rho)^2 V`` at most. Products are not made: ``|B A|^2`` is the sum over ``(A A^T) * (B^T B)``. An
adapter of more than ``LIMIT`` stays unmerged, and so does one whose merged weights, or whose h, might overflow.

An adapter is measured when it is loaded, whole, before a rank takes its shard, and the base once: so all ranks say the
same, and no step computes or waits for anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, starmap
from typing import NamedTuple

import torch

from vlora_sgl.kernels.merge import FoldTarget, MergeTarget
from vlora_sgl.lora.bulk import each, one_matrix
from vlora_sgl.lora.layout import BaseLayout, canonical_name
from vlora_sgl.lora.stacking import StackedAdapter, is_embedding

LIMIT = 4.0
"""The largest rho. Trained adapters of a tiny model stay below 0.6, random ones that change every answer reach 2."""
ACTIVATIONS = 2.0**12
"""What the base model's outputs are taken to stay below, for the room that h has in its type."""
TOGETHER = 1 << 20
"""Numbers of factors of one shape that are measured at a time: experts' are many and small."""
WIDE = 4096
"""Columns of factors that are divided at a time: what is made of them stays in a core's cache."""
SQUARES = (2.0**-60, 2.0**100)
"""Between them sums of squares lose nothing in float32, whose numbers go from 2^-126 to 2^127."""


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """How large one slice's update is.

    Attributes:
        product: ``|s| |B A|``, Frobenius.
        terms: ``|s| sqrt(sum_r |A_r|^2 |B_r|^2)``.
        partial: a bound on every partial sum of an element of ``B A``, without s.
        low: the largest ``max(1, |s|) |A_r|``.
    """

    product: float
    terms: float
    partial: float
    low: float


@dataclass(frozen=True, slots=True)
class BaseSize:
    """How large one slice of the base weights is: Frobenius norm, largest element, largest norm of a row."""

    norm: float
    largest: float
    row: float


def update_sizes(adapter: StackedAdapter, layout: BaseLayout) -> dict[str, tuple[UpdateSize, ...]]:
    """The sizes of an adapter's updates of linear layers, by canonical module name; one of every slice.

    Args:
        adapter: whole, not a rank's shard.
        layout: of the engine that it was stacked for.
    """
    places = [key.rsplit(".", 2)[:2] for key in adapter.tensors if not is_embedding(key)]
    names = [name for name, side in places if side == "lora_A"]
    if not names:
        return {}
    owners: list[str] = []
    a: list[torch.Tensor] = []
    b: list[torch.Tensor] = []
    for batch in _batches(names, adapter, layout):
        owners += batch.owners
        a += _portions(batch.a)
        b += _portions(batch.b)
    found = each(lambda factors: _gram(*factors), [(one, side) for side, some in (("A", a), ("B", b)) for one in some])
    sides = [[torch.cat(of) for of in zip(*some, strict=True)] for some in (found[: len(a)], found[len(a) :])]
    at_once = max(1, TOGETHER // 16 // adapter.rank**2)  # eight bytes each, a few times over
    portions = [*zip(*(of.split(at_once) for side in sides for of in side), strict=True)]
    sizes = chain.from_iterable(each(lambda portion: _sizes(portion, abs(adapter.scale)), portions))
    slices: dict[str, list[UpdateSize]] = {name: [] for name in names}
    for name, size in zip(owners, sizes, strict=True):
        slices[name].append(size)
    return {name: tuple(some) for name, some in slices.items()}


class _Batch(NamedTuple):
    """Slices of one shape: A [modules, slices, r, K] and B [modules, slices, N, r], and the module of each."""

    owners: list[str]
    a: torch.Tensor
    b: torch.Tensor


def _batches(names: Sequence[str], adapter: StackedAdapter, layout: BaseLayout) -> Iterator[_Batch]:
    """All slices, those of a module in their order; modules whose matrices lie behind each other come together."""
    matrices = {
        name: (adapter.tensors[f"{name}.lora_A.weight"], adapter.tensors[f"{name}.lora_B.weight"]) for name in names
    }
    alike: dict[object, list[str]] = {}
    for name in sorted(names, key=lambda name: matrices[name][0].data_ptr()):  # as they lie in memory
        kind = name.rpartition(".")[2], *(matrix.shape for matrix in matrices[name])
        alike.setdefault(kind, []).append(name)
    for same in alike.values():
        a, b = (one_matrix([matrices[name][side] for name in same]) for side in range(2))
        if a is not None and b is not None:
            yield from _slices(same, layout, a, b, adapter.rank)
            continue
        for name in same:
            yield from _slices([name], layout, *matrices[name], adapter.rank)


def _slices(names: Sequence[str], layout: BaseLayout, a: torch.Tensor, b: torch.Tensor, rank: int) -> Iterator[_Batch]:
    """Those of modules of one shape in this layout; neighbours of one size together."""
    outs = [layout.shapes[part][0] for part in layout.parts_of(names[0])]
    of_a, of_b = a.unflatten(0, (len(names), -1, rank)), b.unflatten(0, (len(names), -1))
    first = begin = 0
    for out, same in groupby(outs):
        count = len([*same])
        after, end = first + count, begin + count * out
        owners = [name for name in names for _ in range(count)]
        yield _Batch(owners, of_a[:, first:after], of_b[:, begin:end].unflatten(1, (count, out)))
        first, begin = after, end


def _portions(factors: torch.Tensor) -> Iterator[torch.Tensor]:
    of_module = factors[0].numel()
    for some in factors.split(max(1, TOGETHER // of_module)):
        yield from some.split(max(1, TOGETHER // some[0, 0].numel()), 1) if of_module > TOGETHER else (some,)


def _gram(factors: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows of A [modules, slices, r, K], or columns of B [modules, slices, N, r]: a number for each, [U, r], and
    their products divided by theirs, [U, r, r], float32.

    The numbers are 1, or the largest elements where squares might leave float32.
    """
    factors = factors.float().flatten(0, 1)
    factors = factors if side == "A" else factors.mT  # turned behind the copy, which then follows the memory
    products = factors @ factors.mT
    least, most = torch.aminmax(products.diagonal(dim1=1, dim2=2))
    if least > SQUARES[0] and most < SQUARES[1]:
        return torch.ones(products.shape[:2]), products
    top = factors.abs().amax(2)
    products = torch.zeros_like(products)
    size = torch.where(top == 0, 1.0, top)[..., None]
    for block in factors.split(WIDE, 2):
        unit = block / size
        products.baddbmm_(unit, unit.mT)
    return top, products


def _sizes(grams: Sequence[torch.Tensor], size: float) -> list[UpdateSize]:
    """Of updates with these ``_gram`` of A and of B, and a scale of this size."""
    top_a, gram_a, top_b, gram_b = grams
    # Norms in float64, where no square overflows; the cosines between the terms, within 1, in float32.
    (rows, of_rows), (columns, of_columns) = _rows(top_a, gram_a), _rows(top_b, gram_b)
    terms = rows * columns
    product = (terms[:, None] @ ((of_rows * of_columns).double() @ terms[..., None])).flatten().clamp(min=0).sqrt()
    sizes = size * product, size * torch.linalg.vector_norm(terms, dim=1), terms.sum(1), max(1.0, size) * rows.amax(1)
    return [*starmap(UpdateSize, torch.stack(sizes, 1).tolist())]


def _rows(top: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of rows, [U, r] float64, and the cosines between them, [U, r, r]: 0 where a row is zero, NaN where it
    is not finite."""
    lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
    both = lengths[:, :, None] * lengths[:, None]
    return top.double() * lengths.double(), gram / torch.where(both == 0, 1.0, both)


def base_sizes(
    targets: Sequence[MergeTarget | FoldTarget], reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> dict[str, tuple[BaseSize, ...]]:
    """The sizes of the base weights, by canonical module name; one of every slice. Waits for the device once.

    Args:
        targets: all merge targets; those of a module behind each other.
        reduce: of float64 ``[n]``, the largest over all tensor-parallel ranks. A shard's norm is at most the whole's,
            so the result is on the safe side.
    """
    rows = []
    for target in targets:
        weight = target.base_weights.to(target.lora_a.device)
        norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).double()
        rows.append(torch.stack([torch.linalg.vector_norm(norms), weight.abs().max().double(), norms.max()]))
    sizes = torch.stack(rows)
    if reduce is not None:
        sizes = reduce(sizes.view(-1)).view(sizes.shape)
    named = zip(targets, sizes.tolist(), strict=True)
    return {
        name: tuple(BaseSize(*size) for _, size in same)
        for name, same in groupby(named, key=lambda pair: module_of(pair[0].name))
    }


def module_of(target: str) -> str:
    """The canonical name of a target's module."""
    name = target.partition("[")[0]
    return canonical_name(name) or name


def merge_refusal(
    updates: Mapping[str, Sequence[UpdateSize]],
    base: Mapping[str, Sequence[BaseSize]],
    scale: float,
    dtype: torch.dtype,
) -> str | None:
    """Why an adapter must not be merged into the weights, or ``None``: rows of others would not keep their answers.

    Args:
        updates: the adapter's, by ``update_sizes``.
        base: the base model's, by ``base_sizes``; modules that it lacks are not merged and not looked at.
        scale: the adapter's, as the kernels will be given it.
        dtype: of weights and pools.
    """
    if not abs(scale) <= torch.finfo(torch.float32).max:
        return f"its scale is {scale}"
    largest = torch.finfo(dtype).max
    for name, slices in updates.items():
        for update, weight in zip(slices, base.get(name, ()), strict=False):
            if not math.isfinite(update.product + update.terms):
                return f"{name}: its update is not finite"
            if update.partial > torch.finfo(torch.float32).max or weight.largest + update.product > largest:
                return f"{name}: merged weights might reach {weight.largest + update.product:.3g} and overflow {dtype}"
            if update.low > weight.row * (largest / ACTIVATIONS):
                return f"{name}: a row of A, of size {update.low:.3g}, might overflow {dtype} where it is taken out"
            rho = math.hypot(update.product, update.terms) / weight.norm if weight.norm else math.inf
            if rho > LIMIT and update.terms:
                return (
                    f"{name}: its update is {rho:.3g} times the base weights, and rounding would show in other rows "
                    f"(at most {LIMIT:g})"
                )
    return None
