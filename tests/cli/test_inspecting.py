"""``vlora inspect`` tells what loads, what not and why, and the cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.lora_adapters import TEXT, tiny_adapter, tiny_model
from vlora_sgl.cli import main


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("qwen2").config.save_pretrained(directory)
    return directory


def test_inspect_prints_what_matched_and_the_cost(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=["q_proj", "v_proj"])
    assert main(["inspect", str(tmp_path), "--model", str(model_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["modules"] == {"q_proj": 3, "v_proj": 3}
    hidden, kv = TEXT["hidden_size"], TEXT["hidden_size"] // 2
    factors = 3 * 4 * ((hidden + hidden) + (kv + hidden))
    assert report["nbytes"] == 4 * factors
    assert report["slot_rank"] == 16  # for an adapter of rank 4
    assert report["slot_bytes"] in (4 * 2 * factors, 4 * 4 * factors)  # by the dtype the configuration names
    assert main(["inspect", str(tmp_path)]) == 0
    assert "12, all matched" in capsys.readouterr().out


def test_inspect_shows_the_vision_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("qwen3_vl")
    model.config.save_pretrained(tmp_path / "model")
    targets = r".*(visual\.blocks\.\d+\.attn\.qkv|visual\.deepstack_merger_list\.0\.linear_fc1|layers\.0.*q_proj)"
    tiny_adapter(model, tmp_path / "adapter", r=20, target_modules=targets, rank_pattern={"q_proj": 4})
    inspect = ["inspect", str(tmp_path / "adapter"), "--model", str(tmp_path / "model")]
    assert main([*inspect, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tower = {"visual attn.qkv": 2, "visual deepstack_merger_list.linear_fc1": 1}
    assert report["modules"] == {"q_proj": 1, **tower} and report["layers"] == 1
    assert (report["slot_rank"], report["tower_slot_rank"]) == (16, 32)
    elements = 32 * (2 * (96 + 32) + (128 + 128))
    assert report["tower_slot_bytes"] in (2 * elements, 4 * elements)
    assert main(inspect) == 0
    assert "tower slot:" in capsys.readouterr().out


def test_inspect_says_why_it_would_be_refused(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=["q_proj"])
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "use_qalora": True}))
    assert main(["inspect", str(tmp_path), "--model", str(model_dir)]) == 1
    assert "refused:" in (error := capsys.readouterr().err) and "QA-LoRA" in error


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"use_dora": True}, "note: DoRA: the rows of 3 modules' weights get the norms trained"),
        ({"lora_bias": True}, "note: lora_bias: B of 3 modules has a bias"),
        ({"bias": "all"}, "note: bias: those of 9 modules of the base model are replaced"),
        (
            {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
            "note: an activated LoRA: it starts at the last occurrence of the tokens [5, 6]",
        ),
    ],
    ids=["dora", "lora_bias", "bias", "activated"],
)
def test_inspect_explains_what_is_more_than_plain_lora(
    options: Any, note: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=["q_proj"], **options)
    assert main(["inspect", str(tmp_path), "--model", str(model_dir)]) == 0
    assert note in capsys.readouterr().out


def test_inspect_says_when_the_model_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--model", str(tmp_path)]) == 1
    assert "not a model directory" in capsys.readouterr().err
