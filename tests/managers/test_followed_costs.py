"""Costs that follow the machine: towards what is measured, from any start, past stalls, for all ranks at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import AdapterId, InferenceMode
from vlora_sgl.managers.planner import Planner
from vlora_sgl.managers.planning import Announcements, Planning
from vlora_sgl.managers.policies import make_policy
from vlora_sgl.managers.policies.cost_fit import coefficients, features, with_coefficients
from vlora_sgl.managers.policies.cost_table import CostTable, ModelShape, PhaseCosts, analytic, shipped
from vlora_sgl.managers.policies.followed_costs import EVERY, CostUpdate, FollowedCosts
from vlora_sgl.managers.policies.iteration_log import Iteration
from vlora_sgl.server_args import VLoraArgs

MACHINE = shipped("h200-7b")["atmm"]
SHAPE = ModelShape(3584, 28, 28, 4, 18944, 152064, 64)
BATCHES: list[tuple[str, dict[AdapterId, int], float]] = [
    ("decode", {"a": 8, "b": 8, None: 8}, 9000.0),
    ("decode", {"a": 1}, 300.0),
    ("decode", {None: 32}, 12000.0),
    ("prefill", {"a": 500, "c": 900}, 5e5),
    ("prefill", {None: 256}, 3e4),
]


def serve(
    followed: FollowedCosts,
    machine: Callable[[int], CostTable],
    count: int,
    seed: int,
    merges: bool = True,
    stalls: float = 0.0,
) -> CostTable:
    """Iterations that take what the machine's table says, give or take 3 %; the table that is in use at the end."""
    rng, before, table = random.Random(seed), None, followed.start
    for number in range(count):
        costs = machine(number)
        prefill = rng.random() < 0.2
        merged = rng.choice([before] * 6 + [None, "a", "b"]) if merges else None
        names = rng.sample([None, "a", "b", "c", "d"], rng.randint(1, 5))
        groups: dict[AdapterId, int] = {name: rng.randint(1, 900 if prefill else 9) for name in names}
        context = sum(n * n / 2 for n in groups.values()) if prefill else rng.uniform(100, 800) * sum(groups.values())
        seconds = (costs.prefill if prefill else costs.decode).seconds(groups, context, merged)
        seconds += costs.switch_seconds(before, merged)
        seconds *= rng.gauss(1.0, 0.03) * (30 if rng.random() < stalls else 1)
        followed(Iteration(prefill, groups, context, before, merged, InferenceMode.UNMERGED, 0.0), seconds, 0.0)
        before = merged
        if (update := followed.take()) is not None:
            table = update.table
    return table


def differences(found: CostTable, wanted: CostTable) -> list[float]:
    pairs = [
        (getattr(table, phase).seconds(groups, context, merged) for table in (found, wanted))
        for phase, groups, context in BATCHES
        for merged in (None, "a")
    ]
    return [abs(got / want - 1) for got, want in pairs]


STARTS = {
    "true": MACHINE,
    "another card": shipped("h100-7b")["atmm"],
    "a third": replace(analytic(SHAPE, "card", 12e12, 2e15), merge=0.002, unmerge=0.002),
    "tenfold": analytic(SHAPE, "card", 4e11, 6e13),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("start", STARTS)
def test_from_any_start_the_table_becomes_the_machines(start: str, seed: int) -> None:
    followed = FollowedCosts(STARTS[start])
    table = serve(followed, lambda _: MACHINE, 6000, seed, stalls=0.01)
    assert max(differences(table, MACHINE)) < 0.08
    assert table.merge == pytest.approx(MACHINE.merge, rel=0.2)
    assert max(followed.error.values()) < 0.05
    assert "Followed since" in table.provenance and STARTS[start].provenance in table.provenance


def test_a_machine_that_slows_down_is_followed() -> None:
    slow = with_coefficients(MACHINE, 1.5 * coefficients(MACHINE), "slower")
    followed = FollowedCosts(MACHINE)
    table = serve(followed, lambda number: MACHINE if number < 5000 else slow, 40_000, 3)
    assert max(differences(table, slow)) < 0.08


def test_what_no_iteration_tells_of_stays() -> None:
    followed = FollowedCosts(MACHINE)
    doubled = with_coefficients(MACHINE, 2 * coefficients(MACHINE), "twice as slow")
    table = serve(followed, lambda _: doubled, 3000, 4, merges=False)
    assert (table.merge, table.unmerge, table.decode.lora_per_undo) == (MACHINE.merge, MACHINE.unmerge, 0.0)
    wanted = doubled.decode.seconds({None: 8}, 0, None)
    assert table.decode.seconds({None: 8}, 0, None) == pytest.approx(wanted, rel=0.05)


def test_features_times_coefficients_are_the_tables_seconds() -> None:
    table = replace(MACHINE, decode=PhaseCosts(*(0.1 * n for n in range(1, 10))), merge=3.0, unmerge=5.0)
    for before, merged, switch in ((None, None, 0.0), (None, "a", 3.0), ("b", None, 5.0), ("a", "a", 0.0)):
        groups: dict[AdapterId, int] = {"a": 3, "c": 2, None: 4}
        seconds = features(False, groups, 70.0, before, merged) @ coefficients(table)
        assert seconds == pytest.approx(table.decode.seconds(groups, 70.0, merged) + switch)


def test_an_iteration_is_taken_in_within_microseconds() -> None:
    followed = FollowedCosts(MACHINE)
    began = time.process_time()
    serve(followed, lambda _: MACHINE, 20 * EVERY, 5)
    assert (time.process_time() - began) / (20 * EVERY) < 200e-6, "the making of the batch included"


def test_the_first_ranks_news_goes_with_what_it_received() -> None:
    update = CostUpdate(MACHINE, {"decode": 0.1})
    news: list[object] = [update]
    first = Announcements(None, lambda: [news.pop()] if news else [])
    assert first.handle(["request"]) == ["request", update] and first.handle([]) == []
    assert Announcements(None, lambda: [update]).handle(None) is None, "another rank tells this one"
    blocker: Any = SimpleNamespace(handle=lambda received: received[1:])
    assert Announcements(blocker, list).handle(["blocked", "request"]) == ["request"]


def test_a_plan_goes_on_with_new_costs_and_keeps_what_it_remembers() -> None:
    planning: Any = Planning.__new__(Planning)
    planning.args = VLoraArgs()
    planning.planner = Planner(make_policy("cost", MACHINE), max_batch=4, max_adapters=2)
    planning.planner.memory = {"a": 1.0}
    table = replace(MACHINE, provenance="measured")
    planning.follow(CostUpdate(table, {"decode": 0.02}))
    assert planning.planner.policy.costs is table and planning.planner.memory == {"a": 1.0}
    assert planning.cost_error == {"decode": 0.02}
