"""The simulator: conservation, a case worked out by hand, and what the policies promise, in small."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.serving.policies import POLICIES, compared_policy
from benchmarks.serving.policy_grid import (
    MEANS,
    TAILS,
    cells,
    column,
    deadlines,
    over_best,
    starvation,
    worst_vs_best_other,
    worst_vs_sglang,
)
from benchmarks.serving.simulate import (
    Arrival,
    Machine,
    Replica,
    Workload,
    capacity,
    runners,
    simulate,
    trace,
)
from vlora_sgl.managers.policies import Limits, make_policy
from vlora_sgl.managers.policies.cost_table import shipped

TABLES = shipped()
LIMITS = Limits()


def test_one_request_by_hand() -> None:
    costs = TABLES["atmm"]
    replica = Replica(make_policy("unmerged", costs), costs, Machine())
    replica.offer(Arrival(5.0, "a", prompt=100, output=3))
    replica.advance()
    load = costs.load_disk + costs.load_host
    prefill = costs.prefill.seconds({"a": 100}, 100**2 / 2, None)
    steps = sum(costs.decode.seconds({"a": 1}, context, None) for context in (101, 102))
    assert replica.report().mean_latency == pytest.approx(load + prefill + steps)


@pytest.mark.parametrize("arrivals", ["poisson", "azure", "bursts"])
def test_traces_have_the_rate_and_the_skew_asked_for(arrivals: str) -> None:
    rows = list(trace(Workload(arrivals=arrivals, rate=20.0, adapters=50, skew=0.6, base=0.25), 3600.0))
    assert len(rows) / 3600 == pytest.approx(20.0, rel=0.1)
    assert sum(r.adapter == "a0" for r in rows) / len(rows) == pytest.approx(0.6, abs=0.02)
    assert sum(r.adapter is None for r in rows) / len(rows) == pytest.approx(0.1, abs=0.02)
    assert all(x.at <= y.at for x, y in itertools.pairwise(rows))


@pytest.mark.parametrize("park", [False, True])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_request_finishes(name: str, park: bool) -> None:
    load = Workload(arrivals="bursts", rate=6.0, adapters=30, skew=0.4, base=0.1)
    machine = Machine(slots=6)
    policy = compared_policy(name, TABLES["atmm"], park=park)
    report = simulate(policy, TABLES["atmm"], machine, load, 30.0)
    rows = list(trace(load, 30.0))
    assert (report.requests, report.tokens) == (len(rows), sum(r.output for r in rows))


@pytest.mark.parametrize(("skew", "share"), [(0.1, 0.5), (0.6, 0.3), (0.9, 0.8)])
def test_cost_is_at_the_best_and_far_below_stock(skew: float, share: float) -> None:
    machine, load = Machine(), Workload(skew=skew)
    rate = share * capacity(TABLES["atmm"], machine, load)
    load = Workload(skew=skew, rate=rate)
    latency = {s: run(load, 60.0).token_latency for s, run in runners(TABLES, machine, LIMITS).items()}
    assert latency["cost"] <= 1.02 * min(latency.values())
    assert latency["cost"] <= 0.65 * latency["sglang"]


@pytest.mark.parametrize(("skew", "share"), [(0.3, 0.6), (0.6, 0.9)])
def test_the_default_loses_to_no_policy_in_first_tokens_nor_in_later_ones(skew: float, share: float) -> None:
    ours = {"atmm": shipped("h200-7b")["atmm"]}
    rows = column(ours, Machine(), LIMITS, Workload(skew=skew), [share], 6.0, seeds=(0, 1))
    assert over_best(rows, MEANS)[0] <= 1.02
    assert over_best(rows, TAILS)[0] <= 1.10


def test_adapters_that_come_beside_the_steps_cost_next_to_nothing() -> None:
    """64 adapters over 16 slots, against slots for all and against batches that wait for their adapters."""
    costs = replace(shipped("h200-7b")["atmm"], load_disk=0.0)
    load = Workload(adapters=64, rate=10.0, prompt=256, output=100)
    few, waiting, all_of_them = (
        simulate(make_policy("cost", costs), costs, Machine(slots=slots, fetch_ahead=depth), load, 20.0)
        for slots, depth in ((16, 4), (16, 0), (64, 4))
    )
    assert few.loads > all_of_them.loads and waiting.load_stall_seconds > 10 * few.load_stall_seconds
    assert few.ttft < waiting.ttft and few.tokens / few.span > 0.95 * all_of_them.tokens / all_of_them.span
    assert few.ttft_p99 <= 1.3 * all_of_them.ttft_p99


def test_the_coldest_adapter_is_served_within_the_bound_beside_a_saturating_one() -> None:
    report = starvation(TABLES, Machine(), LIMITS, 60.0)
    assert report.longest_wait > LIMITS.wait_bound, "the hot adapter's own queue must be over the bound"
    assert report.coldest_wait < LIMITS.wait_bound
    assert report.hot_idle_share < 0.05


def test_deadlines_hold_while_batch_work_saturates() -> None:
    reports = deadlines(TABLES, Machine(), LIMITS, 60.0)
    assert reports["cost"].realtime_p99 < 1.0
    assert reports["unmerged"].realtime_p99 > 1.0, "without the class they would not hold"


@pytest.mark.parametrize("skew", [0.3, 0.9])
def test_on_the_papers_costs_and_operators_its_algorithm_is_first(skew: float) -> None:
    """Figure 19: V-LoRA before dLoRA and before never merging, each on its own operator and switch."""
    load = Workload(skew=skew, prompt=256, output=200)
    rows = column(shipped("a100-paper"), Machine(), LIMITS, load, [0.6], 40.0)
    (cell,) = cells(rows).values()
    assert cell["vlora"] < 0.9 * min(cell["dlora"], cell["merged"], cell["unmerged"])
    assert cell["dlora"] < 1.05 * cell["unmerged"]


def test_figures_name_the_worst_cell() -> None:
    latencies = {(0.6, 0.5): (9.0, 10.0, 20.0), (0.9, 0.5): (10.2, 10.0, 15.0), (0.1, 0.5): (9.5, 10.0, 10.0)}
    rows = [
        {"system": system, "skew": skew, "load": load, "token_latency": value, "ttft": 2 * value, "tpot": value}
        for (skew, load), values in latencies.items()
        for system, value in zip(("cost", "unmerged", "sglang"), values, strict=True)
    ]
    assert worst_vs_best_other(rows) == (pytest.approx(1.02), (0.9, 0.5))
    assert worst_vs_sglang(rows) == (pytest.approx(0.68), (0.9, 0.5))


def test_a_thousand_adapters_thrash_visibly() -> None:
    load = Workload(arrivals="poisson", rate=5.0, adapters=1000, skew=0.1)
    few, many = (
        simulate(make_policy("cost", TABLES["atmm"]), TABLES["atmm"], Machine(slots=s), load, 60.0) for s in (4, 64)
    )
    assert few.loads > many.loads
    assert few.token_latency > many.token_latency
