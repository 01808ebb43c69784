"""Sequences that need several adapters in turn: three pictures, three questions, and one answer to all of them.

A handwritten digit, a surface and a picture with several digits; ``=7;brick:3``. Each part of the answer follows a
mark of its own, so it can be told by token id, by position or by a learned token router whose adapter is to say it.
Parts are measured one by one, each behind the true answer up to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from tools.tiny import domains
from vlora_sgl.generate.datasets import SPLITS, Example, read_jsonl
from vlora_sgl.generate.token_router import RouterSettings, joint, load_members, train_routed, train_router
from vlora_sgl.generate.trainer import IGNORE, LoraSettings, Prepared, save_adapter, train_lora
from vlora_sgl.routed.peft import RoutedModel
from vlora_sgl.routed.spec import RoutedSpec

PARTS = ("digits", "surfaces", "counting")
"""Domains, in the order of the pictures, the questions and the answer; and the adapters that know them."""
MARKS = "=;:"
QUESTION = " ".join(domains.QUESTIONS[part] for part in PARTS)
ROUTINGS = ("vocabulary", "position", "learned")


def examples(data: Path, split: str, most: int) -> list[Example]:
    """Up to ``most`` mixed sequences of a split, of as many pictures of each domain; rarer domains repeat theirs."""
    rows = [read_jsonl(data / part / f"{split}.jsonl") for part in PARTS]
    # The files are sorted by class: a stride that no size divides mixes them.
    mixed = [[one[(7919 * i) % len(one)] for i in range(len(one))] for one in rows]
    count = min(most, max(map(len, mixed)))
    triples = zip(*(islice(cycle(one), count) for one in mixed), strict=True)
    return [
        Example(
            tuple(one.images[0] for one in triple),
            QUESTION,
            "".join(mark + one.answer for mark, one in zip(MARKS, triple, strict=True)),
        )
        for triple in triples
    ]


class OnePart(Prepared):
    """Mixed sequences of which only one part, and the marks, are to be learnt."""

    part: int

    @classmethod
    def of(cls, whole: Prepared, part: int) -> OnePart:
        """The same examples; nothing is computed again."""
        made = cls.__new__(cls)
        made.__dict__.update(whole.__dict__)
        made.part = part
        return made

    def batch(self, chosen: Sequence[int], device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs, and labels without the other parts."""
        inputs, labels = super().batch(chosen, device)
        for row, i in enumerate(chosen):
            for part in range(len(PARTS)):
                if part != self.part:
                    labels[row, answer_at(self.data.prompt_lengths[i], part)] = IGNORE
        return inputs, labels


def answer_at(prompt: int, part: int) -> int:
    """Where a part of the answer is; its mark lies in front of it."""
    return prompt + 2 * part + 1


def owners(data: Prepared, image_token: int) -> torch.Tensor:
    """[T] int64: the part that every token of a mixed sequence is for; ``IGNORE`` for the chat's own tokens.

    The same for all: they differ in the pictures and in single tokens of the answer.
    """
    ids, prompt = data.data.rows[0]["input_ids"][0], data.data.prompt_lengths[0]
    found = torch.full_like(ids, IGNORE)
    images = torch.nonzero(ids[:prompt] == image_token)[:, 0]
    for part, own in enumerate(images.chunk(len(PARTS))):
        found[own] = part
        found[answer_at(prompt, part) - 1 : answer_at(prompt, part) + 1] = part
    return found


def rules(kind: str, whole: torch.Tensor, tokenizer: Any) -> RoutedSpec:
    """A routed adapter that tells the parts by token ids, or by position. ``whole``: of ``owners``."""
    if kind == "position":
        places = torch.nonzero(whole != IGNORE)[:, 0].tolist()
        ranges: list[tuple[int, int, int]] = []
        for place in places:
            part = int(whole[place])
            if ranges and ranges[-1][1:] == (place, part):
                ranges[-1] = (ranges[-1][0], place + 1, part)
            else:
                ranges.append((place, place + 1, part))
        return RoutedSpec(PARTS, positions=tuple(ranges))
    said = {0: ["=", *domains.DIGITS], 1: [";", *domains.SURFACES], 2: [":"]}
    ids = [(tokenizer(word)["input_ids"], part) for part, words in said.items() for word in words]
    # Every picture is the last adapter's: ids do not tell one from another.
    return RoutedSpec(
        PARTS, tuple((one, one + 1, part) for (one,), part in ids), {"image": PARTS.index("counting"), "text": 0}
    )


