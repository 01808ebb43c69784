"""A request's state, kept until the coroutine that waits for it has come to fetch it.

SGLang 0.5.17 drops a state the moment its last output arrives. A row of a batch that ends before its coroutine first
runs is then looked up in vain, and the whole batch answers with an internal error.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vlora_sgl.core import JsonDict

KEPT = 256
"""How many ended states are kept at most; the race lasts one turn of the event loop."""


class LingeringStates(JsonDict):
    """SGLang's ``rid_to_state``: an ended request is no member, yet ``states[rid]`` still finds it for a while."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: OrderedDict[str, Any] = OrderedDict()

    def pop(self, rid: str, *default: object) -> Any:
        """Remove a state; it stays findable by ``states[rid]``."""
        if rid in self:
            self._end(rid, super().__getitem__(rid))
        return super().pop(rid, *default)

    def __delitem__(self, rid: str) -> None:
        self._end(rid, super().__getitem__(rid))
        super().__delitem__(rid)

    def __missing__(self, rid: str) -> Any:
        return self._ended[rid]

    def recall(self, rid: str) -> None:
        """Make an ended request a member again, if its last answer was never handed on."""
        state = self._ended.get(rid)
        if rid not in self and state is not None and not (state.out_list or state.event.is_set()):
            self[rid] = self._ended.pop(rid)

    def _end(self, rid: str, state: Any) -> None:
        self._ended[rid] = state
        if len(self._ended) > KEPT:
            self._ended.popitem(last=False)
