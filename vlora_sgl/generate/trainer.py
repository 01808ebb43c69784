"""Trains one LoRA adapter on question-answer examples, and measures accuracy, with transformers and PEFT.

Works for any model that transformers loads as an image-text-to-text model with a chat template. Vision heads may be
trained with the adapter, from the same forward passes, and an adapter may be trained to start after the image.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from pydantic import PositiveFloat, PositiveInt
from tqdm import tqdm

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.generate import heads as head_training
from vlora_sgl.generate.datasets import Example
from vlora_sgl.generate.images import RememberedImages
from vlora_sgl.generate.invocation import AFTER_IMAGE, activate_after_image
from vlora_sgl.heads.base import VisionHead
from vlora_sgl.heads.store import read_description, save_heads

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import PreTrainedModel, ProcessorMixin

    from vlora_sgl.generate.heads import Model

IGNORE = -100
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "internvl")
"""Kinds of models whose towers' adapters are served."""
_TOWER = re.compile(r"(^|\.)(visual|vision_tower|multi_modal_projector)\.")
"""Where they have them, projectors included."""
_FRESH_HEAD_RATE = 5  # times the adapter's learning rate, for heads that start from random weights


@dataclass(frozen=True)
class LoraSettings:
    """What to train. The targets are the language model's; the vision tower stays as it is, unless asked.

    Attributes:
        tower: train every linear layer of the vision tower and its projector too. Images then go through the tower in
            each step, and when served are encoded for this adapter alone.
        activate: ``None`` (from the first token on) or ``"after_image"``.
        head_weight: of the heads' mean loss, beside the loss of the answers.
        steps: optimizer steps; 0 means ``epochs`` over the examples.
        batch_size: examples per step, over all devices.
        gradient_checkpointing: compute activations again in the backward pass: less memory, more time.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    learning_rate: PositiveFloat = 2e-3
    epochs: float = 10
    batch_size: PositiveInt = 32
    seed: int = 0
    activate: str | None = None
    head_weight: float = 1.0
    steps: int = 0
    gradient_checkpointing: bool = False
    tower: bool = False

    def __post_init__(self) -> None:
        if self.tower and self.activate is not None:
            raise ConfigError(
                f"tower does not go with activate: {self.activate}: up to there images are the base model's"
            )
        if self.activate not in (None, AFTER_IMAGE):
            raise ConfigError(f"activate must be None or {AFTER_IMAGE!r}, got {self.activate!r}")


def chat(question: str, images: int) -> list[JsonDict]:
    """A question about ``images`` images as chat messages; serving builds the same ones from a request."""
    content: list[dict[str, str]] = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def shuffled(count: int, size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Indices of ``steps`` batches of ``size`` of ``count`` examples: all in one random order after another."""
    rng = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < size:
            order += rng.sample(range(count), count)
        yield order[:size]
        order = order[size:]


