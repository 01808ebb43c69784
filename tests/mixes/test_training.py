"""A router learns, from answers alone, which of two adapters a question is for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlora_sgl.generation.datasets import Example
from vlora_sgl.generation.router import RouterSettings, balance_loss, make_mix
from vlora_sgl.generation.trainer import LoraSettings, save_adapter, train_lora
from vlora_sgl.mixes.spec import read_mix
from vlora_sgl.models import tiny

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 230)}
WORDS = {"What is it?": ("stop", "go"), "And this?": ("hot", "cold")}


def test_balance_loss_is_one_for_even_use_and_more_for_uneven() -> None:
    even = torch.eye(4).repeat(5, 1)
    assert float(balance_loss(even)) == pytest.approx(1.0)
    assert float(balance_loss(torch.eye(4)[:1].repeat(20, 1))) == pytest.approx(4.0)


def examples(folder: Path, question: str, count: int, seed: int) -> list[Example]:
    """Plain pictures in one of two colours, answered by one of the question's two words."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        which = int(torch.randint(0, 2, (), generator=generator))
        shade = [c + int(torch.randint(-20, 20, (), generator=generator)) for c in list(COLOURS.values())[which]]
        path = folder / f"{i}.png"
        Image.new("RGB", (112, 112), tuple(shade)).save(path)
        found.append(Example((path,), question, WORDS[question][which]))
    return found


def test_a_learned_mix_does_what_each_adapter_does(tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny.path())

    def base() -> Qwen2_5_VLForConditionalGeneration:
        return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)

    train, test, adapters = {}, {}, {}
    for i, question in enumerate(WORDS):
        train[question] = examples(tmp_path / f"train{i}", question, 32, i)
        test[question] = examples(tmp_path / f"test{i}", question, 16, 10 + i)
        settings = LoraSettings(rank=4, alpha=8, steps=25, batch_size=16)
        save_adapter(train_lora(base(), processor, train[question], settings), tmp_path / f"a{i}")
        adapters[f"a{i}"] = tmp_path / f"a{i}"
    settings = RouterSettings(steps=40, batch_size=16, learning_rate=1e-2)
    report = make_mix(base(), processor, adapters, train, test, tmp_path / "mix", settings)
    assert all(value >= 0.9 for value in report["oracle"].values()), report
    assert report["mix_minus_oracle_points"] >= -5, report
    assert max(report["members"][m][d] for m, d in zip(adapters, reversed(list(WORDS)), strict=True)) <= 0.2
    assert all(share > 0.05 for share in report["usage"].values())
    assert report["entropy"] <= math.log(2) and report["adjusted_rand"] > 0.9
    config = base().config.text_config
    spec = read_mix(tmp_path / "mix", "m", config.hidden_size, config.vocab_size)
    assert spec.members == ("a0", "a1") and spec.router is not None
