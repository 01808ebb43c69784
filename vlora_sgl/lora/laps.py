"""How long the parts of a load take: for its line in the log."""

from __future__ import annotations

import time


class Laps:
    """Parts of one work that follow each other.

    >>> laps = Laps()
    >>> laps.end("reading")
    >>> str(laps).split(" ")[0]
    'reading'
    """

    def __init__(self) -> None:
        self._last, self._taken = time.perf_counter(), dict[str, float]()

    def end(self, part: str) -> None:
        """A part has ended, and what comes is another."""
        now = time.perf_counter()
        self._taken[part], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in self._taken.items())
