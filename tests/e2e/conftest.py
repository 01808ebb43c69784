"""Fixtures of the end-to-end tests that need engines of their own kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.support.engine_runs import EngineProcess
from tests.support.modes import (
    HALF,
    MORE,
    THREE,
    TWO,
    Expected,
    engine_options,
    expected_answers,
    make_adapters,
    make_forms,
)
from vlora_sgl.server_args import VLoraArgs


@pytest.fixture(scope="session")
def mode_adapters(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different kinds (``modes.make_adapters``)."""
    return make_adapters(tmp_path_factory.mktemp("modes"), tiny_model.path)


@pytest.fixture(scope="session")
def expected(tiny_model: TinyModel, mode_adapters: dict[str, Path]) -> dict[str | None, Expected]:
    """PEFT's answers of the base model and each of them."""
    return expected_answers(tiny_model.path, mode_adapters)


@pytest.fixture(scope="session")
def expected_combined(
    tiny_model: TinyModel, mode_adapters: dict[str, Path], expected: dict[str | None, Expected]
) -> dict[str | None, Expected]:
    """PEFT's answers, those of combinations too."""
    found = expected_answers(tiny_model.path, mode_adapters, [TWO, THREE, HALF, MORE]) | expected
    assert len({tuple(one.ids) for one in found.values()}) == len(found)
    return found


@pytest.fixture(scope="session")
def form_adapters(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that are more than plain LoRA (``modes.make_forms``)."""
    return make_forms(tmp_path_factory.mktemp("forms"), tiny_model.path)


@pytest.fixture(scope="session")
def expected_of_forms(tiny_model: TinyModel, form_adapters: dict[str, Path]) -> dict[str | None, Expected]:
    """PEFT's answers of the base model and each of them."""
    return expected_answers(tiny_model.path, form_adapters)


@pytest.fixture(scope="session")
def modes_engine(tiny_model: TinyModel, mode_adapters: dict[str, Path]) -> Iterator[EngineProcess]:
    """An engine with these adapters and slots for any form of others; its mode can be forced from batch to batch."""
    options = {**engine_options(tiny_model.path, mode_adapters), "max_loras_per_batch": 8}
    with EngineProcess(options, vlora=VLoraArgs(dora=True)) as process:
        yield process  # which starts while PEFT answers
