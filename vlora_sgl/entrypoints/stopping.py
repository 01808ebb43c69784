"""A server that has been told to stop answers 503 at once, on every route that would begin something.

What only looks (``GET``) is answered to the end, but for the health checks; an abort is carried out.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import StoppingError

HEALTH = ("/health", "/health_generate")
ABORT = "/abort_request"


class RefuseWhileStopping:
    """ASGI middleware: 503 for a request that comes while the server stops."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Callable[[JsonDict], Awaitable[None]]) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "http" and begins_something(scope["method"], scope["path"]) and _is_stopping(scope["app"]):
            await refuse(send)
        else:
            await self.app(scope, receive, send)


def begins_something(method: str, path: str) -> bool:
    """Whether a request is more than a look at the server; a health check asks whether it takes such."""
    return path in HEALTH or (method not in ("GET", "HEAD", "OPTIONS") and path != ABORT)


async def refuse(send: Callable[[JsonDict], Awaitable[None]]) -> None:
    """Send the error, as OpenAI's clients expect one, and close the connection."""
    error = {"message": str(StoppingError()), "type": StoppingError.__name__, "code": StoppingError.http_status}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": StoppingError.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_stopping(app: Any) -> bool:
    serving = getattr(app.state, "openai_serving_chat", None)
    return serving is not None and serving.tokenizer_manager.shutdown.asked
