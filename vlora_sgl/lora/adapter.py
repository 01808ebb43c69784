"""Files of an adapter to SGLang's objects.

SGLang's own path guesses module names from the configuration, needs q, k and v together, and ignores rsLoRA and
pattern tables. Here the tensors decide.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import LoRAAdapter
from vlora_sgl.errors import AdapterError
from vlora_sgl.heads.store import AdapterDescription
from vlora_sgl.lora.bulk import digests, joined
from vlora_sgl.lora.checkpoint import AdapterWeights, module_digests, read_adapter
from vlora_sgl.lora.eight_bits import in_eight_bits
from vlora_sgl.lora.laps import Laps
from vlora_sgl.lora.layout import BaseLayout, is_tower, layer_of
from vlora_sgl.lora.merge_bound import update_sizes
from vlora_sgl.lora.reservation import Reservation, Reserve
from vlora_sgl.lora.stacking import is_embedding, stack
from vlora_sgl.lora.tower import TowerWeights, tower_of, trained_layout
from vlora_sgl.lora.vocabulary import as_lora


@dataclass(frozen=True)
class AdapterBuilder:
    """Reads adapters for one engine.

    Attributes:
        model: the base model.
        hf_config: of its language model.
        load_config, backend: SGLang's, which its adapters ask for.
        dtype: of the engine.
        no_tower: why adapters of the vision tower cannot be served; ``None`` if they can.
        eight_bits: whether the slots hold e4m3 numbers, to which factors are rounded.
    """

    model: nn.Module
    hf_config: Any
    load_config: object
    backend: _sgl.BaseLoRABackend
    dtype: torch.dtype
    no_tower: str | None = None
    eight_bits: bool = False

    def read(
        self, adapter_id: str, directory: Path, reserve: Reserve | None = None, laps: Laps | None = None
    ) -> LoRAAdapter:
        """SGLang's ``LoRAAdapter``, the weights stacked, in the engine's dtype; its ``report`` says what was found.

        Args:
            reserve: makes the memory that the pool packs it in (``PackedPool.reserve``).
            laps: is told what takes how long.

        Raises:
            AdapterError: the files are wrong, or do not fit the base model.
        """
        laps, layout = laps or Laps(), self.layout
        room = None if reserve is None or self.eight_bits else Reservation(reserve, layout, self.dtype)
        weights = read_adapter(directory, trained_layout(layout, self.model), room)
        laps.end("read, digested and checked")
        modules = {name: pair for name, pair in weights.modules.items() if not is_tower(name)}
        content = {name: one for name, one in weights.digests.items() if not is_tower(name)}
        if weights.token_rows:
            rows = as_lora(weights.token_rows, modules, self.model, layout)
            modules, content = {**modules, **rows}, {**content, **module_digests(rows)}
        stacked, lost = stack(modules, layout, self.dtype, weights.biases), None
        if self.eight_bits:
            stacked, lost = in_eight_bits(stacked, layout)
        laps.end("stacked")
        config = _sgl.LoRAConfig.from_dict(
            {
                "peft_type": "LORA",
                "target_modules": sorted(stacked.kinds),
                "r": stacked.rank,
                "lora_alpha": stacked.scale * stacked.rank,
            }
        )
        config.path = weights.report.path
        adapter = _sgl.LoRAAdapter(adapter_id, config, self.hf_config, self.load_config, self.backend)
        adapter.reserved = None if room is None else room.packed
        adapter.scaling = stacked.scale
        adapter.report, adapter.content = weights.report, joined(content)
        adapter.update_sizes = update_sizes(stacked, layout)
        laps.end("measured")
        adapter.output_vectors, adapter.form = stacked.vectors, weights.form
        adapter.vectors, adapter.unmergeable, adapter.weights_loss = None, None, lost
        adapter.tower = self._tower(weights, layout)
        for name, tensor in stacked.tensors.items():
            if is_embedding(name):
                adapter.embedding_layers[name] = tensor
            else:
                layer = layer_of(name)
                assert layer is not None
                adapter.layers[layer].weights[name] = tensor
        return adapter

    @cached_property
    def layout(self) -> BaseLayout:
        """The engine's: whatever wraps its modules, their names and sizes stay."""
        return engine_layout(self.model)

    def _tower(self, weights: AdapterWeights, layout: BaseLayout) -> TowerWeights | None:
        modules = {name: pair for name, pair in weights.modules.items() if is_tower(name)}
        if not modules:
            return None
        if self.no_tower is not None:
            raise AdapterError(
                f"{len(modules)} modules lie in the vision tower, for example {min(modules)}, and {self.no_tower}"
            )
        content = joined({name: weights.digests[name] for name in modules})
        return TowerWeights.of(stack(modules, layout, self.dtype), layout, content)


