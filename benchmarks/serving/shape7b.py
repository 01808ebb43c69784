"""Engines for benchmarks without checkpoints: a Qwen2.5-VL of 7B shape with random weights, and random adapters.

Latency depends on shapes alone; answers of these models mean nothing. ``tiny`` runs the same code on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(directory: Path, tiny: bool) -> Path:
    """Write configuration, tokenizer and processor (and, if tiny, weights) to ``directory``."""
    from tests.tiny_random import make_model as make_tiny

    path = make_tiny(directory)
    if tiny:
        return path
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(SHAPE_7B)
    rope = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    text[rope] = {**text[rope], "mrope_section": [16, 24, 24]}
    text.pop("layer_types", None)
    config["vision_config"]["out_hidden_size"] = SHAPE_7B["hidden_size"]
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def make_adapter(directory: Path, model: Path, seed: int, rank: int) -> Path:
    """Write a random PEFT adapter on all seven projections, bfloat16."""
    text = json.loads((model / "config.json").read_text())
    text = text.get("text_config", text)
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    small = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    shapes = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden))
    shapes |= dict.fromkeys(("k_proj", "v_proj"), (hidden, small))
    shapes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner)) | {"down_proj": (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(text["num_hidden_layers"]):
        for name, (width_in, width_out) in shapes.items():
            block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            stem = f"base_model.model.model.language_model.layers.{layer}.{block}.{name}"
            for part, shape in (("lora_A", (rank, width_in)), ("lora_B", (width_out, rank))):
                noise = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{stem}.{part}.weight"] = noise.to(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def engine_options(model: Path, adapters: dict[str, Path], rank: int, tiny: bool) -> dict[str, Any]:
    """``Engine`` arguments that fit both sizes."""
    options: dict[str, Any] = {
        "model_path": str(model),
        "enable_lora": True,
        "lora_paths": [f"{name}={path}" for name, path in adapters.items()],
        "max_loras_per_batch": len(adapters) + 1,
        "max_lora_rank": rank,
    }
    if not tiny:
        options |= {
            "load_format": "dummy",
            "attention_backend": "triton",
            "mm_attention_backend": "triton_attn",
            "sampling_backend": "pytorch",
            "cuda_graph_bs_decode": [1, 8],
            "mem_fraction_static": 0.7,
            "chunked_prefill_size": 8192,
        }
    return options


def plain_adapter_loading() -> None:
    """SGLang reads adapters in the base's load format, and the dummy one reads no files: give adapters their own."""
    from vlora_sgl import _sgl

    loader = _sgl.lora_module.DefaultModelLoader
    _sgl.lora_module.DefaultModelLoader = lambda load_config: loader(_sgl.LoadConfig())


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of a benchmark's engine."""
    from vlora_sgl import processes

    plain_adapter_loading()
    processes.run_scheduler(*args, **kwargs)


def build_engine(**options: Any) -> Any:
    """A ``vlora_sgl.Engine`` whose adapters load beside dummy base weights."""
    from vlora_sgl import processes
    from vlora_sgl.engine import Engine

    class BenchmarkEngine(Engine):
        run_scheduler_process_func = processes.WithEnvironment(run_scheduler)

    return BenchmarkEngine(**options)
