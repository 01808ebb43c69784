"""The demonstration on two CPU cores: minutes it takes, floors that break, how near adapters come to their teachers.

    python -m benchmarks.generate.bench_demo [--summary FILE] [--config FILE]

Runs what ``make generate-demo`` runs, from nothing, in processes that are pinned to two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.summary import SUMMARY, record
from vlora_sgl.generate.config import read_config

ROOT = Path(__file__).parents[2]
CORES = 2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "examples/generate-demo.yaml")
    parser.add_argument("--threads", type=int, default=CORES, help="of each process; fewer where the cores are shared")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(args.threads)}

    def python(*command: str) -> int:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env)
        os.sched_setaffinity(process.pid, cores)
        return process.wait()

    started = time.monotonic()
    if python("examples/generate_demo_data.py"):
        raise SystemExit("the demonstration's data could not be made")
    output = read_config(args.config).output
    shutil.rmtree(output, ignore_errors=True)
    if python("-m", "vlora_sgl.generate", str(args.config)) == 2:
        raise SystemExit("the demonstration's configuration is faulty")
    minutes = (time.monotonic() - started) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((output / "report.json").read_text())
    gaps = [row["teacher"] - row["accuracy"] for row in report["datasets"] if row["teacher"] is not None]
    record("generation.demo_minutes_2_cores", minutes, "minutes", False, summary=args.summary)
    record(
        "generation.demo_cpu_minutes", (used.ru_utime + used.ru_stime) / 60, "CPU minutes", False, summary=args.summary
    )
    record("generation.floors_broken", report["floors_broken"], "data sets", False, summary=args.summary)
    record("generation.teacher_gap_points", round(100 * max(gaps), 6), "points", False, summary=args.summary)
    print(f"{minutes:.1f} minutes; {len(report['adapters'])} adapters, bound {report['bound']}; gaps {gaps}")


if __name__ == "__main__":
    main()
