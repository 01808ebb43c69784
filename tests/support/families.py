"""Random models of the families that the generator supports, a hundred thousand parameters each, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer

WORDS = ["What colour is this? red green blue yellow How many are there? 0 1 2 3 system user assistant"]
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava")


def make(family: str, directory: Path) -> Path:
    """Write a model and its processor to ``directory``; images become few tokens."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(WORDS)
    model, processor = (_llava if family == "llava" else _qwen)(family, tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def _qwen(family: str, tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    vision = {
        "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "depth": 1,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 2,
            "fullatt_block_indexes": [0],
        },
    }[family]
    config = getattr(t, f"{prefix}Config")(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    pixels = {"min_pixels": 56**2, "max_pixels": 56**2}
    processor = getattr(t, f"{prefix}Processor")(
        image_processor=t.Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    return getattr(t, f"{prefix}ForConditionalGeneration")(config), processor


def _llava(family: str, tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    image = "<|image_pad|>"
    config = t.LlavaConfig(
        text_config=t.LlamaConfig(
            **TEXT, vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id
        ),
        vision_config=t.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(image),
    )
    processor = t.LlavaProcessor(
        image_processor=t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=image,
        chat_template=CHAT_TEMPLATE,
    )
    return t.LlavaForConditionalGeneration(config), processor
