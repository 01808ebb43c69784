"""How a server is asked and what it streams back: SGLang's ``/generate``, and the OpenAI routes that vLLM has.

Bodies are written for ``/generate`` (``traces.Speaker``); ``Api.body`` says the same to another server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Body = Mapping[str, Any]
IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
BASE = "base"
"""What the base model is called on a server that names it."""


@dataclass(frozen=True, slots=True)
class Api:
    """One way to ask.

    Attributes:
        body: what stands for a body of ``/generate``.
        route: where that goes.
        is_token: whether a line of a stream brought a token.
        counts: of the last line's JSON: tokens of the answer, of the prompt, and of those that a cache had.
    """

    body: Callable[[Body], Body]
    route: Callable[[Body], str]
    is_token: Callable[[bytes], bool]
    counts: Callable[[Body], tuple[int, int, int]]


def _generate_counts(chunk: Body) -> tuple[int, int, int]:
    meta = chunk["meta_info"]
    return meta["completion_tokens"], meta["prompt_tokens"], meta.get("cached_tokens", 0)


GENERATE = Api(lambda body: body, lambda _: "/generate", lambda _: True, _generate_counts)


def openai_body(body: Body) -> Body:
    """A body of ``/generate`` for OpenAI's routes: a chat where there are images, else a completion."""
    sampling, images = body["sampling_params"], body.get("image_data") or []
    new = {"model": body.get("lora_path") or BASE, "max_tokens": sampling["max_new_tokens"]}
    new |= {name: sampling[name] for name in ("temperature", "ignore_eos")}
    if body.get("stream"):
        new |= {"stream": True, "stream_options": {"include_usage": True}}
    if not images:
        return {**new, "prompt": body["text"] if "text" in body else body["input_ids"]}
    text = body["text"].removeprefix(IMAGE_MARK * len(images))
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return {**new, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def _openai_token(line: bytes) -> bool:
    """Whether there is a choice; of a chat not the one that opens it. A token may spell no whole character."""
    deltas = [choice.get("delta", {}) for choice in chunk_of(line).get("choices", ())]
    return any("role" not in delta or delta.get("content") for delta in deltas)


def _openai_counts(chunk: Body) -> tuple[int, int, int]:
    usage = chunk["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["completion_tokens"], usage["prompt_tokens"], cached


OPENAI = Api(
    openai_body,
    lambda body: "/v1/chat/completions" if "messages" in body else "/v1/completions",
    _openai_token,
    _openai_counts,
)


def chunk_of(line: bytes) -> dict[str, Any]:
    """The JSON in a line of a stream.

    Raises:
        ValueError: there is none.
    """
    return dict(json.loads(line[6:]))
