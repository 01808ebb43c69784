"""Routes of SGLang's that this server refuses by name, because they would answer wrongly or end it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, WebSocket
from fastapi.routing import APIWebSocketRoute

from vlora_sgl.seams import Place

_OLLAMA = "Ollama's API would drop images and adapters; /v1/chat/completions takes both"
_SOUND = "no model that hears is served with adapters"
_KEPT = "this server keeps no answers"
_EXPERTS = "recording experts ends a server that was not started for it"
_SENT = "weights are not sent to a running server; /update_weights_from_disk reads them"
_INSTANCES = "weights are not sent to other instances"

REFUSED = {
    **dict.fromkeys(("ollama_chat", "ollama_generate", "ollama_tags", "ollama_show"), _OLLAMA),
    "vertex_generate": "its instances cannot name an adapter each; /generate takes batches",
    **dict.fromkeys(("openai_v1_audio_transcriptions", "openai_v1_realtime_transcription"), _SOUND),
    **dict.fromkeys(("v1_retrieve_responses", "v1_cancel_responses"), _KEPT),
    **dict.fromkeys([f"{verb}_expert_distribution_record_async" for verb in ("start", "stop", "dump")], _EXPERTS),
    **dict.fromkeys(("init_weights_update_group", "destroy_weights_update_group"), _SENT),
    **dict.fromkeys([f"update_weights_from_{source}" for source in ("tensor", "distributed", "ipc")], _SENT),
    **dict.fromkeys(("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance"), _INSTANCES),
    **dict.fromkeys(("get_remote_instance_transfer_engine_info", "remote_instance_transfer_engine_info"), _INSTANCES),
    **dict.fromkeys(("scale_elastic_ep", "is_scaling_elastic_ep"), "expert parallelism does not go with adapters"),
    "slow_down": "it would hold up every request",
}
"""The reason, by the name of SGLang's function."""


def refusals(app: FastAPI) -> Iterator[Place]:
    """What goes in the place of refused routes, in the application's own list and in those of included routers."""
    included = [route.original_router.routes for route in app.router.routes if hasattr(route, "original_router")]
    for routes in (app.router.routes, *included):
        for index, route in enumerate(routes):
            reason = REFUSED.get(getattr(getattr(route, "endpoint", None), "__name__", ""))
            if reason:
                yield Place(routes, index, _refusal(route, f"{route.path} is not served: {reason}", app))  # type: ignore[attr-defined]


def _refusal(route: Any, message: str, app: FastAPI) -> Any:
    async def refuse() -> None:
        raise HTTPException(501, message)

    async def refuse_socket(socket: WebSocket) -> None:
        await socket.close(code=1008, reason=message)

    if isinstance(route, APIWebSocketRoute):
        return APIWebSocketRoute(route.path, refuse_socket)
    return app.router.route_class(route.path, refuse, methods=route.methods, name=route.name)
