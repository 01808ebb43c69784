"""Whole and streamed answers are one text, whatever tokens a stop is written in and wherever it stands."""

from __future__ import annotations

import functools
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tools.tiny.build import build_tokenizer
from vlora_sgl import _sgl
from vlora_sgl.managers import stopping
from vlora_sgl.managers.decoding import SteadyStatus
from vlora_sgl.managers.stopping import ends_with_beginning, show_regex

PAIRS = [f"{letter}{digit}" for letter in "abcdef" for digit in range(10)]
TOKENIZER = build_tokenizer(["c3c4 c5c6 abab the end. stop here é中文字 \U0001f600", *PAIRS])
TOKENIZER.additional_stop_token_ids = None  # an attribute of SGLang's


def _bytes_of_tokens() -> dict[bytes, int]:
    """Every token's bytes; a byte-level vocabulary has each single byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = set(TOKENIZER.all_special_tokens)
    return {bytes(letters[c] for c in t): i for t, i in TOKENIZER.get_vocab().items() if t not in special}


TOKENS = _bytes_of_tokens()
LONGEST = max(map(len, TOKENS))


@pytest.fixture(autouse=True, scope="module")
def in_place() -> Iterator[None]:
    """The rows of the table, in SGLang's classes."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, ours in (
            (_sgl.Req, "_stop_match_tail_len", stopping.stop_match_tail_len),
            (_sgl.Req, "update_finish_state", stopping.update_finish_state),
            (_sgl.Req, "check_match_stop_str_prefix", stopping.check_match_stop_str_prefix),
            (_sgl.StreamAccumulator, "accept", stopping.accept),
            (_sgl.FINISHED_MATCHED_REGEX, "to_json", stopping.regex_to_json),
        ):
            patch.setattr(owner, name, _around(getattr(owner, name), ours))
        patch.setattr(_sgl.detokenizer_manager, "DecodeStatus", SteadyStatus)
        yield


def _around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(original, self, *args, **kwargs)

    return wrapped


def spelled(text: str, lengths: list[int]) -> list[int]:
    """A text in tokens of at most these many bytes, in turn: not as the tokenizer would write it."""
    data, found, at = text.encode(), [], 0
    while at < len(data):
        most = min(lengths[len(found) % len(lengths)], LONGEST, len(data) - at)
        size = next(n for n in range(most, 0, -1) if data[at : at + n] in TOKENS)
        found.append(TOKENS[data[at : at + size]])
        at += size
    return found


def told(tokens: list[int], sampling: dict[str, Any], *, stream: bool, every: int) -> tuple[list[str], dict[str, Any]]:
    """What the detokenizer sends of an answer, and why it ended: SGLang's scheduler and detokenizer, less the model.

    Args:
        every: tokens after which it is told of; those of a whole answer too.
    """
    params = _sgl.SamplingParams(**{"max_new_tokens": len(tokens), **sampling, "stream_interval": every})
    params.normalize(TOKENIZER)
    req = _sgl.Req("r", "", array("q", [0]), params, stream=stream, vocab_size=len(TOKENIZER))
    req.tokenizer = TOKENIZER
    detokenizer = object.__new__(_sgl.DetokenizerManager)
    detokenizer.tokenizer, detokenizer.vocab_size = TOKENIZER, len(TOKENIZER)
    detokenizer.decode_status, detokenizer.disable_tokenizer_batch_decode = OrderedDict(), False
    detokenizer.is_tool_call_parser_gpt_oss = False
    sent: list[str] = []
    for token in tokens:
        req.output_ids.append(token)
        req.update_finish_state(1)
        told_of = _sgl.StreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=_sgl.SpeculativeAlgorithm.NONE,
            disaggregation_mode=None,
            default_stream_interval=1,
            default_force_stream_interval=every,
            get_cached_tokens_details=lambda req: None,
        )
        told_of.accept(req=req)
        payload = told_of.to_payload(dp_rank=0, is_idle_batch=False)
        if payload is not None:
            sent += detokenizer._decode_batch_token_id_output(payload)
        if req.finished():
            break
    reason: dict[str, Any] = req.finished_reason.to_json()
    show_regex(reason)
    return sent, reason


def expected(tokens: list[int], sampling: dict[str, Any]) -> str:
    """The text that these tokens are, up to the first stop that is there; a stop that a token completes ends it."""
    for count in range(1, len(tokens) + 1):
        text = str(TOKENIZER.decode(tokens[:count]))
        for stop in sampling.get("stop", ()):
            if stop in text:
                return text[: text.find(stop) + (len(stop) if sampling.get("no_stop_trim") else 0)]
        for pattern in sampling.get("stop_regex", ()):
            if re.search(pattern, text):
                return text
    return str(TOKENIZER.decode(tokens))


TEXT = st.text(st.sampled_from("abc345 é中字\U0001f600.\n"), min_size=1, max_size=40)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stops of which most are somewhere in it."""
    text = draw(TEXT)
    stops = draw(st.lists(TEXT.map(lambda word: word[:4]), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 9))])
    return text, stops


@settings(max_examples=150, deadline=None)
@given(
    answer=answers(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    every=st.integers(1, 7),
    keep=st.booleans(),
)
@example(answer=("".join(PAIRS), ["c3c4c5"]), lengths=[2], every=50, keep=False)
@example(answer=("".join(PAIRS), ["c3c4c5"]), lengths=[1], every=1, keep=False)
@example(answer=("中é", ["中é"]), lengths=[1], every=1, keep=False)
@example(answer=("中\U0001f600é", []), lengths=[1], every=2, keep=False)
def test_stops_in_any_spelling(answer: tuple[str, list[str]], lengths: list[int], every: int, keep: bool) -> None:
    text, stops = answer
    tokens, sampling = spelled(text, lengths), {"stop": stops, "no_stop_trim": keep}
    right = expected(tokens, sampling)
    for stream in (False, True):
        for often in (1, every):
            sent, reason = told(tokens, sampling, stream=stream, every=often)
            assert "".join(sent) == right, (stream, often, sent)
            assert (reason["type"] == "stop") == any(stop in text for stop in stops)


PATTERNS = [r"c\d", "c3c4c5", r"[a-c]{2}\d", "é中", r"\s", r"(?:b3|中)+", r"^a", r"3.", "^(b|c)"]


@settings(max_examples=100, deadline=None)
@given(
    text=TEXT,
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    every=st.integers(1, 7),
)
@example(text="".join(PAIRS), patterns=["c3c4c5"], lengths=[1], every=3)
@example(text="x 3. a3.b", patterns=["3."], lengths=[9], every=1)
def test_expressions_in_any_spelling(text: str, patterns: list[str], lengths: list[int], every: int) -> None:
    tokens, sampling = spelled(text, lengths), {"stop_regex": patterns}
    right = expected(tokens, sampling)
    for stream in (False, True):
        sent, reason = told(tokens, sampling, stream=stream, every=every)
        assert "".join(sent) == right
        assert reason.get("matched") in (None, *patterns)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_and_a_stop_text_end_alike(stream: bool) -> None:
    tokens = spelled("ab. the end", [1])
    stop = tokens[3]
    sent, reason = told(tokens, {"stop_token_ids": [stop], "stop": ["end"]}, stream=stream, every=2)
    assert "".join(sent) == "ab." and reason == {"type": "stop", "matched": stop}


@given(text=st.text("ab", max_size=8), word=st.text("ab", min_size=1, max_size=5))
def test_the_beginning_of_a_word_at_the_end_of_a_text(text: str, word: str) -> None:
    assert ends_with_beginning(text, word) == any(text.endswith(word[:n]) for n in range(1, len(word) + 1))