@torch.no_grad()
def accuracy(model: Any, data: Prepared, batch_size: int = 32) -> dict[str, float]:
    """Of each part, and of the whole answer with its marks."""
    device = next(model.parameters()).device
    hits = torch.zeros(len(PARTS) + 1, dtype=torch.int64)
    for start in range(0, len(data), batch_size):
        chosen = range(start, min(start + batch_size, len(data)))
        inputs, labels = data.batch(chosen, device)
        with data.seen(chosen):
            guess = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1)
        right = (guess == labels[:, 1:]) | (labels[:, 1:] == IGNORE)
        prompt = data.data.prompt_lengths[start]
        hits[: len(PARTS)] += right[:, [answer_at(prompt, part) - 1 for part in range(len(PARTS))]].sum(0).cpu()
        hits[-1] += right.all(1).sum().cpu()
    return dict(zip((*PARTS, "whole"), [hit / len(data) for hit in hits.tolist()], strict=True))


@torch.no_grad()
def served_by(model: Any, spec: RoutedSpec, data: Prepared, whole: torch.Tensor) -> dict[str, dict[str, float]]:
    """Which adapter serves which tokens: its share of each part's pictures, and of the marks that part follows."""
    routed, prompt = RoutedModel(model, spec), data.data.prompt_lengths[0]
    chosen = range(min(32, len(data)))
    inputs, _ = data.batch(chosen, next(model.parameters()).device)
    with routed.applied(), data.seen(chosen):
        model(**inputs, use_cache=False)
    share, found = routed.weights.mean(0).cpu(), {}
    for number, part in enumerate(PARTS):
        mine = torch.nonzero(whole == number)[:, 0]
        for what, places in (("picture", mine[mine < prompt]), ("answer", mine[mine >= prompt][:1])):
            found[f"{part}, {what}"] = {
                name: round(float(s), 3) for name, s in zip(PARTS, share[places].mean(0), strict=True)
            }
    return found


def measure(
    model: Any,
    processor: Any,
    adapters: Path,
    data: Path,
    out: Path,
    steps: tuple[int, int],
    most: tuple[int, int],
    seed: int = 0,
) -> dict[str, Any]:
    """Train each adapter on its part alone, then the three of them under each routing, and compare.

    Args:
        model, processor: the base model.
        adapters: PEFT directories to start from.
        data: of ``domains.prepare``.
        out: where the trained adapters go.
        steps: of 16 examples, of an adapter alone and of the three together, which share what an answer teaches.
        most: training and test examples.

    Returns:
        accuracies by part: ``own`` (each adapter alone on its part), ``alone`` (each adapter on all parts), ``merged``
        (all of them as one, by ``add_weighted_adapter``), ``routed`` by routing; ``served``: shares of tokens.
    """
    train, test = (Prepared(model, processor, examples(data, s, n)) for s, n in zip(SPLITS[::2], most, strict=True))
    settings = LoraSettings(rank=8, alpha=16, seed=seed, steps=steps[0], batch_size=16, learning_rate=1e-3)
    alone = {}
    for number, part in enumerate(PARTS):
        adapter = train_lora(model, processor, OnePart.of(train, number), settings, part, start=adapters / part)
        save_adapter(adapter, out / "alone" / part)
        alone[part] = accuracy(adapter, test)
        _take_out(adapter)
    paths = {part: out / "alone" / part for part in PARTS}
    members = load_members(model, paths)
    report: dict[str, Any] = {"own": {part: alone[part][part] for part in PARTS}, "alone": alone}
    report |= {"merged": _merged(members, test), "routed": {}, "served": {}}
    _take_out(members)
    together = joint(RouterSettings(steps=steps[1], context="token", seed=seed))
    whole = owners(train, model.config.image_token_id)
    for kind in ROUTINGS:
        members = load_members(model, paths)
        if kind == "learned":
            spec = train_router(members, processor, PARTS, train, together, [whole] * len(train))
        else:
            spec = rules(kind, whole, processor.tokenizer)
            train_routed(members, processor, spec, train, together)
        save_adapter(members, out / kind)
        with RoutedModel(members, spec).applied():
            report["routed"][kind] = accuracy(members, test)
        report["served"][kind] = served_by(members, spec, test, whole)
        _take_out(members)
    return report | {"examples": [len(train), len(test)], "steps": steps}


def _take_out(members: Any) -> None:
    """The base model as it was."""
    model = members.get_base_model()
    members.unload()
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        model.__dict__.pop(attribute, None)


def _merged(members: Any, test: Prepared) -> dict[str, dict[str, float]]:
    """All adapters as one: their sum, and their mean."""
    found = {}
    for name, weight in (("sum", 1.0), ("mean", 1 / len(PARTS))):
        members.add_weighted_adapter(list(PARTS), [weight] * len(PARTS), name, combination_type="cat")
        members.set_adapter(name)
        found[name] = accuracy(members, test)
    return found


def least_points(report: Mapping[str, Any], kind: str) -> float:
    """The worst part of a routing, in points above its own adapter alone."""
    return 100 * min(report["routed"][kind][part] - report["own"][part] for part in PARTS)
