"""The shipped H200 table is what its script makes of the measurements beside it, and describes them."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import pytest

from benchmarks.serving.bench_modes import cases_of
from benchmarks.serving.table_from_modes import CONTEXT, PROMPT, ROWS, tables
from benchmarks.summary import RESULTS
from vlora_sgl.managers.policies.cost_table import shipped

MEASURED = json.loads((RESULTS / "modes_r64.json").read_text())
SHIPPED = shipped("h200-7b")


def test_the_shipped_table_is_made_from_the_measurements() -> None:
    for operator, table in tables(MEASURED).items():
        for phase in ("prefill", "decode"):
            costs, saved = getattr(table, phase), getattr(SHIPPED[operator], phase)
            for name in costs.__slots__:
                assert getattr(saved, name) == pytest.approx(getattr(costs, name), rel=1e-3, abs=1e-8), name


@pytest.mark.parametrize(("phase", "tokens", "tolerance"), [("decode", 1, 0.05), ("prefill", PROMPT, 0.07)])
def test_it_describes_every_measured_case(phase: str, tokens: int, tolerance: float) -> None:
    seen = 0
    for case in cases_of([f"a{n}" for n in range(8)], ROWS, True, "attention"):
        if "attention" in case.name:
            continue
        table = SHIPPED["csgmv" if case.engine == "stock" else "atmm"]
        groups = {adapter: tokens * count for adapter, count in Counter(case.adapters).items()}
        context = ROWS * CONTEXT if phase == "decode" else 0.0
        seconds = getattr(table, phase).seconds(groups, context, None if case.mode == "unmerged" else "a0")
        measured = statistics.median(row[phase] for row in MEASURED["rows"] if row["case"] == case.name)
        assert seconds == pytest.approx(measured, rel=tolerance), case.name
        seen += 1
    assert seen == 21
