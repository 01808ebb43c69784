"""Heads in the forward pass: one matrix product on the hidden states that the LM head reads, for all rows that ask.

A head request is a generate request of one token that names a head. Its answer is computed in the
prefill pass that computes its last token; nothing is decoded for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import GenerationBatchResult, ModelRunner, ScheduleBatch
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.base import Grid, VisionHead, grouped_linear
from vlora_sgl.seams import Place, Places


@dataclass(eq=False)
class HeadRequest:
    """What a request wants from a head, and how far it is.

    Attributes:
        head: the head.
        images: for a dense head, ``(start, end, grid)`` of each image in the prompt.
        raw: for a dense head, raw outputs by prompt position: they may come in chunks. ``None`` until the first.
        answer: the final answer. A dense head's boxes of several images are in one list, each with its ``image``.
        fault: why there is none: its outputs are not finite, or it raised.
    """

    head: VisionHead
    images: tuple[tuple[int, int, Grid], ...] = ()
    raw: Tensor | None = None
    answer: JsonDict | None = None
    fault: Exception | None = None

    @property
    def dense(self) -> bool:
        """Whether it reads image tokens."""
        return self.head.features == "image_tokens"

    @property
    def pending(self) -> bool:
        """Whether the forward pass must compute something for it."""
        return self.answer is None

    def finish(self, raw: Tensor) -> JsonDict:
        """The answer, from all raw outputs on the CPU: [outputs], or for a dense head [prompt positions, outputs].

        Raises:
            HeadError: outputs that are not finite.
        """
        if not self.dense:
            return self._answer(raw)
        first = self.images[0][0]
        return merge_images([self._answer(raw[start - first : end - first], grid) for start, end, grid in self.images])

    def _answer(self, raw: Tensor, grid: Grid | None = None) -> JsonDict:
        if not raw.isfinite().all():
            raise HeadError(f"head {self.head.name!r} computed values that are not finite")
        return self.head.postprocess(raw, grid)


def merge_images(answers: list[JsonDict]) -> JsonDict:
    """One answer from a dense head's answers for each image of a request."""
    boxes = [{"image": image, **box} for image, answer in enumerate(answers) for box in answer["boxes"]]
    sizes = [answer["image_size"] for answer in answers]
    return {"kind": answers[0]["kind"], "image_sizes": sizes, "boxes": boxes}


@dataclass
class HeadResults:
    """Raw outputs of one forward pass on their way to the CPU.

    Attributes:
        requests: whose prompt this pass completes, with the shape of each one's raw outputs.
        raw: all of them, flat, on the CPU once ``ready``.
        ready: recorded behind the copy; ``None`` on a CPU.
    """

    requests: list[tuple[HeadRequest, torch.Size]] = field(default_factory=list)
    raw: Tensor | None = None
    ready: torch.Event | None = None

    def deliver(self) -> None:
        """Wait for the copy and set every request's ``answer``."""
        if self.raw is None:
            return
        if self.ready is not None:
            self.ready.synchronize()
        parts = self.raw.split([shape.numel() for _, shape in self.requests])
        for (request, shape), part in zip(self.requests, parts, strict=True):
            try:
                request.answer = request.finish(part.reshape(shape))
            except Exception as error:  # whatever a head's own code does, the other rows have their answers
                request.fault = error
            request.raw = None


