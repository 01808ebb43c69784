"""Tiny random transformers models and PEFT adapters on them, for tests that compare us with PEFT."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from vlora_sgl.lora.layout import BaseLayout

Config = dict[str, Any]

TEXT: Config = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,  # 16 numbers a head: the least that attention on a GPU takes
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 10000.0}
_VISION_TOKENS = {
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}
_QWEN2_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_channels": 3, "in_chans": 3, "spatial_merge_size": 2}


def _qwen25_vl(text: Config, tokens: Config, more: Config) -> nn.Module:
    vision = {**_QWEN2_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
    text = {**text, "rope_parameters": _MROPE}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**vision, "window_size": 16, "fullatt_block_indexes": [1], **more},
        tie_word_embeddings=False,
        **tokens,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_vl(text: Config, tokens: Config, more: Config) -> nn.Module:
    text = {**text, "rope_parameters": _MROPE}
    vision = {**_QWEN2_VISION, "embed_dim": 32, "hidden_size": 32, **more}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    return Qwen2VLForConditionalGeneration(config)


def _qwen3_vl(text: Config, tokens: Config, more: Config) -> nn.Module:
    vision = {**_QWEN2_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
    text = {**text, "head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], **more},
        tie_word_embeddings=False,
        **tokens,
    )
    return Qwen3VLForConditionalGeneration(config)


EXPERTS: Config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


def _qwen3_vl_moe(text: Config, tokens: Config, more: Config) -> nn.Module:
    # SGLang takes the outputs of three layers of the tower for the first three of the text, whatever is configured.
    vision = {**_QWEN2_VISION, "depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
    text = {**EXPERTS, **text, "head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2], **more},
        tie_word_embeddings=False,
        **tokens,
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def _llava(text: Config, tokens: Config, more: Config) -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**{**small, "image_size": 16, "patch_size": 8, **more})
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text),
        image_token_index=tokens["image_token_id"],
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _internvl(text: Config, tokens: Config, more: Config) -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    # SGLang cuts images of this model into tiles of 448 pixels, whatever its configuration says.
    vision = {**small, "image_size": 448, "patch_size": 112, "attention_bias": True, **more}
    config = InternVLConfig(
        vision_config=vision,
        text_config=Qwen2Config(**text),
        image_token_id=tokens.get("context_token_id", tokens["image_token_id"]),
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config)


def _mistral3(text: Config, tokens: Config, more: Config) -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Mistral3Config(
        vision_config={**small, "head_dim": 16, "image_size": 32, "patch_size": 8, "hidden_act": "silu", **more},
        text_config=MistralConfig(**text, head_dim=16, sliding_window=None),
        image_token_index=tokens["image_token_id"],
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def _gemma3(text: Config, tokens: Config, more: Config) -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(
        vision_config={**small, "image_size": 32, "patch_size": 8, "vision_use_head": False, **more},
        text_config=Gemma3TextConfig(**text, head_dim=16, sliding_window=16, sliding_window_pattern=2),
        mm_tokens_per_image=4,
        image_token_index=tokens["image_token_id"],
        boi_token_index=tokens.get("boi_token_id", 104),
        eoi_token_index=tokens.get("eoi_token_id", 105),
        tie_word_embeddings=True,  # SGLang takes no other
    )
    return Gemma3ForConditionalGeneration(config)


_BUILDERS: dict[str, Callable[[Config, Config, Config], nn.Module]] = {
    "llama": lambda text, *_: LlamaForCausalLM(LlamaConfig(**text)),
    "qwen2": lambda text, *_: Qwen2ForCausalLM(Qwen2Config(**text)),
    "qwen3": lambda text, *_: Qwen3ForCausalLM(Qwen3Config(**text, head_dim=16)),
    "qwen3_moe": lambda text, *_: Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**EXPERTS, **text}, head_dim=16)),
    "mistral": lambda text, *_: MistralForCausalLM(MistralConfig(**text, sliding_window=None)),
    "phi3": lambda text, *_: Phi3ForCausalLM(Phi3Config(**{**text, "pad_token_id": 0})),
    "llava": _llava,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen25_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
FAMILIES = tuple(_BUILDERS)


def tiny_model(
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    text: Config | None = None,
    tokens: Config | None = None,
    vision: Config | None = None,
) -> nn.Module:
    """A random model of ``family``, the same for the same seed.

    Args:
        text: changes to the language model's configuration.
        tokens: ids of the vision tokens, for a model that is to have a tokenizer.
        vision: changes to the vision tower's configuration.
    """
    torch.manual_seed(seed)
    return _BUILDERS[family]({**TEXT, **(text or {})}, tokens or _VISION_TOKENS, vision or {}).to(dtype).eval()


@functools.cache
def tiny_config(family: str) -> Any:
    """The configuration of ``tiny_model(family)``."""
    return tiny_model(family).config


def tiny_adapter(model: nn.Module, directory: Path, seed: int = 1, strength: float = 0.3, **config: Any) -> PeftModel:
    """Wraps ``model`` with a random adapter whose B is not zero, saves it to ``directory`` and returns the wrapper."""
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "magnitude" in name:
                parameter *= torch.empty_like(parameter).uniform_(0.6, 1.6)
            elif "lora_" in name or (name.endswith("bias") and parameter.requires_grad):
                nn.init.normal_(parameter, std=strength)
    peft.save_pretrained(directory)
    return peft.eval()


def stacked_layout(layers: int, hidden: int, kv: int, inner: int, vocabulary: int) -> BaseLayout:
    """A text model as an engine serves it: q, k, v and gate, up stacked."""
    linears: list[tuple[str, tuple[int, int], tuple[int, ...]]] = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        linears += [
            (f"{at}.self_attn.qkv_proj", (hidden + 2 * kv, hidden), (hidden, kv, kv)),
            (f"{at}.self_attn.o_proj", (hidden, hidden), ()),
            (f"{at}.mlp.gate_up_proj", (2 * inner, hidden), (inner, inner)),
            (f"{at}.mlp.down_proj", (hidden, inner), ()),
        ]
    return BaseLayout.from_modules(linears, {"model.embed_tokens": (hidden, vocabulary)})
