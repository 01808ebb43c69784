"""Images and their markers: a prompt has as many of one as of the other, or is refused.

SGLang drops what is too many of either, or waits for what never comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.errors import RequestError
from vlora_sgl.multimodal.words import Words, plain

KINDS = ("image", "video", "audio")


@dataclass(frozen=True)
class Marker:
    """What stands for one image (or video, or sound) in a prompt.

    Attributes:
        pattern: what the processor looks for.
        token: how the tokenizer spells the token that takes the place; ``None`` where it has none.
        shown: the marker, as an error says it.
    """

    pattern: re.Pattern[str]
    token: str | None
    shown: str

    def count(self, text: str) -> tuple[int, int]:
        """How many there are, and how many places beside those, in a text without a user's words."""
        found = [match[0] for match in self.pattern.finditer(text)]
        if self.token is None:
            return len(found), 0
        inside = sum(self.token in one for one in found)
        return len(found), text.count(self.token) - inside


class Markers:
    """The markers of a model, by kind.

    Args:
        processor: SGLang's multimodal processor, or ``None`` for a model that does not see.
        tokenizer: of the model.
    """

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        self._places_missing = hasattr(processor, _sgl.PLACES_MARKERS)
        kinds = () if processor is None or tokenizer is None else KINDS
        found = {kind: _marker(processor, tokenizer, kind) for kind in kinds}
        self.of: Mapping[str, Marker] = {kind: one for kind, one in found.items() if one is not None}
        spelled = {word for one in self.of.values() for word in (one.token, one.shown) if word}
        self._ids = {tokenizer.convert_tokens_to_ids(word) for word in spelled}

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """What in a text would be taken for a marker."""
        tokens = [re.compile(re.escape(one.token)) for one in self.of.values() if one.token]
        return [*(one.pattern for one in self.of.values()), *tokens]

    def check(self, request: Any, words: Words) -> None:
        """Refuse a prompt (SGLang's request of one) with another number of markers than it has images.

        Ids that spell a marker, in tokens of text, are none: the processor, which reads a text, gets them coded.

        Raises:
            RequestError: names both numbers.
        """
        if not self.of:
            return
        given = {kind: _items(getattr(request, f"{kind}_data", None)) for kind in self.of}
        text = request.text
        if text is None and request.input_ids and (any(given.values()) or not self._ids.isdisjoint(request.input_ids)):
            text = words.of_ids(request.input_ids)
            if any(given.values()) and plain(text) is not text:
                request.text = text
        if isinstance(text, str):
            if self._places_missing and (written := self._written(text)) != text:
                text = request.text = written
            for kind, marker in self.of.items():
                self._check(kind, marker, text, given[kind])

    def _written(self, text: str) -> str:
        """A text whose markers are those that the processor looks for; some chat templates write the places instead.

        A processor that places what a prompt lacks would have both.
        """
        for marker in self.of.values():
            if marker.token is not None:
                text = text.replace(marker.token, marker.shown)
        return text

    def _check(self, kind: str, marker: Marker, text: str, items: Sequence[object]) -> None:
        if any(isinstance(one, dict) and "format" in one for one in items):
            return  # preprocessed: several may be one item
        there, beside = marker.count(text)
        found = there + beside
        if found > len(items) or (found < len(items) and not self._places_missing):
            raise RequestError(
                f"a prompt must have a marker ({marker.shown}) for each {kind}; got {found} and {len(items)} {kind}s"
            )
        if beside:
            raise RequestError(
                f"a prompt must have {marker.token} in a marker ({marker.shown}); got {beside} outside of one"
            )


def _items(given: object) -> list[object]:
    return [one for one in given if one is not None] if isinstance(given, list) else [] if given is None else [given]


def _marker(processor: Any, tokenizer: Any, kind: str) -> Marker | None:
    """SGLang's description of a kind's marker, or what the model's configuration calls its token."""
    tokens = getattr(processor, "mm_tokens", None)
    if tokens is None:
        config = getattr(processor, "hf_config", None)
        index = getattr(config, f"{kind}_token_index", None) or getattr(config, f"{kind}_token_id", None)
        token = None if index is None else tokenizer.convert_ids_to_tokens(index)
        return None if token is None else Marker(re.compile(re.escape(token)), None, token)
    pattern = getattr(tokens, f"{kind}_token_regex")
    if pattern is None:
        return None
    index, shown = getattr(tokens, f"{kind}_token_id"), getattr(tokens, f"{kind}_token")
    token = None if index is None else tokenizer.convert_ids_to_tokens(index)
    return Marker(pattern, token, shown if isinstance(shown, str) else pattern.pattern)
