"""Checks a bake against PEFT: sampled modules, random inputs, float64."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn

from vlora_sgl.bake.fold import DTYPES, shards_of, stored_tensors, targets_in
from vlora_sgl.errors import VLoraError
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.layout import BaseLayout

_ROWS = 4
_MAX_ROWS_OF_WEIGHT = 1024


class BakeMismatchError(VLoraError):
    """A baked module does not compute what PEFT does on the original weights."""


def verify_bake(
    base: Path,
    out: Path,
    layout: BaseLayout,
    adapters: Mapping[str, tuple[Mapping[str, LoraPair], Mapping[str, LoraPair]]],
    samples: int,
    slack: float = 0.0,
) -> float:
    """The largest error found, in units of the base dtype's rounding of the fused weight (1.0 is the bound).

    Args:
        adapters: name -> (modules on the original base, delta modules on the fused base).
        samples: how many weights to check.
        slack: relative error that compression was allowed, added to the bound.

    Raises:
        BakeMismatchError: a sampled module's output is off by more than rounding the fused weight explains.
    """
    everything = {name: pair for own, delta in adapters.values() for name, pair in {**own, **delta}.items()}
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
        unit = torch.finfo(DTYPES[tensor.dtype]).eps
        for name, (own, delta) in adapters.items():
            expected = _peft_output(original, own.get(part), x, rows)
            ours, extra = x @ fused.T, torch.zeros(rows, x.shape[1], dtype=torch.float64)
            if part in delta:
                extra = delta[part].delta()[:rows]
                ours = ours + x @ extra.T
            bound = unit * (x.abs() @ (fused.abs() + extra.abs()).T) + slack * (
                x.norm(dim=1, keepdim=True) * extra.norm()
            )
            error = float(((ours - expected).abs() / bound.clamp_min(1e-30)).max())
            if error > 1.0:
                raise BakeMismatchError(
                    f"{part}, adapter {name}: off by {error:.2f} times what rounding to {tensor.dtype} explains"
                )
            worst = max(worst, error)
    return worst


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
