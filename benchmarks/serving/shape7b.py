"""Engines for benchmarks without checkpoints: models of real shapes with random weights, and random adapters.

The vision tower has its real shape too, so an image costs what it costs. Latency depends on shapes alone; answers of
these models mean nothing. ``tiny`` runs the same code on a CPU. LLaVA-1.5-7B comes in its original layout, the one
whose images stock SGLang serves. The language models stand alone for engines that do not start with the tower.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.serving.apis import IMAGE_MARK


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        text: of the language model, as its configuration names them.
        language: transformers' model of the language model alone.
        family: of the whole, a key of ``served_families.FAMILIES``.
        vision: of the tower, as its configuration names them.
        tiles: its name in ``tiling_search.MODELS``.
        figure: what the names of its figures have in them; nothing for the shape that most are of.
        mark: how a prompt marks an image.
        dtype: what its configuration says. SGLang's LLaVA has its tower in float16 whatever that is.
    """

    text: dict[str, Any]
    language: str
    family: str
    vision: dict[str, Any]
    tiles: str
    figure: str = ""
    mark: str = IMAGE_MARK
    dtype: str = "bfloat16"


TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
"""Of every Qwen2.5-VL."""
MOST = "qwen2_5_vl"
"""The family of most figures, whose engines start with the tower in every benchmark."""

SHAPES = {
    "7b": Shape(
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
        "Qwen2",
        MOST,
        TOWER,
        "qwen2.5-vl-7b",
    ),
    "3b": Shape(
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        "Qwen2",
        MOST,
        TOWER,
        "qwen2.5-vl-3b",
        "3b.",
    ),
    "llava-7b": Shape(
        {
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 8192,  # its own 4,096 leave little room beside six images of 576 tokens
        },
        "Llama",
        "llava_original",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
        "llava-1.5-7b",
        "llava.",
        "<|image_pad|>",
        "float16",
    ),
    "qwen3vl-8b": Shape(
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        "Qwen3",
        "qwen3_vl",
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
            "num_position_embeddings": 2304,
        },
        "qwen3-vl-8b",
        "qwen3vl.",
    ),
}
MAX_PIXELS = 1024 * 1024
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_numbers(rank: int, shape: str = "7b") -> int:
    """Weights of an adapter on all linears of the language model, all of which a decode step reads."""
    from vlora_sgl.kernels.tiling_search import MODELS

    layer = sum(rank * ((len(p.offsets) - 1) * p.k + p.n) for p in MODELS[SHAPES[shape].tiles])
    return layer * int(SHAPES[shape].text["num_hidden_layers"])


def base_numbers(shape: str = "7b") -> int:
    """Weights of the base model that a decode step reads."""
    from vlora_sgl.kernels.tiling_search import MODELS

    sizes = SHAPES[shape].text
    layer = sum(p.k * p.n for p in MODELS[SHAPES[shape].tiles])
    return int(layer * sizes["num_hidden_layers"] + sizes["vocab_size"] * sizes["hidden_size"])


