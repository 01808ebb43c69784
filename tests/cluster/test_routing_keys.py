"""What the replica router reads from a body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlora_sgl.cluster.routing_keys import Wanted, read
from vlora_sgl.errors import RequestError, UnknownAdapterError

ADAPTERS, BASES = {"a", "b", "org:c"}, {"base", "/models/base", "default"}


def adapters(body: Any) -> tuple[str, ...]:
    return read(json.dumps(body).encode(), ADAPTERS, BASES).adapters


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "x"}, ()),
        ({"text": "x", "lora_path": None}, ()),
        ({"text": "x", "lora_path": "a"}, ("a",)),
        ({"text": ["x", "y", "z", "u"], "lora_path": ["a", None, "b", "b"]}, ("b", "a")),
        ({"model": "base", "messages": []}, ()),
        ({"model": "base", "lora_path": "a"}, ("a",)),
        ({"model": "a"}, ("a",)),
        ({"model": "base:a", "lora_path": "b"}, ("a",)),
        ({"model": "/models/base:b"}, ("b",)),
        ({"model": "org:c"}, ("org:c",)),
        ({"model": "base", "adapters": {"b": 0.5, "a": 0.5}}, ("b", "a")),
        ({"text": ["x", "y"], "adapters": [{"a": 0.5}, None]}, ("a",)),
        ({"lora_path": '{"a": 0.5, "b": 0.5}'}, ("a", "b")),
        ({"adapters": 3}, ()),
        ([1], ()),
    ],
)
def test_names(body: Any, expected: tuple[str, ...]) -> None:
    assert adapters(body) == expected


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"model": "a", "model": "b"}', b"NaN"])
def test_what_a_server_does_not_take_for_json_reaches_none(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body must"):
        read(body, ADAPTERS, BASES)


def test_no_body_and_no_object_want_nothing() -> None:
    assert read(b"", ADAPTERS, BASES) == Wanted() == read(b"[1]", ADAPTERS, BASES)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"lora_path": "x"}, "x"),
        ({"lora_path": ["a", "x"]}, "x"),
        ({"model": "base:x"}, "x"),
        ({"adapters": {"a": 0.5, "x": 0.5}}, "x"),
        ({"model": "y:a"}, "y:a"),
    ],
)
def test_an_unknown_name_is_refused(body: Any, name: str) -> None:
    with pytest.raises(UnknownAdapterError, match=repr(name)):
        adapters(body)


def test_the_first_image_is_what_a_request_is_about() -> None:
    url = "data:image/png;base64,AAAA"
    bodies = [
        {"image_data": url},
        {"image_data": [url, "data:other"]},
        {"image_data": [[url], ["data:other"]]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]},
        {"input": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": url}]},
    ]
    digests = {read(json.dumps(body).encode(), ADAPTERS, BASES).content for body in bodies}
    assert len(digests) == 1 and None not in digests
    assert read(json.dumps({"image_data": ["data:other"]}).encode(), ADAPTERS, BASES).content not in digests
    assert read(b'{"messages": [{"content": "x"}, 3], "image_data": []}', ADAPTERS, BASES).content is None
