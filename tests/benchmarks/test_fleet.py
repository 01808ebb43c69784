"""Fleets in the simulator: nothing is lost, work is shared, and affinity loads less."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.serving.fleet import Fronts, simulate_fleet
from benchmarks.serving.simulate import Machine, capacity
from benchmarks.serving.traces import Workload, trace
from vlora_sgl.cluster.placement import Affinity, RoundRobin
from vlora_sgl.managers.policies.cost_table import shipped


def test_affinity_loads_less_and_shares_the_work() -> None:
    costs, machine = shipped("h200-7b")["atmm"], Machine(slots=4)
    load = Workload(adapters=16, skew=0.6)
    load = replace(load, rate=0.7 * 4 * capacity(costs, machine, load, 500))
    rows = {
        name: simulate_fleet(name, routing, costs, machine, load, 20.0, 4)
        for name, routing in (("affinity", Affinity(4)), ("fronts", Fronts(3, 4)), ("round_robin", RoundRobin()))
    }
    assert {row.requests for row in rows.values()} == {len(list(trace(load, 20.0)))}
    assert rows["round_robin"].loads >= 2 * rows["affinity"].loads
    assert rows["affinity"].token_latency <= 1.05 * rows["round_robin"].token_latency
    assert rows["affinity"].busiest < 1.35
    assert rows["fronts"].busiest < 1.35
    assert rows["round_robin"].loads >= 2 * rows["fronts"].loads > 2 * 4
    assert rows["fronts"].tpot <= 1.05 * rows["affinity"].tpot
