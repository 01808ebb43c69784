"""The bodies of requests, before a route's schema sees them: bounded, strict JSON, a model that is served.

Every route of the server, SGLang's and ours, reads its body here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware

from vlora_sgl import _sgl, seams
from vlora_sgl.combined import written
from vlora_sgl.core import JsonDict, RequestParams
from vlora_sgl.entrypoints.body_limit import BodyLimit
from vlora_sgl.entrypoints.stopping import RefuseWhileStopping
from vlora_sgl.entrypoints.stream_errors import StreamErrors
from vlora_sgl.entrypoints.uploads import most_bytes
from vlora_sgl.errors import RequestError, VLoraError, quoted
from vlora_sgl.managers.model_names import NAMED, adapter_named
from vlora_sgl.managers.unreadable import UNFORESEEN, in_line, is_of_the_request
from vlora_sgl.seams import Place
from vlora_sgl.server_args import VLoraArgs
from vlora_sgl.strict_json import read_json

logger = logging.getLogger(__name__)

SHOWN_FAULTS = 3
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


async def read(request: Any) -> Any:
    """The body of a request as its route is to see it, in place of SGLang's ``ORJSONRequest.json``.

    Raises:
        HTTPException: it is refused; one line in the log says why.
    """
    if not hasattr(request, "_json"):
        try:
            manager, path = _manager(request), request.scope["path"]
            request._json = accept(read_json(await request.body()), path, manager)
            await manager.adapters.fetch(NAMED.get())
        except VLoraError as error:
            logger.warning("%s: %s", request.scope["path"], error)
            raise HTTPException(error.http_status, str(error)) from None
    return request._json


def accept(body: Any, path: str, manager: Any) -> Any:
    """A body, with what it asks of us where SGLang carries it; whom its ``model`` names is kept in ``NAMED``.

    Raises:
        UnknownAdapterResponse: a model that is not served.
        RequestError: no object, or what this route does not do.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body must be an object; got {quoted(body)}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError(f"model must be the name of a model or adapter; got {quoted(model)}")
    NAMED.set(None if model is None else adapter_named(manager, model))
    body = combine(body, path, manager)
    if path == "/v1/score" and body.get("label_token_ids") == []:
        raise RequestError("label_token_ids must have one token at least; got []")
    if path in ("/detokenize", "/v1/detokenize"):
        check_ids(body.get("tokens"))
    if path == "/v1/responses":
        return without_keeping(body)
    if path == "/configure_logging" and str(body.get("log_level") or "info").lower() not in LOG_LEVELS:
        raise RequestError(f"log_level must be one of {', '.join(LOG_LEVELS)}; got {quoted(body['log_level'])}")
    return move_head(body, path) if path in ("/generate", "/v1/chat/completions") else body


def combine(body: JsonDict, path: str, manager: Any) -> JsonDict:
    """A body with ``adapters``, several as one with their scales, moved to where the gate looks for who answers.

    Raises:
        RequestError: it names an adapter besides, or is not what scales are.
        UnknownAdapterResponse: an adapter that is not loaded.
    """
    if (given := body.get("adapters")) is None:
        return body
    if NAMED.get() is not None or body.get("lora_path") is not None:
        raise RequestError("adapters stands for lora_path, and for an adapter as model; give one of them")
    rest = {name: value for name, value in body.items() if name != "adapters"}
    if path == "/generate" and isinstance(given, list):
        listed = [None if one is None else written(one) for one in given]
        manager.adapters.check_may_serve(listed)
        return {**rest, "lora_path": listed}
    NAMED.set(written(given))
    manager.adapters.check_may_serve(NAMED.get())
    return rest


def check_ids(tokens: object) -> None:
    """Refuse numbers that a tokenizer takes for none; whatever is no list of numbers, or of such, SGLang refuses.

    Raises:
        RequestError: a number that is negative, or has more than 32 bits.
    """
    rows = tokens if isinstance(tokens, list) else []
    for row in [rows, *(row for row in rows if isinstance(row, list))]:
        for token in row:
            if isinstance(token, int) and not 0 <= token < 2**32:
                raise RequestError(f"tokens must be token ids; got {token}")


