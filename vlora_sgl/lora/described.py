"""What the LoRA manager knows of an adapter beyond its LoRA weights: description, heads, and identity by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlora_sgl.heads.base import VisionHead
from vlora_sgl.heads.store import AdapterDescription, load_heads, read_description
from vlora_sgl.lora.invocation import split_batch
from vlora_sgl.lora.layout import is_tower
from vlora_sgl.lora.manager import VLoraManager


@dataclass(frozen=True)
class DescribedAdapter:
    """One loaded adapter.

    Attributes:
        description: its ``vlora_adapter.json``.
        heads: its heads, on the device, by name.
        digest: of all that decides KV: weights, configuration, activation. Equal digests mean interchangeable KV.
        tower: the digest, if the adapter has weights in the vision tower; ``None`` if images are encoded as ever.
    """

    description: AdapterDescription
    heads: Mapping[str, VisionHead]
    digest: str
    tower: str | None = None


class DescribedLoRAManager(VLoraManager):
    """The LoRA manager of this package: it also keeps each adapter's description, heads and digest.

    Attributes:
        described: by adapter id; present exactly while the adapter is loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.described: dict[str, DescribedAdapter] = {}
        super().__init__(*args, **kwargs)

    def load_lora_weights(self, lora_ref: Any) -> None:
        """Load heads and weights.

        Raises:
            HeadError: the adapter's description or heads are wrong; SGLang turns it into a failed load.
        """
        directory = Path(lora_ref.lora_path)
        description = read_description(directory) if directory.is_dir() else AdapterDescription()
        heads = load_heads(directory, self.base_hf_config.hidden_size, self.device, description)
        super().load_lora_weights(lora_ref)
        self._describe(lora_ref, description, heads)

    def load_lora_weights_from_tensors(self, lora_ref: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Load weights; an adapter that comes as tensors has no heads."""
        super().load_lora_weights_from_tensors(lora_ref, tensors)
        self._describe(lora_ref, AdapterDescription(), {})

    def _describe(self, lora_ref: Any, description: AdapterDescription, heads: dict[str, VisionHead]) -> None:
        adapter = self.loras[lora_ref.lora_id]
        digest = content_digest(adapter, description)
        sees = any(is_tower(name) for layer in adapter.layers for name in layer.weights)
        self.pack(adapter)  # after the digest: it keeps this tensor-parallel rank's part of the weights only
        self.described[lora_ref.lora_id] = DescribedAdapter(description, heads, digest, digest if sees else None)

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """SGLang's, over rows split at their invocation starts."""
        if self.plan.invocation_starts:
            forward_batch = split_batch(forward_batch, self.plan.invocation_starts)
        super().prepare_lora_batch(forward_batch)

    def _unload_lora_adapter(self, lora_ref: Any) -> Any:
        result = super()._unload_lora_adapter(lora_ref)
        if lora_ref.lora_id not in self.loras:
            self.described.pop(lora_ref.lora_id, None)
        return result


def content_digest(adapter: Any, description: AdapterDescription) -> str:
    """Digest of a loaded adapter: what the engine holds, not what its files say by now.

    Args:
        adapter: SGLang's ``LoRAAdapter`` with its weights on the CPU.
        description: its description; only the invocation counts, because heads leave the KV alone.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps([adapter.scaling, adapter.config.hf_config], sort_keys=True, default=str).encode())
    digest.update(json.dumps(description.invocation).encode())
    groups = [layer.weights for layer in adapter.layers]
    groups += [adapter.embedding_layers, adapter.added_tokens_embeddings]
    for place, weights in enumerate(groups):
        for name in sorted(weights):
            tensor = weights[name].detach().cpu().contiguous()
            digest.update(f"{place} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
