"""Quantised checkpoints of a tiny model, in the layouts that SGLang reads, each beside what its numbers mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vlora_sgl.scaled import E4M3, quantise

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""A linear's tensors by what follows its name, and its weight as they mean it, [N, K] float32."""
GROUP = 32
AWQ_PACK = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each nibble of a word holds."""


def per_tensor(weight: torch.Tensor) -> Written:
    """FP8, one scale."""
    found = quantise(weight, weight.shape, E4M3)  # type: ignore[arg-type]
    return {"weight": found.weight, "weight_scale": found.scale.reshape(())}, found.wide()


def per_channel(weight: torch.Tensor, dtype: torch.dtype = E4M3) -> Written:
    """A scale for each output."""
    found = quantise(weight, (1, weight.shape[1]), dtype)
    return {"weight": found.weight, "weight_scale": found.scale}, found.wide()


def blocks(weight: torch.Tensor, scale: str = "weight_scale_inv") -> Written:
    """FP8, a scale for each 128 x 128."""
    found = quantise(weight, (128, 128), E4M3)
    return {"weight": found.weight, scale: found.scale}, found.wide()


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [K, N] of 0 to 15, zeros and scales [K / GROUP, N] of groups of inputs, and what they mean [N, K]."""
    grouped = weight.T.unflatten(0, (-1, GROUP))
    low, high = grouped.amin(1, keepdim=True).clamp(max=0), grouped.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(1, 15)
    numbers = (grouped / scale + zero).round().clamp(0, 15)
    meant = ((numbers - zero) * scale).flatten(0, 1).T.contiguous()
    return numbers.flatten(0, 1).int(), zero.squeeze(1).int(), scale.squeeze(1), meant


def _words(numbers: torch.Tensor, order: Any = range(8)) -> torch.Tensor:
    """[R, C / 8] int32 of [R, C]: nibble p holds column ``order[p]`` of eight."""
    grouped = numbers.unflatten(1, (-1, 8))
    return sum(grouped[..., c].long() << 4 * p for p, c in enumerate(order)).to(torch.int32)  # type: ignore[union-attr]


def awq(weight: torch.Tensor) -> Written:
    """Four bits, packed along the outputs."""
    numbers, zeros, scales, meant = four_bits(weight)
    packed = {"qweight": _words(numbers, AWQ_PACK), "qzeros": _words(zeros, AWQ_PACK), "scales": scales}
    return packed, meant


def gptq(weight: torch.Tensor) -> Written:
    """Four bits, packed along the inputs, zeros less 1."""
    numbers, zeros, scales, meant = four_bits(weight)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    qweight = _words(numbers.T).T.contiguous()
    return {"qweight": qweight, "qzeros": _words(zeros - 1), "scales": scales, "g_idx": groups}, meant


def online(weight: torch.Tensor) -> Written:
    """Quantised by the engine."""
    return {"weight": weight}, per_channel(weight)[1]


def _compressed(form: str, kind: str, strategy: str, inputs: str = "token", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": inputs, "dynamic": True}
    if inputs == "group":
        activations["group_size"] = 128
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    ignored = ["re:.*visual.*", "lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["visual", "lm_head"]}


@dataclass(frozen=True)
class Format:
    """A layout.

    Attributes:
        config: ``quantization_config``.
        write: a linear.
        flag: ``quantization`` that the engine is given.
        folds: whether adapters are folded into it.
    """

    config: dict[str, Any] | None
    write: Callable[[torch.Tensor], Written]
    flag: str | None = None
    folds: bool = True


FORMATS = {
    "fp8-tensor": Format(FP8, per_tensor),
    "fp8-block": Format({**FP8, "weight_block_size": [128, 128]}, blocks),
    "fp8-online": Format(None, online, "fp8"),
    "compressed-fp8-tensor": Format(_compressed("float-quantized", "float", "tensor", "tensor"), per_tensor),
    "compressed-fp8-channel": Format(_compressed("float-quantized", "float", "channel"), per_channel),
    "compressed-fp8-block": Format(
        _compressed("float-quantized", "float", "block", "group", block_structure=[128, 128]),
        lambda weight: blocks(weight, "weight_scale"),
    ),
    "compressed-int8-channel": Format(
        _compressed("int-quantized", "int", "channel"), lambda weight: per_channel(weight, torch.int8), folds=False
    ),
    "w8a8-int8": Format(
        {"quant_method": "w8a8_int8", "ignore": ["re:.*visual.*", "lm_head"]},
        lambda weight: per_channel(weight, torch.int8),
        folds=False,
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": ["visual", "lm_head"],
        },
        awq,
        folds=False,
    ),
    "gptq": Format(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "dynamic": {"-:.*visual.*": {}},
        },
        gptq,
        folds=False,
    ),
}


def make(name: str, model: Path, root: Path) -> tuple[Path, Path]:
    """Write ``model``'s decoder quantised, and beside it what that means; returns both directories."""
    form, directories = FORMATS[name], (root / "quantised", root / "meant")
    for directory in directories:
        shutil.copytree(model, directory)
    tensors, quantised, meant = load_file(model / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        own, what = {key: tensor}, tensor
        if key.endswith("_proj.weight") and "visual" not in key:
            written, what = form.write(tensor.float())
            own = {f"{key.removesuffix('weight')}{kind}": value.contiguous() for kind, value in written.items()}
        quantised.update(own)
        meant[key] = what.contiguous()
    for directory, found in zip(directories, (quantised, meant), strict=True):
        save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    if form.config is not None:
        path = directories[0] / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": form.config}))
    return directories
