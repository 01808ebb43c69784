"""The scheduler's side of vision heads: which head a request means, and that nothing is decoded for it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from vlora_sgl.errors import HeadError
from vlora_sgl.heads.base import Grid
from vlora_sgl.heads.requests import HEAD_KEY
from vlora_sgl.heads.worker import HeadRequest
from vlora_sgl.mem_cache.radix_cache import CacheIdentity

# SGLang's scheduler, of which this is one side.
Base: Any = object

DENSE_RESULTS = 1024
"""Answers of dense heads that are remembered, by image and what came before it, adapter and head."""


class HeadRequests(Base):
    """Mixed into the scheduler, before the prefix cache's part."""

    _answered: list[Any]
    _dense_results: OrderedDict[bytes, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._answered = []
        self._dense_results = OrderedDict()
        self.head_totals = {"requests": 0, "remembered": 0}
        super().__init__(*args, **kwargs)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        name = (req.sampling_params.custom_params or {}).get(HEAD_KEY)
        if name is not None and req.to_finish is None:
            try:
                req.vlora_head = self._head_request(req, name)
                # One token, because an answer leaves the engine with a token; it is the prefill's own.
                req.sampling_params.max_new_tokens = 1
                self.head_totals["requests"] += 1
            except HeadError as error:
                req.set_finish_with_abort(str(error))
        super()._add_request_to_queue(req, is_retracted)
        request = getattr(req, HEAD_KEY, None)
        if request is not None and request.dense and isinstance(req.extra_key, CacheIdentity):
            request.answer = self._dense_results.get(self._dense_key(req))
            self.head_totals["remembered"] += not request.pending
            # Cached tokens have no hidden states in this pass: compute the images again, unless the answer is known.
            req.extra_key.reuse_limit = request.images[0][0] if request.pending else None

    def _head_request(self, req: Any, name: Any) -> HeadRequest:
        described = self.lora_manager.described.get(req.lora_id) if self.lora_manager is not None else None
        if described is None:
            raise HeadError(f"head {name!r}: the base model has no heads; name an adapter that has")
        head = described.heads.get(name)
        if head is None:
            raise HeadError(f"no head named {name!r}; heads of this adapter: {', '.join(described.heads) or 'none'}")
        if head.features != "image_tokens":
            return HeadRequest(head)
        images = image_grids(req.multimodal_inputs, self.model_config.hf_config)
        if not images:
            raise HeadError(f"head {name!r} reads an image, and the request has none")
        return HeadRequest(head, images)

    def _dense_key(self, req: Any) -> bytes:
        head, identity = req.vlora_head.head, req.extra_key
        end = req.vlora_head.images[-1][1]
        # The id, not the content: an adapter reloaded with the same LoRA weights may have other heads.
        digest = hashlib.blake2b(
            repr((identity.root, identity.adapter, identity.invocation_start, req.lora_id, head.name)).encode()
        )
        digest.update(identity.elements(req.origin_input_ids)[:end].tobytes())
        return digest.digest()

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        """SGLang's, after taking rows whose answer is under way out of the batch that would go on to decode."""
        self._answered = []
        if last_batch is not None and last_batch.forward_mode.is_extend():
            self._answered = [
                req
                for req in last_batch.reqs
                if getattr(req, HEAD_KEY, None) is not None and req is not self.chunked_req and not req.finished()
            ]
        if self._answered:
            last_batch.filter_batch(
                keep_indices=[row for row, req in enumerate(last_batch.reqs) if req not in self._answered]
            )
            running_batch.batch_is_full = False
        return super().get_next_batch_to_run(running_batch, last_batch)

    def _in_flight(self) -> list[Any]:
        return [*super()._in_flight(), *self._answered]

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """SGLang's, after putting the answers where its output stream finds them."""
        results = getattr(result, "head_results", None)
        if results is not None:
            results.deliver()
        for req in batch.reqs if batch.forward_mode.is_extend() else ():
            request = getattr(req, HEAD_KEY, None)
            if request is None or request.pending:
                continue
            if request.dense and isinstance(req.extra_key, CacheIdentity):
                self._remember(self._dense_key(req), request.answer)
            req.customized_info = {**(req.customized_info or {}), HEAD_KEY: [request.answer]}
        super().process_batch_result(batch, result)

    def _remember(self, key: bytes, answer: Any) -> None:
        self._dense_results[key] = answer
        self._dense_results.move_to_end(key)
        if len(self._dense_results) > DENSE_RESULTS:
            self._dense_results.popitem(last=False)


def image_grids(multimodal_inputs: Any, hf_config: Any) -> tuple[tuple[int, int, Grid], ...]:
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
        for (first, last), (_, height, width) in zip(item.offsets, shapes, strict=True):
            cells = Grid(height // merge, width // merge, vision.patch_size * merge)
            if cells.cells != last + 1 - first:
                raise HeadError(f"an image of {cells.cells} cells has {last + 1 - first} tokens in the prompt")
            spans.append((first, last + 1, cells))
    return tuple(sorted(spans, key=lambda span: span[0]))
