"""Adapters of the vision tower on tiny random models, and transformers + PEFT's answers to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from tests.support.lora_adapters import tiny_adapter

BLOCKS, PROJECTORS = r".*visual\.blocks\..*(qkv|proj|fc1|fc2)", r".*visual\.(merger|deepstack).*(mlp\.[02]|fc[12])"
LANGUAGE = r".*layers\.\d+\.(self_attn|mlp)\..*_proj"
# Name -> LoRA options. Ranks, scales and the parts of the model differ.
ADAPTERS: dict[str, dict[str, Any]] = {
    "tower": {"target_modules": BLOCKS, "r": 4},
    "projector": {"target_modules": PROJECTORS, "r": 20, "lora_alpha": 30},
    "both": {
        "target_modules": f"{BLOCKS}|{PROJECTORS}",
        "r": 8,
        "use_rslora": True,
        "rank_pattern": {r".*merger.*": 3},
    },
    "whole": {"target_modules": f"{BLOCKS}|{PROJECTORS}|{LANGUAGE}", "r": 8},
    "language": {"target_modules": LANGUAGE, "r": 8},
}
TOKENS = 10


def make_adapters(root: Path, model: Path) -> dict[str, Path]:
    """One of every kind of ``ADAPTERS``, and ``twin``: the language part of ``whole``, and another tower."""
    paths = {name: root / name for name in [*ADAPTERS, "twin"]}
    for seed, (name, options) in enumerate([*ADAPTERS.items(), ("twin", ADAPTERS["whole"])], start=1):
        base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        tiny_adapter(base, paths[name], seed=seed, strength=0.25, **options)
    weights = {name: load_file(paths[name] / "adapter_model.safetensors") for name in ("whole", "twin")}
    mixed = {key: weights["twin" if "visual" in key else "whole"][key] for key in weights["whole"]}
    save_file(mixed, paths["twin"] / "adapter_model.safetensors", metadata={"format": "pt"})
    return paths


def over_all_frames(grid_thw: torch.Tensor, **_: Any) -> torch.Tensor:
    """SGLang's Qwen2.5-VL attends to all frames of a video, transformers' to one at a time, without adapters too."""
    return torch.nn.functional.pad(grid_thw.prod(1).cumsum(0), (1, 0)).int()


class Reference:
    """transformers + PEFT on the same files."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.processor = AutoProcessor.from_pretrained(model)
        # The server's, on a CPU; torchvision's resizes a little differently.
        self.processor.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil")
        base: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        base.generation_config.eos_token_id = None
        first, *others = adapters
        self.model: Any = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
        for name in others:
            self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()

    def ids(self, text: str, name: str | None, images: Sequence[Image.Image]) -> list[int]:
        """Greedy tokens."""
        return self._answer(self.processor(text=[text], images=list(images), return_tensors="pt"), name)

    def ids_of_video(self, text: str, name: str | None, frames: torch.Tensor) -> list[int]:
        """Greedy tokens of a text with a video [T, 3, H, W]."""
        inputs = self.processor(text=[text], videos=[frames], return_tensors="pt")
        with mock.patch.object(modeling_qwen2_5_vl, "get_vision_cu_seqlens", over_all_frames):
            return self._answer(inputs, name)

    @torch.inference_mode()
    def _answer(self, inputs: Any, name: str | None) -> list[int]:
        options = {"do_sample": False, "max_new_tokens": TOKENS}
        if name is None:
            with self.model.disable_adapter():
                output = self.model.generate(**inputs, **options)
        else:
            self.model.set_adapter(name)
            output = self.model.generate(**inputs, **options)
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found
