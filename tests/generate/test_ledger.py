"""No step is made twice: not in one run, and not after a process was killed in the middle of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.worlds import random_world
from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.fusion import fuse_by_search
from vlora_sgl.generate.ledger import Ledger

ROOT = Path(__file__).parents[2]

# Packs a world whose steps take a while and leave a file each, as training does.
SLOW_RUN = """
import sys, time
from pathlib import Path
from tests.support.worlds import random_world
from vlora_sgl.generate.fusion import fuse_by_search
from vlora_sgl.generate.ledger import Ledger

folder = Path(sys.argv[1])
world, floors = random_world("mixed", 6, 3)

class Slow:
    def fuse(self, sequence):
        time.sleep(0.05)
        state = folder / "-".join(sequence)
        assert len(sequence) == 1 or (folder / "-".join(sequence[:-1])).exists()
        state.write_text(state.read_text() + "again" if state.exists() else "once")
        return world.accuracy(sequence)

    def probe(self, names):
        return world.probe(names)

ledger = Ledger(Slow(), floors, folder / "ledger.jsonl", "digest")
print(fuse_by_search(world.names, ledger, extra=12))
"""


def run(folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(folder)], cwd=ROOT, env=env, stdout=-1, text=True)


def fused(path: Path) -> list[tuple[str, ...]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(row["names"]) for row in rows if row["kind"] == "fuse"]


def test_a_killed_run_resumes_without_repeating_and_ends_the_same(tmp_path: Path) -> None:
    world, floors = random_world("mixed", 6, 3)
    whole = Ledger(world, floors)
    expected = fuse_by_search(world.names, whole, extra=12)
    path = tmp_path / "ledger.jsonl"
    for done in (2, 5):
        process = run(tmp_path)
        deadline = time.monotonic() + 60
        while not (path.exists() and len(fused(path)) >= done) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert done <= len(fused(path)) < whole.trainings, "it was killed in the middle"
    process = run(tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.strip() == str(expected)
    assert fused(path) == list(whole.steps)
    # The step that the kill interrupted may have left its state; no step that was finished is made again.
    again = [p.name for p in tmp_path.glob("d*") if p.read_text() != "once"]
    assert len(again) <= 2


def test_a_torn_last_line_is_dropped_and_made_again(tmp_path: Path) -> None:
    world, floors = random_world("mixed", 4, 1)
    path = tmp_path / "ledger.jsonl"
    first = fuse_by_search(world.names, Ledger(world, floors, path, "x"), extra=8)
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:7])
    world.asked = world.asked[:-1]
    assert fuse_by_search(world.names, Ledger(world, floors, path, "x"), extra=8) == first
    assert path.read_text() == text


def test_a_ledger_of_another_configuration_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    world, floors = random_world("mixed", 2, 1)
    path = tmp_path / "ledger.jsonl"
    Ledger(world, floors, path, "x").fuse(("d0",))
    with pytest.raises(ConfigError, match="another configuration"):
        Ledger(world, floors, path, "y")
    path.write_text(path.read_text().replace('"fuse"', '"fu', 1))
    with pytest.raises(ConfigError, match="damaged"):
        Ledger(world, floors, path, "x")
