"""Whatever an adapter's numbers, no other row changes, and what it computed is not found again.

Two ways to such numbers: valid files whose products overflow, and weights or scales spoiled behind the loader. The
adapter is the one most asked for, so that a mode which merges would merge it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import TinyModel
from tests.support.engine_runs import EngineProcess
from tests.support.modes import TEXT, TOKENS, Expected, check
from tests.support.tiny_random import make_adapter

pytestmark = pytest.mark.e2e

Answers = dict[str | None, Expected]
NAMES = ["bad", "bad", "all", None, "bad", "mlp", "bad", "bad"]
POISONS: dict[str, tuple[str, float] | None] = {
    "overflow": None,
    "nan scale": ("scale", float("nan")),
    "infinite scale": ("scale", float("inf")),
    "nan weights": ("weights", float("nan")),
    "infinite weights": ("weights", float("-inf")),
}


def request(name: str | None, temperature: float = 0.0) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}
    options = {"return_logprob": True, "top_logprobs_num": 2} if not temperature else {}
    return {"prompt": TEXT, "lora_path": name, "sampling_params": sampling, **options}


@pytest.fixture(scope="module")
def healthy(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("healthy") / "bad", tiny_model.path, 9)


@pytest.fixture(scope="module")
def overflowing(healthy: Path) -> Path:
    """Finite in bfloat16 and float32; a product of two is in neither."""
    path = healthy.parent / "overflowing"
    shutil.copytree(healthy, path)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())
    save_file({name: tensor.sign() * 1e30 for name, tensor in tensors.items()}, file)
    return path


def never_merged(engine: EngineProcess) -> dict[str, str | None]:
    """Why not, by adapter; ``None`` for those that may be."""
    return {adapter: shown["never_merged"] for adapter, shown in engine.state()["adapters"].items()}


@pytest.mark.parametrize("mode", ["unmerged", "mixture", "auto"])
@pytest.mark.parametrize("kind", POISONS)
def test_rows_that_are_not_finite_end_alone(
    modes_engine: EngineProcess, expected: Answers, healthy: Path, overflowing: Path, kind: str, mode: str
) -> None:
    engine, poison = modes_engine, POISONS[kind]
    engine.force_mode(mode)
    engine.flush()
    before, others = engine.state()["faults"]["nonfinite"], never_merged(engine)
    assert engine.load("bad", overflowing if poison is None else healthy) is None
    if poison is not None:
        engine.poison("bad", *poison)
    try:
        for temperature in (0.0, 1.0, 0.0):  # the second and third time with a filled prefix cache
            answers = engine.ask_each([request(name, temperature if name == "bad" else 0.0) for name in NAMES])
            for name, answer in zip(NAMES, answers, strict=True):
                if name == "bad":
                    assert isinstance(answer, str) and "adapter 'bad' computed values that are not finite" in answer
                else:
                    assert not isinstance(answer, str), answer
                    check(answer, expected[name])
        state = engine.state()
        assert state["faults"]["nonfinite"] == before + 3 * NAMES.count("bad")
        reasons = never_merged(engine)
        (reason,) = (reasons.pop(adapter) for adapter in reasons.keys() - others)
        assert reason is not None and reasons == others and None in others.values()
    finally:
        assert engine.unload("bad") is None
    if poison is not None:  # the same content, and nothing of what was computed under it
        assert engine.load("bad", healthy) is None
        (answer,) = engine.ask_each([request("bad")])
        assert not isinstance(answer, str), answer
        assert answer["meta_info"]["cached_tokens"] == 0 and len(answer["output_ids"]) == TOKENS
        assert engine.unload("bad") is None
