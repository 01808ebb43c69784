"""The LoRA trainer: it learns, touches only the language model, and counts exact answers as generation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vlora_sgl.generation.datasets import Example
from vlora_sgl.generation.trainer import LoraSettings, chat, exact_match, train_lora
from vlora_sgl.models import tiny

SHADES = {"grass": (30, 160, 40), "brick": (170, 60, 40)}


@pytest.fixture
def model() -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny.path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny.path())


def examples(folder: Path) -> list[Example]:
    made = []
    for name, colour in SHADES.items():
        for shift in range(2):
            path = folder / f"{name}{shift}.png"
            Image.new("RGB", (112, 112), tuple(c + 10 * shift for c in colour)).save(path)
            made.append(Example((path,), "What material is this surface?", name))
    return made


def test_training_changes_answers_and_only_the_language_model(processor: Any, model: Any, tmp_path: Path) -> None:
    data = examples(tmp_path)
    assert not any(exact_match(model, processor, data))
    before = {name: value.clone() for name, value in model.named_parameters()}
    adapter = train_lora(model, processor, data, LoraSettings(rank=8, epochs=30, batch_size=4))
    assert all(exact_match(adapter, processor, data))
    adapted = [name for name, _ in adapter.named_parameters() if "lora_" in name]
    assert adapted and all("language_model" in name and "visual" not in name for name in adapted)
    base = {n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in adapter.named_parameters()}
    assert all(torch.equal(base[name], value) for name, value in before.items())


def test_exact_match_is_what_greedy_generation_says(processor: Any, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "blank.png"
    Image.new("RGB", (112, 112), (20, 20, 20)).save(path)
    text = processor.apply_chat_template(chat("What pattern has the background?", 1), add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(path)], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    said = processor.tokenizer.decode(out, skip_special_tokens=True)
    right = Example((path,), "What pattern has the background?", said)
    wrong = Example((path,), "What pattern has the background?", said + " no")
    assert exact_match(model, processor, [right, wrong]) == [True, False]
