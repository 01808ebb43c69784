"""Which kinds of images keep coming to the encoder, and are to be captured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from vlora_sgl.multimodal.vision_structures import Grid

AFTER = 3
"""Images of a size, or calls with several of it, that come before it is captured, once nothing runs."""

OVERDUE = 24
"""As many that ran eagerly, after which its capture waits no longer for that."""

REMEMBERED = 512
"""Kinds that are counted at a time."""

Kind = tuple[Grid, int, int]
"""Of a graph: the size of its images, how many they are, and how many adapters one of them applies at most."""


class Demand:
    """Kinds that have no graph.

    Args:
        wanted: to be captured, the first one first.
    """

    def __init__(self, wanted: Iterable[Kind]) -> None:
        self.wanted: dict[Kind, None] = dict.fromkeys(wanted)
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        self._given_up: set[tuple[bool, bool]] = set()

    def came(self, kind: Kind) -> bool:
        """Count a kind, and want it if it keeps coming; whether it is overdue."""
        if self._never(kind):
            return False
        count = self._seen.pop(kind, 0) + 1
        self._seen[kind] = count
        if len(self._seen) > REMEMBERED:
            forgotten, _ = self._seen.popitem(last=False)
            self.wanted.pop(forgotten, None)
        if count >= AFTER:
            self.wanted[kind] = None
        return count >= OVERDUE

    def pop(self) -> Kind | None:
        """The kind to capture next, which is no longer wanted then."""
        while self.wanted:
            kind = next(iter(self.wanted))
            del self.wanted[kind]
            if not self._never(kind):
                return kind
        return None

    def left(self, kind: Kind) -> None:
        """A kind's graph made room for another. One kind too many would be captured each time it comes, or every few
        times: it has to come much more often now."""
        self._seen[kind] = -OVERDUE

    def give_up(self, several: bool, adapted: bool) -> None:
        """Want nothing more of several images, with or without adapters, or of one with them."""
        self._given_up.add((several, adapted))

    def _never(self, kind: Kind) -> bool:
        return (kind[1] > 1, kind[2] > 0) in self._given_up
