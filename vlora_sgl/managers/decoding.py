"""What the detokenizer remembers of an answer: nothing that was sent is sent again.

While a character's bytes are coming in, SGLang sends the text before it, then may take that back and send it anew.
"""

from __future__ import annotations

from typing import Any

from vlora_sgl import _sgl, seams
from vlora_sgl.seams import Place


class SteadyStatus(_sgl.DecodeStatus):
    """SGLang's, whose offset of what was sent only grows."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sent_offset":
            value = max(value, self.__dict__.get(name, 0))
        super().__setattr__(name, value)


def install() -> None:
    """Put it in place, in the detokenizer's process."""
    seams.place("detokenizer_manager.DecodeStatus", [Place(_sgl.detokenizer_manager, "DecodeStatus", SteadyStatus)])
