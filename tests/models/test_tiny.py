"""The embedded model: its batched path equals the stock one, its splits are disjoint, and training it works."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tools.tiny import batches, build, domains
from tools.tiny import scenes as S
from tools.tiny.card import LOG, of_directory
from vlora_sgl.generate.datasets import SPLITS, read_jsonl, write_jsonl
from vlora_sgl.generate.trainer import Prepared, exact_match
from vlora_sgl.heads import load_heads, read_description
from vlora_sgl.models import tiny
from vlora_sgl.routed.spec import read_routed

FIVE = ("colour", "shape", "count", "position", "digit")


@pytest.fixture(scope="module")
def shipped() -> Any:
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny.path(), use_fast=False)
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32).eval(), processor


@pytest.mark.parametrize("images", [1, 3])
def test_batched_forward_equals_the_stock_one(shipped: Any, images: int) -> None:
    model, processor = shipped
    drawn = S.render(S.sample(images, np.random.default_rng(1)))
    pictures = [Image.fromarray(picture) for picture in drawn.permute(0, 2, 3, 1).numpy()]
    content = [{"type": "image"}] * images + [{"type": "text", "text": S.MOTION_QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=pictures, return_tensors="pt")
    encoder, asked = batches.Encoder(processor.tokenizer), (S.MOTION_QUESTION, "left")
    ids, _, index, segment = (part[: inputs["input_ids"].shape[1]] for part in encoder.row([asked], images=images))
    assert ids == inputs["input_ids"][0].tolist()
    pixels = batches.patches(drawn, processor)
    torch.testing.assert_close(pixels.flatten(0, 1), inputs["pixel_values"], atol=1e-5, rtol=0)
    with torch.no_grad():
        tokens = batches.encode_images(model.model.visual, pixels)
        places = torch.tensor([ids]), tokens.flatten(0, 1), torch.tensor([index]), torch.tensor([segment])
        ours = model.lm_head(batches.forward(model, *places))
        stock = model(**inputs).logits
    torch.testing.assert_close(ours, stock, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_question_that_stands_alone_is_a_dialogue_of_its_own(shipped: Any) -> None:
    """Questions of one row see neither each other nor each other's positions."""
    model, processor = shipped
    encoder = batches.Encoder(processor.tokenizer)
    asked = [("What color is the ring?", "red"), ("How many objects are there?", "3"),
             ("What is at the top left?", "red ring")]  # fmt: skip
    batch = encoder.tensors([encoder.row(asked, system=True, alone=True)])
    pixels = batches.patches(S.render(S.sample(1, np.random.default_rng(1))), processor)
    tokens = batches.encode_images(model.model.visual, pixels).flatten(0, 1)
    hidden = batches.forward(model, batch["ids"], tokens, batch["index"], batch["segment"])
    found = hidden.flatten(0, 1)[batch["where"]]
    expected, wanted = [], []
    for question, answer in asked:
        ids, labels, index, segment = encoder.row([(question, answer)], system=True)
        assert (index, segment) == (list(range(len(ids))), [0] * len(ids))
        whole = f"{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        assert ids[-len(encoder.piece(whole)) :] == encoder.piece(whole)
        one = batches.forward(model, torch.tensor([ids]), tokens, torch.tensor([index]), torch.tensor([segment]))[0]
        places = [i for i in range(len(ids) - 1) if labels[i + 1] != batches.IGNORE]
        expected.append(one[places])
        wanted += [labels[i + 1] for i in places]
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-4)
    assert batch["wanted"].tolist() == wanted


