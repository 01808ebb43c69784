"""A trained adapter that is folded into FP8 weights keeps its accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.bench_quantised import measure


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_an_embedded_adapter_keeps_its_accuracy(blocks: bool, tmp_path: Path) -> None:
    beside, folded, lost = measure("digits", tmp_path / "digits", blocks, every=4)
    assert beside > 0.8 and abs(beside - folded) <= 0.02  # of a quarter of the pictures; the benchmark takes all
    assert 0.001 < lost < 0.05
