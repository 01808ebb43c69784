"""The accuracy that shows a floor: against Wilson's interval, against sampling, and what it does to a packing."""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds import random_world
from vlora_sgl.generate.floors import bar, examples_needed, independent_examples
from vlora_sgl.generate.fusion import fuse_by_search, fuse_greedily
from vlora_sgl.generate.ledger import Ledger, Names

FLOORS = st.floats(0.01, 0.99)
COUNTS = st.integers(1, 2000)
CONFIDENCES = st.floats(0.5, 0.999)


def wilson(accuracy: float, n: int, confidence: float) -> float:
    """The lower end of Wilson's score interval, as textbooks write it."""
    z = NormalDist().inv_cdf(confidence)
    centre = accuracy + z * z / (2 * n)
    spread = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    return (centre - spread) / (1 + z * z / n)


def test_values_worked_out_by_hand() -> None:
    assert bar(0.8, 100, 0.95) == pytest.approx(0.8 + 1.644854 * 0.04)
    assert bar(0.5, 25, 0.975) == pytest.approx(0.5 + 1.959964 * 0.1)
    assert bar(1.0, 3, 0.99) == 1.0
    assert examples_needed(0.9, 0.95) == 25  # 1.645 squared is 2.71, times 9
    assert independent_examples([2, 2, 2]) == 3 and independent_examples([1, 1, 1, 9]) == 144 / 84


@given(FLOORS, COUNTS, CONFIDENCES, st.floats(0, 1))
def test_an_accuracy_passes_where_wilsons_lower_bound_reaches_the_floor(
    floor: Any, n: Any, confidence: Any, share: Any
) -> None:
    accuracy = round(share * n) / n
    bound, least = wilson(accuracy, n, confidence), bar(floor, n, confidence)
    if abs(bound - floor) > 1e-9:
        assert (accuracy >= least) == (bound > floor)


@given(FLOORS, COUNTS, CONFIDENCES)
def test_it_needs_less_with_more_examples_and_nothing_extra_by_the_floor_itself(
    floor: Any, n: Any, confidence: Any
) -> None:
    assert bar(floor, n, 0.5) == floor
    assert floor <= bar(floor, n + 1, confidence) <= bar(floor, n, confidence)
    assert bar(floor, n, confidence) <= bar(floor, n, min(0.9995, confidence + 0.0005))


@given(FLOORS, CONFIDENCES)
def test_the_fewest_examples_that_can_show_a_floor(floor: Any, confidence: Any) -> None:
    needed = examples_needed(floor, confidence)
    assert bar(floor, needed, confidence) <= 1 + 1e-9
    assert needed == 1 or bar(floor, needed - 1, confidence) > 1


@pytest.mark.parametrize(("floor", "n"), [(0.7, 52), (0.8, 90), (0.5, 47), (0.9, 300)])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_an_adapter_below_its_floor_passes_no_more_often_than_the_confidence_says(
    floor: float, n: int, confidence: float
) -> None:
    """Exact binomial tails just below the floor; the normal approximation may miss by some of a step of 1 / n."""
    least = bar(floor, n, confidence)
    tail = sum(
        math.comb(n, hits) * floor**hits * (1 - floor) ** (n - hits) for hits in range(n + 1) if hits / n >= least
    )
    assert tail <= 1 - confidence + 0.015


class Sampled:
    """A world whose accuracies are measured on a validation split of ``n``, as real ones are."""

    def __init__(self, kind: str, names: int, seed: int, n: int) -> None:
        self.world, self.floors = random_world(kind, names, seed)
        self.n = n

    def fuse(self, sequence: Names) -> dict[str, float]:
        return self._seen(sequence, self.world.fuse(sequence))

    def probe(self, names: Names) -> dict[str, float]:
        return self._seen(names, self.world.probe(names))

    def _seen(self, sequence: Names, truth: dict[str, float]) -> dict[str, float]:
        rng = random.Random(repr(sequence))
        return {d: sum(rng.random() < p for _ in range(self.n)) / self.n for d, p in truth.items()}


@pytest.mark.parametrize("kind", ["conflicts", "mixed", "forgetful"])
def test_floors_break_on_the_truth_by_chance_without_a_margin_and_rarely_with_one(kind: str) -> None:
    """Floors 0.02 to 0.2 below what each data set can alone, known from 150 examples each."""
    broken, adapters, kept = {0.5: 0, 0.95: 0}, {0.5: 0, 0.95: 0}, 0
    for seed in range(120):
        for confidence in broken:
            world = Sampled(kind, 5, seed, n=150)
            bars = {name: bar(floor, world.n, confidence) for name, floor in world.floors.items()}
            ledger = Ledger(world, bars)
            packing = fuse_by_search(world.world.names, ledger, extra=5)
            adapters[confidence] += len(packing)
            for sequence in packing:
                truth = world.world.accuracy(sequence)
                shown = [name for name in sequence if name not in ledger.broken(sequence)]
                broken[confidence] += sum(truth[name] < world.floors[name] for name in shown)
                kept += len(shown)
    assert broken[0.95] <= 0.02 * kept / 2 and broken[0.95] * 4 <= broken[0.5], broken
    assert adapters[0.95] >= adapters[0.5], "certainty costs adapters"


def test_a_fusion_that_only_seems_to_hold_is_rolled_back() -> None:
    """b beside a reads 0.82 of a floor of 0.8: enough by itself, not with what 100 examples leave open."""

    class Two:
        def fuse(self, sequence: Names) -> dict[str, float]:
            return {name: 0.95 if len(sequence) == 1 else 0.82 for name in sequence}

        def probe(self, names: Names) -> dict[str, float]:
            return self.fuse(names)

    for confidence, packing in ((0.5, [("a", "b")]), (0.95, [("a",), ("b",)])):
        bars = dict.fromkeys("ab", bar(0.8, 100, confidence))
        assert fuse_greedily("ab", Ledger(Two(), bars)) == packing
