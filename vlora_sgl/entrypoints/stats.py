"""``GET /vlora/stats``: what this package knows of its schedulers, for a person. Prometheus has ``/metrics``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

router = APIRouter(tags=["vlora"])


@router.get("/vlora/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Modes, plan, adapters, prefix cache, image encoder's cache and heads, one entry per scheduler."""
    manager = request.app.state.openai_serving_chat.tokenizer_manager
    return {"schedulers": [state["vlora"] for state in await manager.get_internal_state()]}
