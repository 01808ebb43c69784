"""Who chooses what: the user, a measurement, SGLang."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl, defaults
from vlora_sgl.startup import measured
from vlora_sgl.startup.measured import FAMILIES, HOPPER, QWEN2_5_VL, SAYS, TABLE

CAPABILITY = {HOPPER: (9, 0), "Ampere": (8, 0), "Blackwell": (10, 0)}


@pytest.fixture(params=CAPABILITY)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's GPU is of that family."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: CAPABILITY[request.param])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: f"a {request.param}")
    for module in (defaults, measured):
        monkeypatch.setattr(module, "is_plain_cpu", lambda: False)
    return str(request.param)


@pytest.fixture(params=[QWEN2_5_VL, "LlamaForCausalLM", None])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str | None]:
    """A model's directory, and what its configuration says it is; no directory at all for ``None``."""
    path = tmp_path / "model"
    if request.param is not None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"architectures": [request.param]}))
    return str(path), request.param


def expected(family: str, kind: str | None) -> dict[str, Any]:
    return {row.field: row.value for row in TABLE if row.family == family and row.architecture in (None, kind)}


def test_rows_are_for_fields_that_sglang_has_and_say_where_they_are_from() -> None:
    fields = {field.name for field in dataclasses.fields(_sgl.ServerArgs)}
    assert {row.field for row in TABLE} <= set(SAYS) <= fields
    assert all(row.family in FAMILIES.values() and row.source[:5] in ("H100,", "H200,") for row in TABLE)
    keys = [(row.family, row.architecture, row.field) for row in TABLE]
    assert len(keys) == len(set(keys)), "one row for each"


def test_only_what_was_measured_is_set(family: str, model: tuple[str, str | None]) -> None:
    path, kind = model
    found = defaults.engine_defaults(path)
    assert {field: found[field] for field in SAYS if field in found} == expected(family, kind)
    if family != HOPPER:
        assert not set(found) & set(SAYS), "on a card that nobody has measured SGLang chooses"


@pytest.mark.parametrize("how", ["flag", "equals", "file"])
@pytest.mark.parametrize("field", SAYS)
def test_what_the_user_sets_stays(
    field: str, how: str, family: str, model: tuple[str, str | None], tmp_path: Path
) -> None:
    flag = "--" + field.replace("_", "-")
    (tmp_path / "settings.yaml").write_text(f"{flag[2:]}: '4'\n")
    given = {"flag": [flag, "4"], "equals": [f"{flag}=4"], "file": ["--config", str(tmp_path / "settings.yaml")]}[how]
    argv = ["--model-path", model[0], *given]
    assert flag not in defaults.command_line_defaults(argv)
    assert field in defaults.given_fields(argv)
    others = set(expected(family, model[1])) - {field}
    assert {"--" + name.replace("_", "-") for name in others} <= set(defaults.command_line_defaults(argv))


def test_amds_cards_are_no_hoppers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    assert measured.family() == HOPPER
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert measured.family() is None


def settings(path: str, **values: Any) -> Any:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="breakable", bs=values.pop("cuda_graph_bs_prefill", [8])))
    fields: dict[str, Any] = {"attention_backend": "x", "mm_attention_backend": None, "sampling_backend": "flashinfer"}
    fields["enable_lora_overlap_loading"] = False
    return SimpleNamespace(
        model_path=path, tp_size=1, cuda_graph_backend_prefill=None, cuda_graph_config=graphs, **{**fields, **values}
    )


def test_the_start_says_who_chose_what(family: str, model: tuple[str, str | None]) -> None:
    path, kind = model
    ours = expected(family, kind)
    found = defaults.settle(settings(path, **ours))._vlora_chosen
    assert {field for field, one in found["settings"].items() if one["by"] == "measured"} == set(ours)
    assert {one["by"] for field, one in found["settings"].items() if field not in ours} <= {"SGLang"}
    assert all("20" in one["measured"] for one in found["settings"].values() if one["by"] == "measured")
    json.dumps(found)
    (line,) = measured.line(found).splitlines()
    assert line.startswith(f"a {family}: attention ") and "sampling flashinfer (SGLang)" in line
    if kind == QWEN2_5_VL and family == HOPPER:
        assert "encoder attention triton_attn (measured)" in line and "graphs of prefills to 2048 tokens" in line


def test_a_users_choice_is_the_users_even_where_it_was_the_fastest(model: tuple[str, str | None], family: str) -> None:
    ours = expected(HOPPER, QWEN2_5_VL)
    found = defaults.settle(settings(model[0], **ours), set(ours))._vlora_chosen["settings"]
    assert {field for field, one in found.items() if one["by"] == "user"} == set(ours)


def test_what_sglang_changes_afterwards_is_sglangs(model: tuple[str, str | None], family: str) -> None:
    found = defaults.settle(settings(model[0], attention_backend="flashinfer"))._vlora_chosen["settings"]
    assert found["attention_backend"] == {"value": "flashinfer", "by": "SGLang"}


def test_a_plain_cpu_has_no_choice(model: tuple[str, str | None]) -> None:
    made = settings(model[0], attention_backend="torch_native")
    made.cuda_graph_config.prefill.backend = "disabled"
    found = defaults.settle(made)._vlora_chosen
    assert found["gpu"] is None and {one["by"] for one in found["settings"].values()} == {"plain CPU"}
    assert found["settings"]["cuda_graph_bs_prefill"]["value"] is None


@pytest.mark.parametrize("text", [None, "", "- a\n", "a: [", "{}"])
def test_a_file_of_settings_that_is_none_is_left_to_sglang(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text)
    assert {"config", "port"} <= defaults.given_fields(["--config", str(path), "--port", "1"])
