"""The fewest adapters there could be, by trying everything: the yardstick of the packer on small cases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from vlora_sgl.generate.ledger import Ledger, Names


def fewest_by_trying_all(names: Sequence[str], ledger: Ledger) -> int:
    """Least number of adapters over every order and every partition, each state reached by steps that hold all floors.

    Takes up to ``sum_k n! / (n-k)!`` trainings. A data set that breaks its floor alone counts as one adapter.
    """
    reachable = {frozenset({name}) for name in names}
    frontier: list[Names] = [(name,) for name in names if ledger.holds((name,))]
    while frontier:
        sequence = frontier.pop()
        for name in names:
            if name not in sequence and ledger.holds((*sequence, name)):
                reachable.add(frozenset((*sequence, name)))
                frontier.append((*sequence, name))

    @cache
    def fewest(left: frozenset[str]) -> int:
        if not left:
            return 0
        first = min(left)
        return 1 + min(fewest(left - group) for group in reachable if first in group and group <= left)

    return fewest(frozenset(names))
