"""Wrapped layers as the merge kernel takes them: their weights, a copy of these, and their slots."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl.kernels.merge import FoldTarget, MergeTarget
from vlora_sgl.lora.expert_layers import ExpertLinear
from vlora_sgl.lora.mode_switcher import base_copies
from vlora_sgl.lora.quantised import foldable
from vlora_sgl.scaled import E4M3, Scaled


def merge_targets(
    modules: Sequence[tuple[str, str, Any]], copy: str, copies: MutableMapping[Any, torch.Tensor]
) -> list[MergeTarget]:
    """The merge targets of wrapped modules, one for each stacked projection.

    Args:
        modules: group, name and module; ``why_not_mergeable`` must have nothing against one.
        copy: where the copy of their weights is to lie (``base_copies``).
        copies: filled with the copies, by module.
    """
    if not modules:
        return []
    weights = [_weight(module).data for _, _, module in modules]
    targets = []
    for (group, name, module), weight, base in zip(modules, weights, base_copies(weights, copy), strict=True):
        copies[module] = base
        if isinstance(module, ExpertLinear):
            for index, (e, part, rows) in enumerate(module.slices()):
                own = (module.a[:, e], module.b[:, e, rows], part)
                targets.append(MergeTarget(f"{name}[{index}]", group, weight[e, rows], base[e, rows], *own))
            continue
        lora_a, lora_b = _buffers(module)
        vectors = getattr(module, "vectors", None)  # SGLang's own layers have none
        for index, (start, end) in enumerate(pairwise(module.output_offset_cpu.tolist())):
            rows = slice(start, end)
            factors = None if vectors is None else vectors[:, 0, rows]
            slot = (lora_a, lora_b[:, rows], index, factors)
            targets.append(MergeTarget(f"{name}[{index}]", group, weight[rows], base[rows], *slot))
    return targets


def fold_targets(modules: Sequence[tuple[str, str, Any]], copy: str) -> list[FoldTarget]:
    """The FP8 targets of wrapped modules, one for each stacked projection; arguments as of ``merge_targets``."""
    found = [foldable(module.base_layer) for _, _, module in modules]
    weights = [one for one in found if isinstance(one, Scaled)]
    assert len(weights) == len(found), found
    numbers = base_copies([one.weight.view(torch.uint8) for one in weights], copy) if weights else []
    scales = base_copies([one.scale for one in weights], copy) if weights else []
    targets = []
    for (group, name, module), weight, number, scale in zip(modules, weights, numbers, scales, strict=True):
        base, (lora_a, lora_b) = Scaled(number.view(E4M3), scale, weight.block), _buffers(module)
        for index, (start, end) in enumerate(pairwise(module.output_offset_cpu.tolist())):
            rows = slice(start, end)
            slot = (lora_a, lora_b[:, rows], index)
            targets.append(FoldTarget(f"{name}[{index}]", group, weight.rows(rows), base.rows(rows), *slot))
    return targets


def is_folded(module: Any) -> bool:
    """Whether a wrapped module that can be merged into is an FP8 one."""
    return not isinstance(module, ExpertLinear) and not _plain(module.base_layer)


def _plain(layer: Any) -> bool:
    return isinstance(layer.quant_method, _sgl.UnquantizedLinearMethod)


def _weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight if isinstance(module, ExpertLinear) else module.base_layer.weight
    return weight


def why_not_mergeable(module: Any, folding: bool = False) -> str | None:
    """Why a wrapped module's adapters cannot be merged into its weight, or ``None`` if they can.

    Args:
        folding: whether adapters are folded into FP8 weights.
    """
    if isinstance(module, ExpertLinear):
        same = module.a.dtype in (module.weight.dtype, E4M3)
        return None if same else f"its weight is {module.weight.dtype}, adapters are {module.a.dtype}"
    layer: Any = getattr(module, "base_layer", None)
    weight: Any = getattr(layer, "weight", None)
    if not isinstance(module, (_sgl.ColumnParallelLinearWithLoRA, _sgl.RowParallelLinearWithLoRA)):
        return f"a {type(module).__name__} has no single weight matrix"
    if not _plain(layer):
        return _why_not_folded(module) if folding else f"quantised with {type(layer.quant_method).__name__}"
    if weight is None or weight.ndim != 2 or not weight.is_contiguous() or not weight.is_floating_point():
        return "its weight is not stored as a plain matrix"
    lora_a, _ = _buffers(module)
    if lora_a.dtype not in (weight.dtype, E4M3):
        return f"its weight is {weight.dtype}, adapters are {lora_a.dtype}"
    if module.output_offset_cpu[-1] != weight.shape[0]:
        return "adapters cover part of its rows only"
    return None


def _why_not_folded(module: Any) -> str | None:
    found, bounds = foldable(module.base_layer), module.output_offset_cpu.tolist()
    if isinstance(found, str):
        return found
    if bounds[-1] != len(found.weight):
        return "adapters cover part of its rows only"
    if any(bound % found.block[0] for bound in bounds[:-1]):
        return f"its projections share blocks of {found.block[0]} rows"
    return None


def _buffers(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    stacked = hasattr(module, "A_buffer_qkv")
    return (module.A_buffer_qkv, module.B_buffer_qkv) if stacked else (module.A_buffer, module.B_buffer)


def largest_of_ranks(sizes: torch.Tensor) -> torch.Tensor:
    """The largest over all tensor-parallel ranks of float64 ``[n]``, elementwise; on one rank as it is."""
    group = _sgl.get_tp_group()
    if group.world_size == 1:
        return sizes
    on_host = sizes.cpu()
    torch.distributed.all_reduce(on_host, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return on_host
