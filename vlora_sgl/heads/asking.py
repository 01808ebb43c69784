"""``Engine.classify``, ``count`` and ``detect``: a head's answer about images, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError, UnknownAdapterError
from vlora_sgl.heads.requests import HEAD_KEY, describe


class AsksHeads:
    """Mixed into the engine, before SGLang's class. Images are whatever SGLang takes: PIL images, paths, URLs."""

    tokenizer_manager: Any
    generate: Any

    def classify(
        self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None
    ) -> JsonDict:
        """One of the head's labels: ``label``, ``probability``, ``labels``, ``probabilities``.

        Args:
            images: one image or several, for one question.
            adapter: whose head.
            head: left out: the adapter's only one for this task.
            prompt: the question; left out: the one the adapter was trained with.
        Raises:
            HeadError: no such head; the message lists what exists.
            UnknownAdapterError: no such adapter.
        """
        return self._ask("classify", images, adapter, head, prompt)

    def count(self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None) -> JsonDict:
        """How many: ``count``, ``probability``, ``or_more``, ``expectation``. Arguments and errors as ``classify``."""
        return self._ask("count", images, adapter, head, prompt)

    def detect(self, images: object, *, adapter: str, head: str | None = None, prompt: str | None = None) -> JsonDict:
        """Where: ``boxes``, each with ``label``, ``score``, ``box``, ``pixels``. Otherwise as ``classify``."""
        return self._ask("detect", images, adapter, head, prompt)

    def _ask(self, task: str, images: object, adapter: str, head: str | None, prompt: str | None) -> JsonDict:
        loaded = self.tokenizer_manager.lora_ref_cache
        if adapter not in loaded:
            raise UnknownAdapterError(adapter, loaded)
        description = describe(loaded[adapter].lora_path)
        head = description.head_named(head, task, adapter)
        images = list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
        if not images:
            raise HeadError(f"{task} needs an image")
        text = prompt if prompt is not None else description.prompt or ""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        template = self.tokenizer_manager.processor or self.tokenizer_manager.tokenizer
        question = template.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        answer = self.generate(
            prompt=question,
            image_data=images,
            lora_path=adapter,
            sampling_params={"max_new_tokens": 1, "temperature": 0, "custom_params": {HEAD_KEY: head}},
        )
        return answer["meta_info"][HEAD_KEY]
