"""HTTP for adapters, beside SGLang's ``/unload_lora_adapter``: list, load, replace, pin, promote, roll back.

Some of SGLang's own routes are put right on the way: ``/load_lora_adapter`` takes an adapter's files as well as their
place, ``/v1/models`` and ``/v1/models/NAME`` know every adapter, and a streaming ``/generate`` refuses an unknown
adapter with a status instead of an event in a stream that began with 200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from vlora_sgl import _sgl, seams
from vlora_sgl.core import JsonDict
from vlora_sgl.entrypoints.refused import refusals
from vlora_sgl.entrypoints.uploads import order_in
from vlora_sgl.managers.adapter_registry import UnknownAdapterResponse
from vlora_sgl.seams import Place

Handler = TypeVar("Handler", bound=Callable[..., object])
admin: Callable[[Handler], Handler] = _sgl.auth_level(_sgl.AuthLevel.ADMIN_OPTIONAL)


class LoadRequest(BaseModel):
    """An adapter, and where it is; the path stands for the files that came with the order, if they did."""

    lora_name: str = Field(description="NAME, or NAME@VERSION for a version beside the current one")
    lora_path: str
    pinned: bool = False


class ReloadRequest(BaseModel):
    """Which adapter to replace, and with what."""

    lora_name: str
    lora_path: str | None = Field(None, description="left out: the directory it was loaded from, read again")


class PinRequest(BaseModel):
    """Whether an adapter keeps its device slot."""

    lora_name: str
    pinned: bool = True


class PromoteRequest(BaseModel):
    """Which version is to answer, and how often."""

    lora_name: str = Field(description="NAME@VERSION")
    share: float = Field(1.0, ge=0, le=1, description="of the conversations; the current version keeps the rest")
    drop: bool = Field(False, description="unload the version that was current, once its requests have ended")


class RollBackRequest(BaseModel):
    """Which adapter is to be what it was."""

    lora_name: str


async def list_adapters(request: Request) -> JsonDict:
    """Every loaded adapter, with the tier of its nearest copy: device, host or disk."""
    return {"adapters": await _manager(request).list_lora_adapters()}


@admin
async def load_adapter(request: Request) -> JSONResponse:
    """Load an adapter, or a version of one, from a directory or from the body."""
    manager = _manager(request)
    async with order_in(request, LoadRequest, manager.adapters.uploads) as order:
        return _kept(await manager.load_lora_adapter(_sgl.LoadLoRAAdapterReqInput(**dict(order))), order, manager)


@admin
async def reload_adapter(request: Request) -> JSONResponse:
    """Replace an adapter for the requests to come; those that run keep the one they began with."""
    manager = _manager(request)
    async with order_in(request, ReloadRequest, manager.adapters.uploads) as order:
        return _kept(await manager.adapters.reload(order.lora_name, order.lora_path), order, manager)


@admin
async def pin_adapter(body: PinRequest, request: Request) -> JSONResponse:
    """Let an adapter keep its device slot, or no longer."""
    return _answer(await _manager(request).adapters.pin(body.lora_name, body.pinned))


@admin
async def promote_adapter(body: PromoteRequest, request: Request) -> JSONResponse:
    """Let a name mean another of its versions, for everybody or for a share of the conversations."""
    return _answer(await _manager(request).adapters.promote(body.lora_name, body.share, body.drop))


@admin
async def roll_back_adapter(body: RollBackRequest, request: Request) -> JSONResponse:
    """End the trial of a version, or let a name mean again what it meant before."""
    return _answer(await _manager(request).adapters.roll_back(body.lora_name))


async def list_models(request: Request) -> Any:
    """SGLang's list, with the adapters that are on disk, or in a source, until somebody asks for them."""
    models = await _sgl.http_server.available_models()
    listed = {card.id for card in models.data}
    parent = _manager(request).served_model_name
    known = {name: ref.lora_path for name, ref in _manager(request).lora_ref_cache.items()}
    for name, place in {**dict(_manager(request).adapters.sources.offered()), **known}.items():
        if name not in listed:
            models.data.append(type(models.data[0])(id=name, root=place, parent=parent))
    return models


async def retrieve_model(model: str, request: Request) -> Any:
    """The entry of that list.

    Raises:
        UnknownAdapterResponse: there is none.
    """
    card = next((card for card in (await list_models(request)).data if card.id == model), None)
    if card is None:
        raise UnknownAdapterResponse(model, _manager(request).lora_ref_cache)
    return card


async def generate(obj: _sgl.GenerateReqInput, request: Request) -> Any:
    """SGLang's, once a stream's adapters are known to exist, and what it asks to be right.

    Raises:
        UnknownAdapterResponse: one does not.
        SourceResponse: one does not come from where it is to be fetched.
    """
    if obj.stream:
        manager = _manager(request)
        manager.gate.check(obj)
        await manager.adapters.fetch(obj.lora_path)
        manager.adapters.check_names(obj.lora_path)
    return await _sgl.http_server.generate_request(obj, request)


def mount(app: Any) -> None:
    """Put the routes in SGLang's application, before it starts.

    One by one: SGLang's guard looks for the admin mark in the application's own list, where FastAPI hides an included
    router's routes.
    """
    server, kind = _sgl.http_server, app.router.route_class
    routes: list[Any] = app.router.routes
    replaced: dict[Any, Any] = {
        server.available_models: list_models,
        server.retrieve_model: retrieve_model,
        server.generate_request: generate,
        server.load_lora_adapter: load_adapter,
    }
    places = [
        Place(routes, index, kind(route.path, replaced[route.endpoint], methods=route.methods, response_class=answer))
        for index, route in enumerate(routes)
        if (answer := getattr(route, "response_class", None)) and route.endpoint in replaced
    ]
    new = [
        kind("/lora_adapters", list_adapters, methods=["GET"]),
        kind("/reload_lora_adapter", reload_adapter, methods=["POST"]),
        kind("/pin_lora_adapter", pin_adapter, methods=["POST"]),
        kind("/promote_lora_adapter", promote_adapter, methods=["POST"]),
        kind("/roll_back_lora_adapter", roll_back_adapter, methods=["POST"]),
    ]
    added = [Place(routes, None, route) for route in new]
    seams.place("http_server.app.router.routes", [*places, *refusals(app), *added])
    # The one route that changes adapters and that SGLang left open; it refuses, but only to those it should answer.
    marked = Place(vars(server.load_lora_adapter_from_tensors), "_auth_level", _sgl.AuthLevel.ADMIN_OPTIONAL)
    seams.place("http_server.load_lora_adapter_from_tensors", [marked])


def _manager(request: Request) -> Any:
    return request.app.state.openai_serving_chat.tokenizer_manager


def _kept(result: Any, order: LoadRequest | ReloadRequest, manager: Any) -> JSONResponse:
    """The answer to a load; of one that was refused, the files that came are gone."""
    if not result.success and order.lora_path is not None:
        manager.adapters.forget_files(order.lora_path)
    return _answer(result)


def _answer(result: Any) -> JSONResponse:
    told = ("success", "error_message", "loaded_adapters", "report", "version")
    body = {name: getattr(result, name, None) for name in told}
    return JSONResponse(body, status_code=200 if result.success else 400)
