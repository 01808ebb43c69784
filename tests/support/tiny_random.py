"""A random Qwen2.5-VL of a few hundred thousand parameters, with two PEFT adapters, made on the spot.

Random weights answer nothing sensible; they are for checking that two code paths agree. The adapters are strong
enough to change greedy answers, which the tests show before they compare anything.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tools.tiny.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer

VOCABULARY_TEXT = [
    "system user assistant What is in this picture? How many objects are there? Describe the image in one word.",
    "You are a helpful assistant. Answer with a single word. Is there a cat? yes no red green blue 0 1 2 3 4 5",
]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(directory: Path, seed: int = 0) -> Path:
    """Write model, tokenizer and processor to ``directory`` and return it."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    fast = build_tokenizer(VOCABULARY_TEXT)
    ids = {token: fast.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    pixels = {"min_pixels": 56 * 56, "max_pixels": 224 * 224}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=fast,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    vocabulary = (len(fast) + 63) // 64 * 64
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
            "window_size": 112,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Larger than the usual 0.02, so that layers matter and greedy answers are no near-ties.
                parameter.normal_(0.0, 0.6 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def make_adapter(
    directory: Path,
    model_directory: Path,
    seed: int,
    rank: int = 16,
    alpha: float | None = None,
    targets: list[str] | str | None = None,
    scale: float = 1.0,
    **lora_options: object,
) -> Path:
    """Write a PEFT LoRA adapter with random A and B for the model's language layers to ``directory``.

    Args:
        scale: multiplies B's standard deviation; 1.0 changes most greedy answers.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_directory, dtype=torch.float32)
    lora_options.setdefault("exclude_modules", ".*visual.*")  # the tower has gate, up and down projections too
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=TARGETS if targets is None else targets,
        **lora_options,
    )
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name or "lora_embedding_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 * scale)
            elif "trainable_tokens" in name:
                parameter += torch.randn(parameter.shape, generator=generator) * scale
            elif "lora_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
            elif "magnitude" in name:
                parameter *= 0.6 + torch.rand(parameter.shape, generator=generator)
            elif parameter.requires_grad:  # a bias of the base model's
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 * scale)
    peft_model.save_pretrained(directory)
    return directory
