"""Requests that make sense, by route: spoiling one gets further into a server than anything made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.support.fuzz.images import sent
from tests.support.head_reference import data_url, make_image

Body = dict[str, Any]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
MODELS = ("default", "A", "B", "default:B", "base", "nobody")
WHOLE = data_url(make_image(1))


def _image(pick: random.Random) -> str:
    return WHOLE if pick.random() < 0.4 else sent(pick)


def generate(pick: random.Random) -> Body:
    text = pick.choice(("x", "What is this?", "0 cat red", IMAGE + " What?", "x " * 300))
    sampling: Body = {"max_new_tokens": pick.choice((1, 2, 5, 20)), "temperature": pick.choice((0, 0.7))}
    more: Body = {
        **{"n": pick.choice((1, 2, 4)), "stop": pick.choice(("a", ["b", "c"])), "regex": "[ab]{1,5}", "top_k": 3},
        **{"logit_bias": {"5": 2.0}, "ignore_eos": True, "min_new_tokens": 1, "json_schema": '{"type": "integer"}'},
        **{
            "stop_token_ids": [5],
            "presence_penalty": 0.5,
            "stop_regex": "c.t",
            "custom_params": pick.choice(({"vlora_class": "batch"}, {"vlora_head": "x"}, {"vlora_head": "f"})),
        },
    }
    sampling |= {name: more[name] for name in pick.sample(sorted(more), pick.choice((0, 0, 1, 2)))}
    body: Body = {"text": text, "sampling_params": sampling, "lora_path": pick.choice((None, "A", "B"))}
    if IMAGE in text or pick.random() < 0.1:
        body["image_data"] = pick.choice((_image(pick), [_image(pick)], [_image(pick), _image(pick)]))
    kind = pick.randrange(6)
    if kind == 0:
        rows = pick.choice((1, 2, 3))
        body |= {"text": [text] * rows, "lora_path": pick.choices((None, "A", "B"), k=rows)}
    elif kind == 1:
        body["input_ids"] = pick.choice(([1, 2, 3], [[1, 2], [3]]))
        del body["text"]
    elif kind == 2:
        body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    return body


def chat(pick: random.Random) -> Body:
    words = {"type": "text", "text": pick.choice(("What is this?", "What does <|image_pad|> mean?", "<|im_end|>"))}
    parts = [
        words,
        *({"type": "image_url", "image_url": {"url": _image(pick)}} for _ in range(pick.choice((0, 1, 2)))),
    ]
    messages: list[Body] = [{"role": "user", "content": pick.choice((parts, "Hello"))}]
    if pick.random() < 0.3:
        messages = [{"role": "system", "content": "Be kind"}, *messages, {"role": "assistant", "content": "Yes"}]
        messages.append({"role": "user", "content": parts})
    body: Body = {"model": pick.choice(MODELS), "messages": messages, "max_tokens": pick.choice((1, 5, 20))}
    more: Body = {
        **{"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["a"], "seed": 5, "lora_path": "A"},
        **{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
        **{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        **{"tool_choice": "auto", "stream_options": {"include_usage": True}, "continue_final_message": True},
    }
    return body | {name: more[name] for name in pick.sample(sorted(more), pick.choice((0, 0, 1, 2)))}


def completions(pick: random.Random) -> Body:
    prompt = pick.choice(("x", ["x", "y"], [1, 2, 3], [[1], [2, 3]]))
    body: Body = {"model": pick.choice(MODELS), "prompt": prompt, "max_tokens": pick.choice((1, 5))}
    more: Body = {"echo": True, "logprobs": 2, "n": 2, "suffix": "x", "stop": "a", "best_of": 2}
    return body | {name: more[name] for name in pick.sample(sorted(more), pick.choice((0, 1)))}


def responses(pick: random.Random) -> Body:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    return {"model": pick.choice(MODELS), "input": pick.choice(("x", said)), "max_output_tokens": 5}


def messages(pick: random.Random) -> Body:
    source = {"type": "base64", "media_type": "image/png", "data": _image(pick).rpartition(",")[2]}
    parts = [{"type": "text", "text": "x"}, {"type": "image", "source": source}]
    content = pick.choice(("x", parts))
    return {"model": pick.choice(MODELS), "max_tokens": 5, "messages": [{"role": "user", "content": content}]}


def ollama_chat(pick: random.Random) -> Body:
    said = [{"role": "user", "content": "x"}]
    return {"model": pick.choice(MODELS), "messages": said, "stream": False, "options": {"num_predict": 5}}


def ollama_generate(pick: random.Random) -> Body:
    return {"model": pick.choice(MODELS), "prompt": "x", "stream": False, "options": {"num_predict": 5}}


def vision(pick: random.Random) -> Body:
    parts = [{"type": "image_url", "image_url": {"url": _image(pick)}}, {"type": "text", "text": "What?"}]
    return {"model": pick.choice(MODELS), "head": pick.choice((None, "x", "f", "z")), "input": parts}


def score(pick: random.Random) -> Body:
    return {"model": pick.choice(MODELS), "query": "x", "items": ["a", "b"], "label_token_ids": [1, 2]}


def embeddings(pick: random.Random) -> Body:
    return {"model": pick.choice(MODELS), "input": pick.choice(("x", ["x", "y"], [1, 2]))}


def encode(pick: random.Random) -> Body:
    return {"text": pick.choice(("x", ["x", "y"]))}


def tokenize(pick: random.Random) -> Body:
    return {"model": "default", "prompt": pick.choice(("x", ["x", "y"]))}


def detokenize(pick: random.Random) -> Body:
    return {"model": "default", "tokens": pick.choice(([1, 2], [[1], [2]]))}


def session(pick: random.Random) -> Body:
    return {"capacity_of_str_len": 10, "session_id": pick.choice(("s", "t"))}


def abort(pick: random.Random) -> Body:
    return {"rid": "nobody's"}


SEEDS: dict[str, Callable[[random.Random], Body]] = {
    **{"/generate": generate, "/v1/chat/completions": chat, "/invocations": chat, "/v1/completions": completions},
    **{"/v1/responses": responses, "/v1/messages": messages, "/v1/messages/count_tokens": messages},
    **{"/api/chat": ollama_chat, "/api/generate": ollama_generate, "/v1/score": score, "/v1/embeddings": embeddings},
    **dict.fromkeys(("/v1/vision/classify", "/v1/vision/count", "/v1/vision/detect"), vision),
    **dict.fromkeys(("/encode", "/classify"), encode),
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), tokenize),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), detokenize),
    **{"/open_session": session, "/close_session": session, "/abort_request": abort},
    "/vertex_generate": lambda pick: {"instances": [{"text": "x"}], "parameters": {"sampling_params": {}}},
    "/v1/rerank": lambda pick: {"query": "x", "documents": ["a", "b"]},
}
