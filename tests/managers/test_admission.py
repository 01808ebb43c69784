"""The gate of requests: what it lets through, what it refuses by name, and that nothing makes it fail otherwise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora_sgl import _sgl
from vlora_sgl.errors import RequestError
from vlora_sgl.managers.admission import INTERNAL, Limits, RequestGate, check_stop_regex

GATE = RequestGate(Limits(vocabulary=1000, context=64, text_chars=4096, n=8, top_logprobs=5, images=2))
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def ask(**fields: Any) -> Any:
    """SGLang's request with these fields, once it has passed the gate."""
    request = _sgl.GenerateReqInput(
        **({} if {"input_ids", "input_embeds"} & fields.keys() else {"text": "x"}) | fields
    )
    GATE.check(request)
    return request


ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampling": {"sampling_params": GREEDY},
    "ids": {"input_ids": [1, 2, 999]},
    "batch of ids": {"input_ids": [[1], [2, 3]], "sampling_params": [GREEDY, {}]},
    "adapters of a batch": {"text": ["x", "y"], "lora_path": ["a", None]},
    "one adapter for a batch": {"text": ["x", "y"], "lora_path": "a"},
    "adapters as one": {"lora_path": {"a": 0.7, "b": 0.3}},
    "adapters as one, by their text": {"lora_path": '{"a": 0.7, "b": 0.3}'},
    "adapters as one in a batch": {"text": ["x", "y"], "lora_path": [{"a": 0.7, "b": 0.3}, None]},
    "images": {"image_data": ["data:,", {"url": "u"}]},
    "images of a prompt with two answers": {"image_data": [["a", "b"]], "sampling_params": {"n": 2}},
    "images of a batch": {"text": ["x", "y"], "image_data": [["a", "b"], None]},
    "an object": {"image_data": object()},
    "log-probabilities": {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [1, 2]},
    "log-probabilities of a batch": {"text": ["x", "y"], "return_logprob": [True, False], "token_ids_logprob": [1, 2]},
    "lists of token ids": {"text": ["x", "y"], "token_ids_logprob": [[1], [2]]},
    "custom parameters": {"sampling_params": {"custom_params": {"a": [1, {"b": None}]}}},
    "stops": {"sampling_params": {"stop": ["a", "b"], "stop_token_ids": [1], "stop_regex": r"\d{3}-x+"}},
    "bias": {"sampling_params": {"logit_bias": {"7": -3.5}}},
    "nulls": {"sampling_params": dict.fromkeys(("stop", "temperature", "n", "regex")), "lora_path": None},
    "surroundings": {"text": "\U0001f600 é", "rid": "r", "priority": -3, "extra_key": "tenant"},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_sglang_serves_is_let_through(name: str) -> None:
    ask(**ACCEPTED[name])


def test_a_list_of_one_adapter_is_that_adapter() -> None:
    assert ask(lora_path=["a"]).lora_path == "a" and ask(lora_path=[None]).lora_path is None


def test_adapters_as_one_become_their_text_and_one_alone_is_that_adapter() -> None:
    text = '{"a": 0.7, "b": 0.3}'
    assert ask(lora_path={"a": 0.7, "b": 0.3}).lora_path == ask(lora_path=text).lora_path == text
    assert ask(text=["x", "y"], lora_path=[{"a": 0.7, "b": 0.3}, {"c": 1}]).lora_path == [text, "c"]
    assert ask(lora_path=[{"a": 1.0}]).lora_path == "a"


DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a float for an integer": ({"sampling_params": {"max_new_tokens": 2.5}}, "sampling_params.max_new_tokens"),
    "a boolean for an integer": ({"sampling_params": {"top_k": True}}, "sampling_params.top_k"),
    "too large": ({"sampling_params": {"top_k": 10**10}}, "sampling_params.top_k"),
    "an integer beyond any word": ({"priority": 10**400}, "priority"),
    "no number": ({"sampling_params": {"temperature": math.nan}}, "sampling_params.temperature"),
    "endless": ({"sampling_params": {"logit_bias": {"1": math.inf}}}, "sampling_params.logit_bias"),
    "a key that is no id": ({"sampling_params": {"logit_bias": {"one": 1.0}}}, "sampling_params.logit_bias"),
    "a key beyond the vocabulary": ({"sampling_params": {"logit_bias": {"1000": 1.0}}}, "sampling_params.logit_bias"),
    "an empty stop": ({"sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop"),
    "stops that take long to look for": ({"sampling_params": {"stop": ["a" * 4096] * 5}}, "sampling_params.stop"),
    "an unknown parameter": ({"sampling_params": {"temprature": 1}}, "temprature"),
    "parameters that are none": ({"sampling_params": "greedy"}, "sampling_params"),
    "outside the vocabulary": ({"input_ids": [1, 1000]}, "input_ids"),
    "below the vocabulary": ({"input_ids": [-1]}, "input_ids"),
    "ids that are none": ({"input_ids": [1, "2"]}, "input_ids"),
    "in one of a batch": ({"input_ids": [[1], [1000]]}, r"input_ids\[1\]"),
    "too long a prompt": ({"input_ids": [1] * 65}, "input_ids"),
    "too long a text": ({"text": "x" * 4097}, "text"),
    "no text": ({"text": 3}, "text"),
    "half a character": ({"text": "\ud800"}, "text"),
    "an empty batch": ({"text": []}, "1 to"),
    "two batches": ({"text": ["x", "y"], "input_ids": [[1]]}, "do not fit together"),
    "too few adapters": ({"text": ["x", "y"], "lora_path": ["a"]}, "lora_path"),
    "too many adapters": ({"text": ["x", "y"], "lora_path": ["a", "b", "c"]}, "lora_path"),
    "two adapters for one prompt": ({"lora_path": ["a", "b"]}, "lora_path"),
    "an adapter that is a number": ({"lora_path": 3}, "lora_path"),
    "nested adapters": ({"text": ["x"], "lora_path": [["a"]]}, r"lora_path\[0\]"),
    "no adapter of several": ({"lora_path": {}}, "lora_path"),
    "a scale that is none": ({"lora_path": {"a": math.nan}}, "lora_path"),
    "a scale too large": ({"lora_path": '{"a": 1e9}'}, "lora_path"),
    "five adapters as one": ({"lora_path": dict.fromkeys("abcde", 0.2)}, "lora_path"),
    "a long name of several": ({"lora_path": {"a" * 1025: 0.5}}, "lora_path"),
    "a text that is no object": ({"text": ["x"], "lora_path": ['{"a": 1']}, r"lora_path\[0\]"),
    "too many images": ({"image_data": ["a", "b", "c"]}, "image_data"),
    "an image that is a number": ({"image_data": 7}, "image_data"),
    "images for another batch": ({"text": ["x", "y"], "video_data": ["a"]}, "video_data"),
    "too many answers": ({"sampling_params": {"n": 9}}, "sampling_params.n"),
    "too many alternatives": ({"top_logprobs_num": 6}, "top_logprobs_num"),
    "a list for a key": ({"extra_key": ["a"]}, "extra_key"),
    "a list for a flag": ({"stream": "yes"}, "stream"),
    "deep": ({"sampling_params": {"custom_params": {"a": DEEP}}}, "custom_params"),
    "SGLang's own": ({"bootstrap_room": 1}, "bootstrap_room"),
    "another process": ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(name: str) -> None:
    fields, named = REFUSED[name]
    with pytest.raises(RequestError, match=named) as caught:
        ask(**fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("video", ["file.mp4", b"x", {"url": "u"}, ["a", "b"], SimpleNamespace(url="u")])
def test_videos_that_cannot_be_decoded_are_refused(video: Any) -> None:
    for videos in (True, False):
        gate = RequestGate(Limits(vocabulary=1000, context=64, text_chars=4096, videos=videos))
        request = _sgl.GenerateReqInput(text="x", video_data=video)
        if videos:
            gate.check(request)
            continue
        with pytest.raises(RequestError, match="video_data must be frames or features: videos cannot be decoded"):
            gate.check(request)
        gate.check(_sgl.GenerateReqInput(text="x", video_data={"feature": object()}))


@pytest.mark.parametrize(
    ("known", "labels", "refused"),
    [
        (None, {"x": "red"}, False),  # nothing is measured
        (frozenset(), {"x": "red"}, True),
        (frozenset(), {}, False),
        (frozenset({"team", "tier"}), {"team": "a"}, False),
        (frozenset({"team", "tier"}), {"team": "a", "x": "red"}, True),
        (frozenset({"team"}), {"team": 1}, True),
    ],
)
def test_labels_are_those_of_the_metrics(known: Any, labels: dict[str, Any], refused: bool) -> None:
    """Prometheus raises for any other, while the answer is put together."""
    gate = RequestGate(Limits(vocabulary=1000, context=64, text_chars=4096, labels=known))
    request = _sgl.GenerateReqInput(text="x", custom_labels=labels)
    if not refused:
        gate.check(request)
        return
    with pytest.raises(RequestError, match=r"custom_labels must be .*--tokenizer-metrics-allowed-custom-labels"):
        gate.check(request)


@pytest.mark.parametrize("kind", ["GenerateReqInput", "EmbeddingReqInput"])
def test_every_field_of_sglangs_requests_is_known(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(getattr(_sgl, kind))}
    assert fields - set(GATE._fields) == set()


def test_every_sampling_parameter_is_known() -> None:
    fields = set(_sgl.SamplingParams.__struct_fields__)
    derived = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
    assert fields - derived == set(GATE._sampling)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(a*)*", r"(a)\1", "a*a*b", "(?:x{2,}y)*", "(", "a{99999999999}", "(?>(a|b)*)+"]
)
def test_a_stop_that_could_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        check_stop_regex(pattern, "sampling_params")


@pytest.mark.parametrize("pattern", ["a+b", "(yes|no)[.!]", r"\d{3}-\d{4}", "END$", "(?i)stop", "x(?=y)"])
def test_an_ordinary_stop_passes(pattern: str) -> None:
    check_stop_regex(pattern, "sampling_params")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field.name for field in dataclasses.fields(_sgl.GenerateReqInput)})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_whatever_comes_the_gate_answers_or_refuses(fields: dict[str, Any]) -> None:
    request = _sgl.GenerateReqInput(**fields)
    try:
        GATE.check(request)
    except RequestError as error:
        assert "\n" not in str(error)
        return
    assert all(getattr(request, name) in (None, False) for name in INTERNAL if hasattr(request, name))


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GATE._sampling)), JSON, max_size=4))
def test_sampling_parameters_that_pass_can_be_built(given_: dict[str, Any]) -> None:
    try:
        GATE.check(_sgl.GenerateReqInput(text="x", sampling_params=given_))
    except RequestError:
        return
    _sgl.SamplingParams(**given_)


