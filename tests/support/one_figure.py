"""A benchmark of a moment, for the campaign's test: records one figure, having seen who else ran."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import summary
from benchmarks.summary import record

summary.card_name = lambda: "none"  # nothing is measured, and asking torch takes seconds

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("folder", type=Path)
parser.add_argument("--seconds", type=float, default=0.5)
parser.add_argument("--status", type=int, default=0)
parser.add_argument("--summary", type=Path)
args = parser.parse_args()
running = args.folder / f"{args.name}.running"
running.touch()
began = len(list(args.folder.glob("*.running"))) - 1
time.sleep(args.seconds)
beside = max(began, len(list(args.folder.glob("*.running"))) - 1)
running.unlink()
record(args.name, beside, "benchmarks beside it", False, summary=args.summary)
sys.exit(args.status)
