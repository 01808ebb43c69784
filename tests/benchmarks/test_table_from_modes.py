"""The shipped H200 table is what its script makes of the measurements beside it, and describes them."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import pytest

from benchmarks.serving.bench_modes import cases_of
from benchmarks.serving.table_from_modes import CONTEXT, PROMPT, ROWS, STEP_CONTEXT, tables
from benchmarks.summary import RESULTS
from vlora_sgl.managers.policies.cost_table import shipped

MEASURED = json.loads((RESULTS / "modes_r64.json").read_text())
STEPS = json.loads((RESULTS / "kernels" / "step-h200.json").read_text())
SHIPPED = shipped("h200-7b")


def test_the_shipped_table_is_made_from_the_measurements() -> None:
    for operator, table in tables(MEASURED, STEPS).items():
        for phase in ("prefill", "decode"):
            costs, saved = getattr(table, phase), getattr(SHIPPED[operator], phase)
            for name in costs.__slots__:
                assert getattr(saved, name) == pytest.approx(getattr(costs, name), rel=1e-3, abs=1e-8), name


@pytest.mark.parametrize(("phase", "tokens", "tolerance"), [("decode", 1, 0.05), ("prefill", PROMPT, 0.07)])
def test_it_describes_every_measured_case(phase: str, tokens: int, tolerance: float) -> None:
    seen = 0
    for case in cases_of([f"a{n}" for n in range(8)], ROWS, True, "attention"):
        if "attention" in case.name or (phase == "decode" and case.engine != "stock"):
            continue
        table = SHIPPED["csgmv" if case.engine == "stock" else "atmm"]
        groups = {adapter: tokens * count for adapter, count in Counter(case.adapters).items()}
        context = ROWS * CONTEXT if phase == "decode" else 0.0
        seconds = getattr(table, phase).seconds(groups, context, None if case.mode == "unmerged" else "a0")
        measured = statistics.median(row[phase] for row in MEASURED["rows"] if row["case"] == case.name)
        assert seconds == pytest.approx(measured, rel=tolerance), case.name
        seen += 1
    assert seen == (4 if phase == "decode" else 21)


def test_our_decode_steps_are_those_of_today() -> None:
    measured = {row["case"]: row["step_ms"] / 1e3 for row in STEPS["rows"] if row["engine"] == "ours"}
    eight = {f"a{n}": ROWS // 8 for n in range(8)}
    decode = SHIPPED["atmm"].decode
    assert decode.seconds({None: ROWS}, ROWS * STEP_CONTEXT, None) == pytest.approx(measured["base"], rel=1e-3)
    for case, groups in (("one", {"a0": ROWS}), ("eight", eight)):
        adds = decode.lora_seconds(groups, None)
        assert adds == pytest.approx(measured[case] - measured["base"], rel=0.02), case
    assert decode.lora_seconds(eight, None) == pytest.approx(1.04e-3, rel=0.02)
    # A mixture reads the same slots: what it adds is at most what unmerged rows add, and a little for pairs.
    mixture = decode.lora_seconds(eight, "a0")
    assert measured["mixture"] - measured["base"] < mixture < 1.05 * decode.lora_seconds(eight, None)
