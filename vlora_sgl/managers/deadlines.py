"""Deadlines by the clock on the wall: from a request's arrival at the front of the engine to its last token.

Plans have seconds of their own, the cost table's, so that all ranks decide alike (``planner``). The rank that measures
keeps the two together. Of a deadline, it hands on what is left of it when the request reaches the scheduler; and when
iterations take longer than planned, it has all ranks move their clocks on (``WallClock``). Whether a deadline was kept
is for the clock on the wall alone to say (``Deadlines``).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import Req
from vlora_sgl.core import RequestParams, ServiceClass
from vlora_sgl.managers.policies.iteration_log import Iteration

LEAST_S = 0.001
"""What is left of a deadline that is over: a request without one would be treated as if it had time."""
BEHIND_S = 0.01
"""The planners' clocks may be this far behind the wall's."""


def stamp(sampling: Any, arrived: float) -> None:
    """Write when a request is due into its sampling parameters, if it has a deadline.

    Args:
        sampling: SGLang's object.
        arrived: by ``time.perf_counter``, which all processes of a machine share.
    """
    deadline = RequestParams.of(sampling).deadline
    if deadline is not None:
        sampling.custom_params = {**sampling.custom_params, "vlora_due": arrived + deadline}


def shorten(messages: Iterable[Any], clock: Callable[[], float] = time.perf_counter) -> None:
    """Have requests that reach the scheduler say what is left of their deadlines."""
    for message in messages:
        for one in getattr(message, "batch", (message,)):
            given = getattr(getattr(one, "sampling_params", None), "custom_params", None) or {}
            if (due := given.get("vlora_due")) is not None:
                given["vlora_deadline_ms"] = 1e3 * max(LEAST_S, due - clock())


@dataclass(frozen=True, slots=True)
class ClockUpdate:
    """What the rank that measures tells all ranks: their clocks are so many seconds behind."""

    behind: float


class WallClock:
    """A sink of ``IterationTimes``: how far the planners' clock is behind the seconds that iterations really took."""

    def __init__(self) -> None:
        self._behind = 0.0

    def __call__(self, iteration: Iteration, seconds: float, end: float) -> None:
        """Take in one iteration. A clock that is ahead is not set back, nor are later delays forgiven for it."""
        self._behind = max(-BEHIND_S, self._behind + seconds - iteration.expected)

    def take(self) -> ClockUpdate | None:
        """What to tell, once, if it is enough."""
        if self._behind <= BEHIND_S:
            return None
        update, self._behind = ClockUpdate(self._behind), 0.0
        return update


class Deadlines:
    """Which deadlines were kept, by class.

    Attributes:
        met: requests that ended in time.
        missed: requests that did not; those that were aborted are neither.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: weakref.WeakSet[Req] = weakref.WeakSet()  # a request that is aborted in the queue just goes
        self.met: Counter[ServiceClass] = Counter()
        self.missed: Counter[ServiceClass] = Counter()

    def arrived(self, req: Req) -> None:
        """A request has come; most have no deadline."""
        if req.vlora.params.due is not None:
            self._open.add(req)

    def finished(self) -> None:
        """Results were taken in: count those that ended with them."""
        for req in [req for req in self._open if req.finished()]:
            self._open.discard(req)
            if isinstance(req.finished_reason, _sgl.FINISH_ABORT):
                continue
            params = req.vlora.params
            late = params.due is None or self._clock() > params.due
            (self.missed if late else self.met)[params.service] += 1

    def state(self) -> dict[str, dict[str, int]]:
        """Figures for ``/server_info`` and the metrics, by class."""
        return {str(one): {"met": self.met[one], "missed": self.missed[one]} for one in ServiceClass}