def test_rows_of_one_dialogue_are_what_the_chat_template_makes(shipped: Any) -> None:
    """Several turns, a system prompt; in batches of clips, too, only answers are wanted."""
    processor = shipped[1]
    encoder = batches.Encoder(processor.tokenizer)
    turns = [("What color is the ring?", "red"), ("Where is the red ring?", "top left")]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for number, (question, answer) in enumerate(turns):
        image = [{"type": "image"}] if number == 0 else []
        messages.append({"role": "user", "content": [*image, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": answer})
    text = processor.apply_chat_template(messages).removesuffix("\n")
    ids, labels, index, segment = encoder.row(turns, system=True)
    blank = S.render(S.sample(1, np.random.default_rng(1)))[0].permute(1, 2, 0).numpy()
    assert ids == processor(text=[text], images=[Image.fromarray(blank)])["input_ids"][0]
    assert (index, segment) == (list(range(len(ids))), [0] * len(ids))
    said = [token for token, label in zip(ids, labels, strict=True) if label != batches.IGNORE]
    assert processor.tokenizer.decode(said) == "red<|im_end|>top left<|im_end|>"
    clips = batches.make_batch(encoder, 8, seed=7, moving=True)
    assert len(clips["frames"]) == 3 and clips["cells"] is None
    assert processor.tokenizer.decode(clips["ids"].flatten().tolist()).count(S.MOTION_QUESTION) >= 4
    assert (clips["ids"].flatten()[clips["where"] + 1] == clips["wanted"]).all()


def test_a_batch_asks_every_kind_of_question_and_fills_its_rows(shipped: Any) -> None:
    encoder = batches.Encoder(shipped[1].tokenizer)
    batch = batches.make_batch(encoder, 24, seed=1)
    assert batch["ids"].shape == (24, batches.ROW_TOKENS[1])
    assert (batch["ids"] != encoder.pad).float().mean() > 0.7
    text = shipped[1].tokenizer.decode(batch["ids"].flatten().tolist())
    for piece in ("What color is", "What shape is", "How many", "Where is", "Is there", "digit", "box", "Repeat"):
        assert piece in text
    again = batches.make_batch(encoder, 24, seed=1)
    assert all(torch.equal(batch[k], again[k]) for k in ("ids", "index", "segment", "where", "wanted"))


@pytest.mark.parametrize("test", [False, True])
def test_held_out_combinations_are_drawn_only_for_the_test(test: bool) -> None:
    scenes = S.sample(500, np.random.default_rng(2), test=test)
    drawn = scenes.size > 0
    held = S.is_held_out(scenes.colour, scenes.shape, scenes.pattern[:, None]) & drawn
    unseen_font = (scenes.digit >= 0) & (scenes.font == (np.maximum(scenes.digit, 0) * 3 + 1) % len(S.glyphs()))
    if test:
        assert held.any(1)[drawn.any(1)].all() and unseen_font[scenes.digit >= 0].all()
    else:
        assert not held.any() and not unseen_font.any()


def test_every_question_has_one_answer_and_objects_do_not_overlap() -> None:
    scenes = S.sample(200, np.random.default_rng(3))
    for i in range(len(scenes)):
        answers: dict[str, set[str]] = {}
        for _, question, answer in S.questions(scenes, i, random.Random(i)):
            answers.setdefault(question, set()).add(answer)
        assert all(len(found) == 1 for found in answers.values()), answers
        present = np.nonzero(scenes.size[i] > 0)[0]
        for a in present:
            for b in present[present > a]:
                gap = np.abs(scenes.centre[i, a] - scenes.centre[i, b]).max()
                assert gap > scenes.size[i, a] + scenes.size[i, b]


def test_shipped_model_answers_unseen_scenes(shipped: Any) -> None:
    from tools.tiny.train import accuracy

    model, processor = shipped
    found = accuracy(model, processor, scenes=60, seed=99, kinds=FIVE)
    for kind in FIVE:
        assert found[kind]["accuracy"] >= 0.85, (kind, found[kind])
        assert found[kind]["blind"] <= found[kind]["chance"] + 0.1, (kind, found[kind])


def test_shipped_set_is_small_and_complete() -> None:
    files = [f for f in tiny.path().parent.rglob("*") if f.is_file() and f.suffix != ".pyc"]
    assert sum(f.stat().st_size for f in files) < 40e6
    assert sum(f.stat().st_size for f in files if f.suffix == ".safetensors") <= 24e6
    assert domains.ADAPTERS.keys() <= tiny.adapters().keys() <= domains.EVERY.keys()
    for name, directory in tiny.adapters().items():
        domain, invocation = domains.EVERY[name]
        description = read_description(directory)
        assert (description.invocation, description.prompt) == (invocation, domains.QUESTIONS[domain])
        assert load_heads(directory, 256).keys() == {head["name"] for head in domains.HEADS[domain]}
    config = json.loads((tiny.path() / "config.json").read_text())
    routed = read_routed(
        tiny.routed(), "routed", config["text_config"]["hidden_size"], config["text_config"]["vocab_size"]
    )
    assert set(routed.members) == {name for name, (_, invocation) in domains.ADAPTERS.items() if invocation is None}


def test_the_log_says_heads_are_as_good_as_decoding_and_adapters_lift_their_domain() -> None:
    """Of the shipped run; bench_tiny measures the same as served."""
    log = json.loads((tiny.path().parent / LOG).read_text())
    assert all(row["accuracy"] >= 0.85 for kind, row in log["base"].items() if kind in FIVE), log["base"]
    assert log["adapters"].keys() == tiny.adapters().keys()
    for name, row in log["adapters"].items():
        assert row["adapter"] >= row["base"] + 0.2, (name, row)
        for head in row["heads"].values():
            assert head["kind"] == "detect" or head["value"] >= row["adapter"], (name, row)


def test_the_log_says_the_routed_adapter_is_as_good_as_the_best_single_adapter() -> None:
    """Within two points, all members in use; bench_tiny measures the same as served."""
    report = json.loads((tiny.path().parent / LOG).read_text())["routed"]
    assert report["routed_minus_oracle_points"] >= -2, report
    assert min(report["usage"].values()) > 0.02, report["usage"]


def test_half_a_minute_of_training_on_the_cpu_beats_chance() -> None:
    """A third of the size, one question type, 150 steps: the loss falls and unseen scenes are answered."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from tools.tiny.train import accuracy, pretrain

    torch.manual_seed(0)
    processor = build.build_processor(build.build_tokenizer(S.corpus()))
    model = Qwen2_5_VLForConditionalGeneration(build.build_config(processor.tokenizer, small=True))
    log = pretrain(model, processor, 150, batch_size=8, seed=0, kinds=("pattern",))
    losses = [row["answer_loss"] for row in log]
    assert losses[-1] < 0.5 * max(losses), losses
    pattern = accuracy(model, processor, scenes=100, seed=5, kinds=("pattern",))["pattern"]
    assert pattern["accuracy"] > pattern["chance"] + 0.15, pattern


@pytest.mark.parametrize("name", ["counting", "digits", "faces", "surfaces"])
def test_splits_of_a_domain_share_no_picture(name: str, tmp_path: Path) -> None:
    domains.prepare(tmp_path, [name])
    seen = [
        {
            path.read_bytes()
            for example in read_jsonl(tmp_path / name / f"{split}.jsonl")
            for path in example.images
            if example.answer != "0" or name != "counting"  # an empty picture has nothing that could be shared
        }
        for split in SPLITS
    ]
    assert all(seen)
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_shipped_adapter_lifts_its_domain(shipped: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model, processor = shipped
    write_jsonl(tmp_path / "test.jsonl", domains.DOMAINS["digits"]()[2][::8])
    examples = Prepared(model, processor, read_jsonl(tmp_path / "test.jsonl"))
    before = np.mean(exact_match(model, processor, examples))
    adapted = PeftModel.from_pretrained(model, tiny.adapters()["digits"]).eval()
    assert np.mean(exact_match(adapted, processor, examples)) >= before + 0.2
    base = adapted.unload()
    assert np.mean(exact_match(base, processor, examples)) == before


def test_card_is_made_from_the_log() -> None:
    here = tiny.path().parent
    assert (here / "MODEL_CARD.md").read_text() == of_directory(here)
    assert Path(here / "MODEL_CARD.md").stat().st_size > 1000
