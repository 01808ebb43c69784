"""The embedded model's shape, tokenizer and processor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

IMAGE_SIDE = 112  # pixels; 8 x 8 patches of 14, merged 2 x 2 into 4 x 4 image tokens
SPECIAL_TOKENS = tuple(
    f"<|{name}|>"
    for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY_SIZE = 1024


def build_tokenizer(corpus: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer trained on ``corpus``: any text can be encoded, the corpus's words in one token."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus, VOCABULARY_SIZE - 64, min_frequency=1, show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    return fast


def build_processor(tokenizer: Any) -> Any:
    """The stock Qwen2.5-VL processor, which resizes every picture to the area the model was trained at."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    pixels = {"min_pixels": IMAGE_SIDE**2, "max_pixels": IMAGE_SIDE**2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: Any, small: bool = False) -> Any:
    """The model's configuration. ``small`` is a third of the width and depth, for tests."""
    from transformers import Qwen2_5_VLConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    width, layers, vision_width, vision_layers = (128, 2, 96, 2) if small else (256, 6, 192, 6)
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_width,
            "intermediate_size": 512 if not small else 256,
            "num_heads": vision_width // 32,
            "out_hidden_size": width,
            "fullatt_block_indexes": list(range(vision_layers)),
            "window_size": 112,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
