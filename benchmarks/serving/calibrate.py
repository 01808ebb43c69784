"""How far the simulator is from a server: fits costs to a replay's iteration log and simulates the same traces.

    python -m benchmarks.serving.calibrate RESULTS      # a folder that bench_e2e wrote; records policy.simulator.error

Prompts are shortened by the share that the prefix cache had. HTTP, tokenization and image preprocessing take no time
in the simulator: what they cost is part of the error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_e2e import WORKLOADS
from benchmarks.serving.policies import compared_policy
from benchmarks.serving.simulate import Machine, Replica, Report
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.traces import trace
from benchmarks.summary import SUMMARY, record
from vlora_sgl.managers.policies import Limits
from vlora_sgl.managers.policies.cost_fit import describe, fit
from vlora_sgl.managers.policies.cost_table import CostTable
from vlora_sgl.managers.policies.iteration_log import read_log


def simulated(row: dict[str, Any], costs: CostTable, believed: CostTable) -> Report:
    """The trace of a row, served by its policy in the simulator.

    Args:
        row: of ``bench_e2e``.
        costs: what iterations take.
        believed: the table that the server planned by.
    """
    load = replace(WORKLOADS[row["workload"]], arrivals="azure", rate=row["rate"], adapters=row["adapters"])
    machine = Machine(max_batch=row["max_batch"], slots=row["slots"], kv_tokens=65536)
    replica = Replica(compared_policy(row["system"], believed, Limits()), costs, machine)
    for name in (f"a{n}" for n in range(row["slots"])):
        replica.residency.mark_used(name)  # the replay was warmed up
    for arrival in trace(replace(load, skew=row["skew"], seed=row["seed"]), row["seconds"]):
        replica.offer(replace(arrival, prompt=max(1, round(arrival.prompt * (1 - row["cached_share"])))))
    replica.advance()
    return replica.report()


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder with e2e-*.jsonl and iterations-ours.jsonl")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    believed, log = read_log(args.results / "iterations-ours.jsonl")
    fitted = fit(log, believed, "")
    print(describe(fitted))
    rows = [json.loads(line) for path in args.results.glob("e2e-*.jsonl") for line in path.read_text().splitlines()]
    errors = []
    for row in rows:
        if row["workload"] not in WORKLOADS or row["heads"] or SYSTEMS[row["system"]].server != "ours":
            continue
        report = simulated(row, fitted.table, believed)
        errors.append(report.token_latency / row["token_latency"] - 1)
        told = f"{1e3 * row['token_latency']:.2f} ms a token, simulated {1e3 * report.token_latency:.2f}"
        print(f"{row['system']:9s} skew {row['skew']:.2f} rate {row['rate']:5.1f}: {told}: {errors[-1]:+.1%}")
    if errors:
        error = statistics.fmean(map(abs, errors))
        print(f"mean of |error| {error:.3f}, worst {max(map(abs, errors)):.3f}, over {len(errors)} replays")
        record("policy.simulator.error", error, "ratio", False, card=rows[0]["card"], summary=args.summary)


if __name__ == "__main__":
    main()
