"""SGLang's model runner with our decode graphs, and with base weights whenever weights are read or replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import ForwardBatch, LogitsProcessorOutput
from vlora_sgl.kernels.finite_rows import clear_rows_
from vlora_sgl.lora.warmup import compile_prefills
from vlora_sgl.multimodal import encoder_cache
from vlora_sgl.multimodal.embedding_count import EMBEDS_ONLY, leave_out_cached_images
from vlora_sgl.multimodal.vision_graphs import VisionGraphs
from vlora_sgl.seams import Stage

P = ParamSpec("P")
T = TypeVar("T")

READERS = frozenset(
    {
        "save_remote_model",
        "save_sharded_model",
        "get_weights_by_name",
        "send_weights_to_remote_instance",
    }
)
WRITERS = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    }
)


class VLoraModelRunner(_sgl.ModelRunner):
    """One per rank."""

    vision_graphs: VisionGraphs | None = None

    def init_weight_updater(self) -> None:
        super().init_weight_updater()
        seams.own("ModelRunner.weight_updater", self, _Guard(self.weight_updater, self))

    def init_weight_exporter(self) -> None:
        super().init_weight_exporter()
        seams.own("ModelRunner.weight_exporter", self, _Guard(self.weight_exporter, self))

    def init_cuda_graphs(self, *args: object, **kwargs: object) -> None:
        """SGLang's, once the manager knows the KV cache that its routers' votes lie beside.

        Then what prefills too large for a graph will launch is compiled, so that none of them waits for it.
        """
        manager = getattr(self, "lora_manager", None)
        if manager is not None:
            slots = self.max_total_num_tokens + self.page_size  # SGLang pads its KV cache by a page
            manager.bind_pools(self.req_to_token_pool.req_to_token, slots)
        seams.install(Stage.MODEL, self)
        if manager is not None and self.vision_graphs is not None:
            manager.use_vision_graphs(self.vision_graphs)
        super().init_cuda_graphs(*args, **kwargs)
        calls = ("TritonAttnBackend", "BaseCudaGraphBackend", "Qwen2_5_VisionBlock", "Qwen3LLMModel")
        seams.verify(Stage.MODEL, *calls, otherwise="nothing of the kind has been captured")
        if manager is not None:
            largest = max(getattr(self.prefill_cuda_graph_runner, "capture_num_tokens", None) or [0])
            chunk = self.server_args.chunked_prefill_size or 0
            compile_prefills(manager, largest, chunk if chunk > 0 else self.server_args.max_prefill_tokens)

    def forward(self, forward_batch: ForwardBatch, *args: object, **kwargs: object) -> Any:
        """SGLang's, without waiting for the device over images that the prefix cache holds."""
        embeds_only = not EMBEDS_ONLY.isdisjoint(self.model_config.hf_config.architectures or ())
        if embeds_only and forward_batch.forward_mode.is_extend():
            leave_out_cached_images(forward_batch)
        return super().forward(forward_batch, *args, **kwargs)

    def sample(self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> Any:
        """SGLang's. Rows of logits that are not finite are named and cleared before: one would end the sampler."""
        name_bad_rows(logits_output)
        return super().sample(logits_output, forward_batch)

    def compute_logprobs_only(self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> None:
        """SGLang's, of prompts from which nothing is sampled; as ``sample``."""
        name_bad_rows(logits_output)
        super().compute_logprobs_only(logits_output, forward_batch)

    def check_weights(self, action: str, allow_quant_error: bool = False) -> object:
        """SGLang's check (checksum, snapshot, comparison), of the base model's weights."""
        self.unmerge()
        result = super().check_weights(action, allow_quant_error)
        if action == "reset_tensors":
            self.rebase()
        return result

    def unmerge(self) -> None:
        """Bring the base weights back, if there are adapters at all."""
        manager = getattr(self, "lora_manager", None)
        if manager is not None:
            manager.unmerge()

    def rebase(self) -> None:
        """Take the present weights as the base model's, and forget what the weights before computed of images."""
        encoder_cache.forget()
        manager = getattr(self, "lora_manager", None)
        if manager is not None:
            manager.rebase()

    def _decode_cuda_graph_runner_cls(self) -> type:
        if not self.server_args.enable_lora:
            return _sgl.DecodeCudaGraphRunner
        from vlora_sgl.model_executor.graph_runner import VLoraDecodeCudaGraphRunner

        return VLoraDecodeCudaGraphRunner


def name_bad_rows(output: LogitsProcessorOutput) -> None:
    """Clear rows that are not finite, and say on the host which: ``vlora_bad_rows``, valid when the result is.

    Args:
        output: SGLang's, of one step, as the model left it: a grammar or a bias will put -inf there.
    """
    if output.next_token_logits is None:
        return
    flags = clear_rows_(output.next_token_logits)
    output.vlora_bad_rows = torch.empty_like(flags, device="cpu", pin_memory=flags.is_cuda)
    output.vlora_bad_rows.copy_(flags, non_blocking=True)


class _Guard:
    """Stands for one of SGLang's weight components; unmerges before its readers and writers, rebases after writers."""

    def __init__(self, inner: object, runner: VLoraModelRunner) -> None:
        self._inner, self._runner = inner, runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._guarded(found, name in WRITERS) if name in READERS | WRITERS else found

    def _guarded(self, method: Callable[P, T], writes: bool) -> Callable[P, T]:
        @wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            self._runner.unmerge()
            result = method(*args, **kwargs)
            if writes:
                self._runner.rebase()
            return result

        return guarded


def unmerge_before_release(original: Callable[[Any, object], object], updater: Any, request: object) -> object:
    """Wraps ``SchedulerWeightUpdaterManager.release_memory_occupation``: never free weights that hold an adapter."""
    updater.tp_worker.model_runner.unmerge()
    return original(updater, request)
