"""How long the whole search for a model's tiles takes on this GPU: ``python -m benchmarks.kernels.bench_search``.

Starts from nothing, with every rank and number of rows that ``tiling_search`` has by default, and keeps the table.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.summary import SUMMARY, record
from vlora_sgl.kernels.tiling_search import MODELS, SCALED, jobs_of, search

RANKS, ROWS, SLOTS = (8, 16, 32, 64, 128), (1, 16, 32, 64, 256, 1024, 8192), (8,)


def main(argv: Sequence[str] | None = None) -> int:
    """Search and record. Returns 1 if the budget was spent before the last key, and records nothing then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-vl-7b", choices=sorted(MODELS))
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds after which the search stops")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    parser.add_argument("--out", type=Path, default=Path("runs/tiles.json"), help="the table")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    jobs = [one for one in jobs_of(MODELS[args.model], RANKS, ROWS, SLOTS, torch.bfloat16) if one.op not in SCALED]
    args.out.unlink(missing_ok=True)
    began = time.monotonic()
    search(jobs, args.out, args.budget, args.workers, limit=24)
    minutes = (time.monotonic() - began) / 60
    found = len(json.loads(args.out.read_text())["entries"])
    print(f"{found} of {len(jobs)} keys in {minutes:.1f} minutes -> {args.out}")
    if found < len(jobs):
        return 1
    record("atmm.search_minutes", minutes, "minutes", False, summary=args.summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
