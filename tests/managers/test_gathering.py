"""The cost policy gathers admissions into one prefill: when it pays, and never for a deadline."""

from __future__ import annotations

import pytest

from vlora_sgl.core import ServiceClass
from vlora_sgl.managers.policies import QueueState, RequestState, make_policy
from vlora_sgl.managers.policies.cost_table import shipped

COSTS = shipped()["atmm"]


def row(number: int, **more: object) -> RequestState:
    return RequestState(f"r{number}", "a", number, **{"prompt": 0, "context": 500, "progress": 10.0, **more})  # type: ignore[arg-type]


def late(number: int, waited: float = 0.0, **more: object) -> RequestState:
    return row(number, **{"prompt": 400, "context": 0, "progress": 10.0 - waited, "arrived": 10.0 - waited, **more})


def admitted(running: int, waiting: list[RequestState], **more: object) -> int:
    rows = [row(n) for n in range(running)]
    state = QueueState(10.0, waiting, rows, max_batch=32, max_adapters=8, **more)  # type: ignore[arg-type]
    return len(make_policy("cost", COSTS).plan(state).requests) - running


def test_one_free_place_of_a_full_batch_waits_for_more() -> None:
    queue = [late(100 + n, waited=0.3) for n in range(20)]
    assert admitted(31, queue) == 0
    assert admitted(24, queue) == 8


def test_an_idle_engine_and_a_small_batch_admit_at_once() -> None:
    assert admitted(0, [late(100)]) == 1
    assert admitted(2, [late(100)]) == 1


@pytest.mark.parametrize("running", [1, 8, 20, 30, 31])
def test_nobody_waits_while_there_is_a_place_for_everybody(running: int) -> None:
    for count in range(1, 33 - running):
        assert admitted(running, [late(100 + n) for n in range(count)]) == count


@pytest.mark.parametrize("constraint", [{"service": ServiceClass.REALTIME}, {"deadline": 0.5}])
def test_nobody_with_a_constraint_waits(constraint: dict[str, object]) -> None:
    queue = [late(100 + n, waited=0.3) for n in range(20)]
    assert admitted(31, [*queue, late(200, **constraint)]) == 1