def without_keeping(body: JsonDict) -> JsonDict:
    """A request of OpenAI's responses that leaves nothing behind: SGLang keeps every answer, for ever.

    Raises:
        RequestError: it needs an answer that was kept, or one that will be.
    """
    for name in ("background", "previous_response_id", "conversation"):
        if body.get(name):
            raise RequestError(f"{name} is not supported: no answers are kept; send the earlier turns in input")
    return {**body, "store": False}


def move_head(body: JsonDict, path: str) -> JsonDict:
    """A body with ``head`` moved to where SGLang carries it: its request types drop or refuse unknown fields."""
    if not isinstance(body.get("head"), str):
        return body
    asked = RequestParams(head=body["head"])
    rest = {name: value for name, value in body.items() if name != "head"}
    if path != "/generate":
        return _with(asked, rest)
    sampling = rest.get("sampling_params")
    moved = [_with(asked, one) for one in sampling] if isinstance(sampling, list) else _with(asked, sampling or {})
    return {**rest, "sampling_params": moved}


def _with(asked: RequestParams, sampling: Any) -> Any:
    """Sampling parameters that ask for this too; what is wrong with them is told where all requests are checked."""
    fits = isinstance(sampling, dict) and isinstance(sampling.get("custom_params") or {}, dict)
    return asked.added_to(sampling) if fits else sampling


def in_one_line(faults: Iterable[Mapping[str, Any]]) -> str:
    """What a schema says is wrong: where, what was expected, and what came."""
    # Of a message of SGLang's it also tries whether the JSON is one already.
    lines = [
        f"{_place(fault['loc'])}: {fault['msg']}; got {quoted(fault.get('input'))}"
        for fault in faults
        if fault["type"] != "is_instance_of"
    ]
    more = f"; and {len(lines) - SHOWN_FAULTS} more" if len(lines) > SHOWN_FAULTS else ""
    return " ".join(("; ".join(lines[:SHOWN_FAULTS]) + more).split())


def _place(loc: Iterable[Any]) -> str:
    """Where a field is; without what pydantic calls the types that it tried."""
    return ".".join(str(part) for part in loc if part != "body" and "[" not in str(part)) or "the body"


def mount(app: FastAPI) -> None:
    """Put all this in front of SGLang's application, once, before it starts."""
    server, handlers = _sgl.http_server, app.exception_handlers
    refused: Any = handlers[HTTPException]

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, HTTPException(400, in_one_line(error.errors())))

    async def wrong(request: Request, error: ValueError | VLoraError) -> Response:
        logger.warning("%s: %s", request.scope["path"], error)
        status = error.http_status if isinstance(error, VLoraError) else 400  # as SGLang's handlers have it
        return await refused(request, HTTPException(status, str(error)))

    async def unforeseen(request: Request, error: Exception) -> Response:
        if not is_of_the_request(error):
            raise error
        logger.warning("%s: %s", request.scope["path"], in_line(error))
        return await refused(request, HTTPException(400, in_line(error)))

    seams.place("http_server.ORJSONRequest.json", [Place(server.ORJSONRequest, "json", read)])
    shown = [Place(handlers, kind, wrong) for kind in (VLoraError, ValueError)]
    shown.append(Place(handlers, RequestValidationError, invalid))
    shown += [Place(handlers, kind, unforeseen) for kind in UNFORESEEN]
    seams.place("http_server.app.exception_handlers", shown)
    limit = Middleware(BodyLimit, most=VLoraArgs.from_environment().max_body_bytes, forms=most_bytes())
    outermost_first = (Middleware(RefuseWhileStopping), Middleware(StreamErrors), limit)
    around = [Place(app.user_middleware, None, one) for one in outermost_first]
    seams.place("http_server.app.user_middleware", around)


def _manager(request: Any) -> Any:
    return request.app.state.openai_serving_chat.tokenizer_manager
