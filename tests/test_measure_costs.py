"""The batches that are measured, and the files; the engine itself is run by hand (a minute)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.managers.test_cost_fit import COSTS, log
from vlora_sgl import measure_costs
from vlora_sgl.managers.policies.cost_table import load_tables, table_for
from vlora_sgl.managers.policies.iteration_log import read_log


def test_the_schedule_has_every_mode_with_and_without_base_rows() -> None:
    cases = list(measure_costs.batches(["a", "b", "c"], 16))
    assert {mode for mode, _ in cases} == {"unmerged", "mixture", "merged"}
    assert {len(rows) for _, rows in cases} == {1, 2, 8, 16}
    assert all(set(rows) == {"a"} for mode, rows in cases if mode == "merged")
    assert any(mode == "mixture" and None in rows for mode, rows in cases)
    assert any(mode == "mixture" and set(rows) == {"a", "b", "c"} for mode, rows in cases)
    assert any(mode == "unmerged" and set(rows) == {None} for mode, rows in cases)


def test_a_log_becomes_a_table_that_a_server_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"costs": replace(COSTS, merge=1.0).to_json()}, *log(noise=0.0)]
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_log(tmp_path / "log")[1]) == len(lines) - 1
    target = tmp_path / "table.json"
    assert measure_costs.main(["--iterations", str(tmp_path / "log"), "--save", str(target)]) == 0
    assert "merge 9.55 ms" in capsys.readouterr().out
    table = load_tables(target)["atmm"]
    assert table.merge == pytest.approx(COSTS.merge, rel=1e-3)
    assert "fitted by vlora_sgl.measure_costs" in table.provenance
    again = ["--iterations", str(tmp_path / "log"), "--save", str(target), "--json"]
    assert measure_costs.main(again) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["saved"] == str(target) and set(told["error"]) and told["provenance"] == table.provenance
    assert table_for("any", None, str(target)) == table  # type: ignore[arg-type]


def test_mistakes_cost_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_costs.main(["--iterations", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("vlora_sgl.measure_costs:")
