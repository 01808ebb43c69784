"""A head's answer about images, from an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from vlora_sgl.core import JsonDict, RequestParams
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.requests import describe

Task = Literal["classify", "count", "detect"]


def ask(engine: Any, task: Task, images: object, adapter: str, head: str | None, prompt: str | None) -> JsonDict:
    """What ``Engine.classify``, ``count`` and ``detect`` return; arguments and errors are theirs."""
    manager = engine.tokenizer_manager
    description = describe(manager.adapters.directory_of(adapter))
    head = description.head_named(head, task, adapter)
    images = list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
    if not images:
        raise HeadError(f"{task} needs an image")
    text = prompt if prompt is not None else description.prompt or ""
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    question = (manager.processor or manager.tokenizer).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    answer: JsonDict = engine.generate(
        prompt=question,
        image_data=images,
        lora_path=adapter,
        sampling_params=RequestParams(head=head).added_to({"max_new_tokens": 1, "temperature": 0}),
    )["meta_info"]["vlora"]["head"]
    return answer
