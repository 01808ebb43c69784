"""Ended requests: no longer counted, still found by the coroutine that comes late."""

from __future__ import annotations

import pytest

from vlora_sgl.managers.ended_requests import KEPT, LingeringStates


@pytest.mark.parametrize("how", ["pop", "del"])
def test_an_ended_request_is_no_member_and_still_found(how: str) -> None:
    states = LingeringStates()
    states["a"] = 1
    if how == "pop":
        assert states.pop("a") == 1
    else:
        del states["a"]
    assert "a" not in states and len(states) == 0 and states.get("a") is None
    assert states["a"] == 1
    with pytest.raises(KeyError):
        states["b"]


def test_what_is_kept_is_bounded() -> None:
    states = LingeringStates()
    for number in range(KEPT + 5):
        states[str(number)] = number
        states.pop(str(number))
    assert states[str(KEPT + 4)] == KEPT + 4
    with pytest.raises(KeyError):
        states["4"]
    assert states.pop("x", None) is None
