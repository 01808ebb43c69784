"""An adapter on the input embedding and the LM head answers as PEFT's does, in every mode and company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyModel
from tests.support.engine_runs import EngineProcess
from tests.support.modes import TEXT, Expected, check_all, expected_answers
from vlora_sgl.platforms.cpu import is_plain_cpu

pytestmark = pytest.mark.e2e

Answers = dict[str | None, Expected]
SUM = '{"vocabulary": 0.7, "mlp": 0.6}'
BATCHES: dict[str, list[str | None]] = {
    "alone": ["vocabulary"],
    "rows of tokens": ["tokens"],
    "beside the merged": ["all", "vocabulary", "all", "all"],
    "all kinds": ["mlp", "vocabulary", None, "all", SUM, "tokens", "attention", "all", "vocabulary", "all", "tokens"],
}


@pytest.fixture(scope="module")
def answers(tiny_model: TinyModel, mode_adapters: dict[str, Path], expected: Answers) -> Answers:
    """PEFT's answers, one of a combination with it too."""
    return expected_answers(tiny_model.path, mode_adapters, [SUM]) | expected


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
@pytest.mark.parametrize("batch", BATCHES)
def test_it_answers_as_peft_does_in_every_mode_and_company(
    modes_engine: EngineProcess, answers: Answers, mode: str, batch: str
) -> None:
    modes_engine.force_mode(mode)
    modes_engine.flush()
    run = check_all(modes_engine, BATCHES[batch], answers)
    if len(BATCHES[batch]) == 1:
        assert {step.plan[2] for step in run.steps} == {run.steps[0].plan[2]}, "it is never merged"
    check_all(modes_engine, BATCHES[batch], answers)


def test_the_log_probabilities_of_a_prompt_are_pefts(
    modes_engine: EngineProcess, tiny_model: TinyModel, mode_adapters: dict[str, Path]
) -> None:
    """The LM head then sees every row, of requests whose prompts begin anywhere in a chunk."""
    from peft import PeftModel
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    ids = AutoTokenizer.from_pretrained(tiny_model.path)(TEXT, return_tensors="pt").input_ids
    wanted: dict[str | None, torch.Tensor] = {}
    for name in ("vocabulary", "all", None):
        model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_model.path, dtype=torch.float32).eval()
        if name is not None:
            model = PeftModel.from_pretrained(model, mode_adapters[name]).eval()
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0].log_softmax(-1)
        wanted[name] = scores[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert (wanted["vocabulary"] - wanted[None]).abs().max() > 0.1
    modes_engine.force_mode("unmerged")
    modes_engine.flush()
    names = ["all", "vocabulary", None, "vocabulary"]
    starts = [0, 5, 0, 0]
    found = modes_engine.generate(
        prompt=[TEXT] * len(names),
        lora_path=names,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=starts,
    ).answers
    for name, start, answer in zip(names, starts, found, strict=True):
        scores = [score for score, _, _ in answer["meta_info"]["input_token_logprobs"] if score is not None]
        exact = wanted[name][-len(scores) :]
        assert len(exact) >= len(wanted[name]) - start
        torch.testing.assert_close(torch.tensor(scores), exact, atol=2e-3 if is_plain_cpu() else 0.1, rtol=1e-3)
