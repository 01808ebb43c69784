"""Policies: hand-written queues, then properties over random ones."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings

from tests.support.plans import check_plan
from tests.support.queues import COSTS, LIMITS, queue, running, states, waiting
from vlora_sgl.core import BatchPlan, InferenceMode, ServiceClass
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies import POLICIES, QueueState, make_policy, policy_class


def decide(name: str, state: QueueState) -> BatchPlan:
    """The checked plan of a policy."""
    plan = make_policy(name, COSTS, LIMITS).plan(state)
    check_plan(state, plan)
    return plan


@pytest.mark.parametrize(("hot", "stays"), [("small", True), ("large", False)])
def test_cost_empties_the_slot_that_a_starving_adapter_needs(hot: str, stays: bool) -> None:
    """Slots of unequal ranks: one holds "large" or "big", any holds "small" or "tiny"."""

    def fits(adapters: set[str | None]) -> bool:
        return len(adapters & {"large", "big"}) <= 1

    rows = queue((hot, 5), ("large" if hot == "small" else "tiny", 1))
    late = [waiting("big", 10), waiting(hot, 11, arrived=3.0, progress=3.0)]
    state = QueueState(3.0, late, rows, max_batch=16, max_adapters=2, fits=fits)
    plan = decide("cost", state)
    assert "r10" not in plan.requests, "its slot is taken"
    assert ("r11" in plan.requests) is stays, "who holds the slot must be let run out"


def test_algorithm_1_merges_for_a_group_over_half_of_the_batch() -> None:
    late = [*(waiting("m", i) for i in range(5)), *(waiting("x", i) for i in range(5, 8))]
    plan = decide("vlora", QueueState(0.0, late, [], max_batch=8))
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MERGED, "m")
    assert plan.requests == ("r0", "r1", "r2", "r3", "r4")


def test_algorithm_1_chooses_mixture_when_at_most_half_starve() -> None:
    late = [*(waiting("m", i, progress=10.0) for i in range(5)), waiting("x", 5, progress=1.0)]
    late.append(waiting("y", 6, progress=10.0))
    plan = decide("vlora", QueueState(10.0, late, [], merged="m", max_batch=8))
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MIXTURE, "m")
    assert plan.requests == ("r5", "r0", "r1", "r2", "r3", "r4"), "the starving first; y does not starve and waits"


def test_algorithm_1_merges_beside_rows_of_others_that_run() -> None:
    state = QueueState(0.0, [], queue(("m", 5), ("x", 3)), max_batch=8)
    plan = decide("vlora", state)
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MIXTURE, "m")
    assert len(plan.requests) == 8


@pytest.mark.parametrize(("groups", "starve"), [((("m", 4), ("x", 4)), False), ((("m", 6), ("x", 2)), True)])
def test_algorithm_1_unmerges_without_a_majority_or_when_many_starve(
    groups: tuple[tuple[str, int], ...], starve: bool
) -> None:
    rows = queue(*groups, progress=0.0)
    plan = decide("vlora", QueueState(10.0 if starve else 0.0, [], rows, merged="m", max_batch=8))
    assert plan.mode is InferenceMode.UNMERGED
    assert len(plan.requests) == 8


def test_credit_counts_waiting_execution_and_switch() -> None:
    policy = make_policy("vlora", COSTS, LIMITS)
    state = QueueState(3.0, [], [], merged="m")
    row = running("x", 0, progress=1.0)
    step = COSTS.decode.seconds({"x": 1}, 300, "m")
    assert policy.credit(row, state) == pytest.approx(2.0 + step + COSTS.merge)
    row.service = ServiceClass.REALTIME
    assert policy.credit(row, state) == pytest.approx(8.0 + step + COSTS.merge)
    row.service, row.deadline = ServiceClass.BATCH, 100.0
    assert policy.credit(row, state) < LIMITS.theta * 2
    row.deadline = 4.0
    assert policy.credit(row, state) > LIMITS.theta, "half of its four seconds is gone"


def test_merged_keeps_to_the_oldest_request() -> None:
    late = [waiting("m", 2), waiting("x", 3)]
    assert decide("merged", QueueState(0.0, late, [running("m", 0)])).requests == ("r0", "r2")
    plan = decide("merged", QueueState(0.0, late, [running("m", 0), running("x", 1)]))
    assert (plan.requests, plan.mode) == (("r0", "r1", "r2"), InferenceMode.MIXTURE), "x runs on, and admits nobody"


def test_cost_merges_only_when_it_pays_for_the_switch() -> None:
    lone = QueueState(0.0, [], [running("m", 0)])
    policy = make_policy("cost", COSTS, LIMITS)
    assert policy.plan(lone).merged_adapter is None, "sixteen steps of saving do not pay a switch"
    steps = 0
    while policy.plan(lone).merged_adapter is None:
        lone.memory = policy.remember(lone.memory, False, {"m": 1}, None)
        steps += 1
    saved = COSTS.decode.lora_seconds({"m": 1}, None)
    price = 3.0 * (COSTS.merge + COSTS.unmerge)
    assert (steps + 16) * saved > price >= (steps + 15) * saved


def test_cost_forgets_an_adapter_that_would_have_lost() -> None:
    policy = make_policy("cost", COSTS, LIMITS)
    memory = policy.remember({}, False, {"m": 8}, None, repeats=3)
    assert memory["m"] == pytest.approx(3 * COSTS.decode.lora_seconds({"m": 8}, None))
    assert "m" not in policy.remember(memory, False, {"x": 8, "y": 8}, None, repeats=50)


def test_cost_serves_the_deadline_first_and_keeps_batch_work_out_of_the_reserve() -> None:
    rows = [running("m", i, service=ServiceClass.BATCH) for i in range(7)]
    queue_ = [
        waiting("m", 10, service=ServiceClass.BATCH),
        waiting("x", 11, service=ServiceClass.REALTIME, deadline=0.5),
    ]
    plan = decide("cost", QueueState(0.0, queue_, rows, max_batch=8))
    assert plan.requests[-1] == "r11"
    assert "r10" not in plan.requests


def test_cost_lets_in_a_starving_adapter_that_has_nothing_running() -> None:
    late = [waiting("m", i, arrived=0.0, progress=0.0) for i in range(20, 30)] + [waiting("cold", 40)]
    state = QueueState(1.5, late, queue(("m", 7), progress=1.5), merged="m", max_batch=8)
    assert decide("cost", state).requests[-1] == "r40"


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fifo.*cost, vlora"):
        make_policy("fifo", COSTS)


def test_a_policy_is_found_by_its_import_path() -> None:
    assert policy_class("vlora_sgl.managers.policies.cost:CostPolicy") is POLICIES["cost"]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("nowhere.at_all:Policy", "expected module:Class that can be imported, got 'nowhere.at_all:Policy'"),
        ("vlora_sgl.errors:Nothing", "expected module:Class that can be imported, got 'vlora_sgl.errors:Nothing'"),
        (":CostPolicy", "expected module:Class that can be imported, got ':CostPolicy'"),
        ("vlora_sgl.errors:ConfigError", "expected a subclass of .*Policy, got 'vlora_sgl.errors:ConfigError'"),
        ("vlora_sgl.managers.policies:make_policy", "expected a subclass of .*Policy, got .*make_policy"),
        ("vlora_sgl.managers.policies:Policy", "expected a subclass of .*Policy, got .*:Policy"),
    ],
)
def test_an_import_path_that_is_no_policy_says_what_was_expected_and_what_came(path: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        policy_class(path)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=150, deadline=None)
@given(state=states())
def test_every_plan_is_legal_and_a_function_of_the_state(name: str, state: QueueState) -> None:
    before = copy.deepcopy(state)
    plan = decide(name, state)
    assert state == before, "a policy only reads"
    assert make_policy(name, COSTS, LIMITS).plan(copy.deepcopy(state)) == plan, "another rank decides alike"


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(state=states())
def test_nothing_is_lost(name: str, state: QueueState) -> None:
    """Run the plans with one token a request: everything finishes, once, in as many plans as there are requests."""
    policy = make_policy(name, COSTS, LIMITS)
    everyone = {r.rid for r in (*state.running, *state.waiting)}
    finished: list[str] = []
    for _ in range(len(everyone)):
        plan = policy.plan(state)
        check_plan(state, plan)
        finished += plan.requests
        state.running = [r for r in state.running if r.rid not in plan.requests]
        state.waiting = [r for r in state.waiting if r.rid not in plan.requests]
        state.merged = plan.merged_adapter
        state.clock += 0.01
    assert sorted(finished) == sorted(everyone)
