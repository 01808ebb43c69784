"""The front of the engine: what a request asks and which adapters it means; what is told of its answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from http import HTTPStatus
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import torch
from fastapi import BackgroundTasks

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import (
    GenerateReqInput,
    LoadLoRAAdapterReqInput,
    LoadLoRAAdapterReqOutput,
    MultimodalInputs,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
)
from vlora_sgl.core import JsonDict, RequestParams, Version
from vlora_sgl.heads.requests import answer_text, check_head_requests
from vlora_sgl.lora.exported import BASE_DELTA, ExportedModel, read_exported
from vlora_sgl.managers import live, tensor_pickle
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle, Reply
from vlora_sgl.managers.admission import Limits, RequestGate
from vlora_sgl.managers.deadlines import stamp
from vlora_sgl.managers.ended_requests import LingeringStates
from vlora_sgl.managers.meters import Meters
from vlora_sgl.managers.model_names import NAMED
from vlora_sgl.managers.shutdown import Shutdown
from vlora_sgl.managers.stopping import show_regex
from vlora_sgl.managers.unreadable import refusing_what_cannot_be_read
from vlora_sgl.managers.waits import behind, limit_of, within
from vlora_sgl.multimodal.gemma3 import why_blind
from vlora_sgl.multimodal.markers import Markers
from vlora_sgl.multimodal.opening import naming_images
from vlora_sgl.multimodal.words import Words
from vlora_sgl.request import show
from vlora_sgl.seams import Place, Stage
from vlora_sgl.server_args import VLoraArgs
from vlora_sgl.versions import conversations

logger = logging.getLogger(__name__)

ABORT_AFTER_S = 2.0
"""After the end of a stream, as in SGLang."""


class VLoraTokenizerManager(_sgl.TokenizerManager):
    """SGLang's tokenizer manager, which resolves adapter names and reads requests before they enter the engine.

    Attributes:
        adapters: which adapters there are, in memory and on disk.
        gate: what every request has to pass.
        shutdown: the end of a server that is told to stop.
        markers: what stands for an image in a prompt.
        words: tells a user's words from special tokens.
        meters: what was answered, by adapter.
    """

    _uncounted = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.meters = Meters()
        self.shutdown = Shutdown(self, VLoraArgs.from_environment().drain_seconds)
        super().__init__(*args, **kwargs)
        seams.own("TokenizerManager.rid_to_state", self, LingeringStates())
        blind = why_blind(self.model_config.hf_config, self.server_args) is not None
        sees = Place(self.model_config, "is_image_understandable_model", False)
        seams.place("TokenizerManager.model_config", [sees] if blind else "images are not refused")
        limits, context = VLoraArgs.from_environment(), self.context_len
        labels = frozenset(self.server_args.tokenizer_metrics_allowed_custom_labels or ())
        self.gate = RequestGate(
            Limits(
                vocabulary=self.model_config.vocab_size,
                context=context,
                text_chars=limits.max_text_chars or 64 * context,
                n=limits.max_answers,
                top_logprobs=limits.max_top_logprobs,
                images=limits.max_images,
                videos=_sgl.VIDEO_DECODER != "decord" or find_spec("decord") is not None,  # its last resort
                labels=labels if self.enable_metrics else None,
            )
        )
        self.markers = Markers(self.mm_processor, self.tokenizer)
        self.words = Words(self.tokenizer, self.markers.patterns)
        seams.verify(
            Stage.ENGINE, "TokenizerManager", otherwise=None if self.server_args.enable_lora else "LoRA is off"
        )
        exported = read_exported(self.server_args.model_path)
        # Where the caller chose other adapters, names mean what they mean in any other engine.
        self.exported = exported if exported is not None and BASE_DELTA in self.lora_ref_cache else None

    async def get_internal_state(self) -> list[JsonDict]:
        """SGLang's, with the replacements that are in this process."""
        states = await super().get_internal_state()
        for state in states:
            state["vlora"]["seams"] = seams.report(state["vlora"]["seams"])
        return states

    # It begins, and ends

    def auto_create_handle_loop(self) -> None:
        """SGLang's, which begins to listen to the engine and to signals; what a signal does is ours."""
        if self.event_loop is not None:
            return
        before = signal.getsignal(signal.SIGTERM)
        super().auto_create_handle_loop()
        if threading.current_thread() is threading.main_thread():
            self.shutdown.listen(asyncio.get_event_loop(), before)

    def create_abort_task(self, obj: GenerateReqInput) -> BackgroundTasks:
        """SGLang's, for a stream whose client may have left, which does not keep a server from stopping."""

        async def abort() -> None:
            await self.shutdown.asked_within(ABORT_AFTER_S)
            for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid or []:
                self.abort_request(rid)

        tasks = BackgroundTasks()
        tasks.add_task(abort)
        return tasks

    async def sigterm_watchdog(self) -> None:
        """Wait for the signal to stop, and stop (see ``Shutdown``)."""
        await self.shutdown.run()

    # A request comes

    async def _validate_and_resolve_lora(self, obj: GenerateReqInput) -> None:
        """Read what a request asks of us, check what it says of heads and images, then SGLang's resolution.

        Raises:
            RequestError, HeadError: it asks for what there is not (a 400 in both protocols).
        """
        self._choose_versions(obj)
        given = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
        asked = [RequestParams.of(one) for one in given]
        check_head_requests(obj, asked, self.lora_ref_cache)
        if self.exported is not None:
            serve_from_exported(obj, asked, self.exported)
        # SGLang would take a caller's word for the content of an image, and so serve one image's KV for another.
        if getattr(obj, "mm_hashes", None):
            obj.mm_hashes = None
        forget_claimed_hashes(getattr(obj, "image_data", None))
        await super()._validate_and_resolve_lora(obj)

    def _choose_versions(self, obj: GenerateReqInput) -> None:
        """Say of each adapter that a request names which version its conversation gets."""
        if obj.lora_path is None:
            return
        names = [obj.lora_path] if isinstance(obj.lora_path, str) else obj.lora_path
        whose = conversations(obj, len(names))
        name_adapters(obj, [self.adapters.meant(name, one) for name, one in zip(names, cycle(whose), strict=False)])

    async def _resolve_lora_path(self, obj: GenerateReqInput) -> None:
        """SGLang's names to ids, once all are in memory.

        Raises:
            UnknownAdapterResponse: a name that is not loaded.
        """
        await self.adapters.bring_in(obj.lora_path)
        if obj.lora_path is not None:  # those that were chosen may be called otherwise by now
            names = [obj.lora_path] if isinstance(obj.lora_path, str) else obj.lora_path
            name_adapters(obj, [*map(self.adapters.called, names)])
        await super()._resolve_lora_path(obj)

    async def _tokenize_one_request(self, obj: GenerateReqInput) -> TokenizedGenerateReqInput:
        """SGLang's, with hashes for the images, once there are as many as the prompt has markers.

        Raises:
            RequestError: there are not.
            ImageError: an image that cannot be opened.
            RequestError: something else of it that SGLang cannot read.
        """
        self.markers.check(obj, self.words)
        with naming_images(obj), refusing_what_cannot_be_read():
            tokenized = await super()._tokenize_one_request(obj)
        if (state := self.rid_to_state.get(obj.rid)) is not None:
            stamp(tokenized.sampling_params, state.time_stats.created_time)
        await hash_images(getattr(tokenized, "mm_inputs", None))
        return tokenized

    def _validate_batch_tokenization_constraints(self, batch_size: int, obj: Any) -> None:
        """SGLang's of prompts that it tokenizes together (``--enable-tokenizer-batch-encode``), then as for one."""
        super()._validate_batch_tokenization_constraints(batch_size, obj)
        for index in range(batch_size):
            self.markers.check(obj[index], self.words)

    def _dispatch_to_scheduler(self, obj: object) -> None:
        """SGLang's, with tensors that take no archive; where it would write into the message first, just SGLang's."""
        if _sgl.USE_PICKLE_IPC and self.tokenizer_ipc_name is None:
            self.send_to_scheduler.send(tensor_pickle.dumps(obj))
        else:
            super()._dispatch_to_scheduler(obj)

    async def generate_request(
        self, obj: GenerateReqInput, request: object = None
    ) -> AsyncIterator[JsonDict | list[JsonDict]]:
        """SGLang's answers, with what we say of each as one dict: ``meta_info["vlora"]``.

        Every route and the engine come here; nothing reads a request before it has passed the gate.

        Raises:
            RequestError: a field of the request is not what it must be.
            StoppingResponse: the server has been told to stop.
        """
        self.shutdown.check()
        if obj.lora_path is None:
            obj.lora_path = NAMED.get()
        self.gate.check(obj)
        await self.adapters.fetch(obj.lora_path)
        asked = obj.lora_path
        obj.lora_id = None  # the engine's own name for an adapter; an id that it does not know would end it
        answers = super().generate_request(obj, request)
        out: JsonDict | list[JsonDict] = []
        versions: list[list[Version]] = []
        try:
            async for out in answers:
                versions = versions or self._versions_of(obj)
                show_all(out, asked, getattr(obj, "parallel_sample_num", 1), versions)
                yield out
        except (GeneratorExit, asyncio.CancelledError):
            if self.enable_metrics and not has_ended(out):  # else the route just has what it wanted
                self._count_aborted(obj)
            raise
        finally:
            await answers.aclose()
            self.adapters.registry.let_go(obj.lora_id)

    def _versions_of(self, obj: GenerateReqInput) -> list[list[Version]]:
        """Of every adapter that answers a prompt, for each prompt of a request."""
        ids = obj.lora_id if isinstance(obj.lora_id, list) else [obj.lora_id]
        return [self.adapters.registry.versions(one) for one in ids]

    # An answer comes

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        """SGLang's, which ends the process if it raises: here the answers of that step end, with status 500."""
        try:
            await super()._handle_batch_output(recv_obj)
        except Exception as error:
            message = f"{type(error).__name__} while the answer was put together: {error}"
            logger.error("requests %s end: %s", ", ".join(recv_obj.rids), message, exc_info=error)
            reason = _sgl.FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError").to_json()
            for rid in recv_obj.rids:
                self.rid_to_state.recall(rid)
                self._handle_abort_req(_sgl.AbortReq(rid=rid, finished_reason=reason))

    def collect_metrics(self, state: Any, recv_obj: Any, i: int) -> None:
        """SGLang's, with ``--enable-metrics`` only; a request that has ended counts for its adapter, too.

        What cannot be counted is named once, and ends no answer.
        """
        try:
            self._count(state, recv_obj, i)
        except Exception as error:
            if not self._uncounted:
                logger.error("%s while request %s was counted", type(error).__name__, recv_obj.rids[i], exc_info=error)
            self._uncounted += 1

    def _count(self, state: Any, recv_obj: Any, i: int) -> None:
        super().collect_metrics(state, recv_obj, i)
        if state.finished:
            times, reason = state.time_stats, recv_obj.finished_reasons[i] or {}
            first, whole = times.get_first_token_latency(), times.get_e2e_latency()
            counts = recv_obj.prompt_tokens[i], (recv_obj.completion_tokens or [0] * (i + 1))[i]
            for version in self._counted(state.obj):
                self.meters.finished(version, reason.get("type", "stop"), *counts, first, whole)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        """SGLang's; it counts for the adapter of the request, too."""
        state = self.rid_to_state.get(recv_obj.rid)
        if state is not None and self.enable_metrics and not state.finished:
            self._count_aborted(state.obj)
        super()._handle_abort_req(recv_obj)

    def _count_aborted(self, obj: Any) -> None:
        for version in self._counted(obj):
            self.meters.aborted(version)

    def _counted(self, obj: Any) -> list[Version | None]:
        """The versions of adapters that a request is counted for; ``None`` is the base model."""
        if getattr(obj, "lora_id", None) is None and getattr(obj, "lora_path", None) is not None:
            return []  # it ended before its names were resolved
        return [one for used in self._versions_of(obj) for one in used or (None,)]

    # Others ask and change

    async def open_session(self, obj: object, request: object = None) -> Any:
        """SGLang's, within ``--vlora-wait-seconds``."""
        return await self._within("the opening of a session", super().open_session(obj, request))

    async def pause_generation(self, obj: object) -> None:
        """SGLang's, which may wait for all requests to end, within ``--vlora-wait-seconds``."""
        await self._within("the pause", super().pause_generation(obj))

    async def _wait_for_model_update_from_disk(self, obj: object) -> Any:
        """SGLang's, within ten times ``--vlora-wait-seconds``."""
        return await self._within("the update of weights", super()._wait_for_model_update_from_disk(obj), obj)

    async def _within(self, doing: str, work: Coroutine[Any, Any, Any], message: object = None) -> Any:
        return await within(limit_of(message), lambda: f"{doing} is still under way", behind(work))

    # Adapters come and go

    def init_lora(self) -> None:
        """SGLang's, with our registry."""
        super().init_lora()
        known, lock = self.lora_ref_cache, self.lora_update_lock
        self.adapters = AdapterLifecycle(
            self.server_args, lambda: self.served_model_name, known, lock, self._ask_ranks
        )
        seams.own("TokenizerManager.lora_registry", self, self.adapters.registry)

    async def _ask_ranks(self, message: object) -> list[LoadLoRAAdapterReqOutput]:
        self.auto_create_handle_loop()
        return list(await self.update_lora_adapter_communicator.to_the_end(message))

    async def load_lora_adapter(self, obj: LoadLoRAAdapterReqInput, _: object = None) -> Reply:
        """Load an adapter (see ``AdapterLifecycle.load``)."""
        return await self.adapters.load(obj)

    async def load_lora_adapter_from_tensors(self, obj: object, _: object = None) -> Reply:
        """Refuses: these tensors arrive pickled."""
        return self.adapters.refuse_tensors()

    async def unload_lora_adapter(self, obj: UnloadLoRAAdapterReqInput, _: object = None) -> Reply:
        """Unload an adapter for good (see ``AdapterLifecycle.unload``)."""
        return await self.adapters.unload(obj)

    async def list_lora_adapters(self) -> list[JsonDict]:
        """Every loaded adapter: where its nearest copy is, what it is, who uses it."""
        return (await self.state_and_adapters())[1]

    async def state_and_adapters(self) -> tuple[JsonDict, list[JsonDict]]:
        """What the scheduler says of us now, and every loaded adapter."""
        self.auto_create_handle_loop()
        (state, *_) = await self.get_internal_state()
        return state["vlora"], self.adapters.listed(state["vlora"]["adapters"])

    async def live(self, since: int, whole: bool) -> JsonDict:
        """What the engine does now (see ``managers.live``): the steps after this number, the queue; adapters, if
        ``whole``."""
        self.auto_create_handle_loop()
        look = _sgl.GetInternalStateReq(rid=live.question(since, whole))
        (answer, *_) = await self.get_internal_state_communicator(look)
        state: JsonDict = answer.internal_state
        if whole:
            state["adapters"] = self.adapters.listed(state["adapters"])
        return state


