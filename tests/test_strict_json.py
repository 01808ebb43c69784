"""What is JSON for a server: one reading, that every reader behind it survives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora_sgl.errors import RequestError
from vlora_sgl.strict_json import DEEP, LARGE, LONG, read_json

WRONG = {
    "nothing": b"",
    "half": b'{"a"',
    "words": b"hello",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "too large a number": b"[0.5, [1e999]]",
    "more than 64 bits": b'{"a": [1, {"b": 18446744073709551616}]}',
    "less than 64 bits": b"[-9223372036854775809]",
    "thousands of digits": b"1" * 5000,
    "a key twice": b'{"a": {"model": "x", "model": "y"}}',
    "half a pair": b'["\\ud800"]',
    "half a pair, in capitals": b'["\\uDFFF"]',
    "deep lists": b"[" * (DEEP + 1) + b"]" * (DEEP + 1),
    "very deep lists": b"[" * 10**6,
    "deep objects": b'{"a":' * (DEEP + 1) + b"1" + b"}" * (DEEP + 1),
    "very deep objects": b'{"a":' * 10**5,
    "deep behind much": b'{"x": [[1], [2]], "a":' * (DEEP + 1) + b"1" + b"}" * (DEEP + 1),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_not_taken(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body must") as caught:
        read_json(body)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "value",
    [None, True, "x", 1.5, [], {}, [2**64 - 1, -(2**63), 1e308], {"é😀": ["\n", {"a": None}]}, {"a": [[1, 2], [3]]}],
)
def test_what_is_taken_means_what_it_means_to_others(value: Any) -> None:
    for ascii_only in (True, False):
        assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("open, close", [(b"[", b"]"), (b'{"a":', b"}")])
def test_the_depth_is_exact(open: bytes, close: bytes) -> None:
    assert read_json(open * (DEEP - 1) + b"[]" + close * (DEEP - 1))


@pytest.mark.parametrize("body", [body for name, body in WRONG.items() if name != "nothing"])
def test_what_is_not_taken_is_not_beside_an_image_either(body: bytes) -> None:
    image = b"A" * LARGE
    for around in (b'["%s", %s]' % (image, body), b'{"a": %s, "image": "%s"}' % (body, image)):
        with pytest.raises(RequestError, match="the body must"):
            read_json(around)
    for inside in (b"\xff", b"\\ud800", b"\n", b"\\x"):
        with pytest.raises(RequestError, match="the body must"):
            read_json(b'["%s%s"]' % (image, inside))


PIECES = ['"', "\\", "\\\\", ":", "é", "😀", "a" * (LONG - 3), "a" * LONG, ",", "[", "\n"]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=8), st.booleans())
def test_a_large_body_means_what_it_means_to_others(texts: list[str], ascii_only: bool) -> None:
    value = {"texts": texts, "large": "b" * LARGE, **{text: i for i, text in enumerate(texts)}}
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    "large", ["\\" * 10**6, '"' * 10**6, '\\"' * 5 * 10**5, [""] * 10**5], ids=["slashes", "quotes", "both", "strings"]
)
def test_no_large_body_takes_long(large: Any) -> None:
    start = time.perf_counter()
    assert read_json(json.dumps([large, "a" * LARGE]).encode())[0] == large
    assert time.perf_counter() - start < 2
