"""Simulated fleets: up to 64 replicas and thousands of adapters, behind the replica router's own routing objects.

    python -m benchmarks.serving.fleet      # 2 to 64 replicas, as many adapters as the fleet has slots, and four times

Every replica is the simulator's engine with the server's policy on a measured cost table. Adapters are loaded from
host memory or disk when a batch needs them; what is compared is how often, and what it does to latency.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.serving.simulate import Machine, Replica, capacity, quantile
from benchmarks.serving.traces import Workload, trace
from benchmarks.summary import SUMMARY
from vlora_sgl.cluster.placement import Affinity, Random, RoundRobin, Routing
from vlora_sgl.managers.policies import make_policy
from vlora_sgl.managers.policies.cost_table import CostTable, shipped

RESULTS = SUMMARY.parent / "serving" / "fleet.jsonl"


class Member(Replica):
    """A simulated replica as a routing policy sees it (``placement.Candidate``)."""

    number = 0

    def holds(self, adapter: str) -> bool:
        """Whether the adapter has a slot."""
        return adapter in self.resident


@dataclass(frozen=True)
class FleetRow:
    """What a fleet did.

    Attributes:
        loads: adapters brought to a device.
        token_latency: latencies summed over tokens summed, seconds.
        p99_latency: of a request, seconds.
        busiest: requests of the busiest replica over the mean.
    """

    routing: str
    replicas: int
    adapters: int
    slots: int
    skew: float
    requests: int
    loads: int
    token_latency: float
    p99_latency: float
    busiest: float


def simulate_fleet(
    name: str, routing: Routing, costs: CostTable, machine: Machine, load: Workload, seconds: float, replicas: int
) -> FleetRow:
    """Serve ``seconds`` of ``load``, the whole fleet's, to the last request."""
    fleet = [Member(make_policy("cost", costs), costs, machine) for _ in range(replicas)]
    for number, member in enumerate(fleet):
        member.number = number
    for arrival in trace(load, seconds):
        for member in fleet:
            member.advance(arrival.at)
        fleet[routing.choose(arrival.adapter, None, fleet)].offer(arrival)
    for member in fleet:
        member.advance()
    reports = [member.report() for member in fleet]
    done = [entry for member in fleet for entry in member.done]
    requests, tokens = len(done), sum(entry[2] for entry in done)
    return FleetRow(
        routing=name,
        replicas=replicas,
        adapters=load.adapters,
        slots=machine.slots,
        skew=load.skew,
        requests=requests,
        loads=sum(report.loads for report in reports),
        token_latency=sum(entry[1] for entry in done) / max(1, tokens),
        p99_latency=quantile([entry[1] for entry in done], 0.99),
        busiest=max(report.requests for report in reports) * replicas / max(1, requests),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print and write one row per size and routing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--adapters-each", type=int, nargs="+", default=[8, 32], help="adapters for each replica")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.6)
    parser.add_argument("--load", type=float, default=0.7, help="share of what unmerged replicas can finish")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--table", default="h200-7b", help="name of a shipped set of cost tables")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    costs, machine = shipped(args.table)["atmm"], Machine(slots=args.slots)
    rows = []
    for replicas, each in itertools.product(args.replicas, args.adapters_each):
        one = Workload(adapters=each * replicas, skew=args.skew)
        load = replace(one, rate=args.load * capacity(costs, machine, one) * replicas)
        makers: dict[str, Callable[[], Routing]] = {
            "affinity": lambda: Affinity(args.slots),
            "round_robin": RoundRobin,
            "random": Random,
        }
        for name, make in makers.items():
            began = time.perf_counter()
            row = simulate_fleet(name, make(), costs, machine, load, args.seconds, replicas)
            print(f"{json.dumps(asdict(row))}  # {time.perf_counter() - began:.0f} s", flush=True)
            rows.append(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