class HiddenStates:
    """Stands in the place of ``LogitsProcessor.forward``, which runs eagerly, after a replayed prefill too.

    Args:
        forward: the processor's.

    Attributes:
        wanted: whether to keep what comes next.
        kept: [tokens, hidden], what came last while it was wanted.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.wanted = False
        self.kept: Tensor | None = None

    def __call__(
        self, input_ids: Any, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> GenerationBatchResult:
        """As the processor."""
        if self.wanted:
            self.kept = hidden_states
        return self.forward(input_ids, hidden_states, *args, **kwargs)


def hidden_states(runner: ModelRunner) -> Places:
    """What keeps the hidden states that go into a model runner's logits processors.

    A model may have one of its own and one in its language model; which of them it calls is its business.
    """
    return [Place(one, "forward", HiddenStates(one.forward)) for one in logits_processors(runner.model)]


def logits_processors(model: torch.nn.Module) -> list[Any]:
    """Those of a model and of its parts."""
    return [part for part in model.modules() if isinstance(part, _sgl.LogitsProcessor)]


class HeadWorker(_sgl.TpModelWorker):
    """SGLang's worker, which also runs the heads of a prefill batch, on the forward stream, after the model."""

    @cached_property
    def _states(self) -> list[HiddenStates]:
        return [one.forward for one in logits_processors(self.model_runner.model)]

    def forward_batch_generation(self, batch: ScheduleBatch, *args: object, **kwargs: object) -> GenerationBatchResult:
        """SGLang's result, with ``head_results`` on it when rows of the batch asked for heads."""
        rows = [
            (row, request)
            for row, req in enumerate(batch.reqs if batch is not None and batch.forward_mode.is_extend() else ())
            if (request := req.vlora.head) is not None and request.pending
        ]
        if not rows:
            return super().forward_batch_generation(batch, *args, **kwargs)
        chunk = [(start, length) for start, length in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        unfinished = batch.chunked_req
        last = [request for row, request in rows if batch.reqs[row] is not unfinished]
        hidden: Tensor | None = None
        for states in self._states:
            states.wanted = True
        try:
            result = super().forward_batch_generation(batch, *args, **kwargs)
        finally:
            for states in self._states:
                hidden = states.kept if hidden is None else hidden
                states.wanted, states.kept = False, None
        assert hidden is not None, "the model ran without its logits processor: heads have nothing to read"
        with torch.inference_mode():
            result.head_results = run_heads(hidden, chunk, rows, last)
        return result


def run_heads(
    hidden: Tensor, chunks: list[tuple[int, int]], rows: list[tuple[int, HeadRequest]], last: list[HeadRequest]
) -> HeadResults:
    """Run the heads of one forward pass.

    Args:
        hidden: [tokens, hidden], all rows of the batch one after the other.
        chunks: per row of the batch, position of its first token in its prompt, and how many tokens it has.
        rows: rows that have a head.
        last: those of them whose prompt ends in this pass.
    """
    ends, end = [], 0
    for _, length in chunks:
        end += length
        ends.append(end)
    closed = [(row, request) for row, request in rows if not request.dense and request in last]
    outputs: dict[int, Tensor] = {}
    if closed:
        states = hidden[torch.tensor([ends[row] - 1 for row, _ in closed], device=hidden.device)]
        for (_, request), raw in zip(closed, grouped_linear(states, [r.head for _, r in closed]), strict=True):
            outputs[id(request)] = raw
    for row, request in rows:
        if request.dense:
            start, length = chunks[row]
            _run_dense(request, hidden[ends[row] - length : ends[row]], start)
            if request in last and request.raw is not None:
                outputs[id(request)] = request.raw
    results = HeadResults([(request, outputs[id(request)].shape) for request in last if id(request) in outputs])
    if results.requests:
        flat = torch.cat([outputs[id(request)].reshape(-1) for request, _ in results.requests])
        if flat.device.type == "cpu":
            results.raw = flat
        else:
            results.raw = torch.empty_like(flat, device="cpu", pin_memory=True)
            results.raw.copy_(flat, non_blocking=True)
            results.ready = torch.get_device_module(flat.device).Event()
            results.ready.record()
    return results


def _run_dense(request: HeadRequest, states: Tensor, start: int) -> None:
    """Raw outputs of the image tokens in ``states``, the first at ``start`` of the prompt, to ``request.raw``."""
    first, end = request.images[0][0], request.images[-1][1]
    begin, stop = max(start, first), min(start + len(states), end)
    if begin >= stop:
        return
    if request.raw is None:
        request.raw = torch.full((end - first, request.head.outputs), float("nan"), device=states.device)
    request.raw[begin - first : stop - first] = request.head(states[begin - start : stop - start])
