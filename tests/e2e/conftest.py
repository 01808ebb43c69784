"""Fixtures of the end-to-end tests that need engines of their own kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.support.modes import Expected, expected_answers, make_adapters


@pytest.fixture(scope="session")
def mode_adapters(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of different kinds (``modes.make_adapters``)."""
    return make_adapters(tmp_path_factory.mktemp("modes"), tiny_model.path)


@pytest.fixture(scope="session")
def expected(tiny_model: TinyModel, mode_adapters: dict[str, Path]) -> dict[str | None, Expected]:
    """PEFT's answers of the base model and each of them."""
    return expected_answers(tiny_model.path, mode_adapters)
