"""Every mode, every neighbour: the same answers, equal to PEFT merged and unmerged.

An engine for this and for isolation, because only there can a mode be forced from batch to batch. It prefills in
chunks and keeps a radix cache. On a GPU it schedules with overlap and replays decode graphs of both variants; on a CPU
it does neither.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_runs import EngineProcess
from tests.support.modes import CHUNK, Expected, check_all

pytestmark = pytest.mark.e2e

Answers = dict[str | None, Expected]
MODES = ("unmerged", "merged", "mixture")
BATCHES: dict[str, list[str | None]] = {
    "alone": ["all"],
    "alike": ["all", "all", "all"],
    "with base": ["all", None, "all", "all"],
    "base with": [None, None, "attention", None],
    "all kinds": ["mlp", "all", "attention", None, "all", "all", "mlp"],
    "base alone": [None, None],
}


@pytest.fixture
def engine(modes_engine: EngineProcess) -> EngineProcess:
    return modes_engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
def test_modes_and_neighbours_leave_answers_alone(
    engine: EngineProcess, expected: Answers, mode: str, batch: str
) -> None:
    engine.force_mode(mode)
    engine.flush()
    names = BATCHES[batch]
    cold, warm = check_all(engine, names, expected), check_all(engine, names, expected)
    assert all(answer["meta_info"]["cached_tokens"] > CHUNK for answer in warm.answers)
    prefills = [step for step in cold.steps if step.kind == "prefill"]
    assert len(prefills) >= 3 and all(step.tokens <= CHUNK for step in prefills), "prefill must have been chunked"
    ran = {step.plan[1] for step in cold.steps if step.rows == len(names)}
    if set(names) == {None}:
        # Base rows alone merge nothing; a mode that merges keeps what is merged.
        assert ran <= {"unmerged", "mixture"}
    elif mode == "merged":
        assert ran == {"merged" if len(set(names)) == 1 else "mixture"}
    else:
        assert ran == {mode}


def test_a_stream_of_batches_in_every_order_of_modes(engine: EngineProcess, expected: Answers) -> None:
    before = engine.state()["switches"]
    for mode, names in (
        ("merged", ["all"]),
        ("merged", ["mlp"]),
        ("mixture", ["attention", None, "mlp"]),
        ("unmerged", ["mlp", "all"]),
        ("merged", ["attention"]),
        ("mixture", [None]),
        ("merged", ["all"]),
        ("unmerged", [None]),
    ):
        engine.force_mode(mode)
        check_all(engine, names, expected)
    after = engine.state()["switches"]
    assert all(after[kind]["count"] > before[kind]["count"] for kind in ("merge", "direct", "unmerge"))


def test_unloading_the_merged_adapter_unmerges_it_first(
    engine: EngineProcess, expected: Answers, mode_adapters: dict[str, Path]
) -> None:
    engine.force_mode("merged")
    check_all(engine, ["all"], expected)
    assert engine.state()["merged"] == "all"
    assert engine.unload("all") is None
    assert engine.state()["merged"] is None
    check_all(engine, [None, "mlp"], expected)
    assert engine.load("all", mode_adapters["all"]) is None
    check_all(engine, ["all"], expected)
    assert engine.state()["merged"] == "all"
