"""A discrete-event simulator that runs the server's own policy objects against a cost table, on a CPU, without a
model.

It mirrors the engine's rules (SGLang's scheduler with ours on top): one iteration is either a prefill of newly
admitted requests, within a token budget, or one decode step of the running ones; prefill goes first; adapters hold
device slots. Between two events (an arrival, a finish) a batch whose plan cannot change is advanced many steps at
once, so a day of traffic takes seconds to minutes.

    python -m benchmarks.serving.simulate --policy cost --adapters 8 --skew 0.6 --load 0.8
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from benchmarks.serving.policies import compared_policy
from benchmarks.serving.traces import Arrival, Workload, trace
from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode, ServiceClass
from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.managers.fetch_ahead import FetchAhead
from vlora_sgl.managers.policies import Limits, Policy, QueueState, RequestState, make_policy, mode_of
from vlora_sgl.managers.policies.base import Memory, visible
from vlora_sgl.managers.policies.cost_table import CostTable, shipped


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated replica has.

    Attributes:
        max_batch: most requests at once.
        slots: device slots for adapters.
        host: adapters that host memory holds.
        kv_tokens: tokens the KV cache holds.
        prefill_tokens: tokens of one prefill iteration (SGLang's chunked prefill size).
        window: waiting requests that a policy is shown (``visible``).
        can_park: whether policies may leave running requests out of an iteration (``policies.parking``).
        fetch_ahead: most adapters on their way to slots beside the computation (``VLoraArgs.fetch_ahead``); 0: every
            batch stalls for its own (stock).
    """

    max_batch: int = 32
    slots: int = 16
    host: int = 512
    kv_tokens: int = 400_000
    prefill_tokens: int = 8192
    window: int = 128
    can_park: bool = False
    fetch_ahead: int = 4


@dataclass(slots=True)
class Report:
    """What a run did. Latencies in seconds; ``token_latency`` is the paper's: latencies summed over tokens summed.

    ``ttft`` is the time to a request's first token, ``tpot`` the time of each later one; means over requests.
    """

    requests: int = 0
    tokens: int = 0
    span: float = 0.0
    token_latency: float = 0.0
    mean_latency: float = 0.0
    p99_latency: float = 0.0
    ttft: float = 0.0
    ttft_p99: float = 0.0
    tpot: float = 0.0
    tpot_p99: float = 0.0
    longest_wait: float = 0.0
    coldest_wait: float = 0.0
    hot_idle_share: float = 0.0
    realtime_p99: float = 0.0
    realtime_missed: float = 0.0
    switches: int = 0
    switch_seconds: float = 0.0
    loads: int = 0
    load_stall_seconds: float = 0.0
    modes: dict[str, float] = field(default_factory=dict)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class _Live(RequestState):
    """A request of the simulation: its state and what only the simulator knows."""

    output: int = 0
    prompt_total: int = 0
    left: int = 0
    first: float = 0.0
    worst_wait: float = 0.0


