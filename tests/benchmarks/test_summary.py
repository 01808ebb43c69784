import json
from pathlib import Path

import pytest

from benchmarks import summary


def test_newest_row_of_a_name_wins_and_old_rows_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary.json"
    summary.record("a.time", 2.0, "ms", False, summary=path, command="run a")
    summary.record("b.ratio", 1.5, "ratio", True, summary=path)
    row = summary.record("a.time", 1.25, "ms", False, summary=path)
    rows = json.loads(path.read_text())
    assert [r["value"] for r in rows] == [2.0, 1.5, 1.25]
    rows[0]["date"] = "2000-01-01T00:00:00+00:00"
    assert [r["name"] for r in summary.newest(rows)] == ["a.time", "b.ratio"]
    assert summary.newest(rows)[0]["value"] == 1.25
    assert set(row) >= {"card", "versions", "revision", "command", "date"} and "torch" in row["versions"]
    summary.main(["--summary", str(path)])
    assert "| `a.time` | 1.25 | ms | lower |" in capsys.readouterr().out


def test_merge_appends_each_row_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    summary.record("x", 1, "ratio", True, summary=there)
    assert (summary.merge(there, here), summary.merge(there, here)) == (1, 0)


def test_record_refuses_a_value_that_is_not_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        summary.record("x", "fast", "ms", False, summary=tmp_path / "s.json")


def test_a_command_names_no_file_outside_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = str(summary.ROOT / "benchmarks" / "results" / "x.json")
    rest = [
        "--tiny",
        "--rows",
        "/elsewhere/rows.json",
        "--summary",
        inside,
        "--parts",
        "a",
        "b",
        "--out",
        "/elsewhere",
    ]
    monkeypatch.setattr("sys.argv", [str(summary.ROOT / "tests" / "soak" / "__main__.py"), *rest])
    assert summary.running_command() == f"python -m tests.soak --tiny --summary {inside} --parts a b"


def test_the_page_of_figures_is_the_summarys(tmp_path: Path) -> None:
    written = tmp_path / "figures.md"
    summary.main(["--markdown", str(written)])
    shipped = summary.ROOT / "docs" / "figures.md"
    assert shipped.read_text() == written.read_text(), "python -m benchmarks.summary --markdown docs/figures.md"


def test_a_page_has_the_commands_of_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    for name, command in (("a.one", "run it"), ("a.two", "run more"), ("a.three", "run it"), ("b.one", "run b")):
        summary.record(name, 0.5, "ratio", True, command=command, card="a card", summary=path)
    text = summary.page(summary.newest(summary.read(path)))
    first, second = text.split("## b")
    assert [line.split("|")[1].strip() for line in first.splitlines() if line.startswith("| `")] == [
        "`a.one`",
        "`a.three`",
        "`a.two`",
    ]
    assert "1. `run it`\n2. `run more`" in first and "1. `run b`" in second
