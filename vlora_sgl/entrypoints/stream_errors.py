"""A request that is refused before its stream begins gets the status of its refusal, as it would without a stream.

SGLang's ``/generate`` answers 200 as soon as a stream is asked for, and sends the refusal as an event of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

BEGINNING = b'data: {"error":'


class StreamErrors:
    """ASGI middleware: an event stream whose first event is an error becomes an answer with that error's status."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Hold back an event stream's status until its first event is there; pass everything else on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held: Message | None = None  # the start of a stream
        refused = False

        async def send_held(message: Message) -> None:
            nonlocal held, refused
            if message["type"] == "http.response.start":
                if message["status"] == 200 and _is_stream(message):
                    held = message
                    return
            elif message["type"] == "http.response.body":
                if refused:
                    return  # the rest of a stream that is none
                if held is not None and (message.get("body") or not message.get("more_body")):
                    start, held = held, None
                    if (error := _error(message.get("body", b""))) is not None:
                        refused = True
                        body = json.dumps({"error": error}).encode()
                        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                        await send({**start, "status": error["code"], "headers": headers})
                        await send({"type": "http.response.body", "body": body})
                        return
                    await send(start)
            await send(message)

        await self.app(scope, receive, send_held)


def _is_stream(start: Message) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in start["headers"])


def _error(event: bytes) -> dict[str, Any] | None:
    """The error that an event is, if it has a status."""
    if not event.startswith(BEGINNING):
        return None
    try:
        error = json.loads(event.partition(b"\n")[0].removeprefix(b"data: "))["error"]
    except ValueError:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return error if isinstance(code, int) and 400 <= code < 600 else None