class Replica:
    """One simulated engine. ``offer`` it arrivals in order and ``advance`` it; ``report`` at the end.

    The hook for a fleet: the replica router calls ``offer`` on the replica it picks, after ``load`` and ``resident``.

    Args:
        policy: decides; its own cost table is what it believes.
        costs: what iterations really take here.
        machine: the replica.
    """

    def __init__(self, policy: Policy, costs: CostTable, machine: Machine) -> None:
        self.policy, self.costs, self.machine = policy, costs, machine
        self.now = 0.0
        self.pending: deque[tuple[float, _Live]] = deque()
        self.waiting: list[_Live] = []
        self.running: list[_Live] = []
        self.merged: AdapterId = None
        self.memory: Memory = {}
        self.residency = SlotResidency(memory=machine.slots)
        self.ahead = FetchAhead(self, machine.fetch_ahead, lambda adapter: self.load_seconds[adapter])
        self.load_seconds: dict[str, float] = {}  # of the last load of each
        self.host: OrderedDict[str, None] = OrderedDict()
        self.kv = 0
        self.mean_output = 64.0
        self.arrived = 0
        self.done: list[tuple[AdapterId, float, int, float, ServiceClass, float | None]] = []
        self.ttfts: list[float] = []
        self.tpots: list[float] = []
        self.result = Report()
        self.mode_seconds: Counter[str] = Counter()
        self.busy = self.hot_busy = 0.0
        self.hot: AdapterId = "a0"

    @property
    def load(self) -> int:
        """Requests in the replica."""
        return len(self.waiting) + len(self.running) + len(self.pending)

    @property
    def resident(self) -> Collection[AdapterId]:
        """Adapters that hold a slot, or come to one."""
        return self.residency.resident

    def offer(self, arrival: Arrival) -> None:
        """Add a request that arrives at ``arrival.at``, not before the ones offered so far."""
        request = _Live(
            rid=str(self.arrived),
            adapter=arrival.adapter,
            arrival=self.arrived,
            prompt=arrival.prompt,
            service=arrival.service,
            deadline=arrival.deadline,
            output=arrival.output,
            prompt_total=arrival.prompt,
            left=arrival.output,
        )
        self.arrived += 1
        self.pending.append((arrival.at, request))

    def advance(self, until: float = math.inf) -> None:
        """Run until the clock reaches ``until`` or, if that is infinite, until nothing is left."""
        while self.now < until:
            self._take_arrivals()
            if not self.waiting and not self.running:
                if not self.pending or self.pending[0][0] >= until:
                    self.now = until if until < math.inf else self.now
                    return
                self.now = self.pending[0][0]
                continue
            self._iterate()

    def _take_arrivals(self) -> None:
        while self.pending and self.pending[0][0] <= self.now:
            at, request = self.pending.popleft()
            request.arrived = request.progress = at
            request.remaining = max(1, round(self.mean_output))
            self.waiting.append(request)

    def _iterate(self) -> None:
        machine = self.machine
        state = QueueState(
            clock=self.now,
            waiting=visible(self.waiting, machine.window),
            running=self.running,
            merged=self.merged,
            max_batch=machine.max_batch,
            max_adapters=machine.slots,
            memory=self.memory,
        )
        plan = self.policy.plan(state)
        if machine.fetch_ahead and (absent := self._fetch_ahead(state, plan)) and self.running:
            plan = self.policy.plan(replace(state, absent=absent))
        planned = set(plan.requests)
        rows = [r for r in self.running if r.rid in planned]
        keep = {r.adapter for r in rows} | {plan.merged_adapter}
        admitted = self._admit(plan.requests, state.waiting, keep)
        if admitted:
            self._prefill(admitted, plan.merged_adapter)
        elif rows:
            self._decode(rows, plan.merged_adapter)
        else:
            raise AssertionError("the simulation is stuck: nothing runs")

    def _fetch_ahead(self, state: QueueState, plan: BatchPlan) -> Sequence[AdapterId]:
        """As ``Planning.begin``."""
        adapters = {r.rid: r.adapter for r in (*state.running, *state.waiting)}
        planned = dict.fromkeys((self.merged, plan.merged_adapter, *(adapters[rid] for rid in plan.requests)))
        wanted = {adapter: [] if adapter is None else [adapter] for adapter in (*planned, *adapters.values())}
        self.residency.want(wanted)
        return self.ahead.begin(self.now, wanted, len(planned))

    def fetch_ahead(self, adapter: str, keep: Collection[AdapterId]) -> bool:
        """As ``VLoraManager.fetch_ahead``."""
        with self.residency.before_use():
            return self._load(adapter, keep)

    def _admit(self, order: Sequence[str], visible: Sequence[_Live], keep: set[AdapterId]) -> list[_Live]:
        """Requests of the next prefill: planned, within tokens, KV cache and resident adapters."""
        by_id = {r.rid: r for r in visible}
        budget, admitted = self.machine.prefill_tokens, []
        for rid in order:
            request = by_id.get(rid)
            if request is None:
                continue
            need = request.prompt + request.output
            if self.kv + need > self.machine.kv_tokens or (admitted and request.prompt > budget):
                break
            if not self._ready(request.adapter, keep):
                continue
            keep.add(request.adapter)
            budget -= request.prompt
            self.kv += need
            admitted.append(request)
        return admitted

    def _ready(self, adapter: AdapterId, keep: set[AdapterId]) -> bool:
        """Have the batch wait for the adapter; ``False`` if there is no slot for it."""
        if adapter is None:
            return True
        if adapter not in self.resident:
            if not self._load(adapter, keep):
                return False
            self.now += self.load_seconds[adapter]
            self.result.load_stall_seconds += self.load_seconds[adapter]
        arrives = self.ahead.coming.get(adapter, self.now)
        self.result.load_stall_seconds += max(0.0, arrives - self.now)
        self.now = max(self.now, arrives)
        self.residency.mark_used(adapter)
        return True

    def _load(self, adapter: str, keep: Collection[AdapterId]) -> bool:
        """Begin to load an adapter into a slot that nobody in ``keep`` holds, if there is one."""
        if len(self.resident) >= self.machine.slots:
            victims = {uid for uid in self.resident if uid not in keep}
            if not victims:
                return False
            self.residency.remove(self.residency.select_victim(victims))
        self.load_seconds[adapter] = self.costs.load_host
        if adapter not in self.host:
            self.load_seconds[adapter] += self.costs.load_disk
            if len(self.host) >= self.machine.host:
                self.host.popitem(last=False)
        self.host[adapter] = None
        self.host.move_to_end(adapter)
        self.result.loads += 1
        self.residency.mark_used(adapter)
        return True

    def _merge(self, target: AdapterId) -> None:
        if target == self.merged:
            return
        self._ready(target, {target, *(r.adapter for r in self.running)})
        seconds = self.costs.switch_seconds(self.merged, target)
        self.now += seconds
        self.result.switches += 1
        self.result.switch_seconds += seconds
        self.merged = target

    def _account(self, rows: Sequence[_Live], seconds: float, prefill: bool, groups: Counter, repeats: int) -> None:
        self.now += seconds
        self.busy += seconds
        if self.hot in groups:
            self.hot_busy += seconds
        self.mode_seconds[mode_of(groups, self.merged)] += seconds
        self.memory = self.policy.remember(self.memory, prefill, groups, self.merged, repeats)
        for r in rows:
            r.progress = self.now

    def _prefill(self, rows: list[_Live], merged: AdapterId) -> None:
        self._merge(merged)
        groups: Counter[AdapterId] = Counter()
        pairs = 0.0
        for r in rows:
            groups[r.adapter] += r.prompt
            pairs += r.prompt**2 / 2
            r.worst_wait = max(r.worst_wait, self.now - r.progress)
        self._account(rows, self.costs.prefill.seconds(groups, pairs, self.merged), True, groups, 1)
        chosen = {r.rid for r in rows}
        self.waiting = [r for r in self.waiting if r.rid not in chosen]
        for r in rows:
            r.context, r.prompt = r.prompt + 1, 0
            r.left -= 1
            r.generated, r.first = 1, self.now
        self.running.extend(rows)
        self._finish()

    def _decode(self, rows: list[_Live], merged: AdapterId) -> None:
        before = self.merged
        self._merge(merged)
        for r in rows:
            r.worst_wait = max(r.worst_wait, self.now - r.progress)
        groups = Counter(r.adapter for r in rows)
        context = sum(r.context for r in rows)
        step = self.costs.decode.seconds(groups, context, self.merged)
        steps = 1
        if len(rows) == len(self.running) and before == merged:
            steps = min(r.left for r in rows)
            if self.waiting:  # the server plans every step: somebody may become urgent, or an adapter may be there
                steps = 1
            if self.pending:
                steps = min(steps, max(1, math.ceil((self.pending[0][0] - self.now) / step)))
            steps = max(1, min(steps, 16))
        seconds = steps * step + self.costs.decode.per_context * len(rows) * steps * (steps - 1) / 2
        self._account(rows, seconds, False, groups, steps)
        for r in rows:
            r.context += steps
            r.left -= steps
            r.generated += steps
            r.remaining = max(1, r.remaining - steps)
        self._finish()

    def _finish(self) -> None:
        if all(r.left > 0 for r in self.running):
            return
        still = []
        for r in self.running:
            if r.left > 0:
                still.append(r)
                continue
            self.kv -= r.prompt_total + r.output
            self.mean_output += 0.02 * (r.output - self.mean_output)
            self.ttfts.append(r.first - r.arrived)
            if r.output > 1:
                self.tpots.append((self.now - r.first) / (r.output - 1))
            self.done.append((r.adapter, self.now - r.arrived, r.output, r.worst_wait, r.service, r.deadline))
        self.running = still

    def report(self) -> Report:
        """Figures over everything finished so far."""
        return report_of([self])