def make_model(directory: Path, tiny: bool, shape: str = "7b") -> Path:
    """Write configuration, tokenizer and processor (and, if tiny, weights) of a shape below ``directory``; where."""
    from tests.support import served_families
    from tests.support.tiny_random import make_model as make_tiny

    sizes, family = SHAPES[shape], SHAPES[shape].family
    path = (
        make_tiny(directory)
        if family == MOST
        else served_families.save(family, directory, max_position_embeddings=8192)[0]
    )
    if tiny:
        return path
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    for derived in ("head_dim", "layer_types"):  # of the tiny model
        text.pop(derived, None)
    text.update(sizes.text)
    config["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    config["dtype"] = config["torch_dtype"] = sizes.dtype
    if "mm_vision_tower" in config:
        config["mm_hidden_size"] = sizes.vision["hidden_size"]
        _shape_tower(Path(config["mm_vision_tower"]), sizes.vision)
    else:
        rope = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
        text[rope] = {**text[rope], "mrope_section": [16, 24, 24] if family == MOST else [24, 20, 20]}
        config["vision_config"].update(sizes.vision, out_hidden_size=text["hidden_size"])
    (path / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).exists():
            settings = json.loads((path / name).read_text())
            _shape_images(settings, sizes.vision)
            (path / name).write_text(json.dumps(settings, indent=1))
    return path


def _shape_tower(directory: Path, sizes: dict[str, Any]) -> None:
    """A tower that lies beside its model: its configuration, without weights."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes, indent=1))
    for weights in directory.glob("*.safetensors"):
        weights.unlink()


def make_language_model(directory: Path, tiny: bool, shape: str = "llava-7b") -> Path:
    """Write configuration and tokenizer (and, if tiny, weights) of a shape's language model to ``directory``."""
    import transformers

    from tests.support.tiny_random import VOCABULARY_TEXT
    from tools.tiny.build import build_tokenizer

    tokenizer = build_tokenizer(VOCABULARY_TEXT)
    small = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = f"{SHAPES[shape].language}ForCausalLM"
    sizes = {**SHAPES[shape].text, **(small if tiny else {})}
    config = getattr(transformers, f"{SHAPES[shape].language}Config")(**sizes, architectures=[model])
    config.dtype = torch.float32 if tiny else torch.bfloat16
    config.eos_token_id = tokenizer.eos_token_id
    if tiny:
        getattr(transformers, model)(config).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _shape_images(settings: Any, tower: dict[str, Any]) -> None:
    """Give an image processor's settings a tower's patches, and its image size or else a high limit of pixels, in
    place, wherever this release keeps them."""
    if not isinstance(settings, dict):
        return
    size = tower.get("image_size")
    for key, value in settings.items():
        if key == "patch_size" and "patch_size" in tower:
            settings[key] = tower["patch_size"]
        elif key in ("height", "width", "shortest_edge") and size:
            settings[key] = size
        elif key in ("max_pixels", "longest_edge") and value is not None:
            settings[key] = MAX_PIXELS
        else:
            _shape_images(value, tower)


def make_adapters(
    root: Path,
    model: Path,
    names: Iterable[str],
    rank: int,
    projections: Sequence[str] = PROJECTIONS,
    dora: bool = False,
) -> dict[str, Path]:
    """Write random PEFT adapters on these projections, bfloat16, one directory per name below ``root``.

    They differ in one matrix, which makes them different adapters and saves the time to draw the rest.
    """
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    layers = "model.language_model.layers" if text is not config else "model.layers"
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    small = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    shapes = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden))
    shapes |= dict.fromkeys(("k_proj", "v_proj"), (hidden, small))
    shapes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner)) | {"down_proj": (inner, hidden)}
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(text["num_hidden_layers"]):
        for name in projections:
            width_in, width_out = shapes[name]
            block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            stem = f"base_model.model.{layers}.{layer}.{block}.{name}"
            tensors |= _random_pair(stem, rank, width_in, width_out)
            if dora:
                tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(width_out).add(0.5).to(torch.bfloat16)
    return _write_adapters(root, names, tensors, rank, list(projections), dora)


def make_tower_adapters(root: Path, model: Path, names: Iterable[str], rank: int) -> dict[str, Path]:
    """As ``make_adapters``, on every linear of a Qwen2.5-VL's vision tower and its projector, and on nothing else.

    Of rank 16 their updates are a third of SGLang's dummy weights: trained ones stay below 0.6 of the base. One that
    is larger than those weights makes the GEMMs of a merged tower 2 to 3 % slower, with the same kernels (H200).
    """
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    block = {"attn.qkv": (hidden, 3 * hidden), "attn.proj": (hidden, hidden)}
    block |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (hidden, inner)) | {"mlp.down_proj": (inner, hidden)}
    shapes = {f"blocks.{i}.{name}": shape for i in range(vision["depth"]) for name, shape in block.items()}
    shapes |= {"merger.mlp.0": (merged, merged), "merger.mlp.2": (merged, vision["out_hidden_size"])}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors |= _random_pair(f"base_model.model.model.visual.{name}", rank, *shape, size=0.005)
    return _write_adapters(root, names, tensors, rank, sorted(f"visual.{name}" for name in shapes))


