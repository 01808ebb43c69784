"""CUDA graphs in two variants: without LoRA kernels ("nolora"), and with them ("lora").

A batch that runs on the weights as they are (all rows of the merged adapter, or all base on base weights) replays
the first, at the speed of a model without LoRA; an unmerged or mixture batch replays the second, whose metadata was
refreshed in place. SGLang 0.5.17 can capture both for decode but nothing in it asks for that; of a prefill it knows
one variant, and for models that see it captures none. Where the pool has more slots than the dense kernels take,
decode has a third variant, for steps that use so many.

A prefill's graphs are pieces of the decoder between its attentions, which run eagerly; those of short prefills come
whole as well (``prefill_attention``). Without them a prefill takes as long as the host needs for its launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import ForwardBatch
from vlora_sgl.model_executor.fast_paths.prefill_attention import captured_attention

WHOLE = ",whole"
"""Follows the variant in the key of a graph that captures attention as well."""

DEEPSTACK = "input_deepstack_embeds"
"""What Qwen3-VL's decoders call the features of images that they add behind each of their first layers."""


class VLoraDecodeCudaGraphRunner(_sgl.DecodeCudaGraphRunner):
    """SGLang's decode graph runner, choosing the variant by what the LoRA manager prepared."""

    record_nolora_graph = True

    def _resolve_lora_variant(self, forward_batch: ForwardBatch) -> str | None:
        if forward_batch.lora_ids is None:
            return None
        # The manager prepared this very batch on this thread just before; asking its result keeps the two agreed.
        return str(self.model_runner.lora_manager.prepared_variant())

    def capture_one_shape(
        self,
        size: int,
        forward: Callable[..., object],
        stream_idx: int | None = None,
        variant_label: str | None = None,
    ) -> None:
        """SGLang's, and with LoRA kernels once for each of the manager's variants."""
        variants = self.model_runner.lora_manager.decode_variants if variant_label == "lora" else (variant_label,)
        for variant in variants:
            _sgl.capture_mode._set_capture_lora_variant(variant)
            super().capture_one_shape(size, forward, stream_idx, variant)

    def can_run_graph(self, forward_batch: ForwardBatch) -> object:
        """SGLang's verdict; a batch whose routed rows a graph's tables cannot hold runs eagerly."""
        if self.model_runner.lora_manager.exceeds_graph(forward_batch):
            return False
        return super().can_run_graph(forward_batch)


