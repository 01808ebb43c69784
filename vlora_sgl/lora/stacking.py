"""From canonical modules to the tensors an SGLang memory pool takes: projections stacked, one rank, one scale.

A pool slot has one rank and one scale for all its modules, and holds q, k, v (gate, up) as one stack of A factors
``[parts * r, in]`` and one B ``[sum of outs, r]``. An adapter that lacks a part, or whose ranks or scales differ from
module to module, is padded with zeros and its scale multiplied into B in float32, which changes nothing it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.bulk import each, is_finite, one_matrix
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.experts import FUSED, is_expert
from vlora_sgl.lora.layout import EMBEDDING_MODULES, BaseLayout


@dataclass(frozen=True)
class OutputVectors:
    """What an adapter has for the outputs of one linear, [N] float32 each; ``None`` for what it has for none.

    Attributes:
        magnitude: DoRA's; NaN where an output has none.
        added: what joins the output, LoRA's scale included.
        bias: what takes the place of the base layer's; NaN where an output keeps that.
    """

    magnitude: torch.Tensor | None = None
    added: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class StackedAdapter:
    """What one pool slot holds.

    Attributes:
        rank: of every module, the largest the adapter has.
        scale: of every module.
        tensors: ``NAME.lora_A.weight`` and ``NAME.lora_B.weight`` by the engine's canonical module names.
        vectors: by the same names, of the modules that have more than factors.
    """

    rank: int
    scale: float
    tensors: dict[str, torch.Tensor]
    vectors: dict[str, OutputVectors] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """Last names of the modules: what SGLang calls target modules. Of experts it takes both kinds together."""
        found = {name.rsplit(".", 3)[-3] for name in self.tensors} | {n.rsplit(".", 1)[-1] for n in self.vectors}
        return found | set(FUSED if any(is_expert(name) for name in self.tensors) else ())


def stack(
    modules: Mapping[str, LoraPair],
    layout: BaseLayout,
    dtype: torch.dtype,
    biases: Mapping[str, torch.Tensor] | None = None,
) -> StackedAdapter:
    """Lays an adapter's modules out as the pool of the engine with ``layout`` takes them, in the pool's ``dtype``.

    An adapter of no modules is one of rank 1 without tensors.

    Raises:
        AdapterError: a factor is not finite in the pool's dtype; the message names its module.
    """
    if not modules:
        return StackedAdapter(1, 1.0, {})
    rank = max(pair.rank for pair in modules.values())
    # The commonest scale stays a factor of the kernel, so that the usual adapter's B is not rounded a second time.
    # Others are divided by it, so it is 0 only where all are.
    scales = Counter(pair.scale for pair in modules.values())
    scale = max(scales, key=lambda value: (value != 0, scales[value]))
    groups = stacks(layout)

    def stacked(name: str) -> dict[str, torch.Tensor]:
        parts = layout.parts_of(name)
        factors = [_factors(part, modules.get(part), layout.shapes[part], rank, scale, dtype) for part in parts]
        sides = zip("AB", zip(*factors, strict=True), strict=True)
        return {f"{name}.lora_{side}.weight": _below_each_other(of) for side, of in sides}

    found = each(stacked, [*dict.fromkeys(groups.get(module, module) for module in modules)])
    tensors = {name: tensor for one in found for name, tensor in one.items()}
    return StackedAdapter(rank, scale, tensors, _vectors(modules, biases or {}, groups, layout))


def stacks(layout: BaseLayout) -> dict[str, str]:
    """Of each part of a stacked projection of an engine, the stack."""
    return {part: name for name, parts in layout.fused.items() if name in layout.paths for part in parts}


def _below_each_other(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of some; a view where they lie so in memory (``lora.reservation``)."""
    whole = one_matrix(parts)
    return torch.cat(tuple(parts)) if whole is None else whole


def _vectors(
    modules: Mapping[str, LoraPair],
    biases: Mapping[str, torch.Tensor],
    groups: Mapping[str, str],
    layout: BaseLayout,
) -> dict[str, OutputVectors]:
    scaled = {name: pair.magnitude.float() for name, pair in modules.items() if pair.magnitude is not None}
    added = {
        name: (pair.scale * pair.bias.double()).float() for name, pair in modules.items() if pair.bias is not None
    }
    own = {name: bias.float() for name, bias in biases.items()}

    def joined(found: Mapping[str, torch.Tensor], parts: tuple[str, ...], missing: float) -> torch.Tensor | None:
        if not any(part in found for part in parts):
            return None
        rows = [found.get(part, torch.full((layout.shapes[part][0],), missing)) for part in parts]
        return torch.cat(rows)

    return {
        name: OutputVectors(joined(scaled, parts, torch.nan), joined(added, parts, 0.0), joined(own, parts, torch.nan))
        for name in dict.fromkeys(groups.get(module, module) for module in (*scaled, *added, *own))
        if (parts := layout.parts_of(name))
    }


def is_embedding(name: str) -> bool:
    """Whether a stacked tensor belongs to the embedding or the output layer, which SGLang keeps apart."""
    return name.split(".")[0] in EMBEDDING_MODULES


def _factors(
    name: str, pair: LoraPair | None, shape: tuple[int, int], rank: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    out, inner = shape
    if pair is None:
        return torch.zeros(rank, inner, dtype=dtype), torch.zeros(out, rank, dtype=dtype)
    own = pair.scale / scale if pair.scale != scale else 1.0
    a, b = _cast(f"{name}: A", pair.a, 1.0, dtype), _cast(f"{name}: B", pair.b, own, dtype)
    # An engine may pad a layer's sizes (``lora.tower.trained_layout``): what is beyond the adapter's own is zero.
    return _padded(a, (rank, inner)), _padded(b, (out, rank))


def _padded(factor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Itself, where nothing is to be added; nobody writes into what an adapter was read to."""
    if factor.shape == shape:
        return factor.contiguous()
    wide = torch.zeros(shape, dtype=factor.dtype)
    wide[: factor.shape[0], : factor.shape[1]] = factor
    return wide


def _cast(what: str, factor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """A factor that is finite as read, times a scale, in the pool's dtype."""
    if scale == 1.0 and factor.dtype == dtype:
        return factor
    found = (factor if scale == 1.0 else factor.float() * scale).to(dtype)
    if not is_finite(found):
        largest = float(factor.abs().max()) * abs(scale)
        raise AdapterError(
            f"{what}, in {factor.dtype}, reaches {largest:.3g} with its scale; the engine computes in {dtype}, which "
            f"ends at {torch.finfo(dtype).max:.3g}"
        )
    return found