def _random_pair(stem: str, rank: int, width_in: int, width_out: int, size: float = 0.01) -> dict[str, torch.Tensor]:
    shapes = {"lora_A": (rank, width_in), "lora_B": (width_out, rank)}
    return {f"{stem}.{part}.weight": torch.randn(shape).mul(size).to(torch.bfloat16) for part, shape in shapes.items()}


def _write_adapters(
    root: Path,
    names: Iterable[str],
    tensors: dict[str, torch.Tensor],
    rank: int,
    targets: list[str],
    dora: bool = False,
) -> dict[str, Path]:
    adapter = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
        "use_dora": dora,
    }
    first = next(iter(tensors))
    directories = {}
    for name in names:
        directories[name] = root / name
        directories[name].mkdir(parents=True)
        tensors[first] = torch.randn(tensors[first].shape).mul(0.01).to(torch.bfloat16)
        save_file(tensors, directories[name] / "adapter_model.safetensors")
        (directories[name] / "adapter_config.json").write_text(json.dumps(adapter))
    return directories


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
            "cuda_graph_bs_decode": [1, 8, 16, 32],
            "mem_fraction_static": 0.7,
            "chunked_prefill_size": 8192,
        }
    return options


def plain_adapter_loading() -> None:
    """SGLang reads adapters in the base's load format, and the dummy one reads no files: give adapters their own."""
    from vlora_sgl import _sgl

    class FileLoader(_sgl.lora_module.DefaultModelLoader):  # type: ignore[misc]
        """Reads files whatever format the base is told to have."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(_sgl.LoadConfig())

    _sgl.lora_module.DefaultModelLoader = FileLoader


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of a benchmark's engine."""
    from vlora_sgl.startup import processes

    plain_adapter_loading()
    processes.run_scheduler(*args, **kwargs)


def random_towers() -> None:
    """Stock SGLang reads the tower of LLaVA's original layout where it reads weights, which the dummy format does
    not: give it a random one."""
    from sglang.srt.model_loader import loader
    from sglang.srt.models.llava import LlavaBaseForCausalLM
    from transformers import CLIPVisionConfig, CLIPVisionModel

    class RandomTower:
        @staticmethod
        def from_pretrained(path: str, torch_dtype: torch.dtype) -> Any:
            return CLIPVisionModel(CLIPVisionConfig.from_pretrained(path)).to(torch_dtype)

    own, llava = loader.initialize_dummy_weights, sys.modules[LlavaBaseForCausalLM.__module__]

    def fill(model: Any, *how: Any) -> None:
        own(model, *how)
        if isinstance(model, LlavaBaseForCausalLM) and hasattr(model.config, "mm_vision_tower"):
            model.load_weights([])

    llava.CLIPVisionModel, loader.initialize_dummy_weights = RandomTower, fill  # type: ignore[attr-defined]


def run_stock_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of a benchmark's stock engine."""
    from vlora_sgl import _sgl

    plain_adapter_loading()
    random_towers()
    _sgl.run_scheduler_process(*args, **kwargs)


def build_stock_engine(**options: Any) -> Any:
    """Stock SGLang's ``Engine``, told the same. To be called in a process that runs nothing of ours."""
    from vlora_sgl import _sgl
    from vlora_sgl.defaults import CPU_DEFAULTS
    from vlora_sgl.platforms.cpu import is_plain_cpu

    class StockEngine(_sgl.Engine):
        run_scheduler_process_func = staticmethod(run_stock_scheduler)

    here = {**CPU_DEFAULTS, "lora_backend": "torch_native"} if is_plain_cpu() else {}
    return StockEngine(**{**here, "enable_multimodal": True, "log_level": "error", **options})


def build_engine(**options: Any) -> Any:
    """A ``vlora_sgl.Engine`` whose adapters load beside dummy base weights."""
    from vlora_sgl.engine import Engine
    from vlora_sgl.startup import processes

    class BenchmarkEngine(Engine):
        run_scheduler_process_func = processes.WithEnvironment(run_scheduler)

    return BenchmarkEngine(**options)
