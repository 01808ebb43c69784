"""What a server is doing now, for who watches: the steps since the last look, the queue, adapters, kept images.

The question travels as SGLang's for its internal state, told apart by its ``rid``. Steps are remembered from the first
look on, and no longer than ``WATCHED_S`` after the last: a step that nobody watches pays for one comparison.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from vlora_sgl.combined import members
from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.managers.policies.iteration_log import Iteration

WATCHED_S = 5.0
KEPT = 4096
"""Steps that are remembered: 20 s of steps of 5 ms."""
_MARK = "vlora-live"


def question(since: int, whole: bool) -> str:
    """The ``rid`` of the question: steps after this number; ``whole`` asks for adapters and images, too."""
    return f"{_MARK} {since} {int(whole)}"


def asked(rid: str | None) -> tuple[int, bool] | None:
    """What ``question`` was given, or ``None`` where a ``rid`` is none of its."""
    if rid is None or not rid.startswith(_MARK):
        return None
    _, since, whole = rid.split(" ")
    return int(since), whole == "1"


class LiveSteps:
    """The last steps of a scheduler that is watched.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float, Iteration]] = deque(maxlen=KEPT)
        self._until = clock() + WATCHED_S
        self._refs: dict[str, Any] = {}

    def names(self, refs: Mapping[str, Any]) -> Callable[[AdapterId], str]:
        """``names_of`` these adapters, and of those that have gone since somebody began to watch: their last steps are
        still shown."""
        if len(self._refs) > KEPT:
            self._refs.clear()
        self._refs.update(refs)
        return names_of(self._refs)

    def launched(self, number: int, iteration: Iteration) -> bool:
        """Remember a step; ``False`` once nobody has looked for too long."""
        now = self._clock()
        self._steps.append((number, now, iteration))
        return now < self._until

    def since(self, number: int, name_of: Callable[[AdapterId], str]) -> list[list[Any]]:
        """The steps after a number, and watch on.

        Returns:
            Of each: its number, when it was launched (seconds since 1970), its mode, the merged adapter, whether that
            changed, whether it was a prefill, and its tokens by adapter; the base model's name is empty.
        """
        self._until = self._clock() + WATCHED_S
        return [
            [
                step,
                round(when, 4),
                str(one.mode),
                name_of(one.merged),
                one.merged != one.before,
                one.prefill,
                _by_name(one.groups, name_of),
            ]
            for step, when, one in self._steps
            if step > number
        ]


def _by_name(groups: Mapping[AdapterId, int], name_of: Callable[[AdapterId], str]) -> dict[str, int]:
    tokens: Counter[str] = Counter()
    for adapter, count in groups.items():  # combinations of the same adapters have one name
        tokens[name_of(adapter)] += count
    return dict(tokens)


def names_of(refs: Mapping[str, Any]) -> Callable[[AdapterId], str]:
    """Adapters' names by id, from SGLang's table: those of a combination together; an id whose adapter has gone stays
    one."""

    def name(adapter: AdapterId) -> str:
        ids = [one for one in members([adapter]) if one is not None]
        return " + ".join(refs[one].lora_name if one in refs else one for one in ids)

    return name


def images_shown(images: Mapping[int, JsonDict], names: Mapping[str, str]) -> list[JsonDict]:
    """Kept images (``VLoraRadixCache.kept_images``) with names for digests, those of unloaded adapters left
    out; the largest first."""
    known = {"": "", **names}
    shown = [
        {**one, "image": number, "adapters": sorted(known[digest] for digest in one["adapters"] if digest in known)}
        for number, one in images.items()
    ]
    return sorted(shown, key=lambda one: (-one["tokens"], one["image"]))
