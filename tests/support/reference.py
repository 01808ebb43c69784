"""What served answers are compared with: transformers + PEFT on the same files, one request at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image


class Reference:
    """Greedy answers of the base model and its adapters.

    Args:
        model: directory of a Qwen2.5-VL checkpoint.
        adapters: PEFT directories by name.
    """

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

        self.processor = Qwen2_5_VLProcessor.from_pretrained(model)
        # The server's, on a CPU; torchvision's resizes a little differently.
        self.processor.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil")
        base = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
        base.generation_config.eos_token_id = None
        self.vocabulary: int = base.config.get_text_config().vocab_size
        (first, path), *others = adapters.items()
        self.model = PeftModel.from_pretrained(base, path, adapter_name=first)
        for name, path in others:
            self.model.load_adapter(path, adapter_name=name)
        self.model.eval()

    @torch.inference_mode()
    def generate(
        self, text: str, adapter: str | None, image: Image.Image | None = None, tokens: int = 16
    ) -> list[int]:
        """The ids of the ``tokens`` greedy tokens after ``text``."""
        inputs = self.processor(text=[text], images=[image] if image is not None else None, return_tensors="pt")
        options = {"do_sample": False, "max_new_tokens": tokens}
        if adapter is None:
            with self.model.disable_adapter():
                output = self.model.generate(**inputs, **options)
        else:
            self.model.set_adapter(adapter)
            output = self.model.generate(**inputs, **options)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def prompt_tokens(self, text: str, image: Image.Image) -> tuple[int, int]:
        """How many tokens the prompt has, and how many of them are the image's."""
        ids = self.processor(text=[text], images=[image], return_tensors="pt")["input_ids"][0]
        return len(ids), int((ids == self.model.config.image_token_id).sum())
