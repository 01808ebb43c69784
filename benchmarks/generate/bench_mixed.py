"""One answer that needs three adapters in turn, against each of them alone and all of them merged, token by token.

    python -m benchmarks.generate.bench_mixed [--summary FILE] [--steps N M] [--rows FILE]
    python -m benchmarks.generate.bench_mixed --recorded FILE     # the figures of a run's rows

On the embedded model's pictures (``tools.tiny.mixed``), in transformers. ``mixed_minus_own_points`` is the worst part
under the worst of three routings (by token ids, by position, learned) against that part's own adapter alone;
``merged_minus_own_points`` the mean of the parts of the better merge. Minutes on a GPU, longer on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.summary import SUMMARY, record
from tools.tiny import domains, mixed
from tools.tiny.train import load
from vlora_sgl.models import tiny


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(400, 1200),
        help="of 16 examples, of an adapter alone and of the three together",
    )
    parser.add_argument("--examples", type=int, nargs=2, default=(3000, 450), help="for training, and for the test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the trained adapters here")
    parser.add_argument("--rows", type=Path, help="where the report goes, as JSON")
    parser.add_argument("--recorded", type=Path, help="measure nothing: the figures of these rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    report = json.loads(args.recorded.read_text()) if args.recorded else measure(args)
    print(json.dumps(report, indent=1))
    if args.rows:
        args.rows.write_text(json.dumps(report, indent=1) + "\n")
    least = {kind: mixed.least_points(report, kind) for kind in mixed.ROUTINGS}
    own = report["own"]
    merged = max(mean(100 * (one[part] - own[part]) for part in mixed.PARTS) for one in report["merged"].values())
    for kind, points in least.items():
        record(f"routing.mixed_minus_own_points.{kind}", points, "points, worst part", True, summary=args.summary)
    worst = min(least.values())
    record("routing.mixed_minus_own_points", worst, "points, worst part and routing", True, summary=args.summary)
    record("routing.merged_minus_own_points", merged, "points, mean of the parts", True, summary=args.summary)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train and test what the command line asks for."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "domains", args.out or Path(folder) / "out"
        domains.prepare(data, mixed.PARTS)
        adapters = Path(tiny.path()).parent / "adapters"
        model, processor = load(tiny.path(), torch.device(args.device))
        sizes = tuple(args.steps), tuple(args.examples)
        return dict(mixed.measure(model, processor, adapters, data, out, *sizes, args.seed))


if __name__ == "__main__":
    main()
