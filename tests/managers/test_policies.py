"""Policies: hand-written queues, then properties over random ones."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora_sgl.core import BatchPlan, InferenceMode, ServiceClass
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies import POLICIES, Limits, QueueState, RequestState, make_policy
from vlora_sgl.managers.policies.base import check_plan
from vlora_sgl.managers.policies.cost_table import shipped

COSTS = shipped()["atmm"]
LIMITS = Limits(theta=0.5, wait_bound=2.0)


def waiting(adapter: str | None, arrival: int, **more: object) -> RequestState:
    """A request that has not started."""
    return RequestState(f"r{arrival}", adapter, arrival, **{"prompt": 256, **more})  # type: ignore[arg-type]


def running(adapter: str | None, arrival: int, **more: object) -> RequestState:
    """A request that decodes."""
    return RequestState(f"r{arrival}", adapter, arrival, **{"context": 300, **more})  # type: ignore[arg-type]


def queue(*groups: tuple[str | None, int], progress: float = 0.0) -> list[RequestState]:
    """Running requests: ``(adapter, how many)``."""
    rows = [a for a, n in groups for _ in range(n)]
    return [running(a, i, progress=progress) for i, a in enumerate(rows)]


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
    state = QueueState(0.0, [], queue(("m", 5), ("x", 3)), max_batch=8, can_park=True)
    plan = decide("vlora", state)
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MERGED, "m")
    assert plan.requests == ("r0", "r1", "r2", "r3", "r4")


def test_algorithm_1_chooses_mixture_when_at_most_half_starve() -> None:
    rows = [*queue(("m", 5), progress=10.0), running("x", 5, progress=1.0), running("y", 6, progress=10.0)]
    plan = decide("vlora", QueueState(10.0, [], rows, merged="m", max_batch=8, can_park=True))
    assert (plan.mode, plan.merged_adapter) == (InferenceMode.MIXTURE, "m")
    assert plan.requests == ("r5", "r0", "r1", "r2", "r3", "r4"), "the starving first; y does not starve and waits"


@pytest.mark.parametrize(("groups", "starve"), [((("m", 4), ("x", 4)), False), ((("m", 6), ("x", 2)), True)])
def test_algorithm_1_unmerges_without_a_majority_or_when_many_starve(
    groups: tuple[tuple[str, int], ...], starve: bool
) -> None:
    rows = queue(*groups, progress=0.0)
    plan = decide("vlora", QueueState(10.0 if starve else 0.0, [], rows, merged="m", max_batch=8, can_park=True))
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
    state = QueueState(0.0, [waiting("m", 2), waiting("x", 3)], [running("m", 0), running("x", 1)], can_park=True)
    assert decide("merged", state).requests == ("r0", "r2")


def test_dlora_unmerges_for_the_starving() -> None:
    rows = queue(("m", 6), ("x", 2))
    assert decide("dlora", QueueState(0.0, [], rows, can_park=True)).mode is InferenceMode.MERGED
    assert decide("dlora", QueueState(9.0, [], rows, merged="m", can_park=True)).mode is InferenceMode.UNMERGED


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


def test_cost_parks_only_when_the_others_are_few() -> None:
    few = QueueState(1.0, [], queue(("m", 31), ("x", 1), progress=1.0), merged="m", can_park=True)
    assert decide("cost", few).mode is InferenceMode.MERGED
    many = QueueState(1.0, [], queue(("m", 20), ("x", 12), progress=1.0), merged="m", can_park=True)
    assert decide("cost", many).mode is InferenceMode.MIXTURE


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"fifo.*cost, vlora"):
        make_policy("fifo", COSTS)


ADAPTERS = st.sampled_from([None, "a", "b", "c", "d", "e"])


@st.composite
def states(draw: st.DrawFn) -> QueueState:
    """Any state an engine can be in."""
    max_batch = draw(st.integers(1, 8))
    max_adapters = draw(st.integers(1, 4))
    can_park = draw(st.booleans())
    can_merge = draw(st.booleans())
    clock = draw(st.floats(0, 20))
    size = draw(st.integers(0, max_batch))
    rows: list[RequestState] = []
    used: set[str] = set()
    for i in range(size):
        adapter = draw(ADAPTERS)
        if not can_park and adapter is not None and len(used | {adapter}) > max_adapters:
            adapter = None
        used |= {adapter} - {None}  # type: ignore[arg-type]
        rows.append(running(adapter, i, progress=draw(st.floats(0, clock)), remaining=draw(st.integers(1, 50))))
    late = [
        waiting(
            draw(ADAPTERS),
            size + i,
            progress=draw(st.floats(0, clock)),
            service=draw(st.sampled_from(ServiceClass)),
            deadline=draw(st.sampled_from([None, 0.1, 5.0])),
        )
        for i in range(draw(st.integers(0, 10)))
    ]
    merged = draw(ADAPTERS) if can_merge else None
    memory = draw(st.dictionaries(ADAPTERS, st.floats(0, 1)))
    return QueueState(clock, late, rows, merged, max_batch, max_adapters, can_park, can_merge, memory=memory)


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
