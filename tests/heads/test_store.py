"""The adapter's own description and heads on disk: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlora_sgl.errors import HeadError
from vlora_sgl.heads import ClassifyHead, CountHead, DetectHead, load_heads, read_description, save_heads
from vlora_sgl.heads.store import DESCRIPTION_FILE, WEIGHTS_FILE

HIDDEN = 16


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    heads = [ClassifyHead("digit", HIDDEN, ["0", "1"]), CountHead("dots", HIDDEN, 4)]
    save_heads(
        tmp_path,
        [*heads, DetectHead("find", HIDDEN, ["cat"], threshold=0.3)],
        invocation="after_image",
        prompt="Which digit?",
        metrics={"accuracy": 0.9},
    )
    return tmp_path


def test_round_trip(directory: Path) -> None:
    description = read_description(directory)
    assert (description.invocation, description.prompt) == ("after_image", "Which digit?")
    assert description.metrics == {"accuracy": 0.9}
    heads = load_heads(directory, HIDDEN)
    assert list(heads) == ["digit", "dots", "find"] and heads["find"].threshold == 0.3
    x, tensors = torch.randn(3, HIDDEN), load_file(directory / WEIGHTS_FILE)
    for name, head in heads.items():
        assert torch.equal(head(x), x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        assert not any(p.requires_grad for p in head.parameters())


def test_an_adapter_without_description_has_no_heads(tmp_path: Path) -> None:
    assert load_heads(tmp_path, HIDDEN) == {} and read_description(tmp_path).invocation is None


def test_an_adapter_names_its_own_sequence(tmp_path: Path) -> None:
    save_heads(tmp_path, [], invocation=(5, 6))
    assert read_description(tmp_path).invocation == (5, 6)


def test_an_invocation_as_peft_writes_it(tmp_path: Path) -> None:
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"peft_type": "LORA", "alora_invocation_tokens": [5, 6]}))
    assert read_description(tmp_path).invocation == (5, 6), "without a description of ours"
    save_heads(tmp_path, [])
    assert read_description(tmp_path).invocation == (5, 6)
    save_heads(tmp_path, [], invocation=(5, 6))
    assert read_description(tmp_path).invocation == (5, 6)
    save_heads(tmp_path, [], invocation="after_image")
    with pytest.raises(HeadError, match=r"'after_image'.*alora_invocation_tokens.*\(5, 6\)"):
        read_description(tmp_path)
    settings.write_text(json.dumps({"peft_type": "LORA", "alora_invocation_tokens": [5, "6"]}))
    with pytest.raises(HeadError, match="token ids"):
        read_description(tmp_path)


HEAD = {"name": "digit", "kind": "classify", "labels": ["0", "1"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"colour": 1}, r"unknown keys \['colour'\]"),
        ({"invocation": "before_image"}, "invocation"),
        ({"invocation": []}, "invocation"),
        ({"invocation": [True]}, "invocation"),
        ({"invocation": [-1]}, "invocation"),
        ({"invocation": [1 << 70]}, "invocation"),
        ({"prompt": 3}, "prompt"),
        ({"heads": {}}, "list"),
        ({"heads": [{**HEAD, "name": "a.b"}]}, "name"),
        ({"heads": [HEAD, HEAD]}, "two heads"),
        ({"heads": [{**HEAD, "kind": "segment"}]}, "kinds are classify, count, detect"),
        ({"heads": [{"name": "digit", "kind": "classify"}]}, "needs"),
        ({"heads": [{**HEAD, "threshold": 0.5}]}, "may have"),
        ({"heads": [{**HEAD, "labels": "01"}]}, "labels must be list"),
        ({"heads": [{**HEAD, "labels": [0, 1]}]}, "strings"),
        ({"heads": [{"name": "n", "kind": "count", "maximum": True}]}, "maximum must be int"),
    ],
)
def test_a_wrong_description_is_refused_by_key(directory: Path, change: dict[str, Any], message: str) -> None:
    (directory / DESCRIPTION_FILE).write_text(json.dumps({"format": 1, "heads": [HEAD], **change}))
    with pytest.raises(HeadError, match=message):
        read_description(directory)


def test_wrong_weights_are_refused_by_tensor(directory: Path) -> None:
    good = load_file(directory / WEIGHTS_FILE)
    for change, message in (
        ({"digit.weight": torch.zeros(2, HIDDEN + 1)}, r"digit.weight is \[2, 17\], expected \[2, 16\]"),
        ({"digit.bias": torch.tensor([0.0, float("nan")])}, "digit.bias has values that are not finite"),
        ({"extra.bias": torch.zeros(1)}, r"unknown tensors \['extra.bias'\]"),
    ):
        save_file({**good, **change}, directory / WEIGHTS_FILE)
        with pytest.raises(HeadError, match=message):
            load_heads(directory, HIDDEN)
    del good["find.bias"]
    save_file(good, directory / WEIGHTS_FILE)
    with pytest.raises(HeadError, match=r"missing tensors \['find.bias'\]"):
        load_heads(directory, HIDDEN)
    (directory / WEIGHTS_FILE).write_bytes(b"truncated")
    with pytest.raises(HeadError, match="cannot be read"):
        load_heads(directory, HIDDEN)
    (directory / DESCRIPTION_FILE).write_text('{"format": 1}')
    with pytest.raises(HeadError, match="does not describe"):
        load_heads(directory, HIDDEN)
    (directory / DESCRIPTION_FILE).write_text("{")
    with pytest.raises(HeadError, match="not readable as JSON"):
        read_description(directory)


def test_asking_for_a_head_lists_what_exists(directory: Path) -> None:
    description = read_description(directory)
    assert description.head_named(None, "count", "A") == "dots"
    assert description.head_named("digit", None, "A") == "digit"
    for name, kind in (("digits", None), ("digit", "count")):
        with pytest.raises(HeadError, match=r"'A'.*digit \(classify\), dots \(count\), find \(detect\)"):
            description.head_named(name, kind, "A")
    with pytest.raises(HeadError, match="several"):
        description.head_named(None, None, "A")
