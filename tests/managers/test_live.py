"""What is remembered for who watches, and no longer than somebody does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vlora_sgl.core import InferenceMode
from vlora_sgl.managers.live import KEPT, WATCHED_S, LiveSteps, asked, images_shown, names_of, question
from vlora_sgl.managers.policies.iteration_log import Iteration

MERGED = Iteration(False, {"id": 3, None: 1}, 0.0, None, "id", InferenceMode.MIXTURE, 0.0)
PLAIN = Iteration(True, {None: 64}, 0.0, None, None, InferenceMode.UNMERGED, 0.0)


@pytest.mark.parametrize("since", [0, 12345])
@pytest.mark.parametrize("whole", [False, True])
def test_a_question_is_read_as_it_was_put(since: int, whole: bool) -> None:
    assert asked(question(since, whole)) == (since, whole)


@pytest.mark.parametrize("rid", [None, "", "a-request"])
def test_other_questions_are_none(rid: str | None) -> None:
    assert asked(rid) is None


def test_steps_come_once_with_names_and_switches() -> None:
    now = [100.0]
    steps = LiveSteps(lambda: now[0])
    assert steps.launched(7, PLAIN) and steps.launched(8, MERGED)
    name_of = names_of({"id": SimpleNamespace(lora_name="<b>")})
    assert steps.since(0, name_of) == [
        [7, 100.0, "unmerged", "", False, True, {"": 64}],
        [8, 100.0, "mixture", "<b>", True, False, {"<b>": 3, "": 1}],
    ]
    assert steps.since(8, name_of) == []
    assert steps.since(7, names_of({}))[0][3] == "id", "an adapter that has gone"
    assert name_of('{"id": 0.5, "gone": 1}') == "<b> + gone"


def test_nobody_watches_for_long_and_memory_is_bounded() -> None:
    now = [0.0]
    steps = LiveSteps(lambda: now[0])
    for number in range(2 * KEPT):
        assert steps.launched(number, PLAIN)
    assert len(steps.since(-1, names_of({}))) == KEPT
    now[0] = WATCHED_S - 0.1
    assert steps.launched(1, PLAIN)
    steps.since(0, names_of({}))
    now[0] += WATCHED_S - 0.1
    assert steps.launched(2, PLAIN), "a look keeps it going"
    now[0] += 0.2
    assert not steps.launched(3, PLAIN)


def test_images_are_shown_by_names_that_are_loaded() -> None:
    kept = {
        3: {"tokens": 10, "copies": 1, "adapters": {"", "d1", "gone"}},
        1: {"tokens": 20, "copies": 2, "adapters": {"d1"}},
    }
    assert images_shown(kept, {"d1": "fire", "d2": "signs"}) == [
        {"tokens": 20, "copies": 2, "adapters": ["fire"], "image": 1},
        {"tokens": 10, "copies": 1, "adapters": ["", "fire"], "image": 3},
    ]


def test_steps_of_an_adapter_that_has_gone_keep_its_name() -> None:
    steps = LiveSteps()
    for number in range(KEPT + 2):
        name_of = steps.names({f"id{number}": SimpleNamespace(lora_name=f"n{number}")})
        assert name_of(f"id{number}") == f"n{number}"
    assert steps.names({})(f"id{KEPT + 1}") == f"n{KEPT + 1}"
    assert steps.names({})("id0") == "id0", "names are not kept for ever"
