"""What each iteration ran and how long it took, one JSON object a line: ``vlora_sgl.measure_costs`` fits costs to it.

    {"costs": {…}}                                          # first: the cost table that the engine starts with
    {"prefill": false, "groups": {"a": 4, "": 1}, "context": 1310.0, "before": null, "merged": "a", "mode": "mixture",
     "seconds": 0.0079, "expected": 0.0075, "end": 12.81}

``groups`` holds tokens by adapter id (the base model's under ""), ``before`` and ``merged`` the merged adapter before
and during the iteration. ``seconds`` is the time to its result since the result before it, or since its launch where
the engine was idle; where launches overlap with computation, the sum over a busy stretch is exact, the share of one
iteration is not. ``expected`` is the cost table's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlora_sgl.core import AdapterId, InferenceMode, JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_table import CostTable, Groups


@dataclass(frozen=True, slots=True)
class Iteration:
    """One launched batch, as cost tables see it.

    Attributes:
        prefill: whether it was a prefill.
        groups: tokens by adapter.
        context: what ``PhaseCosts.per_context`` counts: attended pairs in prefill, cached tokens in decode.
        before: the adapter merged until then.
        merged: the adapter merged during it.
        mode: the mode it ran in.
        expected: seconds by the planner's cost table, the switch included.
    """

    prefill: bool
    groups: Groups
    context: float
    before: AdapterId
    merged: AdapterId
    mode: InferenceMode
    expected: float


Sink = Callable[[Iteration, float, float], None]


class IterationTimes:
    """Times iterations, which are launched and finish in the same order.

    Args:
        sinks: each is told of an iteration once it has finished, with its seconds and the time of its end.
        clock: seconds, for tests.
    """

    def __init__(self, sinks: Sequence[Sink], clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks = sinks
        self._clock = clock
        self._open: dict[int, tuple[float, Iteration]] = {}
        self._last = 0.0

    def launched(self, number: int, iteration: Iteration) -> None:
        """An iteration is about to be launched under this number."""
        self._open[number] = (self._clock(), iteration)

    def done(self, number: int) -> None:
        """Its result is here. Numbers that were not launched (idle batches) are passed over."""
        if number not in self._open:
            return
        start, iteration = self._open.pop(number)
        now = self._clock()
        for sink in self._sinks:
            sink(iteration, now - max(start, self._last), now)
        self._last = now


class IterationLog:
    """Writes the file; a sink of ``IterationTimes``.

    Args:
        path: the file; it is emptied.
        costs: the table that the engine starts with.
    """

    def __init__(self, path: Path, costs: CostTable) -> None:
        self._file = path.open("w", buffering=1)
        self._file.write(json.dumps({"costs": costs.to_json()}) + "\n")

    def __call__(self, iteration: Iteration, seconds: float, end: float) -> None:
        """Write a line."""
        row = {
            "prefill": iteration.prefill,
            "groups": {adapter or "": tokens for adapter, tokens in iteration.groups.items()},
            "context": iteration.context,
            "before": iteration.before,
            "merged": iteration.merged,
            "mode": str(iteration.mode),
            "seconds": round(seconds, 6),
            "expected": round(iteration.expected, 6),
            "end": round(end, 6),
        }
        self._file.write(json.dumps(row) + "\n")


def read_log(path: Path) -> tuple[CostTable, list[JsonDict]]:
    """The cost table and the rows of a log; a last line that was cut off with the engine is left out.

    Raises:
        ConfigError: the file cannot be read or is no iteration log.
    """
    try:
        first, *rest = path.read_text().splitlines()
        costs = CostTable.from_json(json.loads(first)["costs"])
        return costs, [json.loads(line) for line in rest if line.endswith("}")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no iteration log: {error}") from None
