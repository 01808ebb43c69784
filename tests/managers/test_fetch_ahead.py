"""Who is brought to a slot, in which order, and who waits for it: for how long is bounded, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.managers.test_planner import Request
from tests.support.queues import COSTS, LIMITS, queue, running, states, waiting
from vlora_sgl.core import AdapterId
from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.managers.fetch_ahead import FetchAhead
from vlora_sgl.managers.planning import Planning
from vlora_sgl.managers.policies import POLICIES, QueueState, make_policy
from vlora_sgl.managers.policies.cost_table import TABLES
from vlora_sgl.server_args import VLoraArgs

SECONDS = 1.0


class Slots:
    """So many slots; whoever is kept stays, of the others the least needed goes (``SlotResidency``)."""

    def __init__(self, count: int, *resident: str) -> None:
        self.count, self.resident, self.fetched = count, list(resident), list[str]()
        self.order: list[AdapterId] = []

    def fetch_ahead(self, adapter: str, keep: Collection[AdapterId]) -> bool:
        assert adapter not in self.resident
        if len(self.resident) >= self.count:
            victims = [uid for uid in self.resident if uid not in keep]
            if not victims:
                return False
            order = [*self.order, *victims]  # who is not needed comes last
            self.resident.remove(max(victims, key=order.index))
        self.resident.append(adapter)
        self.fetched.append(adapter)
        return True


class Ahead(FetchAhead):
    """What is under test, over slots that know the order of need, as the planner tells them."""

    slots: Slots

    def begin(
        self, clock: float, wanted: Mapping[AdapterId, Collection[str]], planned: int = 99
    ) -> Sequence[AdapterId]:
        self.slots.order = [uid for holders in wanted.values() for uid in holders]
        return super().begin(clock, wanted, planned)


def ahead(slots: Slots, depth: int = 2) -> Ahead:
    return Ahead(slots, depth, lambda adapter: SECONDS)


def alone(*adapters: AdapterId) -> dict[AdapterId, list[str]]:
    return {adapter: [] if adapter is None else [adapter] for adapter in adapters}


def test_copies_follow_each_other_in_the_order_of_need() -> None:
    slots = Slots(8, "a")
    one = ahead(slots)
    assert one.begin(10.0, alone(None, "a", "b", "c", "d")) == ["b", "c", "d"]
    assert slots.fetched == ["b", "c"] and one.coming == {"b": 11.0, "c": 12.0}, "d's turn has not come"
    assert one.begin(11.0, alone("a", "b", "c", "d")) == ["c", "d"], "b is there"
    assert one.coming == {"c": 12.0, "d": 13.0}
    assert one.begin(13.0, alone("a", "b", "c", "d")) == [] and slots.fetched == ["b", "c", "d"]


def test_a_slot_is_taken_only_from_who_is_needed_later() -> None:
    slots = Slots(3, "a", "x", "b")
    one = ahead(slots)
    assert one.begin(0.0, alone("a", "c", "b")) == ["c"] and slots.resident == ["a", "b", "c"]
    assert one.begin(2.0, alone("a", "b", "c", "d")) == [], "no slot is d's: it does not come by waiting"
    assert one.begin(2.0, alone("a", "d", "b", "c")) == ["d"] and slots.resident == ["a", "b", "d"]
    assert one.begin(2.0, alone("a", "b", "c")) == [] and slots.resident == ["a", "b", "d"], "d is on its way"


def test_who_comes_after_the_plan_takes_nobodys_slot_that_anybody_needs() -> None:
    slots = Slots(3, "a", "b", "x")
    one = ahead(slots)
    assert one.begin(0.0, alone("a", "c", "b"), planned=1) == ["c"] and slots.resident == ["a", "b", "c"]
    assert one.begin(9.0, alone("a", "d", "b", "c"), planned=1) == [] and slots.resident == ["a", "b", "c"]
    assert one.begin(9.0, alone("a", "d", "b", "c"), planned=2) == ["d"] and slots.resident == ["a", "b", "d"]


def test_one_of_several_adapters_that_is_not_there_keeps_them_all_waiting() -> None:
    slots = Slots(8, "a", "b")
    assert ahead(slots).begin(0.0, {"ab": ["a", "b"], "bc": ["b", "c"]}) == ["bc"]


def test_what_was_unloaded_or_evicted_meanwhile_is_not_waited_for() -> None:
    slots = Slots(8)
    one = ahead(slots)
    one.begin(0.0, alone("a", "b"))
    slots.resident.remove("a")
    assert one.begin(0.5, alone("b")) == ["b"] and one.coming == {"b": 2.0}


@given(st.randoms(use_true_random=False))
def test_everybody_who_waits_has_a_copy_under_way_or_behind_one(pick: random.Random) -> None:
    slots = Slots(pick.randint(1, 6))
    one = ahead(slots, depth=pick.randint(1, 3))
    names, clock = [f"a{i}" for i in range(10)], 0.0
    for _ in range(60):
        wanted = alone(*pick.sample(names, pick.randint(0, 8)))
        before, running_ = set(slots.resident), next(iter(wanted), None)
        absent = one.begin(clock, wanted, pick.randint(0, len(wanted)))
        assert len(one.coming) <= one.depth and len(slots.resident) <= slots.count
        assert running_ not in before or running_ in slots.resident, "who runs keeps the slot"
        for adapter in absent:
            assert one.coming and (adapter in one.coming or len(one.coming) == one.depth)
        assert all(clock < at <= clock + one.depth * SECONDS for at in one.coming.values())
        clock += pick.choice((0.0, 0.3, 1.0, 5.0))


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(state=states(), pick=st.randoms(use_true_random=False))
def test_a_plan_does_without_what_is_not_there(name: str, state: QueueState, pick: random.Random) -> None:
    busy = {r.adapter for r in state.running}
    late = {r.adapter for r in state.waiting if r.adapter not in busy and pick.random() < 0.5}
    state.absent = sorted(late - {state.merged, None}, key=str)
    plan = make_policy(name, COSTS, LIMITS).plan(state)
    adapters = {r.rid: r.adapter for r in (*state.running, *state.waiting)}
    assert not {adapters[rid] for rid in plan.requests} & set(state.absent)
    assert plan.merged_adapter not in state.absent
    assert {r.rid for r in state.running} <= set(plan.requests)


def test_who_is_there_takes_the_place_of_who_is_on_the_way() -> None:
    rows = queue(("m", 7))
    late = [waiting("x", 10), waiting("m", 11)]
    policy = make_policy("unmerged", COSTS, LIMITS)
    whole = policy.plan(QueueState(1.0, late, rows, max_batch=8))
    assert whole.requests[-1] == "r10"
    assert policy.plan(QueueState(1.0, late, rows, max_batch=8, absent=["x"])).requests[-1] == "r11"


def test_the_slot_that_an_adapter_comes_to_is_not_given_to_others() -> None:
    late = [waiting("x", 10), waiting("y", 11), waiting("m", 12)]
    policy = make_policy("unmerged", COSTS, LIMITS)
    state = QueueState(1.0, late, queue(("m", 2)), max_batch=8, max_adapters=2, absent=["x"])
    assert policy.plan(state).requests[2:] == ("r12",), "y would need the slot that x comes to"
    assert policy.plan(replace(state, max_adapters=3)).requests[2:] == ("r11", "r12")


def test_nothing_is_merged_before_it_is_there() -> None:
    late = [running("x", i) for i in range(1)]
    policy = make_policy("merged", COSTS, LIMITS)
    plan = policy.plan(QueueState(1.0, [waiting("y", 0)], late, merged="x", absent=["y"]))
    assert plan.merged_adapter == "x" and plan.requests == ("r0",) * bool(late)


class Manager(Slots):
    """What planning asks of a LoRA manager that merges nothing, with one slot beside the running adapter's."""

    merged, can_merge, slot_ranks = None, False, ()
    lora_refs: ClassVar[dict[str, object]] = {}
    max_lora_rank, max_loras_per_batch = 64, 3

    def __init__(self, *resident: str) -> None:
        super().__init__(2, *resident)
        self.residency = SlotResidency(memory=2)

    def holders(self, adapter: AdapterId) -> list[str]:
        return [] if adapter is None else [adapter]

    def fetch_ahead(self, adapter: str, keep: Collection[AdapterId]) -> bool:
        self.order = [uid for uid in self.residency._wanted if uid is not None]
        return super().fetch_ahead(adapter, keep)

    def load_share(self, adapter: str) -> float:
        return 0.5


