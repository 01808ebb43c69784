"""The trainer behind the packer: learns data sets with transformers and PEFT, keeps every state, measures accuracy."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlora_sgl.core import JsonDict
from vlora_sgl.generate import heads as head_training
from vlora_sgl.generate.config import RunConfig
from vlora_sgl.generate.datasets import Example
from vlora_sgl.generate.ledger import Names
from vlora_sgl.generate.processes import processes_of
from vlora_sgl.generate.scores import METRICS
from vlora_sgl.generate.sources import LoadedSet
from vlora_sgl.generate.trainer import (
    Prepared,
    chat,
    exact_match,
    head_answers,
    load_adapter,
    save_adapter,
    train_lora,
)
from vlora_sgl.heads.base import VisionHead
from vlora_sgl.heads.store import build_head, load_heads

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, ProcessorMixin

    from vlora_sgl.generate.heads import Model

SPARE_TOKENS = 8  # that an answer may be longer than the longest reference


class Learner:
    """Implements ``ledger.Trainer`` on a real model.

    The state after each sequence of data sets is an adapter directory below ``output/states``.

    Args:
        config: the run.
        datasets: its data sets, loaded.
    """

    def __init__(self, config: RunConfig, datasets: Sequence[LoadedSet]) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.config = config
        self.process = processes_of(config)
        self._sets = {one.spec.name: one for one in datasets}
        self._prepared: dict[tuple[str, str], Prepared] = {}
        base = base_directory(config.base)
        self.processor = AutoProcessor.from_pretrained(base)
        on_gpu = self.process.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype)
        self.model.to(self.process.device).eval()

    def state(self, sequence: Names) -> Path:
        """Directory of the adapter that learnt ``sequence``."""
        mark = hashlib.sha256("\n".join(sequence).encode()).hexdigest()[:12]
        return self.config.output / "states" / f"{len(sequence):02d}-{mark}"

    def fuse(self, sequence: Names) -> dict[str, float]:
        """Train the adapter of ``sequence[:-1]`` on the last data set, keep it, and measure all on validation data."""
        start = self.state(sequence[:-1]) if len(sequence) > 1 else None
        heads = self._heads(sequence, start)
        adapter = self._train(self._lesson(sequence), sequence, heads, start, self._steps(sequence[-1]))
        if self.process.is_main_process:
            questions = {e.question for name in sequence for e in self._sets[name].splits["train"]}
            prompt = questions.pop() if len(questions) == 1 else None
            unfinished = self.state(sequence).with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            save_adapter(adapter, unfinished, heads, self.config.lora.activate, prompt)
            _name_base(unfinished, self.config.base)
            shutil.rmtree(self.state(sequence), ignore_errors=True)
            unfinished.rename(self.state(sequence))
        self.process.wait_for_everyone()
        accuracy = {name: self._measure(adapter, name, "validation", heads) for name in sequence}
        self._detach(adapter)
        return self._agreed(accuracy)

    def probe(self, names: Names) -> dict[str, float]:
        """A fresh adapter on all of ``names`` together for a share of the usual steps; nothing is kept."""
        lesson = Prepared.join([(part, range(len(part))) for part in (self._ready(n, "train") for n in names)])
        heads = self._heads(names, None)
        # Every data set gets the same number of its own examples, alone or in company.
        steps = max(1, round(self.config.probe * sum(self._steps(name) for name in names)))
        adapter = self._train(lesson, names, heads, None, steps)
        accuracy = {name: self._measure(adapter, name, "validation", heads) for name in names}
        self._detach(adapter)
        return self._agreed(accuracy)

    def measure(self, sequence: Names, split: str) -> dict[str, float]:
        """Accuracy of the kept adapter of ``sequence`` on each of its data sets."""
        adapter = load_adapter(self.model, self.state(sequence))
        heads = self._load_heads(self.state(sequence))
        accuracy = {name: self._measure(adapter, name, split, heads) for name in sequence}
        self._detach(adapter)
        return accuracy

    def measure_base(self, name: str, split: str) -> float:
        """Accuracy of the base model without any adapter, by its language head."""
        return self._measure(self.model, name, split, [])

    def measure_teacher(self, name: str) -> float | None:
        """Accuracy of the teacher on the test split; ``None`` without a teacher."""
        one = self._sets[name]
        if one.teacher is None:
            return None
        return METRICS[one.spec.metric](one.teacher, references(one.splits["test"]))

    def _train(
        self, lesson: Prepared, sequence: Names, heads: Sequence[VisionHead], start: Path | None, steps: int
    ) -> PeftModel:
        seed = int.from_bytes(hashlib.sha256(f"{self.config.seed} {sequence}".encode()).digest()[:4], "big")
        settings = replace(self.config.lora, seed=seed, steps=steps)
        return train_lora(self.model, self.processor, lesson, settings, " + ".join(sequence), heads, start)

    def _steps(self, name: str) -> int:
        """Optimizer steps for one data set."""
        own, lora = self._sets[name].spec.steps, self.config.lora
        return own or lora.steps or max(1, round(lora.epochs * len(self._ready(name, "train")) / lora.batch_size))

    def _lesson(self, sequence: Names) -> Prepared:
        """The new data set, and a share of each earlier one for rehearsal."""
        new = self._ready(sequence[-1], "train")
        parts: list[tuple[Prepared, Sequence[int]]] = [(new, range(len(new)))]
        for name in sequence[:-1]:
            old = self._ready(name, "train")
            chosen = random.Random(f"{self.config.seed} {sequence} {name}").sample(
                range(len(old)), round(self.config.rehearsal * len(old))
            )
            parts.append((old, chosen))
        return Prepared.join(parts)

    def _ready(self, name: str, split: str) -> Prepared:
        if (name, split) not in self._prepared:
            examples = self._sets[name].splits[split]
            self._prepared[name, split] = Prepared(self.model, self.processor, examples, self.config.lora.tower)
        return self._prepared[name, split]

    def _heads(self, sequence: Names, start: Path | None) -> list[VisionHead]:
        """One head for the task that all of ``sequence`` share; its outputs grow with the labels of the data sets."""
        if not self.config.heads:
            return []
        kind = self._sets[sequence[0]].spec.kind
        labels = list(dict.fromkeys(label for name in sequence for label in self._sets[name].labels or ()))
        settings: JsonDict = {"name": kind.name, "kind": kind.head}
        if kind.head == "count":
            settings["maximum"] = max(1, *(int(label) for label in labels))
        else:
            settings["labels"] = labels
        head = build_head(settings, self.model.get_output_embeddings().weight.shape[1])
        head.to(self.process.device)
        if start is not None:
            head_training.start_from_answers(head, self.model, self.processor.tokenizer)
            learnt = self._load_heads(start)[0]
            rows = learnt.outputs
            places = range(rows) if kind.head == "count" else [head.labels.index(label) for label in learnt.labels]
            head.linear.weight.data[list(places)] = learnt.linear.weight.data
            head.linear.bias.data[list(places)] = learnt.linear.bias.data
        return [head]

    def _load_heads(self, directory: Path) -> list[VisionHead]:
        width = self.model.get_output_embeddings().weight.shape[1]
        return list(load_heads(directory, width, self.process.device).values())

    def _measure(self, model: Model, name: str, split: str, heads: Sequence[VisionHead]) -> float:
        one, ready = self._sets[name], self._ready(name, split)
        metric = METRICS[one.spec.metric]
        if heads:
            answers = head_answers(model, self.processor, heads[0], ready)
            said = [str(a["count"]) if "count" in a else a["label"] for a in answers]
        elif one.spec.metric == "top1":
            hits = exact_match(model, self.processor, ready)
            return sum(hits) / len(hits)
        else:
            said = generate(model, self.processor, ready.examples)
        return metric(said, references(ready.examples))

    def _agreed(self, accuracy: dict[str, float]) -> dict[str, float]:
        """The main process's numbers, so that all processes decide alike whatever their rounding."""
        from accelerate.utils import broadcast_object_list

        shared = [accuracy]
        broadcast_object_list(shared)
        return shared[0]

    def _detach(self, adapter: PeftModel) -> None:
        """The base model as it was, so that the next adapter starts from it."""
        adapter.unload()
        for attribute in ("peft_config", "_hf_peft_config_loaded"):
            self.model.__dict__.pop(attribute, None)


