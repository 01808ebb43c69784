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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, starmap
from typing import TypeVar

import torch

from vlora_sgl.kernels.merge import FoldTarget, MergeTarget
from vlora_sgl.lora.layout import BaseLayout, canonical_name
from vlora_sgl.lora.stacking import StackedAdapter, is_embedding

LIMIT = 4.0
"""The largest rho. Trained adapters of a tiny model stay below 0.6, random ones that change every answer reach 2."""
ACTIVATIONS = 2.0**12
"""What the base model's outputs are taken to stay below, for the room that h has in its type."""
TOGETHER = 64
"""Updates of one shape that are measured at a time: experts' are many and small."""

T = TypeVar("T")


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
    found = {}
    for key, a in adapter.tensors.items():
        name, side, _ = key.rsplit(".", 2)
        if side == "lora_A" and not is_embedding(key):
            widths = [layout.shapes[part][0] for part in layout.parts_of(name)]
            b = adapter.tensors[f"{name}.lora_B.weight"]
            pairs = zip(a.split(adapter.rank), b.split(widths), strict=True)
            alike = (some for _, same in groupby(pairs, lambda pair: len(pair[1])) for some in _batches(same))
            found[name] = tuple(size for some in alike for size in _sizes(some, adapter.scale))
    return found


def _sizes(factors: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float) -> Iterator[UpdateSize]:
    """Of updates with these A [r, in] and B [out, r], all of one shape."""
    a, b = (torch.stack(side).float() for side in zip(*factors, strict=True))
    b = b.mT
    # In float64, where no square overflows; the cosines between the terms, within 1, in float32.
    rows, columns = (torch.linalg.vector_norm(factor, dim=2, dtype=torch.float64) for factor in (a, b))
    terms = rows * columns
    cosines = _cosines(a, rows) * _cosines(b, columns)
    product = (terms[:, None] @ (cosines.double() @ terms[..., None])).flatten().clamp(min=0).sqrt()
    size = abs(scale)
    sizes = size * product, size * torch.linalg.vector_norm(terms, dim=1), terms.sum(1), max(1.0, size) * rows.amax(1)
    return starmap(UpdateSize, torch.stack(sizes, 1).tolist())


def _cosines(factor: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """[U, r, r] between the rows of factors; 0 where a row is zero, NaN where it is not finite."""
    # By the largest element first: a norm may lie past float32.
    top = factor.abs().amax(2, keepdim=True)
    unit = torch.where(top == 0, 0.0, factor / top)
    length = (norms[..., None] / top.double()).float()
    unit = torch.where(top == 0, 0.0, unit / length)
    return unit @ unit.mT


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    left = iter(rows)
    while some := list(islice(left, TOGETHER)):
        yield some


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
