"""Merging a shard takes a fraction of the shard in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_stays_far_below_three_shards() -> None:
    command = [sys.executable, "-m", "benchmarks.serving.bench_export_memory", "--megabytes", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout.rpartition(":")[2]) < 1