def planning(manager: Manager, depth: int = 4) -> Planning:
    shape = SimpleNamespace(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    return Planning(
        VLoraArgs(fetch_ahead=depth, cost_table=str(TABLES / "h200-7b.json")),
        manager,
        shape,
        "cpu",
        max_batch=8,
        measures=False,
    )


def decode(made: Planning, rows: list[Request]) -> None:
    plan = made.planner.settle([(row.rid, row.lora_id) for row in rows])
    made.planner.ran(plan, [(row.lora_id, 1) for row in rows], prefill=False)


def test_a_request_runs_when_its_adapter_is_there_and_others_run_meanwhile() -> None:
    manager = Manager("a")
    made, row, late, other = planning(manager), Request("r0", "a"), Request("r1", "b"), Request("r2", "a")
    copy = made.planner.policy.costs.load_host * 0.5
    made.planner.policy = make_policy("unmerged", made.planner.policy.costs, LIMITS)  # which gathers nothing
    ready, steps = 0.0, 0
    while not made.may_admit(late):
        made.begin([late, other], [row], None)
        ready = ready or made.planner.clock + copy
        assert made.may_admit(other), "who is there need not wait"
        assert made.may_admit(late) is (made.planner.clock >= ready)
        decode(made, [row])
        steps += 1
    assert steps > 1 and manager.fetched == ["b"] and made.state()["slots"]["coming"] == 0


def test_with_nothing_else_to_run_a_request_waits_for_its_adapter_inside_its_batch() -> None:
    manager = Manager("a")
    made, late = planning(manager), [Request("r1", "b"), Request("r2", "c")]
    made.begin(late, [], None)
    assert all(map(made.may_admit, late)) and manager.fetched == ["b", "c"]
    assert made.state()["slots"]["coming"] == 2


def test_without_room_ahead_a_batch_makes_its_own() -> None:
    manager = Manager("a", "b")
    made, rows, late = planning(manager), [Request("r0", "a"), Request("r1", "b")], Request("r2", "c")
    made.planner.policy, made.planner.max_adapters = make_policy("unmerged", made.planner.policy.costs, LIMITS), 3
    made.begin([late], rows, None)
    assert made.may_admit(late) and manager.fetched == [], "its batch evicts whom it may"


def test_nothing_is_fetched_ahead_where_that_is_off() -> None:
    manager = Manager("a")
    made = planning(manager, depth=0)
    made.begin([Request("r1", "b")], [Request("r0", "a")], None)
    assert made.ahead is None and manager.fetched == []
