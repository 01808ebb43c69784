"""What transformers + PEFT + a head say, for the end-to-end tests."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.ties import COARSE
from vlora_sgl.heads import Grid, load_heads
from vlora_sgl.heads.worker import merge_images
from vlora_sgl.platforms.cpu import is_plain_cpu

IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def make_image(seed: int, size: tuple[int, int] = (112, 84)) -> Image.Image:
    """A noisy image of ``size`` (width, height), repeatable."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image) -> str:
    """The image as a PNG data URL."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(text: str, images: int = 1) -> str:
    """A user's turn with images, in the tiny model's template."""
    return f"<|im_start|>user\n{IMAGE_MARK * images}{text}<|im_end|>\n<|im_start|>assistant\n"


ROUNDING = 1.0 if is_plain_cpu() else 40.0 if COARSE else 10.0
"""A GPU serves in 16 bits what the reference computes in float32."""


def assert_close(found: Any, wanted: Any, tolerance: float = 2e-3 * ROUNDING) -> None:
    """Equal but for rounding of the numbers inside."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        if is_tie(wanted, tolerance):
            found, wanted = ({key: answer[key] for key in ("kind", "probabilities")} for answer in (found, wanted))
        for key, value in wanted.items():
            if key == "boxes" and ROUNDING > 1:
                assert_boxes_close(found[key], value, tolerance)
            else:
                assert_close(found[key], value, tolerance)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    else:
        assert found == wanted


def is_tie(answer: dict[str, Any], tolerance: float) -> bool:
    """Whether an answer that picks the best of several falls either way by the rounding of a GPU."""
    if ROUNDING == 1 or "probabilities" not in answer:
        return False
    second, best = sorted(answer["probabilities"])[-2:]
    return bool(best - second <= 2 * tolerance)


def assert_boxes_close(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    """Nearly all boxes have an equal one among the others: rounding swaps near ties, and what they suppress.

    With eight bits of mantissa that may be two of a few.
    """

    def equal(one: Any, other: Any) -> bool:
        try:
            assert_close(one, other, tolerance)
        except AssertionError:
            return False
        return True

    for some, others in ((found, wanted), (wanted, found)):
        lonely = [one for one in some if not any(equal(one, other) for other in others)]
        assert len(lonely) <= max(2 if COARSE else 0, 0.1 * len(some)), (lonely, others)


class Reference:
    """transformers + PEFT on the CPU, float32."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(model, use_fast=False)
        self.model_path = model
        self.build = lambda: Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()

    def answer(self, adapter: Path, head: str, prompt: str, *images: Image.Image) -> Any:
        """The head's answer about one or several images."""
        from peft import PeftModel

        peft = PeftModel.from_pretrained(self.build(), adapter).eval()
        inputs = self.processor(text=[prompt], images=list(images), return_tensors="pt")
        with torch.no_grad():
            states = peft(**inputs, output_hidden_states=True).hidden_states[-1][0]  # post-norm, [tokens, hidden]
        module = load_heads(adapter, states.shape[-1])[head]
        if module.features == "last_token":
            return module.postprocess(module(states[-1:])[0])
        grids = [Grid(height // 2, width // 2, 28) for _, height, width in inputs["image_grid_thw"].tolist()]
        raw = module(states[inputs["input_ids"][0] == peft.config.image_token_id])
        parts = raw.split([grid.cells for grid in grids])
        return merge_images([module.postprocess(part, grid) for part, grid in zip(parts, grids, strict=True)])

    def generate_activated(self, adapter: Path, prompt: str, image: Image.Image, tokens: int) -> list[int]:
        """Greedy tokens of an adapter that starts after the image: the prefix on the base, the rest with it."""
        from peft import PeftModel

        peft = PeftModel.from_pretrained(self.build(), adapter).eval()
        inputs = self.processor(text=[prompt], images=[image], return_tensors="pt")
        ids = inputs["input_ids"]
        start = int((ids[0] == peft.config.image_token_id).nonzero().max()) + 1
        shown = (ids == peft.config.image_token_id).int()
        positions, _ = peft.base_model.model.model.get_rope_index(
            ids, mm_token_type_ids=shown, image_grid_thw=inputs["image_grid_thw"]
        )
        with torch.no_grad():
            with peft.disable_adapter():
                first = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
                state = peft(input_ids=ids[:, :start], position_ids=positions[..., :start], use_cache=True, **first)
            out: list[int] = []
            step, where = ids[:, start:], positions[..., start:]
            while len(out) < tokens:
                state = peft(input_ids=step, position_ids=where, past_key_values=state.past_key_values, use_cache=True)
                out.append(int(state.logits[0, -1].argmax()))
                step, where = torch.tensor([[out[-1]]]), where[..., -1:] + 1
        return out
