"""The examples run on the shared server and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Server

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, server: Server, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--url", server.url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_multi_round_vqa_prints_cached_tokens(server: Server) -> None:
    server.flush()
    printed = run("multi_round_vqa.py", server, "--adapter", "A", "--adapter", "B")
    rows = [line.split() for line in printed.splitlines() if line.startswith(("  A ", "  B "))]
    cached = [int(row[-2]) for row in rows]
    assert [row[0] for row in rows] == ["A", "A", "B", "A"]
    assert cached[0] < 60 and cached[1] >= 64, "the photograph takes 64 tokens, known from the second round on"
    assert cached[2] < 60, "another adapter's first round does not find them"
    assert cached[3] > cached[1]


def test_visual_retrieval(server: Server, tmp_path: Path) -> None:
    run("apps/visual_retrieval.py", server, "--limit", "2", "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "retrieval.jsonl").read_text().splitlines()]
    assert {row["image"] for row in rows} == {"china.jpg", "flower.jpg"}
    assert rows[0]["match"] >= rows[1]["match"]
    assert Image.open(tmp_path / "retrieval.png").size[0] > 400


def test_video_analytics(server: Server, tmp_path: Path) -> None:
    run("apps/video_analytics.py", server, "--chunks", "1", "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "analytics.jsonl").read_text().splitlines()]
    assert [row["camera"] for row in rows] == ["right", "left", "down"]
    assert Image.open(tmp_path / "analytics.png").size[1] > 600
