"""The count of answers that differ: what it runs, and what it says of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import equality
from benchmarks.summary import read

ROOT = Path(__file__).parents[2]


def test_every_file_that_is_run_exists() -> None:
    files = {name.partition("::")[0] for names in equality.SUBJECTS.values() for name in names}
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.parametrize(
    ("printed", "status", "value"),
    [("5 passed in 1s", 0, 0), ("1 failed, 4 passed, 1 error in 1s", 1, 2), ("no tests ran", 5, 1)],
)
def test_what_fails_is_counted(
    printed: str, status: int, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(stdout=f"...\n{printed}\n", returncode=status)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert equality.main(["tower", "--summary", str(tmp_path / "s.json")]) == int(value > 0)
    (row,) = read(tmp_path / "s.json")
    assert (row["name"], row["value"]) == ("tower.mismatches", value)
