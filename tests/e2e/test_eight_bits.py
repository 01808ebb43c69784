"""``--vlora-adapter-weights fp8``: answers are those of PEFT with adapters whose factors were rounded to e4m3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyModel
from tests.support.eight_bits import rounded
from tests.support.engine_runs import EngineProcess
from tests.support.modes import THREE, TWO, Expected, ask, check_all, engine_options, expected_answers
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import VLoraArgs

pytestmark = pytest.mark.e2e
NAMES = ("all", "attention", "mlp", "vocabulary")
BATCHES: list[list[str | None]] = [
    *(["all", "all"], ["mlp", "all", "attention", None, "vocabulary", "dora"]),
    *([TWO, None, "mlp", THREE], ["dora", "attention"]),
]


@pytest.fixture(scope="module")
def given(mode_adapters: dict[str, Path], form_adapters: dict[str, Path]) -> dict[str, Path]:
    return {**{name: mode_adapters[name] for name in NAMES}, "dora": form_adapters["dora"]}


@pytest.fixture(scope="module")
def expected_of_rounded(
    tiny_model: TinyModel, given: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, Expected]:
    folder, dtype = tmp_path_factory.mktemp("rounded"), torch.float32 if is_plain_cpu() else torch.bfloat16
    made = {name: rounded(path, tiny_model.path, folder / name, dtype) for name, path in given.items()}
    return expected_answers(tiny_model.path, made) | expected_answers(tiny_model.path, made, [TWO, THREE])


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel, given: dict[str, Path]) -> Iterator[EngineProcess]:
    vlora = VLoraArgs(policy="vlora", adapter_weights="fp8")
    with EngineProcess(engine_options(tiny_model.path, given), vlora=vlora) as engine:
        yield engine


@pytest.mark.parametrize("mode", ["unmerged", "merged", "mixture"])
def test_answers_are_those_of_the_rounded_adapters(
    engine: EngineProcess, expected_of_rounded: dict[str | None, Expected], mode: str
) -> None:
    engine.force_mode(mode)
    for names in BATCHES:
        engine.flush()
        check_all(engine, names, expected_of_rounded)
    modes = {step.plan[1] for step in ask(engine, ["all", "all"]).steps if step.plan}
    assert mode in modes or mode == "mixture"


def test_slots_are_half_as_large_and_what_is_lost_is_said(engine: EngineProcess, given: dict[str, Path]) -> None:
    state = engine.state()
    assert state["pool"]["dtype"] == "float8_e4m3fn"
    assert {
        row["weights_loss"] is not None and 0.01 < row["weights_loss"] < 0.05 for row in state["adapters"].values()
    } == {True}
