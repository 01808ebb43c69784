"""The campaign runs its jobs in lanes, some alone, kills what takes too long and gathers the figures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.campaign import JOBS, STAGE, Campaign, Job, main
from benchmarks.summary import read

FAKE = "tests.support.one_figure"


def test_lanes_quiet_jobs_limits_and_figures(tmp_path: Path) -> None:
    def job(name: str, *flags: str, seconds: float = 60.0, cards: int = 1, alone: bool = False) -> Job:
        return Job(name, f"{FAKE} {name} {tmp_path} {' '.join(flags)}", seconds, cards, alone)

    jobs = [
        job("left", "--seconds 3"),
        job("right", "--seconds 3"),
        job("quiet", alone=True),
        job("both", cards=2),
        job("large", cards=3),
        job("fails", "--status 3"),
        job("endless", "--seconds 600", seconds=3.0),
    ]
    campaign = Campaign(tmp_path / "out", ["0", "1"], time.monotonic() + 120)
    campaign.LEAST = 1.0
    campaign.run(jobs)
    results = {name: text.partition(" after")[0] for name, text in campaign.results.items()}
    assert results["large"] == "left out: needs 3 cards"
    assert results["fails"] == "status 3" and results["endless"] == "stopped"
    assert [results[name] for name in ("left", "right", "quiet", "both")] == ["status 0"] * 4
    beside = {row["name"]: row["value"] for row in read(tmp_path / "out" / "summary.json")}
    assert beside.keys() == {"left", "right", "quiet", "both", "fails"}
    assert beside["quiet"] == beside["both"] == 0 and max(beside["left"], beside["right"]) == 1
    again = Campaign(tmp_path / "out", ["0", "1"], time.monotonic() + 120)
    again.run([job for job in jobs if job.name in ("left", "quiet", "fails")])
    results = {name: text.partition(" after")[0] for name, text in again.results.items()}
    assert results == {"left": "status 0, before", "quiet": "status 0, before", "fails": "status 3"}
    late = Campaign(tmp_path / "late", ["0"], time.monotonic() + 1)
    late.run(jobs[:1])
    assert late.results == {"left": "left out: no time"}


def test_every_job_names_a_benchmark_that_takes_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for job in JOBS:
        assert job.seconds <= STAGE
        module = job.command.split()[0]
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None and f"{job.name} " in listed
        text = Path(spec.origin).read_text()
        flags = [word for word in job.command.split() if word.startswith("--")] + ["--summary"] * job.records
        assert all(f'"{flag}"' in text for flag in flags), (module, flags)
