"""Vision heads' part of the scheduler: which head a request means, and that nothing is decoded for it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vlora_sgl._sgl_types import GenerationBatchResult, MultimodalInputs, Req, ScheduleBatch
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.base import Grid
from vlora_sgl.heads.worker import HeadRequest

DENSE_RESULTS = 1024
"""Answers of dense heads that are remembered, by image and what came before it, adapter and head."""


class HeadScheduling:
    """One per scheduler.

    Args:
        hf_config: the model's configuration.

    Attributes:
        under_way: rows of the last prefill whose answer is on its way: they are in no batch any more.
        totals: requests of heads so far, and those of them whose answer was remembered.
    """

    def __init__(self, hf_config: object) -> None:
        self.under_way: list[Req] = []
        self.totals = {"requests": 0, "remembered": 0}
        self._hf_config = hf_config
        self._dense_results: OrderedDict[bytes, JsonDict] = OrderedDict()

    def arrived(self, req: Req) -> None:
        """Find the head that a new request means.

        Raises:
            HeadError: its adapter has no such head, or the head lacks an image.
        """
        name, adapter = req.vlora.params.head, req.vlora.adapter
        if name is None:
            return
        if adapter is None:
            raise HeadError(f"head {name!r}: the base model has no heads; name an adapter that has")
        head = adapter.heads.get(name)
        if head is None:
            raise HeadError(f"no head named {name!r}; heads of this adapter: {', '.join(adapter.heads) or 'none'}")
        images: tuple[tuple[int, int, Grid], ...] = ()
        if head.features == "image_tokens":
            images = image_grids(req.multimodal_inputs, self._hf_config)
            if not images:
                raise HeadError(f"head {name!r} reads an image, and the request has none")
        req.vlora.head = HeadRequest(head, images)
        # One token, because an answer leaves the engine with a token; it is the prefill's own.
        req.sampling_params.max_new_tokens = 1
        self.totals["requests"] += 1

    def recall(self, req: Req) -> None:
        """Answer a dense head's request from memory, or have its images computed: cached tokens have no hidden states.

        The request's identity is known by now.
        """
        state = req.vlora
        if state.head is not None and state.head.dense and state.identity is not None:
            state.head.answer = self._dense_results.get(self._dense_key(req))
            self.totals["remembered"] += not state.head.pending
            if state.head.pending:
                state.reuse_limit = state.head.images[0][0]

    def before_decoding(self, running: ScheduleBatch, last: ScheduleBatch | None, chunked: Req | None) -> None:
        """Take rows whose answer is under way out of the batch that would go on to decode.

        Args:
            running: SGLang's batch that decodes.
            last: the batch that was launched last, or ``None``.
            chunked: the request with chunks to come, which SGLang itself keeps out.
        """
        self.under_way = []
        if last is None or not last.forward_mode.is_extend():
            return
        self.under_way = [
            req for req in last.reqs if req.vlora.head is not None and req is not chunked and not req.finished()
        ]
        if self.under_way:
            last.filter_batch(keep_indices=[row for row, req in enumerate(last.reqs) if req not in self.under_way])
            running.batch_is_full = False

    def finished(self, reqs: Sequence[Req], result: GenerationBatchResult) -> list[tuple[Req, Exception]]:
        """A prefill has run: set the answers of its requests.

        Returns:
            requests whose head has no answer, and why.
        """
        results = getattr(result, "head_results", None)
        if results is not None:
            results.deliver()
        faulty = []
        for req in reqs:
            state = req.vlora
            if state.head is not None and state.head.fault is not None:
                faulty.append((req, state.head.fault))
            if state.head is None or state.head.pending:
                continue
            if state.head.dense and state.identity is not None:
                self._remember(self._dense_key(req), state.head.answer)
            state.answer["head"] = state.head.answer
        return faulty

    def _dense_key(self, req: Req) -> bytes:
        identity, request = req.vlora.identity, req.vlora.head
        # The id, not the content: an adapter reloaded with the same LoRA weights may have other heads.
        digest = hashlib.blake2b(
            repr((identity.root, identity.adapter, identity.invocation_start, req.lora_id, request.head.name)).encode()
        )
        digest.update(identity.elements(req.origin_input_ids)[: request.images[-1][1]].tobytes())
        return digest.digest()

    def _remember(self, key: bytes, answer: JsonDict) -> None:
        self._dense_results[key] = answer
        self._dense_results.move_to_end(key)
        if len(self._dense_results) > DENSE_RESULTS:
            self._dense_results.popitem(last=False)


def image_grids(multimodal_inputs: MultimodalInputs | None, hf_config: object) -> tuple[tuple[int, int, Grid], ...]:
    """Where each still image of a request stands in its prompt, and its cells.

    Args:
        multimodal_inputs: SGLang's ``MultimodalInputs``, or ``None``.
        hf_config: the model's configuration, for the patch and merge sizes.
    Raises:
        HeadError: a model that does not lay its image tokens out as one grid of merged patches.
    """
    spans = []
    vision: Any = getattr(hf_config, "vision_config", None)
    for item in multimodal_inputs.mm_items if multimodal_inputs is not None else ():
        if item.modality.name != "IMAGE":
            continue
        grid, merge = item.model_specific_data.get("image_grid_thw"), getattr(vision, "spatial_merge_size", None)
        if grid is None or merge is None:
            raise HeadError("dense heads need a model whose image tokens form a grid (the Qwen2-VL family)")
        shapes = grid.reshape(-1, 3).tolist()
        for (first, last), (_, height, width) in zip(item.offsets or (), shapes, strict=True):
            cells = Grid(height // merge, width // merge, vision.patch_size * merge)
            if cells.cells != last + 1 - first:
                raise HeadError(f"an image of {cells.cells} cells has {last + 1 - first} tokens in the prompt")
            spans.append((first, last + 1, cells))
    return tuple(sorted(spans, key=lambda span: span[0]))
