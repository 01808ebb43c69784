"""The page of the sources' evaluation: as generated, and no row without a value or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import evaluation
from benchmarks.evaluation import Row, counts, page, rows, writer

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
ROWS = list(rows())


def test_the_page_is_what_the_figures_say() -> None:
    assert PAGE.read_text() == page(), "python -m benchmarks.evaluation --markdown docs/evaluation.md"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.figure or row.place)
def test_a_row_has_a_value_or_says_why_not(row: Row) -> None:
    if row.ours is None:
        assert len(row.reason) > 20
    if row.figure is not None and row.ours is None:
        assert writer(row.figure) in row.reason


def test_rows_are_counted() -> None:
    found = counts()
    assert found["rows"] == len(ROWS) > found["rows_measured"] >= found["rows_ahead"] > 0


@pytest.mark.parametrize(
    ("value", "better", "ahead"),
    [(1.0, "lower", True), (1.1, "lower", False), (1.1, "higher", True), (0.9, "higher", False)],
)
def test_who_is_ahead(value: float, better: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "figures", lambda: {"a.figure": {"value": value}})
    assert Row("T", "p", "w", "1", 1.0, better, "a.figure").ahead is ahead
    assert Row("T", "p", "w", "1", None, better, "a.figure").ahead is None


def test_a_row_with_neither_is_a_fault() -> None:
    with pytest.raises(ValueError, match="neither a figure nor a reason"):
        Row("T", "p", "w", "1")
    with pytest.raises(LookupError, match="no job"):
        writer("nobody.measures")
