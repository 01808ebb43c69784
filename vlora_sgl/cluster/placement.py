"""Which replica gets a request. No clock, no network: the simulator and the replica router run the same code.

Device slots are the scarce thing: a replica that sees few adapters keeps them in their slots. So every
adapter has homes: one, or as many as its share of the requests needs. Requests leave them only when these fall behind.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from vlora_sgl.core import AdapterId

Homes = dict[str, tuple[int, ...]]
"""Replicas by adapter."""

SLACK = 0.1
"""How far above its fair share of the requests a replica may be filled."""
SPREADS = (1.0, 1.5, 2.0)
"""Over how many times as many replicas as carry it a hot adapter is split, where that leaves the others more slots."""
SPILL_FACTOR, SPILL_ROOM = 1.25, 4
"""A home is behind when it has more than this times the mean number of requests, and this many more."""
REPLACE_EVERY = 64
"""Requests between two placements, or as many as there are adapters."""
DECAY = 0.9
"""What counts of requests are multiplied by at each placement."""
WINDOW = REPLACE_EVERY / (1 - DECAY)
"""So about this many requests count."""
FORGOTTEN = 0.05
"""An adapter whose count has decayed to this lost its slot long ago, and loses its home."""


def place(
    shares: Mapping[str, float], replicas: Sequence[int], slots: int, before: Mapping[str, Sequence[int]]
) -> Homes:
    """Homes of every adapter: hot ones on several replicas, cold ones on one.

    One that is too hot for a replica is split over just as many as carry it, or over more where that leaves the others
    more slots: a replica without a part of it would get all those that its share of the requests has room for.

    Args:
        shares: requests by adapter, in any unit.
        replicas: those that serve now.
        slots: device slots for adapters on each.
        before: homes until now, which are kept where they fit.
    """
    tried: list[tuple[int, Homes]] = []
    for spread in SPREADS:
        homes = _placed(shares, replicas, slots, before, spread)
        held = Counter(itertools.chain.from_iterable(homes.values()))
        without = sum(max(0, count - slots) for count in held.values())
        moved = sum(len({*homes[adapter]} - {*old}) for adapter, old in before.items() if adapter in homes)
        tried.append((without + moved, homes))
        if not without:
            break
    return min(tried, key=lambda one: one[0])[1]


def _placed(
    shares: Mapping[str, float],
    replicas: Sequence[int],
    slots: int,
    before: Mapping[str, Sequence[int]],
    spread: float,
) -> Homes:
    """Homes as in ``place``, hot adapters split over ``spread`` times as many replicas as carry them.

    Adapters are taken from the hottest down. Each part goes where it fits: if it can where it was before, then where a
    slot is free, then where load is least.
    """
    room = sum(shares.values()) / len(replicas) * (1 + SLACK)
    load = dict.fromkeys(replicas, 0.0)
    held = dict.fromkeys(replicas, 0)
    homes: Homes = {}
    for adapter in sorted(shares, key=lambda name: (-shares[name], name)):
        parts = math.ceil(shares[adapter] / room) if room else 1
        parts = min(len(replicas), math.ceil(parts * spread) if parts > 1 else 1)
        part = shares[adapter] / parts
        stays = frozenset(before.get(adapter, ()))
        best = sorted(
            (max(0.0, load[r] + part - room), r not in stays, held[r] >= slots, load[r], held[r], r) for r in replicas
        )
        homes[adapter] = tuple(sorted(key[-1] for key in best[:parts]))
        for replica in homes[adapter]:
            load[replica] += part
            held[replica] += 1
    return homes


class Candidate(Protocol):
    """What a routing policy sees of a replica that serves."""

    @property
    def number(self) -> int:
        """Which one it is."""

    @property
    def load(self) -> int:
        """Requests that it has or that wait for it."""

    def holds(self, adapter: str) -> bool:
        """Whether the adapter is loaded there."""


class Routing(Protocol):
    """Picks a replica."""

    def choose(self, adapter: AdapterId, content: bytes | None, candidates: Sequence[Candidate]) -> int:
        """Position in ``candidates``, which is not empty, of the replica for a request.

        Args:
            adapter: the adapter of the request.
            content: what its image or other shareable prefix is known by.
            candidates: the replicas that serve.
        """


class Affinity:
    """Adapters have homes, which follow the traffic; images have a favourite among an adapter's homes.

    Args:
        slots: device slots for adapters on each replica.
        shares: requests by adapter that are expected, until others have been seen.
    """

    def __init__(self, slots: int, shares: Mapping[str, float] | None = None) -> None:
        self.slots = slots
        self.homes: Homes = {}
        total = sum((shares or {}).values()) or 1.0
        self.requests = {name: share / total * WINDOW for name, share in (shares or {}).items()}
        self._since = REPLACE_EVERY if shares else 0  # requests since the last placement
        self._seen: set[int] = set()  # replicas that served in the meantime

    def choose(self, adapter: AdapterId, content: bytes | None, candidates: Sequence[Candidate]) -> int:
        """A home that is not behind; else, of the others, one that holds the adapter; else the least loaded."""
        self._count(adapter, candidates)
        homes = self.homes_of(adapter, candidates)
        bound = SPILL_FACTOR * sum(c.load for c in candidates) / len(candidates) + SPILL_ROOM
        fine = [i for i, c in enumerate(candidates) if c.load <= bound]
        at_home = [i for i in fine if candidates[i].number in homes]
        if at_home and content is not None:
            return max(at_home, key=lambda i: _weight(content, candidates[i].number))
        if at_home:
            return min(at_home, key=lambda i: candidates[i].load)
        return min(fine, key=lambda i: (not candidates[i].holds(str(adapter)), candidates[i].load))

    def place(self, replicas: Sequence[int]) -> None:
        """Give the adapters homes on these replicas, by the requests so far."""
        self.requests = {name: DECAY * count for name, count in self.requests.items() if count > FORGOTTEN}
        self.homes = place(self.requests, replicas, self.slots, self.homes)

    def count(self, requests: Mapping[str, int], replicas: Iterable[int]) -> None:
        """Requests came, by adapter, while these replicas served; now and then, homes follow."""
        for adapter, count in requests.items():
            self.requests[adapter] = self.requests.get(adapter, 0.0) + count
        self._since += sum(requests.values())
        self._seen.update(replicas)
        if self._since >= max(REPLACE_EVERY, len(self.homes)):
            self.place(sorted(self._seen))
            self._since, self._seen = 0, set()

    def _count(self, adapter: AdapterId, candidates: Sequence[Candidate]) -> None:
        self.count({} if adapter is None else {adapter: 1}, (c.number for c in candidates))

    def homes_of(self, adapter: AdapterId, candidates: Sequence[Candidate]) -> Collection[int]:
        """The adapter's homes. One that has none, or whose homes are all down, gets another."""
        numbers = {c.number for c in candidates}
        if adapter is None:
            return numbers
        homes = self.homes.get(adapter, ())
        if numbers.isdisjoint(homes):
            homes = self.homes[adapter] = (*homes, self._emptiest(candidates))
        return homes

    def _emptiest(self, candidates: Sequence[Candidate]) -> int:
        held = Counter(itertools.chain.from_iterable(self.homes.values()))
        return min(candidates, key=lambda c: (held[c.number] >= self.slots, c.load, held[c.number])).number


