"""Packing without training: the paper's greedy fusion and our search, on thousands of worlds with a known answer."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fewest_by_trying_all import fewest_by_trying_all
from tests.support.worlds import KINDS, World, random_world
from vlora_sgl.generate.fusion import (
    fewest_adapters,
    fuse_by_search,
    fuse_greedily,
    least_interference,
    packing_bound,
    partition,
    past_the_floors,
)
from vlora_sgl.generate.ledger import Ledger


def world(costs: dict[tuple[str, str], float], names: str = "abcd") -> World:
    every = {(a, b): costs.get((a, b), 0.0) for a in names for b in names if a != b}
    return World(tuple(names), dict.fromkeys(names, 0.9), every, dict.fromkeys(names, 0.0), 1.0)


def floors(names: str = "abcd") -> dict[str, float]:
    return dict.fromkeys(names, 0.8)


def test_the_papers_figure_10() -> None:
    """Six detectors: the fourth breaks two earlier ones, so adapter 1 goes back and adapter 2 opens with it."""
    names = ("license", "sign", "car", "vegetation", "bicycle", "person")
    costs = {(victim, "vegetation"): 0.3 for victim in ("license", "sign")}
    six = World(
        names,
        dict.fromkeys(names, 0.9),
        {(a, b): costs.get((a, b), 0.0) for a in names for b in names if a != b},
        dict.fromkeys(names, 0.0),
        1.0,
    )
    ledger = Ledger(six, dict.fromkeys(names, 0.8))
    assert fuse_greedily(names, ledger) == [names[:3], names[3:]]
    assert ledger.broken(names[:4]) == ["license", "sign"]
    assert ledger.trainings == len(names) + 1  # one step was rolled back


@pytest.mark.parametrize(("healed", "packing"), [(0.0, [("a",), ("b", "c")]), (0.3, [("b", "c", "a")])])
def test_an_adapter_that_learns_past_the_floors_is_the_packing_if_it_holds_them_all(
    healed: float, packing: list[tuple[str, ...]]
) -> None:
    """a is in the way of b; with what c gives, b may hold beside it all the same."""
    three = world({("b", "a"): 0.2, ("b", "c"): -healed}, "abc")
    ledger = Ledger(three, floors("abc"))
    greedy = fuse_greedily("abc", ledger)
    assert greedy == [("a",), ("b", "c")]
    assert past_the_floors(greedy, ledger) == (packing, ["b", "c", "a"])
    assert ledger.broken(("b", "c", "a")) == ([] if healed else ["b"])


def test_a_data_set_that_cannot_hold_its_floor_alone_gets_an_adapter_that_learns_nothing_else() -> None:
    hopeless = world({})
    hopeless.solo["b"] = 0.5
    ledger = Ledger(hopeless, floors())
    assert fuse_greedily("abcd", ledger) == [("b",), ("a", "c", "d")]
    assert ledger.broken(("b",)) == ["b"]
    hopeless.asked.clear()
    assert fuse_by_search("abcd", Ledger(hopeless, floors()), extra=8, probe=False) == [("b",), ("a", "c", "d")]


def test_search_finds_what_the_order_hid() -> None:
    """a and b each clash with what the greedy order puts beside them; the pairs (a, d) and (b, c) fit."""
    clash = world({("a", "b"): 0.3, ("c", "d"): 0.3, ("a", "c"): 0.3, ("b", "d"): 0.3})
    assert len(fuse_greedily("abcd", Ledger(clash, floors()))) == 3
    clash.asked.clear()
    ledger = Ledger(clash, floors())
    packing = fuse_by_search("abcd", ledger, extra=8, probe=False)
    assert sorted(map(frozenset, packing), key=sorted) == [{"a", "d"}, {"b", "c"}]
    assert packing_bound("abcd", ledger) == 2


def test_a_bound_says_when_to_stop_trying() -> None:
    clique = world({(a, b): 0.3 for a in "abcd" for b in "abcd" if a != b})
    ledger = Ledger(clique, floors())
    assert len(fuse_by_search("abcd", ledger, extra=100)) == packing_bound("abcd", ledger) == 4
    assert ledger.trainings <= 4 + 6  # alone, and every pair once


def test_the_order_of_least_interference() -> None:
    choose = least_interference({frozenset("ab"): 0.3, frozenset("ac"): 0.2, frozenset("bc"): 0.0})
    assert choose(("a", "b", "c"), ()) == "a"
    assert choose(("b", "c"), ("a",)) == "c"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 7), st.sets(st.frozensets(st.integers(0, 6), min_size=2, max_size=3), max_size=12))
def test_partition_is_exact(n: Any, forbidden: Any) -> None:
    names = list(range(n))
    forbidden = {bad for bad in forbidden if max(bad) < n}

    def possible(bins: int) -> bool:
        def fits(assignment: list[int]) -> bool:
            if len(assignment) == n:
                return True
            i = len(assignment)
            return any(
                fits([*assignment, b])
                for b in range(min(bins, max(assignment, default=-1) + 2))
                if not any(bad <= {j for j in range(i) if assignment[j] == b} | {i} for bad in forbidden)
            )

        return fits([])

    for bins in range(1, n + 1):
        plan = partition(names, bins, forbidden)
        assert (plan is not None) == possible(bins)
        if plan is not None:
            assert sorted(x for part in plan for x in part) == names and len(plan) <= bins
            assert not any(bad <= part for bad in forbidden for part in plan)


def test_partition_says_when_it_gave_up() -> None:
    pairs = [frozenset({a, b}) for a in range(12) for b in range(a)]
    assert partition(list(range(12)), 11, pairs, nodes=50) == [frozenset()] * 11


@pytest.mark.parametrize("kind", KINDS)
def test_within_one_adapter_of_the_optimum_over_many_worlds(kind: Any) -> None:
    """Every packing is valid; search is never more than one adapter above the best there is, whatever the order."""
    found, by_chance = [], []
    for seed in range(400):
        n = 2 + seed % 4
        stub, least = random_world(kind, n, seed)
        optimum = fewest_by_trying_all(stub.names, Ledger(stub, least))
        stub.asked.clear()
        ledger = Ledger(stub, least)
        packing = fuse_by_search(stub.names, ledger, extra=3 * n)
        assert sorted(name for sequence in packing for name in sequence) == sorted(stub.names)
        assert not any(ledger.broken(sequence) for sequence in packing)
        assert optimum <= len(packing) <= optimum + 1
        found.append(len(packing))
        if kind in ("capacity", "conflicts"):  # where failing is passed on to larger sets and other orders
            assert packing_bound(stub.names, ledger) <= optimum
        stub.asked.clear()
        order = random.Random(seed).sample(stub.names, n)
        by_chance.append(len(fuse_greedily(order, Ledger(stub, least))))
    assert statistics.mean(found) <= statistics.mean(by_chance)
    assert sum(f > g for f, g in zip(found, by_chance, strict=True)) <= len(found) // 50


def test_with_trainings_to_spare_search_reaches_the_optimum() -> None:
    for seed in range(60):
        stub, least = random_world("conflicts", 6, seed)
        optimum = fewest_by_trying_all(stub.names, Ledger(stub, least))
        stub.asked.clear()
        assert len(fuse_by_search(stub.names, Ledger(stub, least), extra=1000)) == optimum


def test_twenty_data_sets_are_planned_quickly() -> None:
    stub, least = random_world("conflicts", 20, 1)
    ledger = Ledger(stub, least)
    packing = fuse_by_search(stub.names, ledger, extra=40)
    assert len(packing) >= packing_bound(stub.names, ledger) == len(fewest_adapters(stub.names, ledger))
    assert not any(ledger.broken(sequence) for sequence in packing)
