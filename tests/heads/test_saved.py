"""A PEFT classification head becomes a head of ours, with the weights that PEFT trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.support.lora_adapters import TEXT, tiny_adapter
from vlora_sgl.errors import HeadError
from vlora_sgl.heads import load_heads, read_description
from vlora_sgl.heads.store import DESCRIPTION_FILE

HIDDEN = TEXT["hidden_size"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = Qwen2ForSequenceClassification(Qwen2Config(**TEXT, num_labels=3, pad_token_id=0))
    tiny_adapter(model, tmp_path, target_modules=["q_proj"], task_type="SEQ_CLS")
    return tmp_path


def test_it_answers_as_transformers_does(directory: Path) -> None:
    config = Qwen2Config(**TEXT, num_labels=3, pad_token_id=0)
    torch.manual_seed(3)
    model = Qwen2ForSequenceClassification(config).eval()
    head = load_heads(directory, HIDDEN)["score"]
    from peft import PeftModel

    peft = PeftModel.from_pretrained(model, directory).eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        states = peft.base_model.model.model(ids).last_hidden_state[:, -1]
        torch.testing.assert_close(head(states), peft(input_ids=ids).logits)
    assert head.postprocess(head(states)[0])["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def describe(directory: Path, **head: object) -> None:
    text = json.dumps({"format": 1, "heads": [{"name": "score", "kind": "classify", **head}]})
    (directory / DESCRIPTION_FILE).write_text(text)


def test_its_labels_may_be_described(directory: Path) -> None:
    describe(directory, labels=["cat", "dog", "owl"])
    assert load_heads(directory, HIDDEN)["score"].labels == ("cat", "dog", "owl")


def test_a_description_that_does_not_fit_is_refused(directory: Path) -> None:
    describe(directory, labels=["cat", "dog"])
    with pytest.raises(HeadError, match="saved with 3 outputs; it is described as classify of 2 labels"):
        read_description(directory)


def test_a_head_of_another_width_is_refused(directory: Path) -> None:
    with pytest.raises(HeadError, match=r"score.weight is \[3, 32\], expected \[3, 64\]"):
        load_heads(directory, 64)
