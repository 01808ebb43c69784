"""Attention inside a prefill's graph, for prefills so short that the host would set their time.

SGLang's breakable graphs stop at every attention, which runs eagerly: its grid and its tables are the batch's. Of a
short prefill these 28 stops are most of its time. SGLang's Triton attention can be captured all the same if the grid
is the largest that the graph allows and the tables lie at fixed addresses: programs past a request's end, and those of
requests that are not there (no tokens), return at once. What the others compute is what they compute eagerly. Where
another backend serves the model, Triton's attention takes its place in these graphs alone; both keep one cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import ForwardBatch, ModelRunner, TritonAttnBackend
from vlora_sgl.model_executor.fast_paths import switched_off, unmeasured

MAX_TOKENS = 512
"""Of a prefill whose attention is captured; the device takes longer for more than the host for its launches."""

MAX_REQUESTS = 32
"""In such a prefill: each has programs in every layer's grid, whether there are so many requests or not."""

MAX_CACHED = 1 << 19
"""Cached tokens before the new ones, of all requests together: 4 MB of their places."""


class CapturedAttention:
    """The tables that captured attentions read, refreshed in place before a replay.

    Args:
        backend: SGLang's Triton attention, whose metadata they stand for.
        served: the backend that serves the model: the same, or another one, whose place it takes.
        device: where its kernels run.
    """

    def __init__(self, backend: TritonAttnBackend, served: Any, device: torch.device | str) -> None:
        self.backend, self.served = backend, served
        self._new = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int32, device=device)
        self._cached = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int32, device=device)
        self._places = torch.zeros(MAX_CACHED, dtype=torch.int64, device=device)

    @staticmethod
    def captures(tokens: int) -> bool:
        """Whether graphs of this many tokens capture their attention."""
        return tokens <= MAX_TOKENS

    @staticmethod
    def serves(tokens: int, cached: Sequence[int]) -> bool:
        """Whether the graph of this many tokens serves requests with so many cached tokens each."""
        return (
            CapturedAttention.captures(tokens)
            and len(cached) <= CapturedAttention._requests(tokens)
            and sum(cached) <= MAX_CACHED
        )

    @staticmethod
    def _requests(tokens: int) -> int:
        return max(1, min(MAX_REQUESTS, tokens // 4))

    def prepare(self, batch: ForwardBatch) -> None:
        """Let the backend prepare the batch; where it serves the model, SGLang has done so."""
        if self.backend is not self.served:
            self.backend.init_forward_metadata(batch)

    def refresh(self, new: int, cached: int) -> None:
        """Copy the tables of the batch that the backend has prepared.

        Args:
            new, cached: tokens of all its requests together.
        """
        metadata = self.backend.forward_metadata
        requests = len(metadata.qo_indptr)
        for table, bounds, end in (
            (self._new, metadata.qo_indptr, new),
            (self._cached, metadata.kv_indptr, cached),
        ):
            table[:requests].copy_(bounds)
            table[requests:].fill_(end)
        if cached:
            self._places[:cached].copy_(metadata.kv_indices[:cached])

    def capture(self, tokens: int, forward: Callable[[], object]) -> Callable[[], object]:
        """``forward`` without stops at its attentions, which read the tables. For ``tokens`` tokens of one request.

        Rows past the batch's tokens come out as zeros: how many those are is not known when the graph is captured.
        """
        self.refresh(tokens, 0)
        last = self._requests(tokens) + 1
        self.backend.forward_metadata = replace(
            self.backend.forward_metadata,
            qo_indptr=self._new[:last],
            kv_indptr=self._cached[:last],
            kv_indices=self._places,
            max_extend_len=tokens,
        )

        attend = self.backend.forward

        def attend_on_zeros(
            q: object, k: object, v: object, layer: object, batch: Any, *args: object, **kwargs: object
        ) -> torch.Tensor:
            batch._attn_output.zero_()
            return attend(q, k, v, layer, batch, *args, **kwargs)

        def whole() -> object:
            token = _sgl.breakable_capture.set(None)  # what stops a capture asks for it
            try:
                with seams.swapped("TritonAttnBackend.forward", self.served, "forward", attend_on_zeros):
                    return forward()
            finally:
                _sgl.breakable_capture.reset(token)

        return whole


def captured_attention(runner: ModelRunner) -> CapturedAttention | None:
    """For a model runner whose attention can be captured; ``None`` for other kinds of attention and of caches."""
    served, why = runner.attn_backend, switched_off()
    backend = served
    if why is None and not _sgl.is_a(served, "TritonAttnBackend"):
        why = unmeasured() or _other_cache(runner)
        backend = served if why is not None else _sgl.TritonAttnBackend(runner)
    if why is None and (
        backend.enable_deterministic
        or backend.dcp_size > 1
        or backend.use_sliding_window_kv_pool
        or (backend.sliding_window_size or 0) > 0
        or backend._translate_kv_loc is not None
    ):
        why = "its attention is deterministic, windowed or of several ranks"
    if why is not None:
        seams.record("TritonAttnBackend.forward", why)
        return None
    return CapturedAttention(backend, served, runner.device)


def _other_cache(runner: ModelRunner) -> str | None:
    """Why Triton's attention cannot take another backend's place for a batch; ``None`` if it can."""
    pool = runner.token_to_kv_pool
    if runner.server_args.enable_deterministic_inference:
        return "--enable-deterministic-inference"
    if type(pool) is not _sgl.MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.dtype != runner.dtype:
        return f"{type(runner.attn_backend).__name__} keeps a cache of another kind"
    return None
