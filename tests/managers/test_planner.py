"""The planner: what it tells the policy, what it makes of the answer, and that two of them agree."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import InferenceMode, RequestParams
from vlora_sgl.managers.planner import Planner
from vlora_sgl.managers.policies import POLICIES, Limits, make_policy
from vlora_sgl.managers.policies.cost_table import shipped

COSTS = shipped()["atmm"]


@dataclass
class Request:
    """What the planner reads of an SGLang request."""

    rid: str
    lora_id: str | None
    prompt: int = 100
    most: int = 8
    output_ids: list[int] = field(default_factory=list)

    @property
    def origin_input_ids(self) -> range:
        return range(self.prompt)

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.most)

    def finished(self) -> bool:
        return False

    @property
    def vlora(self) -> SimpleNamespace:
        return SimpleNamespace(params=RequestParams())


class Engine:
    """SGLang's loop in small: prefill what is planned, else decode."""

    def __init__(self, name: str, max_batch: int = 4) -> None:
        self.planner = Planner(make_policy(name, COSTS, Limits()), max_batch, max_adapters=3)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.log: list[tuple[Any, ...]] = []

    def step(self) -> None:
        self.planner.next(self.waiting, self.running)
        batch = sorted(
            (r for r in self.waiting if self.planner.planned(r.rid)), key=lambda r: self.planner.place(r.rid)
        )
        prefill = bool(batch)
        if prefill:
            self.waiting = [r for r in self.waiting if r not in batch]
            self.running += batch
        else:
            batch = self.running
        plan = self.planner.settle([(r.rid, r.lora_id) for r in batch])
        self.planner.ran(plan, [(r.lora_id, r.prompt if prefill else 1) for r in batch], prefill)
        self.log.append((plan.mode, plan.merged_adapter, plan.requests))
        for r in batch:
            r.output_ids.append(0)
        self.running = [r for r in self.running if len(r.output_ids) < r.most]


def drive(name: str, seed: int) -> Engine:
    """Random traffic to the end."""
    rng, engine, sent = random.Random(seed), Engine(name), 0
    while sent < 60 or engine.waiting or engine.running:
        for _ in range(rng.randrange(3)):
            if sent < 60:
                engine.waiting.append(Request(f"r{sent}", rng.choice([None, "a", "a", "a", "b", "c", "d"])))
                sent += 1
        if engine.waiting or engine.running:
            engine.step()
        assert len(engine.log) < 5000
    return engine


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_two_ranks_decide_alike_and_nothing_is_lost(name: str) -> None:
    one, other = drive(name, 3), drive(name, 3)
    assert one.log == other.log
    assert {rid for _, _, rids in one.log for rid in rids} == {f"r{i}" for i in range(60)}
    assert one.planner.clock == other.planner.clock > 0


def test_the_mode_follows_from_the_batch_that_was_formed() -> None:
    planner = Planner(make_policy("merged", COSTS), 4, 3)
    waiting = [Request("x", "m"), Request("y", "other")]
    assert planner.next(waiting, []).requests == ("x",)
    assert not planner.planned("y")
    assert planner.settle([("x", "m")]).mode is InferenceMode.MERGED
    mixed = planner.settle([("x", "m"), ("y", "other")])
    assert (mixed.mode, mixed.merged_adapter) == (InferenceMode.MIXTURE, "m")


def test_iterations_advance_the_clock_by_the_table() -> None:
    planner = Planner(make_policy("merged", COSTS), 4, 3)
    request = Request("x", "m")
    planner.next([request], [])
    planner.ran(planner.settle([("x", "m")]), [("m", 100)], prefill=True)
    assert planner.clock == pytest.approx(COSTS.merge + COSTS.prefill.seconds({"m": 100}, 5000, "m"))
    assert (planner.switches, planner.merged) == (1, "m")
    before = planner.clock
    request.output_ids.append(0)
    planner.next([], [request])
    planner.ran(planner.settle([("x", "m")]), [("m", 1)], prefill=False)
    assert planner.clock - before == pytest.approx(COSTS.decode.seconds({"m": 1}, 101, "m"))


def test_a_row_that_no_plan_has_seen_is_counted_and_ends_nothing() -> None:
    planner = Planner(make_policy("cost", COSTS), 4, 3)
    planner.next([Request("x", "a")], [])
    plan = planner.settle([("x", "a"), ("late", "b")])
    iteration = planner.ran(plan, [("a", 10), ("b", 20)], prefill=True)
    assert dict(iteration.groups) == {"a": 10, "b": 20}
    assert planner.clock == pytest.approx(COSTS.prefill.seconds({"a": 10, "b": 20}, 250, None))
    assert planner.next([], [Request("x", "a"), Request("late", "b")]).requests == ("x", "late")


def test_another_policy_decides_from_the_next_iteration_on() -> None:
    planner = Planner(make_policy("merged", COSTS), 4, 3)
    waiting = [Request("x", "m"), Request("y", "other")]
    assert planner.next(waiting, []).merged_adapter == "m"
    planner.use(make_policy("unmerged", COSTS))
    assert planner.next(waiting, []).merged_adapter is None


def test_who_waits_and_who_runs_is_known_by_adapter() -> None:
    planner = Planner(make_policy("merged", COSTS), 4, 3)
    x, y = Request("x", "m"), Request("y", None)
    planner.next([x, y], [])
    planner.ran(planner.settle([("x", "m")]), [("m", 100)], prefill=True)
    assert planner.requests() == {"waiting": {None: 1}, "running": {"m": 1}}
    planner.next([], [x])  # the other was aborted
    assert planner.requests() == {"waiting": {}, "running": {"m": 1}}
    planner.next([x], [], chunked=y)  # one was retracted, the other is between two chunks
    assert planner.requests() == {"waiting": {"m": 1}, "running": {None: 1}}
    planner.next([], [])
    assert planner.requests() == {"waiting": {}, "running": {}}