def engine_layout(model: nn.Module) -> BaseLayout:
    """The layout of a model as SGLang serves it, from its linear layers' full (unsharded) sizes."""
    linears: list[tuple[str, tuple[int, int], tuple[int, ...]]] = []
    embeddings: dict[str, tuple[int, int]] = {}
    experts: dict[str, tuple[int, int, int]] = {}
    vocabulary = 0
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")
        if isinstance(module, _sgl.ParallelLMHead):
            linears.append((path, (module.org_vocab_size, module.embedding_dim), ()))
        elif isinstance(module, _sgl.VocabParallelEmbedding):
            embeddings[path] = (module.embedding_dim, module.org_vocab_size)
            vocabulary = module.org_vocab_size
        elif isinstance(module, _sgl.QKVParallelLinear):
            q = module.total_num_heads * module.head_size
            k = module.total_num_kv_heads * module.head_size
            v = module.total_num_kv_heads * module.v_head_size
            linears.append((path, (q + k + v, module.input_size), (q, k, v)))
        elif isinstance(module, _sgl.MergedColumnParallelLinear) and len(module.output_sizes) == 2:
            linears.append((path, (module.output_size, module.input_size), tuple(module.output_sizes)))
        elif isinstance(module, _sgl.FusedMoE):
            inner = module.intermediate_size_per_partition * module.moe_tp_size
            experts[path] = (module.num_experts, inner, module.hidden_size)
        elif isinstance(module, _sgl.LinearBase):
            linears.append((path, (module.output_size, module.input_size), ()))
        elif isinstance(module, nn.Linear) and is_tower(path):
            linears.append((path, (module.out_features, module.in_features), ()))
    if not reads_lm_head(model):
        linears = [one for one in linears if not one[0].endswith("lm_head")]
    elif vocabulary and not any(path.endswith("lm_head") for path, _, _ in linears):
        # Tied to the embedding, so not a module of its own; adapters may still target it.
        hidden = next(iter(embeddings.values()))[0]
        linears.append(("lm_head", (vocabulary, hidden), ()))
    return BaseLayout.from_modules(linears, embeddings, experts)


def reads_lm_head(model: nn.Module) -> bool:
    """Whether a model hands its ``lm_head`` to its logits processor. Gemma and others hand it the embedding, whatever
    else they have: an adapter on the LM head would be without effect there."""
    parts = [p for p in model.modules() if any(isinstance(one, _sgl.LogitsProcessor) for one in p.children())]
    names = [inspect.unwrap(type(part).forward).__code__.co_names for part in parts]
    return not names or any("lm_head" in some for some in names)


def content_digest(adapter: LoRAAdapter, description: AdapterDescription) -> str:
    """Digest of a loaded adapter: what the engine holds, not what its files say by now.

    Of one that was read, what it was read to counts: the engine stacks, casts and rounds all adapters alike.

    Args:
        adapter: SGLang's ``LoRAAdapter`` with its weights on the CPU.
        description: its description; only the invocation counts, because heads leave the KV alone.
    """
    tower = tower_of(adapter)
    weights = adapter.content if hasattr(adapter, "content") else _digest_of_tensors(adapter)
    parts = [adapter.scaling, adapter.config.hf_config, description.invocation, tower and tower.digest, weights]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=32).hexdigest()


def _digest_of_tensors(adapter: LoRAAdapter) -> str:
    groups = [*(layer.weights for layer in adapter.layers), adapter.embedding_layers, adapter.added_tokens_embeddings]
    tensors = {f"{i} {name}": tensor for i, group in enumerate(groups) for name, tensor in group.items()}
    return joined(digests({name: {"": tensor.detach().cpu()} for name, tensor in tensors.items()}))
