"""One request goes wrong inside the engine: it ends with an error, once told in the log, and no other is touched.

A row whose logits are not finite, a head or an image that cannot be computed, an exception while a request is taken
in: each is an answer of status 500 to that request. What it computed does not enter the prefix cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import GenerationBatchResult, Req
from vlora_sgl.combined import members
from vlora_sgl.mem_cache.identity import image_spans
from vlora_sgl.mem_cache.radix_cache import VLoraRadixCache
from vlora_sgl.multimodal.encoder_guard import fault_of

logger = logging.getLogger(__name__)


class Faults:
    """One per scheduler.

    Args:
        tree: the prefix cache.

    Attributes:
        counts: requests that ended so, by what went wrong.
    """

    def __init__(self, tree: object) -> None:
        self.counts = Counter[str](nonfinite=0, head=0, encoder=0, request=0)
        self._tree = tree
        self._told: set[tuple[str, str | None]] = set()

    def finished(self, reqs: Sequence[Req], result: GenerationBatchResult, names: Any) -> None:
        """A step has run: end the rows that are not finite, and those whose image could not be encoded.

        Args:
            reqs: the rows.
            result: SGLang's, of the step.
            names: adapters' references by id, for their names.
        """
        for req in reqs:
            error = fault_of(req.multimodal_inputs)
            if error is not None:
                self.end(req, "encoder", f"an image could not be encoded: {type(error).__name__}: {error}")
        for row in nonfinite_rows(result):
            req = reqs[row]
            whose = " and ".join(
                f"adapter {names[adapter].lora_name!r}" for adapter in members([req.lora_id]) if adapter in names
            )
            whose = whose or "the base model"
            self.end(req, "nonfinite", f"{whose} computed values that are not finite")

    def end(self, req: Req, kind: str, message: str) -> None:
        """End one row with status 500, unless it has ended or comes again; SGLang looks when it adds the row's token.

        Of a prompt in chunks, nothing is done before the last: what is wrong with one chunk is wrong with all later.
        """
        if req.finished() or req.is_retracted or req.inflight_middle_chunks > 0:
            return
        if req.to_finish is None:
            self._count(kind, req.lora_id, message)
        req.to_finish = _sgl.FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        req.skip_radix_cache_insert = True
        if isinstance(self._tree, VLoraRadixCache):
            # Earlier chunks, and a prefix that somebody waited for, are in the tree already.
            adapter = req.vlora.adapter if kind == "nonfinite" else None
            images = image_spans(req.multimodal_inputs)[0] if kind == "encoder" else ()
            self._tree.distrust(None if adapter is None else adapter.digest, images)

    def refused(self, recv_req: Any, error: Exception) -> object:
        """The reply to a request that could not be taken in; the log has the traceback, for this is our fault."""
        self.counts["request"] += 1
        message = f"{type(error).__name__} while the request was taken in: {error}"
        logger.error("request %s ends: %s", recv_req.rid, message, exc_info=error)
        reason = _sgl.FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        return _sgl.AbortReq(rid=recv_req.rid, finished_reason=reason.to_json())

    def _count(self, kind: str, adapter: str | None, message: str) -> None:
        self.counts[kind] += 1
        if (kind, adapter) not in self._told:
            self._told.add((kind, adapter))
            logger.error("request ends: %s (told once)", message)

    def forget(self, adapter: str) -> None:
        """An adapter is unloaded."""
        self._told = {told for told in self._told if told[1] != adapter}


def nonfinite_rows(result: GenerationBatchResult) -> Iterator[int]:
    """Rows of a step whose logits were not finite, once the step is through (``finite_rows.clear_rows_``)."""
    flags = getattr(result.logits_output, "vlora_bad_rows", None)
    if flags is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()  # the first thing that SGLang does with the result, too
    elif flags.is_pinned():
        torch.cuda.current_stream().synchronize()
    yield from flags.nonzero()[:, 0].tolist()
