"""The benchmark of experts without a GPU: figures from rows, the floor, adapters that are what they are said to be."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import bench_moe
from benchmarks.kernels.bench_moe import SHAPE, TINY, figures_of, make_adapters, make_model, step_bytes
from tests.benchmarks.test_bench_step import built, engines_asked_for, rows
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.layout import BaseLayout


def test_figures_are_over_lora_off() -> None:
    made = rows(off__base=5.0, ours16__base=5.1, ours16__eight=6.0, merged16__one=5.0, stock16__eight=9.0)
    found = figures_of(made)
    assert found == pytest.approx(
        {
            "decode8_over_off": 1.2,
            "prefill8_over_off": 1.2,
            "merged_over_off": 1.0,
            "base_over_off": 1.02,
            "overhead_vs_sglang": 0.25,
        }
    )
    assert figures_of([*made, *rows(off_again__base=4.0)])["decode8_over_off"] == 1.5  # the faster one counts
    assert figures_of([*made, *rows(off_again__base=9.0)]) == found
    assert figures_of(rows(ours16__eight=6.0)) == {}
    assert "overhead_vs_sglang" not in figures_of(rows(off__base=5.0, ours16__eight=6.0))


def test_a_step_reads_what_its_rows_choose() -> None:
    rank, layers = bench_moe.RANK, SHAPE["num_hidden_layers"]
    attention = 8 * rank * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)
    expert = rank * 3 * (2048 + 768)
    assert step_bytes(SHAPE, 32) == 2 * layers * (attention + 32 * 8 * expert)
    assert step_bytes(SHAPE, 10**6) == 2 * layers * (attention + 8 * 128 * expert)


def test_adapters_are_on_attention_and_all_experts(tmp_path: Path) -> None:
    make_adapters(tmp_path / "adapters", TINY)
    layout = BaseLayout.from_directory(make_model(tmp_path / "model", tiny=True))
    found = [read_adapter(tmp_path / "adapters" / f"adapter{i}", layout) for i in range(bench_moe.ADAPTERS)]
    assert len({one.report.digest for one in found}) == len(found)
    linears = {name for name in layout.shapes if name.startswith("layers")}
    assert {*found[0].modules} == linears and len(linears) == 2 * (4 + 3 * TINY["num_experts"])


def test_switches_leave_no_trace() -> None:
    found: dict[str, Any] = bench_moe.switches(tiny=True, count=5)
    assert found["mismatches"] == 0.0 and found["switch_bandwidth_share"] > 0.0


def test_every_engine_is_asked_for_in_words_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    args = bench_moe.parse(["--tiny"])
    lines = engines_asked_for(monkeypatch, lambda: bench_moe.run_engines(args, time.monotonic() + 60))
    assert lines.keys() == bench_moe.ENGINES.keys()
    assert all(("vlora" in built(monkeypatch, line)) == (name[:3] in ("our", "mer")) for name, line in lines.items())


def test_the_model_says_where_its_answers_end(tmp_path: Path) -> None:
    """Else a server whose grammars come from llguidance does not start."""
    assert json.loads((make_model(tmp_path, tiny=True) / "config.json").read_text())["eos_token_id"] is not None
