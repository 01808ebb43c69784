"""Deadlines by the clock on the wall: what is left of one, who kept theirs, and clocks that run behind."""

from __future__ import annotations

import gc
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl import _sgl
from vlora_sgl.core import InferenceMode, RequestParams, ServiceClass
from vlora_sgl.managers.deadlines import BEHIND_S, ClockUpdate, Deadlines, WallClock, shorten, stamp
from vlora_sgl.managers.planner import Planner
from vlora_sgl.managers.planning import Announcements, Planning
from vlora_sgl.managers.policies import make_policy
from vlora_sgl.managers.policies.cost_table import shipped
from vlora_sgl.managers.policies.iteration_log import Iteration

COSTS = shipped()["atmm"]


class Request:
    """What is read of an SGLang request."""

    def __init__(self, params: RequestParams) -> None:
        self.vlora, self.finished_reason = SimpleNamespace(params=params), None

    def finished(self) -> bool:
        return self.finished_reason is not None


def message(**asked: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=asked or None))


def iteration(expected: float) -> Iteration:
    return Iteration(False, {"a": 1}, 1.0, None, None, InferenceMode.UNMERGED, expected)


def test_a_deadline_counts_from_the_arrival_at_the_front() -> None:
    plain, late, over, other = (
        message(),
        message(vlora_deadline_ms=500),
        message(vlora_deadline_ms=20),
        message(mine=1),
    )
    for one in (plain, late, over, other):
        stamp(one.sampling_params, arrived=100.0)
    assert RequestParams.of(late.sampling_params).due == 100.5
    assert plain.sampling_params.custom_params is None and other.sampling_params.custom_params == {"mine": 1}
    shorten([plain, SimpleNamespace(batch=[late, over]), other, object()], clock=lambda: 100.2)
    left = [RequestParams.of(one.sampling_params).deadline for one in (plain, late, over, other)]
    assert left == [None, pytest.approx(0.3), pytest.approx(0.001), None]
    assert RequestParams.of(late.sampling_params).due == 100.5, "what it is judged by stays"


def test_the_first_rank_alone_says_what_is_left() -> None:
    late = message(vlora_deadline_ms=500)
    stamp(late.sampling_params, time.perf_counter() - 0.4)
    blocker: Any = SimpleNamespace(handle=lambda received: received)
    assert Announcements(blocker, list).handle([late]) == [late]
    assert 0 < RequestParams.of(late.sampling_params).deadline < 0.1  # type: ignore[operator]


def test_kept_and_missed_are_counted_once_by_class_and_what_is_aborted_is_neither() -> None:
    now = 0.0
    deadlines = Deadlines(clock=lambda: now)
    kept, missed, aborted, gone, free = (
        Request(RequestParams(service=service, deadline=1.0, due=due))
        for service, due in (
            (ServiceClass.REALTIME, 1.0),
            (ServiceClass.BATCH, 2.0),
            (ServiceClass.REALTIME, 1.0),
            (ServiceClass.REALTIME, 1.0),
            (ServiceClass.INTERACTIVE, None),
        )
    )
    for one in (kept, missed, aborted, gone, free):
        deadlines.arrived(one)
    now, kept.finished_reason, free.finished_reason = 0.9, "stop", "stop"
    deadlines.finished()
    deadlines.finished()
    del gone
    gc.collect()
    now, missed.finished_reason, aborted.finished_reason = 2.1, "length", _sgl.FINISH_ABORT("left")
    deadlines.finished()
    nothing = {"met": 0, "missed": 0}
    assert deadlines.state() == {
        "realtime": {"met": 1, "missed": 0},
        "interactive": nothing,
        "batch": {"met": 0, "missed": 1},
    }
    assert not deadlines._open


def test_clocks_keep_up_with_the_wall_and_noise_moves_none() -> None:
    wall, planned, real, pick = WallClock(), 0.0, 0.0, random.Random(0)
    for number in range(20_000):
        slow = 3.0 if number % 1000 < 50 else 1.0  # the encoder, a stall
        expected, seconds = 0.006, 0.006 * slow * pick.uniform(0.8, 1.2)
        wall(iteration(expected), seconds, 0.0)
        planned, real = planned + expected, real + seconds
        if (update := wall.take()) is not None:
            planned += update.behind
        assert planned - real > -BEHIND_S - 1e-9
    assert planned == pytest.approx(real, rel=0.02)


def test_a_clock_that_is_ahead_is_left_alone() -> None:
    wall = WallClock()
    for _ in range(1000):
        wall(iteration(0.01), 0.005, 0.0)
    assert wall.take() is None
    wall(iteration(0.01), 0.01 + 3 * BEHIND_S, 0.0)
    update = wall.take()
    assert update is not None and BEHIND_S < update.behind <= 3 * BEHIND_S and wall.take() is None


def test_all_ranks_move_their_clocks_on() -> None:
    planning: Any = Planning.__new__(Planning)
    planning.planner = Planner(make_policy("cost", COSTS), max_batch=4, max_adapters=2)
    planning.planner.clock = 5.0
    planning.follow(ClockUpdate(0.25))
    assert planning.planner.clock == 5.25
