"""Simulated fleets: up to 64 replicas and thousands of adapters, behind the replica router's own routing objects.

    python -m benchmarks.serving.fleet      # 2 to 64 replicas, as many adapters as the fleet has slots, and four times
    python -m benchmarks.serving.fleet --fronts 4 --replicas 64 --adapters-each 8       # fronts that know things late

Every replica is the simulator's engine with the server's policy on a measured cost table. Adapters are loaded from
host memory or disk when a batch needs them; what is compared is how often, and what it does to latency.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.serving.simulate import Machine, Replica, capacity, quantile
from benchmarks.serving.traces import Workload, trace
from benchmarks.summary import SUMMARY, record
from vlora_sgl.cluster.directory_link import SYNC_S
from vlora_sgl.cluster.placement import Affinity, Random, RoundRobin, Routing, Shared
from vlora_sgl.core import AdapterId
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
        tpot: seconds a token after the first, mean over requests.
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
    tpot: float = 0.0


class Seen:
    """A replica as one of several fronts sees it: what all had there a while ago, and what it sent itself since."""

    def __init__(self, member: Member) -> None:
        self.member, self.number, self.known, self.sent = member, member.number, 0, [0, 0]

    @property
    def load(self) -> int:
        """Requests, of which others' are old; no end of one is seen before the next report."""
        return self.known + sum(self.sent)

    def holds(self, adapter: str) -> bool:
        """Whether the adapter has a slot."""
        return self.member.holds(adapter)


class Fronts:
    """Fronts behind a balancer, and their directory, as one routing policy.

    Every ``SYNC_S`` all fronts report, and are told what the directory knew of the others a report ago: what they
    decide by is one to two reports old. An adapter without a home is asked for at once.

    Args:
        count: how many.
        slots: device slots for adapters on each replica.
        seed: of the balancer.
    """

    def __init__(self, count: int, slots: int, seed: int = 0) -> None:
        self.directory, self.random, self.synced = Affinity(slots), random.Random(seed), 0.0
        self.fronts = [Shared() for _ in range(count)]
        self.seen: list[list[Seen]] = []
        self.reported: list[int] = []

    def choose(self, adapter: AdapterId, content: bytes | None, fleet: Sequence[Member]) -> int:
        """One front's choice."""
        if not self.seen:
            self.seen = [[Seen(member) for member in fleet] for _ in self.fronts]
            self.reported = [0] * len(fleet)
        if fleet[0].now - self.synced >= SYNC_S:
            self._sync(fleet)
        which = self.random.randrange(len(self.fronts))
        front, seen = self.fronts[which], self.seen[which]
        if adapter is not None and adapter not in front.homes:
            front.homes[adapter] = tuple(self.directory.homes_of(adapter, fleet))
        chosen = front.choose(adapter, content, seen)
        seen[chosen].sent[1] += 1
        return chosen

    def _sync(self, fleet: Sequence[Member]) -> None:
        self.synced = fleet[0].now
        for front in self.fronts:
            self.directory.count(front.take(), range(len(fleet)))
        for front, seen in zip(self.fronts, self.seen, strict=True):
            front.homes = dict(self.directory.homes)
            for one, known in zip(seen, self.reported, strict=True):
                one.known, one.sent = known, [one.sent[1], 0]
        self.reported = [member.load for member in fleet]


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
        tpot=sum(sum(member.tpots) for member in fleet) / max(1, sum(len(member.tpots) for member in fleet)),
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
    parser.add_argument("--fronts", type=int, help="only affinity: one front that knows all, and so many that do not")
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
        if args.fronts:
            makers = {"affinity": makers["affinity"], "fronts": lambda: Fronts(args.fronts, args.slots)}
        for name, make in makers.items():
            began = time.perf_counter()
            row = simulate_fleet(name, make(), costs, machine, load, args.seconds, replicas)
            print(f"{json.dumps(asdict(row))}  # {time.perf_counter() - began:.0f} s", flush=True)
            rows.append(row)
    if args.fronts:
        worst = max(stale.tpot / one.tpot for one, stale in zip(rows[::2], rows[1::2], strict=True))
        record("fleet.stale_over_omniscient", worst, "ratio", higher_is_better=False)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
