"""A learned token router against the best single adapter, on the embedded model's domains.

    python -m benchmarks.generate.bench_token_router [--summary FILE] [--steps N] [--out DIR]

Trains the token router of the shipped routed adapter anew, together with its members unless ``--alone``, and measures
it on test images, in transformers, against the adapters as they were; bench_tiny measures the shipped routed adapter
as served. Minutes on a GPU, longer on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.summary import SUMMARY, record
from tools.tiny import domains
from tools.tiny.train import ROUTER_STEPS, train_routed
from vlora_sgl.models import tiny


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=ROUTER_STEPS, help="of 16 examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="leave the adapters as they are, and the domains untold")
    parser.add_argument("--out", type=Path, help="keep the routed adapter here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "domains"
        domains.prepare(data, sorted({domain for domain, _ in domains.ADAPTERS.values()}))
        out = args.out or Path(folder) / "routed"
        adapters = Path(tiny.path()).parent / "adapters"
        report = train_routed(
            tiny.path(), adapters, data, out, torch.device(args.device), args.steps, args.seed, not args.alone
        )
    gap, least = report["routed_minus_oracle_points"], min(report["usage"].values())
    record("routing.learned_minus_oracle_points", gap, "points, mean of the domains", True, summary=args.summary)
    record("routing.least_used_member", least, "share of tokens", True, summary=args.summary)
    for domain, accuracy in report["routed"].items():
        oracle, base = report["oracle"][domain], report["base"][domain]
        points = 100 * (accuracy - oracle)
        record(f"routing.learned_minus_oracle_points.{domain}", points, "points", True, summary=args.summary)
        print(f"{domain}: routed adapter {accuracy:.3f}, oracle {oracle:.3f}, base {base:.3f}")
    print(f"{gap:+.2f} points; used {report['usage']}; adjusted Rand index {report['adjusted_rand']:.3f}")


if __name__ == "__main__":
    main()