def mean(values: Sequence[float]) -> float:
    """The mean, 0 for no values."""
    return sum(values) / max(1, len(values))


def report_of(replicas: Sequence[Replica]) -> Report:
    """Figures over everything that some replicas have finished, pooled; what they took is summed."""
    done = [one for replica in replicas for one in replica.done]
    ttfts = [one for replica in replicas for one in replica.ttfts]
    tpots = [one for replica in replicas for one in replica.tpots]
    busy, results = sum(replica.busy for replica in replicas), [replica.result for replica in replicas]
    latencies, tokens = [d[1] for d in done], sum(d[2] for d in done)
    waits: dict[AdapterId, float] = {}
    counts = Counter(d[0] for d in done)
    for d in done:
        waits[d[0]] = max(waits.get(d[0], 0.0), d[3])
    cold = {a: w for a, w in waits.items() if counts[a] <= min(counts.values(), default=0)}
    real = [(d[1], d[5]) for d in done if d[4] is ServiceClass.REALTIME and d[5]]
    seconds = {m: sum(replica.mode_seconds[m] for replica in replicas) for m in InferenceMode}
    return Report(
        requests=len(done),
        tokens=tokens,
        span=sum(replica.now for replica in replicas),
        token_latency=sum(latencies) / max(1, tokens),
        mean_latency=mean(latencies),
        p99_latency=quantile(latencies, 0.99),
        ttft=mean(ttfts),
        ttft_p99=quantile(ttfts, 0.99),
        tpot=mean(tpots),
        tpot_p99=quantile(tpots, 0.99),
        longest_wait=max(waits.values(), default=0.0),
        coldest_wait=max(cold.values(), default=0.0),
        hot_idle_share=1 - sum(replica.hot_busy for replica in replicas) / busy if busy else 0.0,
        realtime_p99=quantile([lat for lat, _ in real], 0.99),
        realtime_missed=mean([float(lat > due) for lat, due in real]),
        switches=sum(r.switches for r in results),
        switch_seconds=sum(r.switch_seconds for r in results),
        loads=sum(r.loads for r in results),
        load_stall_seconds=sum(r.load_stall_seconds for r in results),
        modes={m.value: s / busy if busy else 0.0 for m, s in seconds.items()},
    )


