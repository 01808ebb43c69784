"""A router learns from answers alone, without being told the domains."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
import torch

from vlora_sgl.generation.datasets import read_jsonl
from vlora_sgl.generation.router import RouterSettings, balance_loss, make_mix
from vlora_sgl.mixes.spec import read_mix
from vlora_sgl.models import tiny
from vlora_sgl.models.tiny import domains


def test_balance_loss_is_one_for_even_use_and_more_for_uneven() -> None:
    even = torch.eye(4).repeat(5, 1)
    assert float(balance_loss(even)) == pytest.approx(1.0)
    assert float(balance_loss(torch.eye(4)[:1].repeat(20, 1))) == pytest.approx(4.0)


def test_a_learned_mix_beats_each_adapter_alone(tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny.path())
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)
    adapters = {name: tiny.adapters()[name] for name in ("digits", "surfaces")}
    domains.prepare(tmp_path, list(adapters))
    train, test = ({n: read_jsonl(tmp_path / n / f"{s}.jsonl")[:50] for n in adapters} for s in ("train", "test"))
    settings = RouterSettings(steps=60, learning_rate=1e-2)
    report = make_mix(model, processor, adapters, train, test, tmp_path / "mix", settings)
    assert all(value >= 0.8 for value in report["oracle"].values()), report
    # A minute of training does not reach the oracle, but it must beat every single adapter.
    single = max(mean(row.values()) for row in report["members"].values())
    assert mean(report["mix"].values()) >= single + 0.15, report
    assert report["members"]["digits"]["surfaces"] <= 0.2 and report["members"]["surfaces"]["digits"] <= 0.2, report
    assert all(share > 0.02 for share in report["usage"].values()), report
    assert 0 < report["entropy"] <= math.log(2) and -1 <= report["adjusted_rand"] <= 1, report
    config = model.config.text_config
    spec = read_mix(tmp_path / "mix", "m", config.hidden_size, config.vocab_size)
    assert spec.members == ("digits", "surfaces") and spec.router is not None
