"""An adapter rounded to e4m3, as files: what a server with ``--vlora-adapter-weights fp8`` serves of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.eight_bits import in_eight_bits
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.stacking import stack


def rounded(adapter: Path, model: Path, out: Path, dtype: torch.dtype) -> Path:
    """Write the adapter of an engine that computes in ``dtype`` to ``out``."""
    layout = BaseLayout.from_directory(model)
    modules = read_adapter(adapter, layout).modules
    found, lost = in_eight_bits(stack(modules, layout, dtype), layout)
    assert lost > 0.01, "rounding changes it"
    tensors, names = {}, []
    for key, tensor in found.tensors.items():
        name, side, _ = key.rsplit(".", 2)
        names.append(layout.paths[name])
        on_embedding = name == "embed_tokens"
        leaf = side.replace("lora", "lora_embedding") if on_embedding else f"{side}.weight"
        tensors[f"base_model.model.{layout.paths[name]}.{leaf}"] = tensor.float().contiguous()
    magnitudes = {name: pair.magnitude for name, pair in modules.items() if pair.magnitude is not None}
    for name, magnitude in magnitudes.items():
        tensors[f"base_model.model.{layout.paths[name]}.lora_magnitude_vector"] = magnitude.float()
    config = {
        "use_dora": bool(magnitudes),
        "peft_type": "LORA",
        "r": found.rank,
        "lora_alpha": found.scale * found.rank,
        "target_modules": sorted(set(names)),
        "base_model_name_or_path": str(model),
    }
    out.mkdir(parents=True)
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    return out
