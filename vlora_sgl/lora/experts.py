"""Adapters on the experts of mixture-of-experts layers, as files have them.

Two layouts are in use. Where experts were modules of their own, each has keys of its own
(``layers.0.mlp.experts.3.up_proj``); those are read like any linear's. Where a model keeps the weights of all experts
in one parameter, PEFT adapts that (``target_parameters``): one A and one B hold the factors of every expert, A's rows
expert by expert, B's columns with the expert running fastest. Two parameters of one module are wrappers in each other,
whose keys do not say which is which; the shapes do. They also say which side of the weight A stands for: PEFT has
taken a parameter's second axis for its inputs, whatever it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from vlora_sgl.errors import AdapterError

FUSED = ("gate_up_proj", "down_proj")
"""The parameters that hold the weights of all experts; and what our layouts call the experts' linears together."""
_WRAPPED = ".base_layer"
Shape = tuple[int, int]


class Layout(Protocol):
    """As much of ``layout.BaseLayout`` as is asked here."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """By canonical name, (out, in)."""

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """By canonical name of what is stacked, its parts."""


def is_expert(name: str) -> bool:
    """Whether a canonical name is that of an expert's linear, or of all experts' together."""
    return "experts" in name.split(".")


def is_fused(name: str) -> bool:
    """Whether a canonical name is that of a wrapper of all experts' weights."""
    return _unwrapped(name).endswith(".experts")


def is_router(name: str, layout: Layout) -> bool:
    """Whether a canonical name is that of what chooses experts."""
    mlp, _, leaf = name.rpartition(".")
    return leaf == "gate" and f"{mlp}.experts.{FUSED[0]}" in layout.fused


def expert_parts(experts: str, count: int) -> dict[str, tuple[str, ...]]:
    """By the canonical name of all experts' linears of a kind, the names of the linears, expert by expert."""
    gate_up = (f"{experts}.{e}.{leaf}" for e in range(count) for leaf in ("gate_proj", "up_proj"))
    down = (f"{experts}.{e}.down_proj" for e in range(count))
    return dict(zip((f"{experts}.{kind}" for kind in FUSED), (tuple(gate_up), tuple(down)), strict=True))


def parameter_of(path: str, name: str, factors: tuple[Shape, Shape], layout: Layout) -> tuple[str, bool]:
    """Which parameter a wrapper has adapted: its path, and whether A stands for the outputs.

    Args:
        path: of the wrapper, as saved; name: its canonical name.
        factors: the shapes of A and B.

    Raises:
        AdapterError: this model has no such experts, or the shapes fit no parameter, or several.
    """
    experts, (_, inner), (outer, _) = _unwrapped(name), *factors
    if f"{experts}.{FUSED[0]}" not in layout.fused:
        raise AdapterError(f"{path}: this model has no module {experts}")
    sizes = {kind: _size(f"{experts}.{kind}", layout) for kind in FUSED}
    fits = [
        (kind, turned)
        for kind, size in sizes.items()
        for turned, seen in ((False, (outer, inner)), (True, (inner, outer)))
        if seen == size
    ]
    if len(fits) != 1:
        shown = ", ".join(f"{kind} {list(size)}" for kind, size in sizes.items())
        how = "fit none" if not fits else "fit more than one way, and the file does not say which is meant,"
        raise AdapterError(f"{path}: updates of [{outer}, {inner}] {how} of this model's experts' weights: {shown}")
    ((kind, turned),) = fits
    return f"{_unwrapped(path)}.{kind}", turned


def factors_of_experts(
    a: torch.Tensor, b: torch.Tensor, kind: str, name: str, turned: bool, layout: Layout, rank: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(canonical name, A [r, in], B [out, r]) of every expert's linears.

    An adapter of separate gates and ups that was converted has both beside each other, half of each rank zero; the
    halves are taken apart again.

    Args:
        a, b: PEFT's, [E * r, in] and [out, r * E]; with ``turned`` their roles are exchanged.
        kind: one of ``FUSED``.
        name: canonical, of the wrapper.
        rank: r; nothing is given where there are not as many experts as the model has.
    """
    parts = layout.fused[f"{_unwrapped(name)}.{kind}"]
    stacked = 2 if kind == FUSED[0] else 1
    experts = len(parts) // stacked
    if len(a) != experts * rank:
        return
    own_a, own_b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if turned:
        own_a, own_b = own_b.transpose(1, 2), own_a.transpose(1, 2)
    halves = own_b.chunk(stacked, 1)
    low, high = slice(0, rank // 2), slice(rank // 2, rank)
    apart = stacked == 2 and rank % 2 == 0 and not halves[0][..., high].any() and not halves[1][..., low].any()
    for i, part in enumerate(parts):
        expert, half = divmod(i, stacked)
        columns = (low, high)[half] if apart else slice(0, rank)
        yield part, own_a[expert, columns], halves[half][expert][:, columns]


def _size(name: str, layout: Layout) -> Shape:
    """(out, in) of one expert's part of a parameter."""
    parts = layout.fused[name]
    own = parts[: 2 if name.endswith(FUSED[0]) else 1]
    return sum(layout.shapes[part][0] for part in own), layout.shapes[own[0]][1]


def _unwrapped(path: str) -> str:
    while path.endswith(_WRAPPED):
        path = path.removesuffix(_WRAPPED)
    return path
