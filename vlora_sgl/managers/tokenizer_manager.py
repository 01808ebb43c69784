"""Names of adapters on the way in: which adapter a request means, and a clear answer where there is none."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

from vlora_sgl import _sgl
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.managers.planner import latency_constraint


class UnknownAdapterResponse(UnknownAdapterError, HTTPException, ValueError):
    """The same error as an HTTP 404, for both of SGLang's protocols (one catches ValueError, one HTTPException)."""

    def __init__(self, name: str, loaded: Any) -> None:
        UnknownAdapterError.__init__(self, name, loaded)
        self.status_code = self.http_status
        self.detail = str(self)
        self.headers = None


class VLoraTokenizerManager(_sgl.TokenizerManager):
    """SGLang's tokenizer manager, which resolves adapter names before a request enters the engine."""

    async def _tokenize_one_request(self, obj: Any) -> Any:
        """Tokenize, once the latency constraint is known to be one.

        Raises:
            RequestError: an unknown service class or a deadline that is none (a 400 in both protocols).
        """
        if isinstance(obj.sampling_params, dict):
            latency_constraint(obj.sampling_params.get("custom_params"))
        return await super()._tokenize_one_request(obj)

    async def _resolve_lora_path(self, obj: Any) -> None:
        """Resolve names to ids.

        Raises:
            UnknownAdapterError: a name that is not loaded.
        """
        names = [obj.lora_path] if isinstance(obj.lora_path, str) else obj.lora_path
        known = self.lora_registry.get_all_adapters()
        for name in names:
            if name is not None and name not in known and name not in self.lora_ref_cache:
                raise UnknownAdapterResponse(name, known)
        await super()._resolve_lora_path(obj)


def resolve_model_name(original: Any, self: Any, request_model: str, explicit_lora_path: Any) -> Any:
    """Wraps ``OpenAIServingBase._resolve_lora_path``: what ``model`` names, before what ``lora_path`` names.

    Besides ``base:adapter``, a bare adapter name is accepted, because ``/v1/models`` lists adapters by it.

    Raises:
        UnknownAdapterError: ``model`` is neither the served model, an adapter, nor ``base:adapter`` of a loaded one.
    """
    manager = self.tokenizer_manager
    if not manager.server_args.enable_lora:
        return original(self, request_model, explicit_lora_path)
    adapters = manager.lora_registry.get_all_adapters()
    if request_model in adapters:
        return request_model
    served = {manager.served_model_name, manager.server_args.model_path, "default"}
    base, separator, adapter = request_model.partition(":")
    if request_model in served:
        return explicit_lora_path
    if separator and base.strip() in served and adapter.strip() in adapters:
        return adapter.strip()
    raise UnknownAdapterResponse(adapter.strip() if separator else request_model, adapters)
