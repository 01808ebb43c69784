"""Accuracy-aware knowledge fusion (V-LoRA, section 4.2.1): which data sets share an adapter.

``fuse_greedily`` is the paper's algorithm. ``fuse_by_search`` is ours: the same algorithm in an order that short runs
suggest, then attempts at packings with fewer adapters that avoid everything seen to fail. Neither knows how training
works; they ask a ``Ledger``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations

from vlora_sgl.generate.ledger import Ledger, Names

Packing = list[Names]
"""One sequence of data sets per adapter."""

Choice = Callable[[Names, Names], str]
"""Which of the remaining data sets (first argument) to try next on an adapter that has learnt the second."""

NODES = 50_000  # of the backtracking in ``partition``; enough for 20 data sets with the conflicts met in practice


def in_order(remaining: Names, fused: Names) -> str:
    """The ``Choice`` of a fixed order."""
    return remaining[0]


def fuse_greedily(names: Sequence[str], ledger: Ledger, choose: Choice = in_order) -> Packing:
    """The paper's greedy fusion of data sets that may share adapters.

    Each data set trains the current adapter further. If any data set learnt so far falls below its floor, the adapter
    goes back to its state before, and a new one is opened with that data set. A data set that breaks its floor even
    alone gets an adapter of its own, which learns nothing else; the caller finds it with ``Ledger.broken``.
    """
    packing: Packing = []
    current: Names = ()
    remaining = list(names)
    while remaining:
        name = choose(tuple(remaining), current)
        remaining.remove(name)
        if current and ledger.holds((*current, name)):
            current = (*current, name)
        elif ledger.holds((name,)):
            if current:
                packing.append(current)
            current = (name,)
        else:
            packing.append((name,))
    return [*packing, current] if current else packing


def fuse_by_search(names: Sequence[str], ledger: Ledger, extra: int, probe: bool = True) -> Packing:
    """Greedy fusion in an order of least interference, then attempts to do with fewer adapters.

    An attempt is a packing in which no adapter holds a combination that was seen to break a floor. It either works or
    yields such a combination, so the attempts end. When no smaller packing is left to try, combinations that failed by
    forgetting alone (the last data set held, earlier ones did not) get a second chance in the opposite order.

    Args:
        names: data sets that may share adapters.
        ledger: trains and remembers.
        extra: how many trainings the attempts may take beyond those of the greedy pass.
        probe: measure the interference of every pair in short runs first; otherwise go in the order given.
    """
    interference = measure_interference(names, ledger) if probe else {}
    packing = fuse_greedily(names, ledger, least_interference(interference) if probe else in_order)
    limit = ledger.trainings + extra
    while (before := ledger.trainings) < limit:
        plan = fewest_adapters(names, ledger)
        if any(not group for group in plan):
            break
        if len(plan) < len(packing):
            hopeless = {name for sequence in packing for name in ledger.broken(sequence)}
            packing = _attempt(plan, ledger, interference, limit, hopeless) or packing
        else:
            _reverse_a_forgetful_one(ledger, limit)
        if ledger.trainings == before:
            break  # nothing new was learnt, so the next plan would be the same
    return packing


def past_the_floors(packing: Packing, ledger: Ledger) -> tuple[Packing, list[str]]:
    """One adapter learns every data set of a packing whatever the floors say: where fusion starts to hurt.

    Returns:
        the packing, or that adapter alone if every floor holds after all; and the order of learning.
    """
    # The fullest adapter first: its states are there already.
    order = tuple(name for sequence in sorted(packing, key=len, reverse=True) for name in sequence)
    for end in range(1, len(order) + 1):
        ledger.fuse(order[:end])
    return (packing if ledger.broken(order) else [order]), list(order)


def packing_bound(names: Sequence[str], ledger: Ledger) -> int:
    """Least number of adapters that avoid every combination seen to break a floor.

    A true lower bound as far as a set that broke a floor once breaks it in every order and in larger sets.
    """
    return len(fewest_adapters(names, ledger))


def fewest_adapters(names: Sequence[str], ledger: Ledger) -> list[frozenset[str]]:
    """A smallest partition without a failed combination; sets of names, empty ones if the search was cut short."""
    failed = ledger.failed()
    alone = [name for name in names if frozenset({name}) in failed]
    rest = [name for name in names if name not in alone]
    own = [frozenset({name}) for name in alone]
    for bins in range(1, len(rest) + 1):
        plan = partition(rest, bins, failed, ledger.held)
        if plan is not None:
            return own + plan
    return own


def partition(
    names: Sequence[str],
    bins: int,
    forbidden: Collection[frozenset[str]],
    prefer: Collection[frozenset[str]] = (),
    nodes: int = NODES,
) -> list[frozenset[str]] | None:
    """Split ``names`` into at most ``bins`` sets, none with a forbidden subset; ``None`` if there is no such split.

    Exact backtracking, the most restricted names first. When it takes more than ``nodes`` steps it returns ``bins``
    empty sets: whether that many are enough is not known.

    Args:
        names: what to split.
        bins: how many sets at most.
        forbidden: sets that must not be inside one part.
        prefer: sets known to be good; growing towards one of them is tried first.
        nodes: how many placements to try.
    """
    bit = {name: 1 << i for i, name in enumerate(names)}
    masks = [sum(bit[name] for name in bad) for bad in forbidden if bad <= bit.keys()]
    good = [sum(bit[name] for name in group) for group in prefer if group <= bit.keys()]
    order = sorted(bit.values(), key=lambda b: -sum(1 / (m.bit_count() - 1) for m in masks if m & b))
    touching = {b: [m for m in masks if m & b] for b in order}
    parts = [0] * bins
    left = nodes

    def place(position: int) -> bool:
        nonlocal left
        if position == len(order):
            return True
        b = order[position]
        used = sum(1 for part in parts if part)
        # Empty parts are alike: only the first is tried.
        candidates = range(min(used + 1, bins))
        for i in sorted(candidates, key=lambda i: not any((parts[i] | b) & ~g == 0 for g in good)):
            left -= 1
            if left < 0:
                return False
            grown = parts[i] | b
            if all(m & ~grown for m in touching[b]):
                parts[i] = grown
                if place(position + 1):
                    return True
                parts[i] = grown & ~b
        return False

    if place(0):
        return [frozenset(name for name in names if bit[name] & part) for part in parts if part]
    return [frozenset()] * bins if left < 0 else None


def measure_interference(names: Sequence[str], ledger: Ledger) -> dict[frozenset[str], float]:
    """How much accuracy two data sets cost each other, from short runs alone and in pairs; points of accuracy >= 0."""
    alone = {name: ledger.probe((name,))[name] for name in names}
    found = {}
    for pair in combinations(names, 2):
        together = ledger.probe(pair)
        found[frozenset(pair)] = sum(max(0.0, alone[name] - together[name]) for name in pair)
    return found


def least_interference(interference: Mapping[frozenset[str], float]) -> Choice:
    """A ``Choice``: open with the data set that has most trouble with the others, go on with the least in the way."""

    def trouble(name: str, others: Names) -> float:
        return sum(interference.get(frozenset({name, other}), 0.0) for other in others if other != name)

    def choose(remaining: Names, fused: Names) -> str:
        if not fused:
            return max(remaining, key=lambda name: trouble(name, remaining))
        return min(remaining, key=lambda name: trouble(name, fused))

    return choose


def _attempt(
    plan: Sequence[frozenset[str]],
    ledger: Ledger,
    interference: Mapping[frozenset[str], float],
    limit: int,
    hopeless: Collection[str],
) -> Packing | None:
    """Train the sets of a plan, the least certain first; ``None`` when one breaks a floor or trainings run out."""
    choose = least_interference(interference)
    packing: Packing = []
    for group in sorted(plan, key=lambda g: (g in ledger.held, -len(g), sorted(g))):
        sequence = max((known for held, known in ledger.held.items() if held <= group), key=len, default=())
        while len(sequence) < len(group):
            rest = tuple(name for name in sorted(group) if name not in sequence)
            sequence = (*sequence, choose(rest, sequence))
            if sequence not in ledger.steps and ledger.trainings >= limit:
                return None
            if not ledger.holds(sequence) and not group <= set(hopeless):
                return None
        packing.append(sequence)
    return packing


def _reverse_a_forgetful_one(ledger: Ledger, limit: int) -> None:
    """Train one combination that failed by forgetting in the opposite order, as far as its floors hold."""
    for tried in ledger.failed().values():
        backwards = tried[::-1]
        if len(tried) > 1 and backwards not in ledger.steps and tried[-1] not in ledger.broken(tried):
            for end in range(1, len(tried) + 1):
                new = backwards[:end] not in ledger.steps
                if (new and ledger.trainings >= limit) or not ledger.holds(backwards[:end]):
                    break
            else:
                return
