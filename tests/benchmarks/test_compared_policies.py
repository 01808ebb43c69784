"""Policies of the benchmarks: dLoRA's, and those that park running requests, beside the server's own."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings

from benchmarks.serving.policies import POLICIES, compared_policy
from benchmarks.serving.systems import DLORA
from tests.support.plans import check_plan
from tests.support.queues import COSTS, LIMITS, queue, running, states, waiting
from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.managers.policies import QueueState, make_policy


def decide(name: str, state: QueueState, park: bool = True) -> BatchPlan:
    """The checked plan of a policy."""
    plan = compared_policy(name, COSTS, LIMITS, park).plan(state)
    check_plan(state, plan, park)
    return plan


def test_algorithm_1_parks_all_but_a_group_over_half_of_the_batch() -> None:
    state = QueueState(0.0, [], queue(("m", 5), ("x", 3)), max_batch=8)
    plan = decide("vlora", state)
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MERGED, "m")
    assert plan.requests == ("r0", "r1", "r2", "r3", "r4")


def test_algorithm_1_lets_the_starving_run_beside_the_merged_adapter() -> None:
    rows = [*queue(("m", 5), progress=10.0), running("x", 5, progress=1.0), running("y", 6, progress=10.0)]
    plan = decide("vlora", QueueState(10.0, [], rows, merged="m", max_batch=8))
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MIXTURE, "m")
    assert plan.requests == ("r0", "r1", "r2", "r3", "r4", "r5"), "y does not starve and is parked"


def test_merged_runs_only_the_oldest_request() -> None:
    state = QueueState(0.0, [waiting("m", 2), waiting("x", 3)], [running("m", 0), running("x", 1)])
    assert decide("merged", state).requests == ("r0", "r2")


def test_dlora_unmerges_for_the_starving() -> None:
    rows = queue(("m", 6), ("x", 2))
    assert decide("dlora", QueueState(0.0, [], rows)).mode is InferenceMode.MERGED
    assert decide("dlora", QueueState(9.0, [], rows, merged="m")).mode is InferenceMode.UNMERGED


def test_dlora_merges_for_nobody_while_others_run_that_it_cannot_park() -> None:
    rows = queue(("m", 6), ("x", 2))
    assert decide("dlora", QueueState(0.0, [], rows), park=False).mode is InferenceMode.UNMERGED
    late = [waiting("x", 9)]
    plan = decide("dlora", QueueState(0.0, late, queue(("m", 6))), park=False)
    assert (plan.mode, len(plan.requests)) == (InferenceMode.MERGED, 6)


def test_cost_parks_only_when_the_others_are_few() -> None:
    few = QueueState(1.0, [], queue(("m", 31), ("x", 1), progress=1.0), merged="m")
    assert decide("cost", few).mode is InferenceMode.MERGED
    many = QueueState(1.0, [], queue(("m", 20), ("x", 12), progress=1.0), merged="m")
    assert decide("cost", many).mode is InferenceMode.MIXTURE


def test_a_chunked_prefill_is_never_parked() -> None:
    late = [waiting("x", 9), waiting("m", 10)]
    plan = decide("vlora", QueueState(0.0, late, queue(("m", 6), ("y", 1)), chunked="r9"))
    assert "r9" in plan.requests and "r6" not in plan.requests


def test_a_server_takes_dlora_by_its_import_path() -> None:
    assert type(make_policy(DLORA, COSTS)) is POLICIES["dlora"]


@pytest.mark.parametrize("park", [False, True])
@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=100, deadline=None)
@given(state=states())
def test_every_plan_is_legal_and_a_function_of_the_state(name: str, park: bool, state: QueueState) -> None:
    before = copy.deepcopy(state)
    plan = decide(name, state, park)
    assert state == before, "a policy only reads"
    assert compared_policy(name, COSTS, LIMITS, park).plan(copy.deepcopy(state)) == plan, "another rank decides alike"


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(state=states())
def test_nothing_is_lost(name: str, state: QueueState) -> None:
    """Run the plans with one token a request: everything finishes, once, in as many plans as there are requests."""
    policy = compared_policy(name, COSTS, LIMITS, park=True)
    everyone = {r.rid for r in (*state.running, *state.waiting)}
    finished: list[str] = []
    for _ in range(len(everyone)):
        plan = policy.plan(state)
        check_plan(state, plan, parks=True)
        finished += plan.requests
        state.running = [r for r in state.running if r.rid not in plan.requests]
        state.waiting = [r for r in state.waiting if r.rid not in plan.requests]
        state.merged = plan.merged_adapter
        state.clock += 0.01
    assert sorted(finished) == sorted(everyone)