class VLoraPrefillCudaGraphRunner(_sgl.PrefillCudaGraphRunner):
    """SGLang's prefill graph runner, with a graph of either variant for each number of tokens.

    Attributes:
        variant: what is being captured; ``None`` otherwise.
        replays: prefills that were replayed.
    """

    variant: str | None = None
    replays = 0
    _whole = False  # of the batch that is loaded: its graph captures attention
    _deepstack: torch.Tensor | None = None
    layer_model: Any  # SGLang's name of the decoder

    def __init__(self, model_runner: Any) -> None:
        self.attention = None
        if model_runner.server_args.enable_lora:
            model_runner.lora_manager.use_prefill_graphs(self)
            self.attention = captured_attention(model_runner)
        super().__init__(model_runner)

    def capture(self) -> None:
        """SGLang's; what a decoder is given for its first layers, beside the embeddings, has a fixed place."""
        if self.layer_model is not None and DEEPSTACK in inspect.signature(self.layer_model.forward).parameters:
            config = self.model_runner.model_config
            width = len(self.layer_model.deepstack_embed_to_decoder_layer) * config.hidden_size
            self._deepstack = torch.zeros(
                self.max_num_tokens, width, dtype=self.model_runner.dtype, device=self.model_runner.device
            )
        super().capture()

    def capture_one_shape(self, size: int, *, prefix_num_chunks: int = 0) -> None:
        """SGLang's capture for each variant: it prepares the batch by the LoRA manager, which asks for ``variant``."""
        if not self._capture_lora or prefix_num_chunks:
            super().capture_one_shape(size, prefix_num_chunks=prefix_num_chunks)
            return
        capture = self.backend.capture_one

        def capture_variant(key: Any, forward: Callable[[], object], *args: object, **kwargs: object) -> None:
            capture(replace(key, variant_label=self.variant), forward, *args, **kwargs)
            if self.attention is not None and self.attention.captures(size):
                whole = self.attention.capture(size, forward)
                capture(replace(key, variant_label=f"{self.variant}{WHOLE}"), whole, *args, **kwargs)

        try:
            with seams.swapped("BaseCudaGraphBackend.capture_one", self.backend, "capture_one", capture_variant):
                for self.variant in ("lora", "nolora"):
                    super().capture_one_shape(size)
        finally:
            self.variant = None

    def execute(self, forward_batch: ForwardBatch, **kwargs: object) -> object:
        """SGLang's replay, counted."""
        self.replays += 1
        return super().execute(forward_batch, **kwargs)

    def _run_forward(self, forward_batch: ForwardBatch, num_tokens: int) -> object:
        if self._deepstack is None:
            return super()._run_forward(forward_batch, num_tokens)
        decoder = self.layer_model
        given = partial(decoder.forward, **{DEEPSTACK: self._deepstack[:num_tokens]})
        self.layer_model = SimpleNamespace(forward=given)
        try:
            return super()._run_forward(forward_batch, num_tokens)
        finally:
            self.layer_model = decoder

    def _init_forward_metadata_for_capture(self, forward_batch: ForwardBatch, num_tokens: int) -> object:
        if self.attention is not None:
            self.attention.prepare(forward_batch)
        return super()._init_forward_metadata_for_capture(forward_batch, num_tokens)

    def _prepare_forward_metadata_for_replay(
        self, forward_batch: ForwardBatch, static_forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        super()._prepare_forward_metadata_for_replay(forward_batch, static_forward_batch, num_tokens)
        attention = self.attention if self._capture_lora else None
        cached = forward_batch.extend_prefix_lens_cpu
        self._whole = False
        if attention is not None and cached is not None and attention.serves(num_tokens, cached):
            attention.prepare(forward_batch)
            attention.refresh(sum(forward_batch.extend_seq_lens_cpu), sum(cached))
            self._whole = True

    def _execute_body_capture(
        self,
        forward_batch: ForwardBatch,
        static_forward_batch: ForwardBatch,
        static_num_tokens: int,
        raw_num_tokens: int,
        shape_key: Any,
        **kwargs: object,
    ) -> object:
        if self._capture_lora and shape_key.variant_label is None:
            pure = self.model_runner.lora_manager.lora_backend.batch_info is None
            label = ("nolora" if pure else "lora") + (WHOLE if self._whole else "")
            shape_key = replace(shape_key, variant_label=label)
        routing = self.model_runner.lora_manager.token_routing if self._capture_lora else None
        with ExitStack() as stack:
            if self._deepstack is not None:
                fill = partial(_fill, self._deepstack[:static_num_tokens])
                stack.enter_context(seams.before_forward("Qwen3LLMModel.forward", self.layer_model, fill))
            if routing is not None and routing.is_ahead:
                replay = self.backend.replay

                def routed_replay(key: Any, batch: ForwardBatch, **options: object) -> object:
                    embeds = self.buffer_registry.get_slot("input_embeds").slice_for(1, static_num_tokens)
                    routing.route_ahead(embeds[:raw_num_tokens], batch)
                    return replay(key, batch, **options)

                row = "BaseCudaGraphBackend.replay"
                stack.enter_context(seams.swapped(row, self.backend, "replay", routed_replay))
            return super()._execute_body_capture(
                forward_batch, static_forward_batch, static_num_tokens, raw_num_tokens, shape_key, **kwargs
            )

    @property
    def embeds_outside(self) -> bool:
        """Whether input embeddings are computed before the graph: of models that see."""
        return bool(self.buffer_registry.has_slot("input_embeds"))

    def tokens_of(self, forward_batch: ForwardBatch) -> int | None:
        """Tokens of the graph that this batch captures or will replay; ``None`` if it runs eagerly or decodes."""
        tokens = len(forward_batch.input_ids)
        if self.variant is not None:
            return tokens
        if not forward_batch.forward_mode.is_extend() or not self.can_run_graph(forward_batch):
            return None
        return int(self._pad_to_bucket(tokens, self.capture_num_tokens))


def _fill(
    place: torch.Tensor, decoder: object, given: tuple[object, ...], options: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Put what a decoder is given beside its embeddings where its graph reads it: zeros for text."""
    features = options.pop(DEEPSTACK, None)
    if features is None:
        place.zero_()
    else:
        place.copy_(features)
    return given, options
