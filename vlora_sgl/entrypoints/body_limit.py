"""Bounds on a request's body, kept while it comes in: its type, its bytes, how it stalls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastapi import HTTPException

from vlora_sgl.errors import BodyTooLargeError, quoted

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

PATIENCE_S = 60.0
JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
FORM = re.compile(rb"multipart/form-data\s*(;|$)", re.IGNORECASE)


class BodyLimit:
    """ASGI middleware: who reads a body gets an error where it is too large (which becomes a 413), no JSON (415), or
    does not go on (408).

    uvicorn buffers 64 KiB of a body that nobody reads, and throws the rest away once the request is answered.

    Args:
        app: what is behind it.
        most: bytes.
        patience: seconds in which more of a body has to come.
        forms: bytes of forms with files, by the paths that take them instead of JSON.
    """

    def __init__(
        self, app: Any, most: int, patience: float = PATIENCE_S, forms: Mapping[str, int] | None = None
    ) -> None:
        self.app, self.most, self.patience, self.forms = app, most, patience, forms or {}

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """Count what is read; refuse at once where the header tells that it will be too much."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        told, kind = headers.get(b"content-length", b""), headers.get(b"content-type", b"")
        form = scope.get("path") in self.forms and FORM.match(kind)
        most = self.forms[scope["path"]] if form else self.most
        flag = "--vlora-max-adapter-bytes" if form else "--vlora-max-body-bytes"
        seen, coming = (int(told) if told.isdigit() and int(told) > most else 0), True

        async def receive_bounded() -> Message:
            nonlocal seen, coming
            if seen <= most:
                try:  # what comes behind a body is the client's hanging up
                    async with asyncio.timeout(self.patience if coming else None):
                        message = await receive()
                except TimeoutError:
                    raise HTTPException(408, f"the body stalled for {self.patience:g} seconds") from None
                seen, coming = seen + len(message.get("body", b"")), bool(message.get("more_body"))
            if seen > most:
                raise HTTPException(413, str(BodyTooLargeError(most, flag)))
            if message.get("body") and not form and not JSON.match(kind):
                raise HTTPException(415, f"the body must be application/json; got {quoted(kind.decode('latin-1'))}")
            return message

        await self.app(scope, receive_bounded, send)
