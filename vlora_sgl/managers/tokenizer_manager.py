"""Names of adapters on the way in: which adapter a request means, and a clear answer where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl.heads.requests import HEAD_KEY, answer_text, check_head_requests, head_of
from vlora_sgl.lora.exported import BASE_DELTA, ExportedModel, read_exported
from vlora_sgl.managers import tensor_pickle
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle, UnknownAdapterResponse, UnknownModelResponse
from vlora_sgl.managers.ended_requests import RequestStates
from vlora_sgl.managers.planner import latency_constraint

OUR_META_INFO = frozenset({"vlora_reuse", HEAD_KEY})
"""Keys of ``meta_info`` that the scheduler fills: what a request reused, and what its head said."""


class VLoraTokenizerManager(AdapterLifecycle, _sgl.TokenizerManager):
    """SGLang's tokenizer manager, which resolves adapter names before a request enters the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rid_to_state = RequestStates()
        exported = read_exported(self.server_args.model_path)
        # Where the caller chose other adapters, names mean what they mean in any other engine.
        self.exported = exported if exported is not None and BASE_DELTA in self.lora_ref_cache else None

    async def _tokenize_one_request(self, obj: Any) -> Any:
        """Tokenize, once the latency constraint is known to be one, and hash the images.

        Raises:
            RequestError: an unknown service class or a deadline that is none (a 400 in both protocols).
        """
        if isinstance(obj.sampling_params, dict):
            latency_constraint(obj.sampling_params.get("custom_params"))
        tokenized = await super()._tokenize_one_request(obj)
        await hash_images(getattr(tokenized, "mm_inputs", None))
        return tokenized

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        """SGLang's, with tensors that take no archive; where it would write into the message first, just SGLang's."""
        if _sgl.USE_PICKLE_IPC and self.tokenizer_ipc_name is None:
            self.send_to_scheduler.send(tensor_pickle.dumps(obj))
        else:
            super()._dispatch_to_scheduler(obj)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """SGLang's answers. What we say of a request travels as its first token's info; show it as one value.

        ``meta_info["vlora"]["adapter"]`` says which adapter served.
        """
        asked = obj.lora_path
        obj.lora_id = None  # the engine's own name for an adapter; an id that it does not know would end it
        answers = super().generate_request(obj, request)
        try:
            async for out in answers:
                for one in out if isinstance(out, list) else (out,):
                    meta_info = one.get("meta_info", {})
                    for key in OUR_META_INFO & meta_info.keys():
                        value = next(iter(meta_info.pop(key)), None)
                        if value is not None:
                            meta_info[key] = value
                    if HEAD_KEY in meta_info:
                        one["text"] = answer_text(meta_info[HEAD_KEY])  # the sampled token means nothing
                name_adapters(out, asked)
                yield out
        finally:
            await answers.aclose()
            await self.lora_registry.let_go(obj.lora_id)

    async def _validate_and_resolve_lora(self, obj: Any) -> None:
        """Check what a request says of heads and images, then SGLang's resolution.

        Raises:
            HeadError: a head that its adapter does not have, or that lacks its image.
        """
        check_head_requests(obj, self.lora_ref_cache)
        if self.exported is not None:
            serve_from_exported(obj, self.exported)
        # SGLang would take a caller's word for the content of an image, and so serve one image's KV for another.
        if getattr(obj, "mm_hashes", None):
            obj.mm_hashes = None
        forget_claimed_hashes(getattr(obj, "image_data", None))
        await super()._validate_and_resolve_lora(obj)


async def hash_images(inputs: Any) -> None:
    """Give the images of a request the hashes that the scheduler would compute, in a thread.

    A hash of a large image takes ten milliseconds; in the scheduler they would be lost to every running request.

    Args:
        inputs: SGLang's processor output, or ``None``. Items whose patches are on a device keep to the scheduler.
    """
    items = [
        item
        for item in (inputs.mm_items if inputs is not None else ())
        if item.pad_value is None and isinstance(item.feature, torch.Tensor) and item.feature.device.type == "cpu"
    ]
    if items:
        await asyncio.to_thread(lambda: [item.set_pad_value() for item in items])


def forget_claimed_hashes(image_data: Any) -> None:
    """Take out, in place, what preprocessed images say about their own content, so that SGLang looks at them."""
    if isinstance(image_data, list):
        for one in image_data:
            forget_claimed_hashes(one)
    elif isinstance(image_data, dict):
        image_data.pop("hash", None)
        image_data.pop("pad_value", None)


def serve_from_exported(obj: Any, exported: ExportedModel) -> None:
    """Turn the names in a request (SGLang's, normalised) into an exported model's adapters, in place."""
    single = obj.is_single
    given = [obj.sampling_params] if single else obj.sampling_params
    names = [obj.lora_path] if single else obj.lora_path or [None] * len(given)
    served = [
        exported.serving(name, head_of(parameters) is not None) for name, parameters in zip(names, given, strict=True)
    ]
    obj.lora_path = served[0] if single else served
    # SGLang made these before, and releases adapters by them.
    for index, one in obj.__dict__.get("_sub_obj_cache", {}).items():
        one.lora_path = served[index]


def name_adapters(output: Any, names: str | Sequence[str | None] | None) -> None:
    """Write the adapter's name into one answer, or into each of a batch's answers, in place."""
    answers = output if isinstance(output, list) else [output]
    for position, answer in enumerate(answers):
        index = answer.get("index", position)
        served = names[index] if isinstance(names, list) and index < len(names) else names
        ours = answer.get("meta_info", {}).setdefault("vlora", {})
        if isinstance(ours, dict):
            ours["adapter"] = served


def resolve_model_name(original: Any, self: Any, request_model: str, explicit_lora_path: Any) -> Any:
    """Wraps ``OpenAIServingBase._resolve_lora_path``: what ``model`` names, before what ``lora_path`` names.

    Besides ``base:adapter``, a bare adapter name is accepted, because ``/v1/models`` lists adapters by it.

    Raises:
        UnknownModelResponse: ``base:adapter`` with an adapter that is loaded, of a base model that is not served.
        UnknownAdapterResponse: anything else but the served model, an adapter, or ``base:adapter`` of a loaded one.
    """
    manager = self.tokenizer_manager
    if not manager.server_args.enable_lora:
        return original(self, request_model, explicit_lora_path)
    adapters = manager.lora_ref_cache
    if request_model in adapters:
        return request_model
    served = {manager.served_model_name, manager.server_args.model_path, "default"}
    base, separator, adapter = (part.strip() for part in request_model.partition(":"))
    if request_model in served:
        return explicit_lora_path
    if separator and base in served and adapter in adapters:
        return adapter
    if separator and adapter in adapters:
        raise UnknownModelResponse(base, manager.served_model_name, adapters)
    raise UnknownAdapterResponse(adapter if separator and base in served else request_model, adapters)
