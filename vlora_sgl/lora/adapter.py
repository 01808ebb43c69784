"""Loads one adapter into SGLang's LoRA manager: our reader, SGLang's objects.

SGLang's own path guesses module names from the configuration, needs q, k and v together, and ignores rsLoRA and
pattern tables. Here the tensors decide, and what does not fit is refused before anything of the engine changes.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.checkpoint import AdapterWeights, read_adapter
from vlora_sgl.lora.layout import BaseLayout, layer_of
from vlora_sgl.lora.stacking import is_embedding, stack
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)


def load_adapter(manager: Any, lora_ref: Any) -> Any:
    """Takes the place of ``LoRAManager._load_lora_adapter``: all of the adapter is loaded, or nothing.

    The reply of a success carries the load report in ``error_message``; the tokenizer manager moves it to a field of
    its own. A refusal carries the reason there.
    """
    try:
        # Adapters of the command line are the operator's own; the roots bound what clients ask for later.
        roots = VLoraArgs.from_environment().adapter_root if hasattr(manager, "memory_pool") else ()
        directory = allowed_directory(lora_ref.lora_path, roots)
        weights = read_adapter(directory, engine_layout(manager.base_model))
        adapter = build_adapter(manager, lora_ref.lora_id, weights)
        manager.validate_new_adapter(adapter.config, lora_ref)
        manager.configs[lora_ref.lora_id] = adapter.config
        manager.incoming[lora_ref.lora_id] = adapter
        manager.load_lora_weights(lora_ref)
    except Exception as error:  # whatever it is, the client gets it as a refusal and the engine goes on
        logger.warning("adapter %s was refused: %s", lora_ref.lora_name, error)
        for table in (manager.configs, manager.incoming, manager.loras):
            table.pop(lora_ref.lora_id, None)
        return manager.create_lora_update_result(success=False, error_message=str(error))
    manager.lora_refs[lora_ref.lora_id] = lora_ref
    manager.num_pinned_loras += int(bool(lora_ref.pinned))
    logger.info("adapter %s: %s", lora_ref.lora_name, weights.report)
    return manager.create_lora_update_result(success=True, error_message=str(weights.report))


def pin_adapter(manager: Any, lora_ref: Any) -> Any:
    """Pin or unpin an adapter that is loaded; ``lora_ref`` is its new reference."""
    before = bool(manager.lora_refs[lora_ref.lora_id].pinned)
    try:
        if lora_ref.pinned and not before:
            manager.check_pins(manager.loras[lora_ref.lora_id].config.r)
    except AdapterError as error:
        return manager.create_lora_update_result(success=False, error_message=str(error))
    manager.lora_refs[lora_ref.lora_id] = lora_ref
    manager.num_pinned_loras += int(bool(lora_ref.pinned)) - int(before)
    return manager.create_lora_update_result(success=True)


def build_adapter(manager: Any, lora_id: str, weights: AdapterWeights) -> Any:
    """SGLang's ``LoRAAdapter`` holding ``weights`` stacked, in the pool's dtype."""
    stacked = stack(weights.modules, engine_layout(manager.base_model), manager.dtype)
    config = _sgl.LoRAConfig.from_dict(
        {
            "peft_type": "LORA",
            "target_modules": sorted(stacked.kinds),
            "r": stacked.rank,
            "lora_alpha": stacked.scale * stacked.rank,
        }
    )
    config.path = weights.report.path
    adapter = _sgl.LoRAAdapter(lora_id, config, manager.base_hf_config, manager.load_config, manager.lora_backend)
    adapter.scaling = stacked.scale
    adapter.report = weights.report
    for name, tensor in stacked.tensors.items():
        if is_embedding(name):
            adapter.embedding_layers[name] = tensor
        else:
            layer = layer_of(name)
            assert layer is not None
            adapter.layers[layer].weights[name] = tensor
    return adapter


def engine_layout(model: Any) -> BaseLayout:
    """The layout of a model as SGLang serves it, from its linear layers' full (unsharded) sizes."""
    linears: list[tuple[str, tuple[int, int], tuple[int, ...]]] = []
    embeddings: dict[str, tuple[int, int]] = {}
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
        elif isinstance(module, _sgl.LinearBase):
            linears.append((path, (module.output_size, module.input_size), ()))
    if vocabulary and not any(path.endswith("lm_head") for path, _, _ in linears):
        # Tied to the embedding, so not a module of its own; adapters may still target it.
        hidden = next(iter(embeddings.values()))[0]
        linears.append(("lm_head", (vocabulary, hidden), ()))
    return BaseLayout.from_modules(linears, embeddings)
