"""Whom a request's ``model`` names: the base model or an adapter, on every route that takes a model.

SGLang's handlers of OpenAI's completions, chats and embeddings resolve it themselves (``resolve_model_name`` wraps
that). The others build their request to the engine without it; for those it is kept beside the request, in ``NAMED``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vlora_sgl.core import AdapterId
from vlora_sgl.managers.adapter_registry import UnknownAdapterResponse, UnknownModelResponse
from vlora_sgl.names import DEFAULT

NAMED: ContextVar[AdapterId] = ContextVar("NAMED", default=None)
"""The adapter that the body of this task's HTTP request names as its model."""


def adapter_named(manager: Any, model: str) -> AdapterId:
    """The adapter that ``model`` names: alone, because ``/v1/models`` lists them so, or as ``base:adapter``.

    Args:
        manager: the tokenizer manager.
        model: as the client sent it.

    Returns:
        The adapter's name; ``None`` for the base model.

    Raises:
        UnknownModelResponse: ``base:adapter`` with an adapter that is loaded, of a base model that is not served.
        UnknownAdapterResponse: anything else but the served model, an adapter, or ``base:adapter`` of a loaded one.
    """
    adapters, may_serve = manager.lora_ref_cache, manager.adapters.may_serve
    served = {manager.served_model_name, manager.server_args.model_path, DEFAULT}
    if manager.adapters.knows(model):
        return model
    if model in served:
        return None
    base, separator, adapter = (part.strip() for part in model.partition(":"))
    if separator and may_serve(adapter):
        if base in served:
            return adapter
        raise UnknownModelResponse(base, manager.served_model_name, adapters)
    if may_serve(model):
        return model
    raise UnknownAdapterResponse(adapter if separator and base in served else model, adapters)


def resolve_model_name(
    original: Callable[..., Any], self: Any, request_model: str, explicit_lora_path: AdapterId | list[AdapterId]
) -> AdapterId | list[AdapterId]:
    """Wraps ``OpenAIServingBase._resolve_lora_path``: what ``model`` names, before what ``lora_path`` names.

    Raises:
        UnknownAdapterResponse: no adapter has a name that one of them gives.
    """
    named = adapter_named(self.tokenizer_manager, request_model)
    if named is None and explicit_lora_path:
        self.tokenizer_manager.adapters.check_may_serve(explicit_lora_path)
    return explicit_lora_path if named is None else named
