"""Errors: what they say is bounded, whatever they quote."""

from __future__ import annotations

import pytest

from vlora_sgl import errors
from vlora_sgl.errors import MESSAGE_CHARS, VLoraError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VLoraError)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.__init__ is VLoraError.__init__])
def test_a_long_message_keeps_its_beginning_and_its_end(kind: type[VLoraError]) -> None:
    said = str(kind("begins " + "x" * 10**6 + " ends"))
    assert said.startswith("begins ") and said.endswith(" ends") and len(said) <= MESSAGE_CHARS + 1
    assert str(kind("x" * MESSAGE_CHARS)) == "x" * MESSAGE_CHARS
    assert kind("short", 5).args == ("short", 5)