def _name_base(adapter: Path, base: str) -> None:
    """Call the base as the configuration does, not by where it lies on this machine."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}, indent=2) + "\n")


def references(examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """The acceptable answers of each example."""
    return [example.references or (example.answer,) for example in examples]


@torch.no_grad()
def generate(model: Any, processor: ProcessorMixin, examples: Sequence[Example], batch_size: int = 32) -> list[str]:
    """Greedy answers, for metrics that need the text itself."""
    device = next(model.parameters()).device
    tokenizer = processor.tokenizer
    longest = max(len(tokenizer(a, add_special_tokens=False)["input_ids"]) for e in references(examples) for a in e)
    said: list[str] = []
    for start in range(0, len(examples), batch_size):
        part = examples[start : start + batch_size]
        text = [
            processor.apply_chat_template(chat(e.question, len(e.images)), add_generation_prompt=True) for e in part
        ]
        images = [e.load_images() for e in part]
        inputs = processor(text=text, images=images, padding=True, padding_side="left", return_tensors="pt")
        out = model.generate(
            **inputs.to(device),
            max_new_tokens=longest + SPARE_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        said += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def base_directory(base: str) -> str:
    """Where the base model lies; ``tiny`` is the embedded one."""
    if base != "tiny":
        return base
    from vlora_sgl.models import tiny

    return str(tiny.path())
