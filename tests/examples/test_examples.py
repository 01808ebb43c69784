"""The examples run, on the shared server as on any model and on the embedded model, and write what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Server

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, url: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--url", url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_multi_round_vqa_prints_cached_tokens(server: Server) -> None:
    server.flush()
    printed = run("multi_round_vqa.py", server.url, "--adapter", "A", "--adapter", "B")
    rows = [line.split() for line in printed.splitlines() if line.startswith(("  A ", "  B "))]
    cached = [int(row[-2]) for row in rows]
    assert [row[0] for row in rows] == ["A", "A", "B", "A"]
    assert cached[0] < 60 and cached[1] >= 64, "the photograph takes 64 tokens, known from the second round on"
    assert cached[2] < 60, "another adapter's first round does not find them"
    assert cached[3] > cached[1]
    assert printed.splitlines()[-1].endswith(f"open {server.url}/ui in a browser.")


def test_visual_retrieval_of_any_model(server: Server, tmp_path: Path) -> None:
    run("apps/visual_retrieval.py", server.url, "--limit", "2", "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "retrieval.jsonl").read_text().splitlines()]
    assert {row["image"] for row in rows} == {"china.jpg", "flower.jpg"}
    assert rows[0]["match"] >= rows[1]["match"]
    assert Image.open(tmp_path / "retrieval.png").size[0] > 400


def test_video_analytics_of_any_model(server: Server, tmp_path: Path) -> None:
    options = ("--streams", "3", "--chunks", "1", "--deadline", "60", "--out", str(tmp_path))
    printed = run("apps/video_analytics.py", server.url, *options)
    rows = [json.loads(line) for line in (tmp_path / "analytics.jsonl").read_text().splitlines()]
    assert [row["truth"] for row in rows] == [f"camera moves {way}" for way in ("right", "left", "down")]
    assert "0 of 3 chunks late" in printed and "the server counts 0 of 6 deadlines missed" in printed
    assert Image.open(tmp_path / "analytics.png").size[1] > 300


def test_the_embedded_model_answers_better_with_its_adapters(embedded: str) -> None:
    printed = run("multi_round_vqa.py", embedded)
    found = re.search(r"base (\d+) of (\d+) right, adapters (\d+) of", printed)
    assert found is not None, printed
    base, asked, adapters = map(int, found.groups())
    assert adapters >= 0.7 * asked and adapters - base >= 0.3 * asked, printed


def test_the_embedded_model_finds_what_is_asked_for(embedded: str, tmp_path: Path) -> None:
    printed = run("apps/visual_retrieval.py", embedded, "--out", str(tmp_path))
    precision = [tuple(map(float, one)) for one in re.findall(r"average precision ([\d.]+) \(about ([\d.]+)", printed)]
    assert len(precision) == 3, "drawn scenes, photographs, faces"
    assert all(reached > 0.6 and reached > chance + 0.3 for reached, chance in precision), printed
    rows = [json.loads(line) for line in (tmp_path / "retrieval.jsonl").read_text().splitlines()]
    assert any(row["boxes"] for row in rows)
    assert Image.open(tmp_path / "retrieval.png").size[0] > 1000


@pytest.mark.parametrize("streams", [1, 8])
def test_heads_of_the_embedded_model_watch_streams_in_time(embedded: str, tmp_path: Path, streams: int) -> None:
    every, chunks = (0.5, 4) if streams == 1 else (4.0, 2)
    options = ("--streams", str(streams), "--chunks", str(chunks), "--every", str(every), "--deadline", "20")
    printed = run("apps/video_analytics.py", embedded, *options, "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "analytics.jsonl").read_text().splitlines()]
    assert len({row["stream"] for row in rows}) == streams and len(rows) == streams * chunks
    assert sum(row["action"] == row["truth"] for row in rows) >= 0.75 * len(rows), printed
    assert sum(bool(row["objects"]) for row in rows) >= 0.75 * len(rows), printed
    assert not any(row["late"] for row in rows), printed
    assert f"the server counts 0 of {2 * len(rows)} deadlines missed" in printed


def test_a_deadline_that_cannot_be_kept_is_said_to_be_missed(embedded: str, tmp_path: Path) -> None:
    printed = run("apps/video_analytics.py", embedded, "--chunks", "2", "--deadline", "0.001", "--out", str(tmp_path))
    assert "2 of 2 chunks late" in printed and "the server counts 4 of 4 deadlines missed" in printed
    rows = [json.loads(line) for line in (tmp_path / "analytics.jsonl").read_text().splitlines()]
    assert all(row["late"] and row["action"] for row in rows), "a late answer is an answer"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_learns_to_count_from_the_server_s_answers(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import rl_counting as example
        from serving import Model, server

        from benchmarks.serving.bench_sources import share_of_bound
    finally:
        sys.path.remove(str(EXAMPLES))
    with server(Model(example.tiny.path(), {}, trained=True), tmp_path / "log", *example.FLAGS) as url:
        policy = example.Policy(url, seed=0)
        learned = example.learn(policy, seed=0, steps=10)
        share = share_of_bound(policy, example.counting()[2][:8])
    assert learned["before"] == pytest.approx(0.26, abs=0.02), "what the model's card says"
    assert learned["after"] - learned["before"] > 0.1
    assert 0 < share <= 1
