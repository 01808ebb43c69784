"""Routes of SGLang's that this server refuses by name, because they would answer wrongly or may end it.

Those that may end it and are of use to its operator are served where there is one: with ``--admin-api-key``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.routing import APIWebSocketRoute

from vlora_sgl.seams import Place

_OLLAMA = "Ollama's API would drop images and adapters; /v1/chat/completions takes both"
_SOUND = "no model that hears is served with adapters"
_KEPT = "this server keeps no answers"
_EXPERTS = "recording experts ends a server that was not started for it"
_INSTANCES = "weights are not sent to other instances"

REFUSED = {
    **dict.fromkeys(("ollama_chat", "ollama_generate", "ollama_tags", "ollama_show"), _OLLAMA),
    "vertex_generate": "its instances cannot name an adapter each; /generate takes batches",
    **dict.fromkeys(("openai_v1_audio_transcriptions", "openai_v1_realtime_transcription"), _SOUND),
    **dict.fromkeys(("v1_retrieve_responses", "v1_cancel_responses"), _KEPT),
    **dict.fromkeys([f"{verb}_expert_distribution_record_async" for verb in ("start", "stop", "dump")], _EXPERTS),
    **dict.fromkeys(("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance"), _INSTANCES),
    **dict.fromkeys(("get_remote_instance_transfer_engine_info", "remote_instance_transfer_engine_info"), _INSTANCES),
    **dict.fromkeys(("scale_elastic_ep", "is_scaling_elastic_ep"), "expert parallelism does not go with adapters"),
}
"""The reason, by the name of SGLang's function."""

OPERATORS = {
    *[f"update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc")],
    *("init_weights_update_group", "destroy_weights_update_group", "release_memory_occupation"),
    *("resume_memory_occupation", "check_weights", "slow_down", "start_profile_async", "stop_profile_async"),
    *("pause_generation", "continue_generation"),
}
"""Names of SGLang's functions by which a wrong request may end the server or hold it up."""


def refusals(app: FastAPI) -> Iterator[Place]:
    """What goes in the place of such routes, in the application's own list and in those of included routers."""
    included = [route.original_router.routes for route in app.router.routes if hasattr(route, "original_router")]
    for routes in (app.router.routes, *included):
        for index, route in enumerate(routes):
            name = getattr(getattr(route, "endpoint", None), "__name__", "")
            if name in REFUSED:
                yield Place(routes, index, _refusal(app, route, REFUSED[name]))
            elif name in OPERATORS:
                yield Place(routes, index, _same(app, route, route.endpoint, [Depends(operator_only)]))


async def operator_only(request: Request) -> None:
    """Let a request through if this server has an operator's key, which it then brings.

    Raises:
        HTTPException: 403 otherwise.
    """
    if not request.app.state.openai_serving_chat.tokenizer_manager.server_args.admin_api_key:
        path = request.scope["path"]
        raise HTTPException(403, f"{path} may end the server: it is served with --admin-api-key only")


def _refusal(app: FastAPI, route: Any, reason: str) -> Any:
    message = f"{route.path} is not served: {reason}"

    async def refuse() -> None:
        raise HTTPException(501, message)

    async def refuse_socket(socket: WebSocket) -> None:
        await socket.close(code=1008, reason=message)

    if isinstance(route, APIWebSocketRoute):
        return APIWebSocketRoute(route.path, refuse_socket)
    return _same(app, route, refuse)


def _same(app: FastAPI, route: Any, endpoint: Any, dependencies: Sequence[Any] = ()) -> Any:
    """A route of the same path and methods."""
    kind = app.router.route_class
    return kind(route.path, endpoint, methods=route.methods, name=route.name, dependencies=dependencies)
