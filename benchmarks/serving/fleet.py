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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
    """A simulated replica as a routing policy sees it (``placement.Candidate``).

    Attributes:
        own: requests that it has from each front.
    """

    number = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own: Counter[int] = Counter()
        self._front: dict[str, int] = {}

    def holds(self, adapter: str) -> bool:
        """Whether the adapter has a slot."""
        return adapter in self.resident

    def next_from(self, front: int) -> None:
        """The next request comes from this front."""
        self.own[front] += 1
        self._front[str(self.arrived)] = front

    def _finish(self) -> None:
        ended = [request.rid for request in self.running if request.left <= 0]
        super()._finish()
        for rid in ended:
            if rid in self._front:
                self.own[self._front.pop(rid)] -= 1


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
    """A replica as one of several fronts sees it: its own requests there are known, those of others as last told."""

    def __init__(self, member: Member, front: int) -> None:
        self.member, self.front, self.number, self.elsewhere = member, front, member.number, 0

    @property
    def load(self) -> int:
        """Requests that it has."""
        return self.member.own[self.front] + self.elsewhere

    def holds(self, adapter: str) -> bool:
        """Whether the adapter has a slot."""
        return self.member.holds(adapter)


class Fronts:
    """Fronts behind a balancer, and their directory, as one routing policy.

    Every ``SYNC_S``, each at a time of its own, a front tells what it has where, and is told what the others told
    last: what it knows of them is up to two periods old. An adapter without a home is asked for at once.

    Args:
        count: how many.
        slots: device slots for adapters on each replica.
        seed: of the balancer.
    """

    def __init__(self, count: int, slots: int, seed: int = 0) -> None:
        self.directory, self.random = Affinity(slots), random.Random(seed)
        self.fronts = [Shared() for _ in range(count)]
        self.due = [SYNC_S * number / count for number in range(count)]
        self.told: list[list[int]] = [[] for _ in range(count)]
        self.seen: list[list[Seen]] = []

    def choose(self, adapter: AdapterId, content: bytes | None, fleet: Sequence[Member]) -> int:
        """One front's choice."""
        if not self.seen:
            self.seen = [[Seen(member, front) for member in fleet] for front in range(len(self.fronts))]
            for seen in self.seen:  # as ``Front`` does
                self.random.shuffle(seen)
        for number, due in enumerate(self.due):
            if fleet[0].now >= due:
                self._sync(number, fleet)
        which = self.random.randrange(len(self.fronts))
        front = self.fronts[which]
        if adapter is not None and adapter not in front.homes:
            front.homes[adapter] = tuple(self.directory.homes_of(adapter, fleet))
        chosen = self.seen[which][front.choose(adapter, content, self.seen[which])].number
        fleet[chosen].next_from(which)
        return chosen

    def _sync(self, which: int, fleet: Sequence[Member]) -> None:
        self.due[which] += SYNC_S
        self.told[which] = [member.own[which] for member in fleet]
        self.directory.count(self.fronts[which].take(), range(len(fleet)))
        self.fronts[which].homes = dict(self.directory.homes)
        others = [told for number, told in enumerate(self.told) if told and number != which]
        for seen in self.seen[which]:
            seen.elsewhere = sum(told[seen.number] for told in others)


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
