"""Quantised bases answer as transformers with what their numbers mean, and PEFT's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.support.engine_runs import EngineProcess
from tests.support.modes import Expected, ask, check_all, engine_options, expected_answers
from tests.support.quantised import FORMATS, make
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import VLoraArgs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not is_plain_cpu(), reason="on a GPU SGLang's kernels quantise activations too"),
]
BATCHES: list[list[str | None]] = [["all"], ["mlp", "all", "attention", None, "all", "all"], [None, None, "mlp"]]


@dataclass
class Served:
    """An engine, the answers of its format's meaning, and where they came from."""

    name: str
    engine: EngineProcess
    expected: dict[str | None, Expected]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "fp8-block" else pytest.mark.slow) for name in FORMATS],
)
def served(
    request: pytest.FixtureRequest,
    tiny_model: TinyModel,
    mode_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """An engine of each format; one of them in every run of the tests."""
    adapters = {name: mode_adapters[name] for name in ("all", "attention", "mlp")}
    quantised, meant = make(request.param, tiny_model.path, tmp_path_factory.mktemp("quantised"))
    options = engine_options(quantised, adapters)
    if (flag := FORMATS[request.param].flag) is not None:
        options["quantization"] = flag
    with EngineProcess(options, vlora=VLoraArgs(policy="vlora")) as engine:
        yield Served(request.param, engine, expected_answers(meant, adapters))


def test_unmerged_answers_are_those_of_what_the_checkpoint_means(served: Served) -> None:
    served.engine.force_mode("unmerged")
    for names in BATCHES:
        check_all(served.engine, names, served.expected)


def test_folding_says_what_it_loses_and_restoring_brings_the_base_back(served: Served) -> None:
    """What a fold computes is held in tests/lora/test_quantised.py; here it runs in an engine."""
    engine = served.engine
    rows = list(engine.state()["adapters"].values())
    engine.force_mode("merged")
    engine.flush()  # keys and values of unmerged rows would be reused
    run = ask(engine, ["all", "all"])
    modes = {step.plan[1] for step in run.steps if step.plan}
    if not FORMATS[served.name].folds:
        assert modes == {"unmerged"} and all(row["merge_loss"] is None for row in rows)
        return
    assert all(row["never_merged"] is None and 0.001 < row["merge_loss"] < 0.05 for row in rows)
    assert len(rows) == 3 and "merged" in modes
    engine.force_mode("unmerged")
    engine.flush()
    check_all(engine, BATCHES[1], served.expected)