class Encoded:
    """Examples as model inputs, each processed once and kept.

    Args:
        processor: the model's processor.
        examples: what to encode.
    """

    def __init__(self, processor: ProcessorMixin, examples: Sequence[Example]) -> None:
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

    def batch(self, indices: Sequence[int], device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
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


class Prepared:
    """Examples, encoded once, with the image features that a frozen vision tower gives once and for all.

    Args:
        model: the base model.
        processor: its processor.
        examples: what to learn or to measure on.
        tower: whether an adapter changes the tower; then pixels are kept, not features.
    """

    def __init__(
        self, model: PreTrainedModel, processor: ProcessorMixin, examples: Sequence[Example], tower: bool = False
    ) -> None:
        self.examples = tuple(examples)
        self.data = Encoded(processor, examples)
        possible = not tower and RememberedImages.possible(model, self.data.rows)
        self.images = RememberedImages(model, self.data.rows) if possible else None
        if self.images is not None:  # the tower has seen the pixels, of which a model then asks for the shape only
            for row in self.data.rows:
                row["pixel_values"] = row["pixel_values"].new_zeros(()).expand(row["pixel_values"].shape)

    def __len__(self) -> int:
        return len(self.examples)

    @classmethod
    def join(cls, parts: Sequence[tuple[Prepared, Sequence[int]]]) -> Prepared:
        """The chosen examples of several, one after another; nothing is computed again."""
        joined = copy.copy(parts[0][0])
        joined.examples = tuple(part.examples[i] for part, chosen in parts for i in chosen)
        joined.data = copy.copy(joined.data)
        joined.data.rows = [part.data.rows[i] for part, chosen in parts for i in chosen]
        joined.data.prompt_lengths = [part.data.prompt_lengths[i] for part, chosen in parts for i in chosen]
        images = [(part.images, chosen) for part, chosen in parts if part.images is not None]
        joined.images = RememberedImages.join(images) if len(images) == len(parts) else None
        return joined

    def batch(self, chosen: Sequence[int], device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs and labels of ``Encoded.batch``."""
        return self.data.batch(chosen, device)

    def seen(self, chosen: Sequence[int]) -> AbstractContextManager[None]:
        """Within it, a forward pass of the batch ``chosen`` uses the remembered features."""
        return self.images.of(chosen) if self.images else nullcontext()


def train_lora(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    examples: Sequence[Example] | Prepared,
    settings: LoraSettings,
    progress: str = "adapter",
    heads: Sequence[VisionHead] = (),
    start: Path | None = None,
) -> PeftModel:
    """Train an adapter on ``examples``; the base's weights are not changed.

    Under ``accelerate launch`` every process takes its share of each batch and gradients are averaged.

    Args:
        start: directory of a saved adapter to train further, with ``heads`` as they are; by default a fresh one.
        heads: trained in place, with the adapter: their loss on the prompt's hidden states is added to that of the
            answers. A closed-set head starts as the LM head's rows of its answers.
    Returns:
        The PEFT model in evaluation mode; ``save_adapter`` writes it.
    Raises:
        ConfigError: an example that a head cannot answer; a model whose tower's adapters are not served.
    """
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[*settings.targets, *(tower_linears(model) if settings.tower else ())],
        exclude_modules=None if settings.tower else r".*(visual|vision_tower|multi_modal_projector).*",
        task_type="CAUSAL_LM",
    )
    device = next(model.parameters()).device
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if device.type == "cuda" else "no")
    data = examples if isinstance(examples, Prepared) else Prepared(model, processor, examples, settings.tower)
    _check_pixels(data, settings.tower)
    grids = [
        head_training.image_grids(row, model.config) if any(h.features == "image_tokens" for h in heads) else []
        for row in data.data.rows
    ]
    targets = {h: [head_training.target(h, e, g) for e, g in zip(data.examples, grids, strict=True)] for h in heads}
    peft_model: PeftModel
    if start is None:
        peft_model = get_peft_model(model, config)
    else:
        peft_model = PeftModel.from_pretrained(model, start, is_trainable=True)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.activate == AFTER_IMAGE:
        activate_after_image(peft_model)
    started = [p for p in peft_model.parameters() if p.requires_grad]
    fresh: list[torch.nn.Parameter] = []
    for head in heads:
        head.to(device).train().requires_grad_(True)
        known = start is not None or head_training.start_from_answers(head, model, processor.tokenizer)
        (started if known else fresh).extend(head.parameters())
    parameters = [*started, *fresh]
    rates = [settings.learning_rate, _FRESH_HEAD_RATE * settings.learning_rate][: 2 if fresh else 1]
    groups = [{"params": group} for group in (started, fresh) if group]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.01)
    steps = settings.steps or max(1, math.ceil(settings.epochs * len(data) / settings.batch_size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1)
    batches = shuffled(len(data), settings.batch_size, steps, settings.seed)
    peft_model.train()
    with head_training.hidden_states(peft_model) as hidden:
        quiet = not accelerator.is_main_process
        for chosen in tqdm(batches, desc=progress, total=steps, mininterval=5, disable=quiet):
            # A batch smaller than the number of processes leaves none without a share.
            chosen = chosen[accelerator.process_index :: accelerator.num_processes] or chosen[:1]
            inputs, labels = data.batch(chosen, device)
            with data.seen(chosen), accelerator.autocast():
                logits = peft_model(**inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
            )
            for head in heads:
                raw = _raw(head, hidden[0], inputs, data.data, chosen, model)
                wanted = [targets[head][i] for i in chosen]
                cells = [grids[i][0] for i in chosen] if head.features == "image_tokens" else []
                part = head_training.batch_loss(head, raw, wanted, cells)
                loss = loss + settings.head_weight / len(heads) * part
            optimizer.zero_grad()
            accelerator.backward(loss)
            if accelerator.num_processes > 1:
                _average_gradients(parameters, accelerator)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
    for head in heads:
        head.eval().requires_grad_(False)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_disable()
    return peft_model.eval()


def _average_gradients(parameters: Sequence[torch.Tensor], accelerator: Accelerator) -> None:
    """Mean over processes, in one exchange: an adapter is small, and the model itself is not wrapped for it."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    mean = accelerator.reduce(torch.cat([g.flatten() for g in gradients]), "mean")
    for parameter, part in zip(parameters, mean.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter)


def _raw(
    head: VisionHead,
    hidden: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    data: Encoded,
    chosen: Sequence[int],
    model: Model,
) -> list[torch.Tensor]:
    prompts = [data.prompt_lengths[i] for i in chosen]
    image_token = getattr(model.config, "image_token_id", None)
    return head_training.raw_outputs(head, hidden, inputs["input_ids"], prompts, image_token)


def save_adapter(
    peft_model: PeftModel,
    directory: str | Path,
    heads: Sequence[VisionHead] = (),
    activate: str | None = None,
    prompt: str | None = None,
    metrics: Mapping[str, object] | None = None,
) -> None:
    """Write an adapter's directory: PEFT's files, and ours where there is something to say in them.

    Its weights are rounded to bfloat16, in the model too, so that what is measured afterwards is what was written.

    Args:
        prompt: the question it was trained with.
        metrics: what was measured, for ``vlora_adapter.json``.
    """
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    peft_model.save_pretrained(str(directory))
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    for readme in Path(directory).rglob("README.md"):
        readme.unlink()
    if heads or activate or prompt or metrics:
        save_heads(directory, heads, activate, prompt, metrics)


def load_adapter(model: PreTrainedModel, directory: str | Path) -> PeftModel:
    """The PEFT model of a saved adapter, in evaluation mode, which starts where its description says.

    Raises:
        ConfigError: an invocation that the trainer does not know.
    """
    from peft import PeftModel

    peft_model = PeftModel.from_pretrained(model, directory).eval()
    invocation = read_description(directory).invocation
    if invocation == AFTER_IMAGE:
        activate_after_image(peft_model)
    elif invocation is not None:
        raise ConfigError(f"{directory}: this trainer knows no invocation {invocation!r}")
    return peft_model


@torch.no_grad()
def head_answers(
    model: Model,
    processor: ProcessorMixin,
    head: VisionHead,
    examples: Sequence[Example] | Prepared,
    batch_size: int = 64,
) -> list[JsonDict]:
    """What serving answers for each example: the head on the hidden states of its prompt.

    Args:
        model: the PEFT model, or the base.
        head: on the model's device. A dense head answers for one image per example.
    """
    device = next(model.parameters()).device
    data = prepared(model, processor, examples)
    model.eval()
    answers: list[JsonDict] = []
    with head_training.hidden_states(model) as hidden:
        for start in range(0, len(data), batch_size):
            chosen = range(start, min(start + batch_size, len(data)))
            inputs, _ = data.batch(chosen, device)
            with data.seen(chosen):
                model(**inputs, use_cache=False)
            for i, raw in zip(chosen, _raw(head, hidden[0], inputs, data.data, chosen, model), strict=True):
                dense = head.features == "image_tokens"
                grid = head_training.image_grids(data.data.rows[i], model.config)[0] if dense else None
                answers.append(head.postprocess(raw.float().cpu(), grid))
    return answers


def head_accuracy(
    model: Model, processor: ProcessorMixin, head: VisionHead, examples: Sequence[Example] | Prepared
) -> float:
    """The head's metric on ``examples``, between 0 and 1."""
    data = prepared(model, processor, examples)
    dense = head.features == "image_tokens"
    grids = [head_training.image_grids(row, model.config) if dense else [] for row in data.data.rows]
    wanted = [head_training.target(head, e, g) for e, g in zip(data.examples, grids, strict=True)]
    return head.metric(head_answers(model, processor, head, data), wanted)


def keep_better_start(
    head: VisionHead, model: Model, processor: ProcessorMixin, validation: Sequence[Example] | Prepared
) -> dict[str, float | bool]:
    """Of a trained closed-set head and the one it started from, keep the better on ``validation``, in place.

    The LM head's own rows are never worse than the decoded answer, and the trained weights mostly not. So these stay
    only where they are better by more than chance, twice the standard error of the difference.

    Returns:
        ``trained`` and ``start``: accuracies; ``kept``: whether the trained weights stay.
    """
    start = copy.deepcopy(head)
    if not head_training.start_from_answers(start, model, processor.tokenizer):
        return {"kept": True}
    trained, rows = (head_accuracy(model, processor, h, validation) for h in (head, start))
    chance = 2 * ((trained * (1 - trained) + rows * (1 - rows)) / len(validation)) ** 0.5
    kept = trained - rows > chance
    if not kept:
        head.load_state_dict(start.state_dict())
    return {"trained": trained, "start": rows, "kept": kept}


@torch.no_grad()
def exact_match(
    model: Model, processor: ProcessorMixin, examples: Sequence[Example] | Prepared, batch_size: int = 64
) -> list[bool]:
    """Whether greedy decoding gives exactly the answer, per example.

    Greedy decoding yields the answer if and only if every answer token, the end token included, is the argmax after
    the ones before it, so one forward pass over prompt and answer decides it.
    """
    device = next(model.parameters()).device
    data = prepared(model, processor, examples)
    model.eval()
    hits: list[bool] = []
    for start in range(0, len(data), batch_size):
        chosen = range(start, min(start + batch_size, len(data)))
        inputs, labels = data.batch(chosen, device)
        with data.seen(chosen):
            guess = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1)
        wrong = (labels[:, 1:] != IGNORE) & (guess != labels[:, 1:])
        hits += (~wrong.any(1)).tolist()
    return hits


def prepared(model: Model, processor: ProcessorMixin, examples: Sequence[Example] | Prepared) -> Prepared:
    """Examples with what the vision tower makes of their images, where no adapter changes that."""
    tower = any("lora_" in name and _TOWER.search(name) for name, _ in model.named_parameters())
    data = examples if isinstance(examples, Prepared) else Prepared(base_of(model), processor, examples, tower)
    _check_pixels(data, tower)
    return data


def _check_pixels(data: Prepared, tower: bool) -> None:
    if tower and data.images is not None:
        raise ConfigError("features of the base model's vision tower do not go with an adapter that changes it")


def tower_linears(model: PreTrainedModel) -> list[str]:
    """Paths of the linear layers of a model's vision tower and projector.

    Raises:
        ConfigError: it has none of those whose adapters are served.
    """
    if model.config.model_type not in TOWERS:
        raise ConfigError(f"adapters of the vision tower of {type(model).__name__} are not served")
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [path for path in linears if _TOWER.search(path)]


def base_of(model: Model) -> PreTrainedModel:
    """The model beneath its adapters, if it has any."""
    return cast("PreTrainedModel", getattr(model, "get_base_model", lambda: model)())
