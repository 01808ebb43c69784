"""The encoder's benchmark without a GPU: its adapters fit its model, and figures come from rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.serving.bench_tower import CASES, FIGURES, RANK, ratios, report
from benchmarks.serving.shape7b import make_model, make_tower_adapters
from benchmarks.summary import read
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.layout import BaseLayout, is_tower


@pytest.mark.parametrize("tiny", [True, False])
def test_adapters_fit_every_linear_of_the_encoder(tiny: bool, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", tiny)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))
    layout = BaseLayout.from_model(model)
    (made,) = make_tower_adapters(tmp_path, path, ["one"], RANK).values()
    read_back = read_adapter(made, layout).modules
    assert set(read_back) == {name for name in layout.shapes if is_tower(name)}
    assert all(pair.a.shape[0] == RANK and pair.b.any() for pair in read_back.values())


def test_figures_are_over_no_lora(tmp_path: Path) -> None:
    ms = {("off", "each"): 20.0, ("unused", "each"): 20.1, ("tower", "each"): 22.0, ("tower", "merged"): 20.2}
    assert {(engine, case) for engine, cases in CASES.items() for case in cases} == set(ms)
    rows: list[dict[str, Any]] = [
        {"engine": engine, "case": case, "eager": eager, "ms": own * (1 + eager)}
        for (engine, case), own in ms.items()
        for eager in (False, True)
    ]
    found = ratios(rows, False)
    assert found == pytest.approx({"encode8_over_off": 1.1, "merged_over_off": 1.01, "unused_over_off": 1.005})
    places = {"summary": tmp_path / "summary.json", "rows": tmp_path / "rows.json"}
    for tiny in (True, False):
        assert not places["summary"].exists(), "a tiny model's figures are nobody's"
        report(rows, type("", (), {"tiny": tiny, **places}))  # type: ignore[arg-type]
    assert {row["name"]: row["value"] for row in read(places["summary"])} == {
        f"tower.{name}": pytest.approx(found[name]) for name in FIGURES
    }
    assert json.loads(places["rows"].read_text())["rows"] == rows
