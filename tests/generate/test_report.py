"""The report page: every number of the run is on it, broken floors are marked, names are escaped."""

from __future__ import annotations

import builtins
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from vlora_sgl.generate.report import render, write_report

ROW = {
    "task": "classification",
    "metric": "top1",
    "floor": 0.8,
    "examples": {"train": 300, "validation": 100, "test": 100},
    "needed": 0.866,
    "base": 0.1,
    "teacher": None,
}
REPORT = {
    "base": "tiny",
    "confidence": 0.95,
    "order": "search",
    "seed": 0,
    "heads": False,
    "rehearsal": 0.5,
    "device": "cpu",
    "seconds": 12.3,
    "trainings": 4,
    "trainings_resumed": 1,
    "bound": 2,
    "floors_broken": 1,
    "adapters": [{"name": "adapter-1", "datasets": ["a<b", "c"]}, {"name": "adapter-2", "datasets": ["d"]}],
    "curves": [["a<b", "c", "d"]],
    "steps": [
        {"datasets": ["a<b"], "accuracy": {"a<b": 0.911}, "broken": []},
        {"datasets": ["a<b", "c"], "accuracy": {"a<b": 0.902, "c": 0.85}, "broken": []},
        {"datasets": ["a<b", "c", "d"], "accuracy": {"a<b": 0.7, "c": 0.6, "d": 0.9}, "broken": ["a<b", "c"]},
        {"datasets": ["d"], "accuracy": {"d": 0.95}, "broken": []},
    ],
    "datasets": [
        ROW | {"name": "a<b", "adapter": "adapter-1", "validation": 0.902, "accuracy": 0.9},
        ROW | {"name": "c", "adapter": "adapter-1", "validation": 0.85, "accuracy": 0.777, "teacher": 0.955},
        ROW | {"name": "d", "adapter": "adapter-2", "validation": 0.95, "accuracy": 0.95},
    ],
}


def test_the_page_says_what_the_run_found(tmp_path: Path) -> None:
    write_report(REPORT, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT
    page = (tmp_path / "report.html").read_text()
    assert "<td class='n bad'>0.777</td>" in page and "<td class='n'>0.955</td>" in page
    assert "1 of 3 data sets lie below their floor" in page
    assert "<td class='n'>0.866</td><td class='n bad'>0.850</td>" in page and "95% confidence" in page
    assert "floor not shown: a&lt;b, c" in page and "a<b" not in page
    assert page.count("<svg") == 3
    kept = copy.deepcopy(REPORT) | {"floors_broken": 0}
    assert "Every data set keeps its floor" in render(kept)


def test_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    assert render(REPORT) == render(copy.deepcopy(REPORT))


def test_without_matplotlib_there_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    page = render(REPORT)
    assert "<svg" not in page and "pip install matplotlib" in page and "0.777" in page