async def hash_images(inputs: MultimodalInputs | None) -> None:
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


def forget_claimed_hashes(image_data: object) -> None:
    """Take out, in place, what preprocessed images say about their own content, so that SGLang looks at them."""
    if isinstance(image_data, list):
        for one in image_data:
            forget_claimed_hashes(one)
    elif isinstance(image_data, dict):
        image_data.pop("hash", None)
        image_data.pop("pad_value", None)


def serve_from_exported(obj: Any, asked: Sequence[RequestParams], exported: ExportedModel) -> None:
    """Turn the names in a request (SGLang's, normalised) into an exported model's adapters, in place."""
    names = [obj.lora_path] if obj.is_single else obj.lora_path or [None] * len(asked)
    name_adapters(obj, [exported.serving(name, one.head is not None) for name, one in zip(names, asked, strict=True)])


def name_adapters(obj: Any, names: list[str | None]) -> None:
    """Put adapters, one for each prompt, in the place of those that a request (SGLang's, normalised) names."""
    obj.lora_path = names[0] if obj.is_single else names
    # SGLang made these before, and releases adapters by them.
    for index, one in obj.__dict__.get("_sub_obj_cache", {}).items():
        one.lora_path = names[index]


def has_ended(output: JsonDict | list[JsonDict]) -> bool:
    """Whether an answer, or each of a batch's, is whole."""
    answers = output if isinstance(output, list) else [output]
    return bool(answers) and all(one.get("meta_info", {}).get("finish_reason") for one in answers)


def show_all(
    output: JsonDict | list[JsonDict],
    names: str | Sequence[str | None] | None,
    answers: int = 1,
    versions: Sequence[Sequence[Version]] = (),
) -> None:
    """Show what we say of one answer, or of each of a batch's, in place.

    Args:
        output: SGLang's answer or answers; those to one prompt follow each other.
        names: the adapter that was asked for, or each prompt's.
        answers: how many there are to each prompt.
        versions: of the adapters that answer each prompt.
    """
    for position, answer in enumerate(output if isinstance(output, list) else [output]):
        prompt = answer.get("index", position) // answers
        name = names if names is None or isinstance(names, str) else names[prompt]
        meta_info = answer.get("meta_info", {})
        show_regex(meta_info.get("finish_reason"))
        shown = show(meta_info, name, versions[prompt] if prompt < len(versions) else ())
        if "head" in shown:
            answer["text"] = answer_text(shown["head"])  # the sampled token means nothing