def simulate(
    policy: Policy, costs: CostTable, machine: Machine, load: Workload, seconds: float, seeds: Sequence[int] = ()
) -> Report:
    """Serve ``seconds`` of ``load`` to the last request on one replica; for each of several seeds, pooled."""
    replicas = []
    for seed in seeds or (load.seed,):
        replica = Replica(policy, costs, machine)
        for arrival in trace(replace(load, seed=seed), seconds):
            replica.offer(arrival)
        replica.advance()
        replicas.append(replica)
    return report_of(replicas)


def capacity(
    costs: CostTable, machine: Machine, load: Workload, requests: int = 1500, seeds: Sequence[int] = ()
) -> float:
    """Requests per second that an unmerged, saturated replica finishes: the unit of ``load`` below."""
    flood = replace(load, arrivals="poisson", rate=1e6)
    report = simulate(make_policy("unmerged", costs), costs, machine, flood, requests / 1e6, seeds)
    return report.requests / report.span


class Runner(Protocol):
    """Serves a workload for so many seconds, once for each seed."""

    def __call__(self, load: Workload, seconds: float, seeds: Sequence[int] = ()) -> Report: ...


def runners(tables: dict[str, CostTable], machine: Machine, limits: Limits) -> dict[str, Runner]:
    """The systems compared: the policies on our operator, and ``sglang``: unmerged, csgmv, loads that stall."""

    def run(name: str, table: CostTable, where: Machine) -> Runner:
        def served(load: Workload, seconds: float, seeds: Sequence[int] = ()) -> Report:
            policy = compared_policy(name, table, limits, where.can_park)
            return simulate(policy, table, where, load, seconds, seeds)

        return served

    systems = {n: run(n, tables["atmm"], machine) for n in ("cost", "vlora", "dlora", "merged", "unmerged")}
    if "einsum" in tables:  # the paper's baselines bring their own operator, and dLoRA its own switch
        systems |= {n: run(n, tables["einsum"], machine) for n in ("dlora", "unmerged")}
    if "csgmv" in tables:
        systems["sglang"] = run("unmerged", tables["csgmv"], replace(machine, can_park=False, fetch_ahead=0))
    return systems


def main(argv: Sequence[str] | None = None) -> None:
    """Run one simulation."""
    parser = argparse.ArgumentParser(description="Serve synthetic traffic with the real policies on a cost table.")
    parser.add_argument("--policy", default="cost", help="a policy, or 'sglang' for the stock baseline")
    parser.add_argument("--table", default="h100-7b", help="name of a shipped set of cost tables")
    parser.add_argument("--arrivals", default="azure", choices=("azure", "poisson", "bursts"))
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.6)
    parser.add_argument("--load", type=float, default=0.8, help="share of what an unmerged replica can finish")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the trace")
    parser.add_argument("--park", action="store_true", help="policies may leave running requests out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tables, machine = shipped(args.table), Machine(slots=args.slots, can_park=args.park)
    load = Workload(arrivals=args.arrivals, adapters=args.adapters, skew=args.skew, seed=args.seed)
    traffic = replace(load, rate=args.load * capacity(tables["atmm"], machine, load))
    started = time.perf_counter()
    report = runners(tables, machine, Limits())[args.policy](traffic, args.seconds)
    print(json.dumps(asdict(report), indent=1))
    print(f"{report.span:.0f} s of traffic in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