def test_a_text_request_costs_microseconds() -> None:
    request = _sgl.GenerateReqInput(text="x" * 2000, sampling_params=GREEDY, lora_path="a", rid="r")
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        for _ in range(200):
            GATE.check(request)
        best = min(best, (time.process_time() - start) / 200)
    assert best < 50e-6


@pytest.mark.parametrize("media", [{}, "data:,", {"url": "data:,"}])
@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data"])
def test_media_of_several_prompts_to_embed_are_a_list(name: str, media: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a list with one entry for each of 2 prompts"):
        GATE.check(_sgl.EmbeddingReqInput(text=["x", "y"], **{name: media}))
    GATE.check(_sgl.EmbeddingReqInput(text=["x", "y"], **{name: ["data:,", None]}))
    GATE.check(_sgl.EmbeddingReqInput(text="x", **{name: "data:,"}))


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["GenerateReqInput", "EmbeddingReqInput"]),
    st.sampled_from(["x", ["x"], ["x", "y"], ["x", "y", "z"]]),
    st.fixed_dictionaries(
        {},
        optional={
            "rid": st.sampled_from(["r", ["r"], ["r", "s"], ["r", "r"], ["r", "s", "t"]]),
            "lora_path": st.sampled_from(["A", ["A"], ["A", None], ["A", "B", "A"], {"A": 1.0}]),
            "sampling_params": st.sampled_from([{}, [{}], [{}, {"max_new_tokens": 1}], [{}] * 3]),
            "image_data": st.sampled_from(["data:,", ["data:,"], [None, "data:,"], [["data:,"], None], [None] * 3]),
        },
    ),
)
def test_what_passes_can_be_normalised(kind: str, text: Any, fields: dict[str, Any]) -> None:
    """Or SGLang says in its own words why not; an assertion of its would be a fault of the server's."""
    request = getattr(_sgl, kind)(text=text, **copy.deepcopy(fields))
    with contextlib.suppress(RequestError, ValueError):
        GATE.check(request)
        request.normalize_batch_and_arguments()
        rids = [request.rid] if isinstance(text, str) else request.rid
        assert len(set(rids)) == len(rids) == (1 if isinstance(text, str) else len(text))
