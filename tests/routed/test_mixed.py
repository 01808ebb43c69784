"""Sequences that need several adapters in turn, and routed adapters whose members learn along."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.tiny import domains, mixed
from tools.tiny.train import load
from vlora_sgl.generate.datasets import write_jsonl
from vlora_sgl.generate.token_router import RouterSettings, label_loss, load_members, train_router
from vlora_sgl.generate.trainer import IGNORE, Prepared
from vlora_sgl.models import tiny
from vlora_sgl.routed.peft import RoutedModel

Loaded = tuple[Any, Any, Prepared]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The embedded model with three adapters, its processor, and eight mixed sequences."""
    data = tmp_path_factory.mktemp("mixed")
    for part in mixed.PARTS:
        rows = domains.DOMAINS[part]()[2]
        write_jsonl(data / part / "test.jsonl", rows[:: len(rows) // 8][:8])
    model, processor = load(tiny.path(), torch.device("cpu"))
    prepared = Prepared(model, processor, mixed.examples(data, "test", 8))
    return load_members(model, {part: tiny.adapters()[part] for part in mixed.PARTS}), processor, prepared


def test_the_parts_of_a_mixed_sequence_are_where_they_are_said_to_be(loaded: Loaded) -> None:
    members, processor, data = loaded
    whole = mixed.owners(data, members.config.image_token_id)
    assert [int((whole == part).sum()) for part in range(3)] == [18, 18, 18], "16 of a picture, a mark and an answer"
    for i, example in enumerate(data.examples):
        ids, prompt = data.data.rows[i]["input_ids"][0], data.data.prompt_lengths[i]
        said = [processor.tokenizer.decode(ids[mixed.answer_at(prompt, part)]) for part in range(3)]
        marks = [processor.tokenizer.decode(ids[mixed.answer_at(prompt, part) - 1]) for part in range(3)]
        assert "".join(mark + one for mark, one in zip(marks, said, strict=True)) == example.answer
        assert tuple(marks) == tuple(mixed.MARKS) and said[1] in domains.SURFACES
    for part in range(3):
        _, labels = mixed.OnePart.of(data, part).batch(range(8), torch.device("cpu"))
        at = [mixed.answer_at(data.data.prompt_lengths[0], other) for other in range(3)]
        assert [bool((labels[:, place] != IGNORE).all()) for place in at] == [other == part for other in range(3)]


@pytest.mark.parametrize("kind", ["vocabulary", "position"])
def test_rules_give_every_part_its_adapter(loaded: Loaded, kind: str) -> None:
    members, processor, data = loaded
    whole = mixed.owners(data, members.config.image_token_id)
    spec = mixed.rules(kind, whole, processor.tokenizer)
    routed, (inputs, _) = RoutedModel(members, spec), data.batch(range(8), torch.device("cpu"))
    with torch.no_grad(), routed.applied(), data.seen(range(8)):
        members(**inputs, use_cache=False)
    prompt = data.data.prompt_lengths[0]
    for part in range(3):
        mark = mixed.answer_at(prompt, part) - 1
        assert bool((routed.weights[:, mark].argmax(-1) == part).all())
    if kind == "position":
        known = whole != IGNORE
        assert bool((routed.weights[:, known].argmax(-1) == whole[known]).all())
        assert not routed.weights[:, ~known].any()
    served = mixed.served_by(members, spec, data, whole)
    assert all(served[f"{part}, answer"][part] == 1 for part in mixed.PARTS)
    assert served["digits, picture"][{"vocabulary": "counting", "position": "digits"}[kind]] == 1


def test_members_learn_along_and_votes_follow_labels(loaded: Loaded) -> None:
    members, processor, data = loaded
    whole = mixed.owners(data, members.config.image_token_id)
    before = {name: p.detach().clone() for name, p in members.named_parameters()}
    settings = RouterSettings(
        steps=12, batch_size=4, adapter_rate=1e-3, labels=50.0, context="token", soft_share=0.5, learning_rate=3e-2
    )
    spec = train_router(members, processor, mixed.PARTS, data, settings, [whole] * len(data))
    for name, parameter in members.named_parameters():
        assert ("lora_" in name) == (not torch.equal(parameter, before[name])), name
    with torch.no_grad():
        for name, parameter in members.named_parameters():
            parameter.copy_(before[name])
    routed, (inputs, _) = RoutedModel(members, spec), data.batch(range(8), torch.device("cpu"))
    with torch.no_grad(), routed.applied(), data.seen(range(8)):
        members(**inputs, use_cache=False)
    marks = [mixed.answer_at(data.data.prompt_lengths[0], part) - 1 for part in range(3)]
    assert routed.votes[0, marks].argmax(-1).tolist() == [0, 1, 2]


def test_label_loss_counts_known_tokens_only() -> None:
    votes = torch.zeros(2, 4, 3)
    votes[0, 1, 2] = 50.0
    labels = [torch.tensor([IGNORE, 2, IGNORE, IGNORE]), torch.full((2,), IGNORE)]
    assert float(label_loss(votes, labels)) == pytest.approx(0, abs=1e-6)
    labels[1] = torch.tensor([0, 1, 2, IGNORE])
    rest = labels
    assert float(label_loss(votes, rest)) == pytest.approx(3 * torch.log(torch.tensor(3.0)).item() / 4, rel=1e-5)
