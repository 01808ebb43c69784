"""Who serves what: shares fit, hot adapters spread, cold ones stay, nothing moves without need."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.traces import Workload, trace
from vlora_sgl.cluster.placement import SLACK, Affinity, Random, RoundRobin, Shared, place


@dataclass
class Spot:
    """A replica as a policy sees it."""

    number: int
    load: int = 0
    loaded: set[str] = field(default_factory=set)

    def holds(self, adapter: str) -> bool:
        return adapter in self.loaded


def loads(shares: dict[str, float], homes: dict[str, tuple[int, ...]], replicas: int) -> list[float]:
    return [sum(shares[a] / len(where) for a, where in homes.items() if r in where) for r in range(replicas)]


def test_placement_by_hand() -> None:
    assert place({"hot": 6, "b": 2, "c": 1, "d": 1}, [0, 1], 4, {}) == {"hot": (0, 1), "b": (0,), "c": (1,), "d": (1,)}
    assert place({"a": 1, "b": 1, "c": 1, "d": 1}, [0, 1], 4, {}) == {"a": (0,), "b": (1,), "c": (0,), "d": (1,)}


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0, 100), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 2**32),
)
def test_every_adapter_has_homes_and_no_replica_too_much(
    shares: dict[str, float], replicas: int, slots: int, seed: int
) -> None:
    rng = random.Random(seed)
    before = {a: (rng.randrange(replicas + 2),) for a in shares if rng.random() < 0.5}
    homes = place(shares, range(replicas), slots, before)
    assert homes.keys() == shares.keys()
    assert all(where and len(set(where)) == len(where) for where in homes.values())
    fair = sum(shares.values()) / replicas
    # One part is never larger than what a replica may hold, so a greedy filling exceeds it by one part at most.
    assert max(loads(shares, homes, replicas)) <= 2 * fair * (1 + SLACK) + 1e-9


@pytest.mark.parametrize("hot", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_hot_adapter_leaves_the_others_slots_everywhere(replicas: int, hot: float) -> None:
    """A replica without a part of it would be the home of all that its share of the requests has room for."""
    slots = 8
    cold = replicas * (slots - 1)
    shares = {"hot": hot} | {f"cold{n}": (1 - hot) / cold for n in range(cold)}
    homes = place(shares, range(replicas), slots, {})
    held = [sum(r in where for where in homes.values()) for r in range(replicas)]
    assert max(held) <= slots + 2
    assert max(loads(shares, homes, replicas)) <= (1 + SLACK) / replicas + (1 - hot) / cold
    assert place(shares, range(replicas), slots, homes) == homes


def test_a_placement_that_fits_is_kept() -> None:
    rng = random.Random(1)
    shares = {f"a{n}": 1 + rng.random() for n in range(40)}
    homes = place(shares, range(4), 10, {})
    slightly = {name: share * (1 + 0.02 * rng.random()) for name, share in shares.items()}
    assert place(slightly, range(4), 10, homes) == homes
    without = place(shares, [0, 1, 3], 10, homes)
    moved = [name for name in shares if without[name] != homes[name]]
    assert {homes[name] for name in moved} == {(2,)}


def test_requests_stay_at_home_until_home_is_behind() -> None:
    policy, spots = Affinity(slots=4), [Spot(n) for n in range(3)]
    home = policy.choose("a", None, spots)
    assert {policy.choose("a", None, spots) for _ in range(20)} == {home}
    assert policy.homes == {"a": (home,)}
    spots[home].load = 30
    elsewhere = policy.choose("a", None, spots)
    assert elsewhere != home
    other = ({0, 1, 2} - {home, elsewhere}).pop()
    spots[other].loaded.add("a")
    spots[other].load = 3
    assert policy.choose("a", None, spots) == other  # it holds the adapter
    spots[home].load = 0
    assert policy.choose("a", None, spots) == home


def test_a_hot_adapter_gets_as_many_homes_as_it_needs_once_it_is_known_to_be_hot() -> None:
    spots = [Spot(n) for n in range(4)]
    seen, told = Affinity(slots=4), Affinity(slots=4, shares={"hot": 60, "a": 20, "b": 20})
    told.choose("a", None, spots)
    for number in range(200):
        seen.choose("hot" if number % 5 < 3 else "ab"[number % 5 - 3], None, spots)
    for policy in (seen, told):
        assert {name: len(homes) for name, homes in policy.homes.items()} == {"hot": 3, "a": 1, "b": 1}


def test_an_adapter_that_nobody_asks_for_is_forgotten() -> None:
    policy, spots = Affinity(slots=4), [Spot(n) for n in range(2)]
    for number in range(6000):
        policy.choose("gone" if number < 100 else "b", None, spots)
        assert ("gone" in policy.homes) or number > 1000
    assert policy.homes.keys() == policy.requests.keys() == {"b"}


def test_an_image_has_a_favourite_among_the_homes() -> None:
    policy, spots = Affinity(slots=4), [Spot(n) for n in range(4)]
    chosen = {content: policy.choose(None, content, spots) for content in (bytes([n]) for n in range(64))}
    assert set(chosen.values()) == {0, 1, 2, 3}
    for content, number in chosen.items():
        spots[(number + 1) % 4].load = 1  # a little load does not matter
        assert policy.choose(None, content, spots) == number
    without = [spot for spot in spots if spot.number != 2]
    kept = [c for c, n in chosen.items() if n != 2]
    assert all(without[policy.choose(None, c, without)].number == chosen[c] for c in kept)


def test_an_adapter_whose_home_is_down_settles_elsewhere_and_the_others_stay() -> None:
    policy, spots = Affinity(slots=4), [Spot(n) for n in range(3)]
    homes = {name: spots[policy.choose(name, None, spots)].number for name in "abcdef"}
    up = [spot for spot in spots if spot.number != homes["a"]]
    first = up[policy.choose("a", None, up)].number
    for name in "abcdef" * 5:
        number = up[policy.choose(name, None, up)].number
        assert number == (homes[name] if homes[name] != homes["a"] else number)
        assert name != "a" or number == first


@pytest.mark.parametrize(("replicas", "least"), [(2, 1.2), (4, 3.0), (8, 3.0)])
def test_affinity_cuts_slot_loads(replicas: int, least: float) -> None:
    """Four times as many adapters as slots of one replica, skew 60 %, an LRU pool on each; two replicas do not have
    the slots to keep them all."""
    slots = 8
    arrivals = list(trace(Workload(adapters=4 * slots, skew=0.6, rate=50.0, seed=3), 200.0))
    misses = {}
    for name, policy in (("affinity", Affinity(slots)), ("round_robin", RoundRobin()), ("random", Random(5))):
        pools: list[dict[str, None]] = [{} for _ in range(replicas)]
        spots = [Spot(n) for n in range(replicas)]
        misses[name], served = 0, [0] * replicas
        for n, arrival in enumerate(arrivals):
            number = policy.choose(arrival.adapter, None, spots)
            served[number] += 1
            spots[number].load += 1
            for spot in spots:  # each finishes its share
                spot.load = max(0, spot.load - (n % replicas == spot.number))
            pool = pools[number]
            assert arrival.adapter is not None
            misses[name] += arrival.adapter not in pool
            pool.pop(arrival.adapter, None)
            pool[arrival.adapter] = None
            if len(pool) > slots:
                del pool[next(iter(pool))]
        assert max(served) < 1.2 * len(arrivals) / replicas
    assert misses["round_robin"] / misses["affinity"] >= least
    assert misses["random"] / misses["affinity"] >= least


def test_counts_that_come_together_place_as_those_that_come_one_by_one() -> None:
    one, together = Affinity(4), Affinity(4)
    spots = [Spot(n) for n in range(3)]
    asked = ["hot"] * 40 + ["a", "b", "c"] * 8
    for adapter in asked:
        one.choose(adapter, None, spots)
    together.count({adapter: asked.count(adapter) for adapter in asked}, range(3))
    assert together.requests == one.requests and together.homes.keys() == one.homes.keys()
    assert len(together.homes["hot"]) == len(one.homes["hot"]) == 2


def test_fronts_send_an_adapter_whose_home_is_down_to_the_same_replica_and_back() -> None:
    spots = [Spot(n, load=n) for n in range(5)]
    fronts = [Shared() for _ in range(3)]
    chosen = []
    for front in fronts:
        front.homes = {f"a{n}": (0,) for n in range(20)}
        for up in (spots[1:], spots[:0:-1]):  # in whichever order
            chosen.append([up[front.choose(f"a{n}", None, up)].number for n in range(20)])
        assert {front.choose(f"a{n}", None, spots) for n in range(20)} == {0}
        assert front.take() == {f"a{n}": 3 for n in range(20)} and front.take() == {}
    assert all(one == chosen[0] for one in chosen) and len(set(chosen[0])) > 1
