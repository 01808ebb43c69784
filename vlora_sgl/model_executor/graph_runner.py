"""Decode graphs in two variants: without LoRA kernels ("nolora"), and with them ("lora").

SGLang 0.5.17 can capture both but nothing in it asks for that. A batch that runs on the weights as they are (all rows
of the folded adapter, or all base on pristine weights) replays the first, at the speed of a model without LoRA; an
unmerged or mixture batch replays the second, whose metadata was refreshed in place.
"""

from __future__ import annotations

from typing import Any

from vlora_sgl import _sgl


class VLoraDecodeCudaGraphRunner(_sgl.DecodeCudaGraphRunner):
    """SGLang's decode graph runner, choosing the variant by what the LoRA manager prepared."""

    record_nolora_graph = True

    def _resolve_lora_variant(self, forward_batch: Any) -> str | None:
        if forward_batch.lora_ids is None:
            return None
        # The manager prepared this very batch on this thread just before; asking its result keeps the two agreed.
        pure = self.model_runner.lora_manager.lora_backend.batch_info is None
        return "nolora" if pure else "lora"

    def can_run_graph(self, forward_batch: Any) -> Any:
        """SGLang's verdict; a batch too large for the routing kernel of mixes runs eagerly if it has any."""
        if self.model_runner.lora_manager.exceeds_graph(forward_batch):
            return False
        return super().can_run_graph(forward_batch)
