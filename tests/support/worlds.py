"""Stubbed trainers: worlds in which the accuracy after any sequence of data sets is a known function."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vlora_sgl.generate.ledger import Names

KINDS = ("capacity", "conflicts", "mixed", "forgetful", "helpful")


@dataclass
class World:
    """A trainer without training.

    Accuracy of d after a sequence S: ``solo - sum of what the others cost d - crowding beyond the capacity - what was
    learnt after d makes it forget``.
    """

    names: Names
    solo: dict[str, float]
    cost: dict[tuple[str, str], float]
    load: dict[str, float]
    capacity: float
    forgetting: float = 0.0
    short_run: float = 0.8
    noise: float = 0.01
    asked: list[Names] = field(default_factory=list)

    def accuracy(self, sequence: Names) -> dict[str, float]:
        crowding = max(0.0, sum(self.load[n] for n in sequence) - self.capacity)
        return {
            n: self.solo[n]
            - sum(self.cost[n, other] for other in sequence if other != n)
            - crowding
            - self.forgetting * (len(sequence) - 1 - i)
            for i, n in enumerate(sequence)
        }

    def fuse(self, sequence: Names) -> dict[str, float]:
        assert sequence[:-1] in ((), *self.asked), "the state before must have been trained"
        assert sequence not in self.asked, "a finished step was repeated"
        self.asked.append(sequence)
        return self.accuracy(sequence)

    def probe(self, names: Names) -> dict[str, float]:
        jitter = random.Random(repr(names))
        return {n: self.short_run * a + jitter.gauss(0, self.noise) for n, a in self.accuracy(names).items()}


def random_world(kind: str, n: int, seed: int) -> tuple[World, dict[str, float]]:
    """A world of ``n`` data sets and their floors; every data set can hold its floor alone."""
    rng = random.Random(f"{kind}-{n}-{seed}")
    names = tuple(f"d{i}" for i in range(n))
    solo = {name: rng.uniform(0.7, 1.0) for name in names}
    pairs = [(a, b) for a in names for b in names if a != b]
    density = rng.uniform(0.1, 0.7)
    cost = dict.fromkeys(pairs, 0.0)
    load, capacity, forgetting = dict.fromkeys(names, 0.0), 1.0, 0.0
    if kind in ("conflicts", "mixed"):
        cost = {pair: rng.uniform(0.1, 0.5) if rng.random() < density / 2 else 0.0 for pair in pairs}
    if kind in ("mixed", "forgetful", "helpful"):
        low = -0.02 if kind == "helpful" else 0.0
        cost = {pair: value + rng.uniform(low, 0.06) for pair, value in cost.items()}
    if kind in ("capacity", "mixed"):
        load = {name: rng.uniform(0.1, 0.7) for name in names}
    if kind == "forgetful":
        forgetting = rng.uniform(0.0, 0.05)
    floors = {name: solo[name] - rng.uniform(0.02, 0.2) for name in names}
    return World(names, solo, cost, load, capacity, forgetting), floors
