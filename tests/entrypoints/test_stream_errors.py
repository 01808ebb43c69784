"""A refusal before a stream begins has its status; a stream that began is not touched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from vlora_sgl.entrypoints.stream_errors import StreamErrors

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x", b"y")]
REFUSAL = b'data: {"error": {"message": "image 1 of 1: none", "code": 400}}\n\n'


def answer(*bodies: bytes, headers: Any = STREAM, status: int = 200) -> list[dict[str, Any]]:
    """What a client gets of an application that answers with these parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(StreamErrors(app)({"type": "http"}, None, send))  # type: ignore[arg-type]
    return sent


def test_a_refusal_before_the_first_token_has_its_status() -> None:
    start, body = answer(REFUSAL, b"data: [DONE]\n\n")
    assert start["status"] == 400
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body["body"]),
    }
    assert json.loads(body["body"])["error"]["message"] == "image 1 of 1: none"
    assert not body.get("more_body")


@pytest.mark.parametrize(
    ("bodies", "options"),
    [
        ((b'data: {"text": "a"}\n\n', REFUSAL), {}),
        ((b'data: {"error": "no status"}\n\n',), {}),
        ((b'data: {"error": {"code": null}}\n\n',), {}),
        ((b'data: {"error": \n\n',), {}),
        ((), {}),
        ((REFUSAL,), {"headers": [(b"content-type", b"text/plain")]}),
        ((REFUSAL,), {"status": 503}),
    ],
    ids=["after a token", "a text", "no code", "no JSON", "empty", "no stream", "an error"],
)
def test_anything_else_passes_as_it_is(bodies: tuple[bytes, ...], options: Any) -> None:
    start, *rest = answer(*bodies, **options)
    assert start["status"] == options.get("status", 200)
    assert start["headers"] == options.get("headers", STREAM)
    assert [message["body"] for message in rest] == [*bodies, b""]
