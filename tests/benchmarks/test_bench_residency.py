"""Residency over recorded rows: which figures there are, and what they compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import bench_residency
from benchmarks.serving.bench_residency import CASES, figures, main


def row(case: str, **values: float) -> dict[str, Any]:
    few = {"slots": 16, "adapters": 64, "tokens_per_second": 100.0, "ttft_p99": 0.1, "token_latency": 0.006}
    return {**few, "case": case, "failed": 0, **values}


def test_few_slots_are_compared_with_each_case_that_was_measured() -> None:
    rows = {"few": row("few"), "all": row("all", tokens_per_second=101.0, ttft_p99=0.08, slots=64)}
    assert figures({"few": rows["few"]}) == {}
    assert figures(rows) == {
        "residency.slots16_of_64_throughput": (pytest.approx(100 / 101), True),
        "residency.slots16_of_64_ttft_p99": (pytest.approx(1.25), False),
    }
    rows |= {"stock": row("stock", token_latency=0.012), "waiting": row("waiting", ttft_p99=0.125)}
    assert figures(rows)["residency.vs_sglang"] == (pytest.approx(0.5), False)
    assert figures(rows)["residency.ahead_ttft_p99"] == (pytest.approx(0.8), False)


def test_a_run_that_was_cut_short_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "residency.jsonl").write_text(json.dumps(row("few")) + "\n")
    asked: list[str] = []

    def serve(names: Any, scratch: Path, args: Any) -> Any:
        asked.extend(names)
        assert (args.adapters, args.slots, args.seconds) == (64, 16, 60.0)
        yield row(names[0], residency={})

    monkeypatch.setattr(bench_residency, "serve", serve)
    monkeypatch.setattr(bench_residency, "describe", lambda one: one["case"])
    summary = tmp_path / "summary.json"
    assert main(["--cases", "all", "few", "--out", str(tmp_path), "--summary", str(summary)]) == 0
    assert asked == ["all"] and set(CASES) >= {"all", "few", "waiting", "stock", "vllm"}
    names = {one["name"] for one in json.loads(summary.read_text())}
    assert names == {"residency.slots16_of_64_throughput", "residency.slots16_of_64_ttft_p99"}
    assert main(["--cases", "all", "few", "--out", str(tmp_path), "--summary", str(summary)]) == 0 and asked == ["all"]
