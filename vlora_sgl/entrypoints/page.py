"""``/ui``, the page, and ``GET /vlora/live``: what the server does, as events, to those who watch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from vlora_sgl import _sgl, page

PERIOD_S = 0.5
WHOLE_EVERY = 4
"""Adapters and kept images are in every so manieth event."""
MOST_WATCHERS = 16
"""Each is one more question to the engine in a period."""

router = APIRouter(include_in_schema=False)
_watchers: set[object] = set()


@router.get("/ui")
@router.get("/ui/page.css")
@router.get("/ui/page.js")
async def file(request: Request) -> Response:
    """One of the page's files."""
    path = request.scope["path"]
    return Response(page.content(path), headers=dict(page.HEADERS), media_type=page.FILES[path][1])


@router.get("/vlora/live")
async def live(request: Request) -> StreamingResponse:
    """Server-sent events, two a second (``managers.live`` says what is in them), until the client leaves.

    Raises:
        HTTPException: 503, too many watch already.
    """
    if len(_watchers) >= MOST_WATCHERS:
        raise HTTPException(503, f"{MOST_WATCHERS} clients watch this server already")
    manager = request.app.state.openai_serving_chat.tokenizer_manager
    return StreamingResponse(_events(manager), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(manager: Any) -> AsyncIterator[bytes]:
    watcher, number, looks = object(), 0, 0
    _watchers.add(watcher)
    try:
        while not manager.shutdown.asked:
            state = await manager.live(number, whole=looks % WHOLE_EVERY == 0)
            number, looks = state["steps"][-1][0] if state["steps"] else number, looks + 1
            yield b"data: " + json.dumps(state).encode() + b"\n\n"
            await manager.shutdown.asked_within(PERIOD_S)
    finally:
        _watchers.discard(watcher)


def open_page(original: Any, *, method: str, path: str, **keys: Any) -> Any:
    """Wraps SGLang's decision about keys: the page's files need none, since a browser that opens it can send none."""
    if method in ("GET", "HEAD") and path in page.FILES:
        return _sgl.AuthDecision(allowed=True)
    return original(method=method, path=path, **keys)
