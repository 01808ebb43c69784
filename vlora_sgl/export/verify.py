"""Checks an export against PEFT: sampled modules, random inputs, float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn

from vlora_sgl.errors import VLoraError
from vlora_sgl.export.merge import DTYPES, shards_of, stored_tensors, targets_in
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.layout import BaseLayout

_ROWS = 4
_MAX_ROWS_OF_WEIGHT = 1024
_SIGMAS = 8


class ExportMismatchError(VLoraError):
    """An exported module does not compute what PEFT does on the original weights."""


def verify_export(
    base: Path,
    out: Path,
    layout: BaseLayout,
    own: Mapping[str, LoraPair],
    delta: Mapping[str, LoraPair],
    samples: int,
    dropped: Mapping[str, float] | None = None,
    adapter: str = "the merged adapter",
) -> float:
    """The largest error found between an adapter on the original base and what it became, over its bound.

    A merged weight is the exact sum rounded once, so an output's error is a sum of independent roundings, of standard
    deviation at most ``eps / sqrt(12)`` of each term: the bound is eight of those. The factors' own rounding, and what
    a compression dropped, are added.

    Args:
        own: the adapter's modules on the original base; none for the base itself.
        delta: its modules on the merged base; none for the hot adapter.
        samples: how many weights to check.
        dropped: per module, the largest singular value that compression left out.
        adapter: its name, for the message.

    Raises:
        ExportMismatchError: a sampled module's output is off by more than the bound.
    """
    everything = {**own, **delta}
    places = [
        (shard.name, tensor, row, part)
        for shard in shards_of(base)
        for tensor, row, _, part in targets_in(stored_tensors(shard), everything, layout)
    ]
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shard, tensor, first, part in random.Random(0).sample(places, min(samples, len(places))):
        rows = min(_MAX_ROWS_OF_WEIGHT, layout.shapes[part][0])
        original, fused = (_rows(folder / shard, tensor.name, first, rows) for folder in (base, out))
        x = torch.randn(_ROWS, original.shape[1], generator=generator, dtype=torch.float64)
        expected = _peft_output(original, own.get(part), x, rows)
        ours = x @ fused.T
        eps = torch.finfo(DTYPES[tensor.dtype]).eps
        bound = _SIGMAS * eps / 12**0.5 * (x.square() @ torch.maximum(fused.abs(), original.abs()).square().T).sqrt()
        bound += (dropped or {}).get(part, 0.0) * x.norm(dim=1, keepdim=True)
        if part in own:  # the merge sums in float32
            bound += torch.finfo(torch.float32).eps * _apply(own[part], x, rows, torch.abs)
        if part in delta:  # the scale went into B, which was rounded
            ours = ours + _apply(delta[part], x, rows)
            bound += torch.finfo(delta[part].b.dtype).eps * _apply(delta[part], x, rows, torch.abs)
        error = float(((ours - expected).abs() / bound.clamp_min(1e-30)).max())
        if error > 1.0:
            raise ExportMismatchError(
                f"{part}, {adapter}: off by {error:.2f} times what rounding to {tensor.dtype} explains"
            )
        worst = max(worst, error)
    return worst


def _apply(pair: LoraPair, x: torch.Tensor, rows: int, of: Callable[..., torch.Tensor] = torch.clone) -> torch.Tensor:
    """The update's first outputs for ``x``, in float64; with ``of=torch.abs`` the sum of its terms' sizes."""
    return pair.scale * (of(x) @ of(pair.a.double()).T) @ of(pair.b[:rows].double()).T


def _rows(path: Path, name: str, first: int, rows: int) -> torch.Tensor:
    with safe_open(str(path), framework="pt") as file:
        return file.get_slice(name)[first : first + rows].double()


def _peft_output(weight: torch.Tensor, pair: LoraPair | None, x: torch.Tensor, rows: int) -> torch.Tensor:
    """PEFT's own forward of a linear layer with this adapter, in float64."""
    linear = nn.Linear(weight.shape[1], rows, bias=False, dtype=torch.float64)
    linear.weight.data = weight
    if pair is None:
        with torch.no_grad():
            return linear(x)
    config = LoraConfig(r=pair.rank, lora_alpha=1, target_modules=["linear"])
    wrapped: Any = get_peft_model(nn.ModuleDict({"linear": linear}), config).double().eval()
    layer = wrapped.base_model.model["linear"]
    layer.lora_A["default"].weight.data = pair.a.double()
    layer.lora_B["default"].weight.data = pair.b[:rows].double()
    layer.scaling["default"] = pair.scale
    with torch.no_grad():
        return layer(x)
