"""A token router learns from answers alone, without being told the domains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tools.tiny import domains
from vlora_sgl.generate.datasets import read_jsonl, write_jsonl
from vlora_sgl.generate.token_router import RouterSettings, balance_loss, make_routed
from vlora_sgl.models import tiny
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import RoutedSpec, read_routed
from vlora_sgl.routed.token_router import Router


def test_balance_loss_is_one_for_even_use_and_more_for_uneven() -> None:
    even = torch.eye(4).repeat(5, 1)
    assert float(balance_loss(even)) == pytest.approx(1.0)
    assert float(balance_loss(torch.eye(4)[:1].repeat(20, 1))) == pytest.approx(4.0)


@pytest.mark.parametrize("context", ["prefix", "token"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_straight_weights_are_the_served_ones_with_the_slope_of_the_soft_ones(context: str, top_k: int) -> None:
    torch.manual_seed(0)
    router, x, slope = Router(16, 3, context), torch.randn(2, 5, 16), torch.randn(2, 5, 3)
    routed = RoutedModel(None, RoutedSpec(("a", "b", "c"), router=router, top_k=top_k))

    def weights(temperature: float | None, straight: bool = False) -> torch.Tensor:
        routed.temperature, routed.straight = temperature, straight
        routed._route(None, (x,), {})
        return routed.weights

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((weights * slope).sum(), router.w1)[0]

    served, soft, straight = weights(None), weights(0.5), weights(0.5, straight=True)
    assert not served.requires_grad and bool(((served > 0).sum(-1) == top_k).all())
    assert bool((soft > 0).all()) and not torch.allclose(soft, served, atol=0.1)
    torch.testing.assert_close(straight, served)
    torch.testing.assert_close(gradient(straight), gradient(weights(0.5)))
    assert bool((gradient(weights(0.5)) != 0).any())


def test_a_learned_routed_adapter_answers_like_the_best_adapter_of_each_domain(tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny.path())
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32)
    adapters = {name: tiny.adapters()[name] for name in ("photos", "surfaces")}
    data: dict[str, dict[str, list]] = {"train": {}, "test": {}}
    for name in adapters:
        rows = domains.DOMAINS[name]()
        for split, part, count in (("train", rows[0], 40), ("test", rows[2], 24)):
            write_jsonl(tmp_path / name / f"{split}.jsonl", part[:: len(part) // count][:count])
            data[split][name] = read_jsonl(tmp_path / name / f"{split}.jsonl")
    settings = RouterSettings(steps=30, batch_size=8, learning_rate=1e-2)
    report = make_routed(model, processor, adapters, data["train"], data["test"], tmp_path / "routed", settings)
    for name in adapters:
        other = next(one for one in adapters if one != name)
        assert report["oracle"][name] >= 0.75 and report["members"][other][name] <= 0.2, report
        assert report["routed"][name] >= report["oracle"][name] - 0.1, report
    assert all(share > 0.1 for share in report["usage"].values()), report
    assert 0 < report["entropy"] <= math.log(2) and report["adjusted_rand"] > 0.8, report
    config = model.config.text_config
    spec = read_routed(tmp_path / "routed", "m", config.hidden_size, config.vocab_size)
    assert spec.members == ("photos", "surfaces") and spec.router is not None