class Shared(Affinity):
    """What one of several fronts chooses by: homes that one place gives out for all, to which it sends its counts.

    Attributes:
        counts: requests by adapter since they were last taken.
    """

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.counts: Counter[str] = Counter()

    def homes_of(self, adapter: AdapterId, candidates: Sequence[Candidate]) -> Collection[int]:
        """The adapter's homes. Where they are all down, one that all fronts name alike, as long as that lasts."""
        homes = super().homes_of(adapter, candidates) if adapter is None else self.homes.get(adapter, ())
        if any(c.number in homes for c in candidates):
            return homes
        return (max((c.number for c in candidates), key=lambda number: _weight(str(adapter).encode(), number)),)

    def take(self) -> dict[str, int]:
        """The counts, which begin anew."""
        taken, self.counts = dict(self.counts), Counter()
        return taken

    def _count(self, adapter: AdapterId, candidates: Sequence[Candidate]) -> None:
        if adapter is not None:
            self.counts[adapter] += 1


class RoundRobin:
    """One after the other: what affinity is measured against."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, adapter: AdapterId, content: bytes | None, candidates: Sequence[Candidate]) -> int:
        """The next."""
        return next(self._turn) % len(candidates)


class Random:
    """Any: the other thing that affinity is measured against.

    Args:
        seed: of the choices.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, adapter: AdapterId, content: bytes | None, candidates: Sequence[Candidate]) -> int:
        """One drawn evenly."""
        return self._random.randrange(len(candidates))


def _weight(content: bytes, replica: int) -> bytes:
    """Rendezvous hashing: every content ranks the replicas in an order of its own, whichever of them are up."""
    return hashlib.blake2b(content + replica.to_bytes(4, "little"), digest_size=8).digest()
