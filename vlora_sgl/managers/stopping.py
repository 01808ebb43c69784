"""Where an answer stops: the same text whole and streamed, whatever tokens the stop was written in.

SGLang looks for a stop in as many of the last tokens as its own tokenizer would write it in; a grammar, or the model,
may write it in more. It keeps back the beginning of a stop from streams only, and sends whole answers on in parts too.
Each function here wraps one of its own, and lives in the scheduler's process.
"""

from __future__ import annotations

import re._constants as op
import re._parser as regex_parser
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import Req
from vlora_sgl.core import JsonDict

BYTES_PER_CHARACTER = 4
"""Most bytes of a character in UTF-8, and so most tokens."""

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""

REGEX = "regex"
"""Key of the expression in a finish reason on its way to the front."""


def stop_match_tail_len(original: Callable[[Req, int], int], self: Req, new_accepted_len: int) -> int:
    """Wraps ``Req._stop_match_tail_len``: how many of the last tokens surely hold a stop that one of them ends."""
    words, patterns = self.sampling_params.stop_strs, self.sampling_params.stop_regex_strs
    longest = max([*(len(word.encode()) for word in words), *map(_most_tokens, patterns)], default=0)
    return min(max(longest + new_accepted_len, original(self, new_accepted_len)), len(self.output_ids))


@lru_cache(maxsize=256)
def _most_tokens(pattern: str) -> int:
    if _begins_somewhere(regex_parser.parse(pattern)):
        return int(_sgl.MOST_STOP_TOKENS)
    return BYTES_PER_CHARACTER * int(_sgl.get_max_seq_length(pattern))


def _begins_somewhere(pattern: Iterable[Any]) -> bool:
    """Whether an expression asks for the beginning of the text, which then has to be there."""
    for part in pattern:
        if part in ((op.AT, op.AT_BEGINNING), (op.AT, op.AT_BEGINNING_STRING)):
            return True
        if isinstance(part, tuple | list | regex_parser.SubPattern) and _begins_somewhere(part):
            return True
    return False


def update_finish_state(original: Callable[[Req, int], None], self: Req, new_accepted_len: int = 1) -> None:
    """Wraps ``Req.update_finish_state``: a stop that the last token allowed completes is a stop, too."""
    sampling = self.sampling_params
    if (
        (sampling.stop_strs or sampling.stop_regex_strs)
        and 0 < sampling.max_new_tokens <= len(self.output_ids)
        and not (self.finished() or self.to_finish)
        and all(0 <= token < self.vocab_size for token in self.output_ids[-new_accepted_len:])
        and self._check_str_based_finish(new_accepted_len)
    ):
        return
    original(self, new_accepted_len)


def check_match_stop_str_prefix(original: Callable[[Req], bool], self: Req) -> bool:
    """Wraps ``Req.check_match_stop_str_prefix``: whether the text ends with what may begin a stop.

    The first bytes of a character may belong to it, too.
    """
    words = self.sampling_params.stop_strs
    if not words:
        return False
    tail = self.tail_str().rstrip(INCOMPLETE)
    return any(ends_with_beginning(tail, word) for word in words)


def ends_with_beginning(text: str, word: str) -> bool:
    """Whether a text ends with the beginning of a word, or all of it."""
    at = text.find(word[:1], max(0, len(text) - len(word)))
    while 0 <= at < len(text):
        if word.startswith(text[at:]):
            return True
        at = text.find(word[:1], at + 1)
    return False


def accept(original: Callable[..., None], self: Any, *, req: Req) -> None:
    """Wraps the accumulator's ``accept``: a part of a whole answer waits for what may be a stop, as a stream does."""
    if not (
        req.sampling_params.stop_strs
        and not req.stream
        and not req.finished()
        and len(req.output_ids) % self.default_force_stream_interval == 0
        and req.check_match_stop_str_prefix()
    ):
        original(self, req=req)


def regex_to_json(original: Callable[[Any], JsonDict], self: Any) -> JsonDict:
    """Wraps ``FINISHED_MATCHED_REGEX.to_json``: the detokenizer would take the expression for a stop's text."""
    found = original(self)
    return found | {"matched": None, REGEX: found["matched"]}


def show_regex(finish_reason: JsonDict | None) -> None:
    """At the front, put the expression where clients look for it, in place."""
    if finish_reason and REGEX in finish_reason:
        finish_reason["matched"] = finish_reason.pop(REGEX)
