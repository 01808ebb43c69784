"""Trains one LoRA adapter on question-answer examples, and measures accuracy, with transformers and PEFT.

Works for any model that transformers loads as an image-text-to-text model with a chat template.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from vlora_sgl.generation.datasets import Example

IGNORE = -100


@dataclass(frozen=True)
class LoraSettings:
    """What to train. The targets are the language model's; the vision tower stays as it is."""

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    learning_rate: float = 2e-3
    epochs: float = 10
    batch_size: int = 32
    seed: int = 0


def chat(question: str, images: int, answer: str | None = None) -> list[dict[str, Any]]:
    """One turn about ``images`` images as chat messages; serving builds the same ones from a request."""
    content: list[dict[str, str]] = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return messages


class Encoded:
    """Examples as model inputs, each processed once and kept.

    Args:
        processor: the model's processor.
        examples: what to encode.
    """

    def __init__(self, processor: Any, examples: Sequence[Example]) -> None:
        self.pad = processor.tokenizer.pad_token_id
        self.rows: list[dict[str, torch.Tensor]] = []
        self.prompt_lengths: list[int] = []
        end = processor.tokenizer.eos_token
        for example in examples:
            prompt = processor.apply_chat_template(
                chat(example.question, len(example.images)), add_generation_prompt=True
            )
            images = example.load_images() or None
            row = processor(text=[prompt + example.answer + end], images=images, return_tensors="pt")
            answer = processor.tokenizer(example.answer + end, add_special_tokens=False)["input_ids"]
            self.rows.append(dict(row))
            self.prompt_lengths.append(row["input_ids"].shape[1] - len(answer))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], device: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Right-padded inputs and labels (B, T); only answer tokens carry a label."""
        rows = [self.rows[i] for i in indices]
        length = max(row["input_ids"].shape[1] for row in rows)
        inputs: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            if rows[0][name].ndim == 2 and rows[0][name].shape == rows[0]["input_ids"].shape:
                fill = self.pad if name == "input_ids" else 0
                inputs[name] = torch.cat(
                    [torch.nn.functional.pad(r[name], (0, length - r[name].shape[1]), value=fill) for r in rows]
                ).to(device)
            else:
                inputs[name] = torch.cat([row[name] for row in rows]).to(device)
        labels = inputs["input_ids"].clone()
        for r, i in enumerate(indices):
            labels[r, : self.prompt_lengths[i]] = IGNORE
        labels[inputs["attention_mask"] == 0] = IGNORE
        return inputs, labels


def train_lora(
    model: Any, processor: Any, examples: Sequence[Example], settings: LoraSettings, progress: str = "adapter"
) -> Any:
    """Train an adapter on ``examples``; the base's weights are not changed.

    Returns:
        The PEFT model; ``save_pretrained`` writes the adapter.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        exclude_modules=r".*(visual|vision_tower|multi_modal_projector).*",
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(model, config)
    device = next(model.parameters()).device
    data = Encoded(processor, examples)
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.01)
    steps = max(1, math.ceil(settings.epochs * len(data) / settings.batch_size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps + 1)
    rng = random.Random(settings.seed)
    order: list[int] = []
    peft_model.train()
    for _ in tqdm(range(steps), desc=progress, mininterval=5):
        if len(order) < settings.batch_size:
            order += rng.sample(range(len(data)), len(data))
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        inputs, labels = data.batch(chosen, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = peft_model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return peft_model.eval()


@torch.no_grad()
def exact_match(model: Any, processor: Any, examples: Sequence[Example], batch_size: int = 64) -> list[bool]:
    """Whether greedy decoding gives exactly the answer, per example.

    Greedy decoding yields the answer if and only if every answer token, the end token included, is the argmax after
    the ones before it, so one forward pass over prompt and answer decides it.
    """
    device = next(model.parameters()).device
    data = Encoded(processor, examples)
    model.eval()
    hits: list[bool] = []
    for start in range(0, len(data), batch_size):
        inputs, labels = data.batch(range(start, min(start + batch_size, len(data))), device)
        guess = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1)
        wrong = (labels[:, 1:] != IGNORE) & (guess != labels[:, 1:])
        hits += (~wrong.any(1)).tolist()
    return hits
