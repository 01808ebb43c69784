"""A bound on the bytes of a request's body, whatever its header says, kept while the body comes in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from vlora_sgl.errors import BodyTooLargeError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class BodyLimit:
    """ASGI middleware: who reads more of a body than this gets an error, which becomes a 413.

    uvicorn buffers 64 KiB of a body that nobody reads, and throws the rest away once the request is answered.

    Args:
        app: what is behind it.
        most: bytes.
    """

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """Count what is read; refuse at once where the header tells that it will be too much."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        seen = int(told) if told.isdigit() and int(told) > self.most else 0

        async def receive_bounded() -> Message:
            nonlocal seen
            if seen <= self.most:
                message = await receive()
                seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(413, str(BodyTooLargeError(self.most)))
            return message

        await self.app(scope, receive_bounded, send)
