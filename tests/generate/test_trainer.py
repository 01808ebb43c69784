"""The LoRA trainer: it learns, touches only the language model, and counts exact answers as generation does.

Heads are trained on the hidden states that serving gives them, and an adapter that starts after the image leaves the
image to the base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.lora_adapters import tiny_model
from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.datasets import Example
from vlora_sgl.generate.heads import hidden_states, raw_outputs, start_from_answers, target
from vlora_sgl.generate.images import RememberedImages
from vlora_sgl.generate.invocation import AFTER_IMAGE, after_image
from vlora_sgl.generate.trainer import (
    Encoded,
    LoraSettings,
    Prepared,
    chat,
    exact_match,
    head_accuracy,
    head_answers,
    load_adapter,
    save_adapter,
    tower_linears,
    train_lora,
)
from vlora_sgl.heads import Boxes, ClassifyHead, CountHead, DetectHead, Grid, load_heads
from vlora_sgl.heads.worker import HeadRequest, run_heads
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.invocation import split_row
from vlora_sgl.lora.layout import is_tower
from vlora_sgl.models import tiny

SHADES = {"grass": (30, 160, 40), "brick": (170, 60, 40)}


@pytest.fixture
def model() -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny.path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny.path())


def examples(folder: Path) -> list[Example]:
    made = []
    for name, colour in SHADES.items():
        for shift in range(2):
            path = folder / f"{name}{shift}.png"
            Image.new("RGB", (112, 112), tuple(c + 10 * shift for c in colour)).save(path)
            made.append(Example((path,), "What material is this surface?", name))
    return made


def test_training_changes_answers_and_only_the_language_model(processor: Any, model: Any, tmp_path: Path) -> None:
    data = examples(tmp_path)
    assert not any(exact_match(model, processor, data))
    before = {name: value.clone() for name, value in model.named_parameters()}
    adapter = train_lora(model, processor, data, LoraSettings(rank=8, epochs=30, batch_size=4))
    assert all(exact_match(adapter, processor, data))
    adapted = [name for name, _ in adapter.named_parameters() if "lora_" in name]
    assert adapted and all("language_model" in name and "visual" not in name for name in adapted)
    base = {n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in adapter.named_parameters()}
    assert all(torch.equal(base[name], value) for name, value in before.items())


def test_the_vision_tower_is_trained_where_asked(processor: Any, model: Any, tmp_path: Path) -> None:
    data = examples(tmp_path)
    settings = LoraSettings(rank=4, steps=3, batch_size=4, tower=True)
    with pytest.raises(ConfigError, match="features of the base model's vision tower"):
        train_lora(model, processor, Prepared(model, processor, data), settings)
    before = {name: value.clone() for name, value in model.named_parameters()}
    adapter = train_lora(model, processor, Prepared(model, processor, data, tower=True), settings)
    learnt = {name for name, value in adapter.named_parameters() if "lora_B" in name and value.any()}
    for part in ("language_model", "visual.blocks.0.attn.qkv", "visual.merger.mlp.2"):
        assert any(part in name for name in learnt), part
    base = {n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in adapter.named_parameters()}
    assert all(torch.equal(base[name], value) for name, value in before.items())
    said = exact_match(adapter, processor, data)
    with pytest.raises(ConfigError, match="features of the base model's vision tower"):
        exact_match(adapter, processor, Prepared(adapter.get_base_model(), processor, data))
    save_adapter(adapter, tmp_path / "saved")
    modules = read_adapter(tmp_path / "saved").modules
    assert {is_tower(name) for name in modules} == {True, False}
    assert exact_match(load_adapter(adapter.unload(), tmp_path / "saved"), processor, data) == said


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl"])
def test_every_linear_of_a_tower_and_its_projector_is_trained(family: str) -> None:
    with torch.device("meta"):
        model: Any = tiny_model(family)
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    outside = [path for path in linears if "language_model" not in path and path != "lm_head"]
    assert tower_linears(model) == outside and len(outside) > 8


@pytest.mark.parametrize("family", ["mistral3", "gemma3", "qwen2"])
def test_towers_whose_adapters_are_not_served_are_not_trained(family: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="are not served"):
        tower_linears(tiny_model(family))  # type: ignore[arg-type]


def test_a_tower_that_starts_after_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="tower does not go with activate"):
        LoraSettings(tower=True, activate=AFTER_IMAGE)


def test_exact_match_is_what_greedy_generation_says(processor: Any, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "blank.png"
    Image.new("RGB", (112, 112), (20, 20, 20)).save(path)
    text = processor.apply_chat_template(chat("What pattern has the background?", 1), add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.open(path)], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    said = processor.tokenizer.decode(out, skip_special_tokens=True)
    right = Example((path,), "What pattern has the background?", said)
    wrong = Example((path,), "What pattern has the background?", said + " no")
    assert exact_match(model, processor, [right, wrong]) == [True, False]


def test_heads_learn_with_the_adapter_and_are_the_same_when_read_back(
    processor: Any, model: Any, tmp_path: Path
) -> None:
    data = [
        Example(
            e.images, e.question, e.answer, boxes=((e.answer, (0.25, 0.25, 0.5, 0.75)),) if e.answer == "grass" else ()
        )
        for e in examples(tmp_path)
    ]
    width = model.config.text_config.hidden_size
    torch.manual_seed(0)  # heads start from random weights
    heads = [ClassifyHead("material", width, ["grass", "brick"]), DetectHead("find", width, ["grass", "brick"])]
    untrained = head_accuracy(model, processor, heads[1], data)
    adapter = train_lora(model, processor, data, LoraSettings(rank=8, epochs=60, batch_size=4), heads=heads)
    assert all(exact_match(adapter, processor, data))
    assert [head_accuracy(adapter, processor, head, data) for head in heads] == [1.0, 1.0] and untrained < 0.5
    save_adapter(adapter, tmp_path / "saved", heads, prompt=data[0].question)
    written = [head_answers(adapter, processor, head, data) for head in heads]
    base = adapter.unload()
    loaded = load_adapter(base, tmp_path / "saved")
    again = load_heads(tmp_path / "saved", width)
    for head, before in zip(heads, written, strict=True):
        after = head_answers(loaded, processor, again[head.name], data)
        for a, b in zip(after, before, strict=True):
            assert a.get("label") == b.get("label") and len(a.get("boxes", [])) == len(b.get("boxes", []))


@torch.no_grad()
def test_training_features_are_those_of_serving(processor: Any, model: Any, tmp_path: Path) -> None:
    """Serving sees prompts without answers, one after the other without padding, and runs ``run_heads``."""
    data = [*examples(tmp_path), Example((tmp_path / "grass0.png",), "What?", "gravel")]
    width = model.config.text_config.hidden_size
    heads = [ClassifyHead("material", width, ["grass", "brick"]), DetectHead("find", width, ["grass", "brick"])]
    encoded = Encoded(processor, data)
    inputs, _ = encoded.batch(range(len(data)), "cpu")
    with hidden_states(model) as seen:
        model(**inputs)
        ours = [
            raw_outputs(head, seen[0], inputs["input_ids"], encoded.prompt_lengths, model.config.image_token_id)
            for head in heads
        ]
        flat, requests = [], []
        for example in data:
            text = processor.apply_chat_template(chat(example.question, 1), add_generation_prompt=True)
            prompt = processor(text=[text], images=example.load_images(), return_tensors="pt")
            model(**prompt)
            flat.append(seen[0][0])
            first = int((prompt["input_ids"][0] == model.config.image_token_id).nonzero()[0])
            requests.append([HeadRequest(head, ((first, first + 16, Grid(4, 4, 28)),)) for head in heads])
    for number in range(len(heads)):
        asked = [one[number] for one in requests]
        results = run_heads(torch.cat(flat), [(0, len(rows)) for rows in flat], list(enumerate(asked)), asked)
        assert results.raw is not None
        torch.testing.assert_close(
            torch.cat([raw.flatten() for raw in ours[number]]), results.raw, atol=2e-4, rtol=1e-4
        )


def test_a_head_that_starts_from_answers_is_right_where_decoding_is(
    processor: Any, model: Any, tmp_path: Path
) -> None:
    from tools.tiny import scenes

    head = ClassifyHead("pattern", model.config.text_config.hidden_size, list(scenes.PATTERNS))
    assert start_from_answers(head, model, processor.tokenizer)
    path = tmp_path / "blank.png"
    Image.new("RGB", (112, 112), (20, 20, 20)).save(path)
    data = [Example((path,), "What pattern has the background?", "plain")]
    assert exact_match(model, processor, data) == [True]
    assert head_answers(model, processor, head, data)[0]["label"] == "plain"
    alike = ClassifyHead("x", model.config.text_config.hidden_size, ["left of", "left to"])
    assert not start_from_answers(alike, model, processor.tokenizer)


@pytest.mark.parametrize(("trained", "kept"), [(0.95, False), (1.0, True)])
def test_trained_head_weights_stay_only_where_better_by_more_than_chance(
    processor: Any, model: Any, monkeypatch: pytest.MonkeyPatch, trained: float, kept: bool
) -> None:
    from tools.tiny import scenes
    from vlora_sgl.generate import trainer

    accuracies = iter((trained, 0.9))  # of the trained head and of the LM head's rows, on 100 examples
    monkeypatch.setattr(trainer, "head_accuracy", lambda *_: next(accuracies))
    head = ClassifyHead("pattern", model.config.text_config.hidden_size, list(scenes.PATTERNS))
    before = head.linear.weight.detach().clone()
    found = trainer.keep_better_start(head, model, processor, [Example((), "q", "plain")] * 100)
    assert found == {"trained": trained, "start": 0.9, "kept": kept}
    assert torch.equal(head.linear.weight, before) is kept


def test_what_a_head_cannot_answer_is_refused(tmp_path: Path) -> None:
    picture = (tmp_path / "a.png",)
    with pytest.raises(ConfigError, match="no label of head"):
        target(ClassifyHead("c", 8, ["cat"]), Example(picture, "q", "dog"))
    with pytest.raises(ConfigError, match="counts"):
        target(CountHead("n", 8, 5), Example(picture, "q", "many"))
    boxed = Example(picture, "q", "a", (("dog", (0.0, 0.0, 0.5, 0.5)),))
    with pytest.raises(ConfigError, match="boxes labelled"):
        target(DetectHead("d", 8, ["cat"]), boxed, [Grid(4, 4, 28)])
    with pytest.raises(ConfigError, match="one image"):
        target(DetectHead("d", 8, ["dog"]), boxed, [Grid(4, 4, 28)] * 2)
    found = target(DetectHead("d", 8, ["dog"]), boxed, [Grid(4, 8, 28)])
    assert isinstance(found, Boxes) and found.boxes.tolist() == [[0, 0, 112, 56]]


@torch.no_grad()
def test_an_adapter_after_the_image_leaves_the_image_to_the_base(processor: Any, model: Any, tmp_path: Path) -> None:
    data = examples(tmp_path)
    encoded = Encoded(processor, data)
    inputs, _ = encoded.batch(range(len(data)), "cpu")
    with hidden_states(model) as seen:
        model(**inputs)
        base = seen[0].clone()
    with torch.enable_grad():
        settings = LoraSettings(rank=8, epochs=40, batch_size=4, activate=AFTER_IMAGE)
        adapter = train_lora(model, processor, data, settings)
    assert all(exact_match(adapter, processor, data))
    with hidden_states(adapter) as seen:
        adapter(**inputs)
        changed = (seen[0] - base).abs().amax(-1) > 1e-3
    runs = after_image(inputs["input_ids"], model.config.image_token_id)
    assert not changed[~runs].any() and changed[runs & (inputs["attention_mask"] == 1)].all()
    # The same tokens that serving gives to the adapter, whose invocation start is the end of the last image.
    for row, ids in zip(runs, inputs["input_ids"], strict=True):
        start = int((ids == model.config.image_token_id).nonzero()[-1]) + 1
        assert split_row("x", 0, len(ids), start) == [(None, int((~row).sum())), ("x", int(row.sum()))]
    save_adapter(adapter, tmp_path / "saved", activate=AFTER_IMAGE)
    assert all(exact_match(load_adapter(adapter.unload(), tmp_path / "saved"), processor, data))


def test_text_and_decoded_tokens_run_with_an_adapter_that_starts_after_the_image() -> None:
    assert after_image(torch.tensor([[5, 9, 9, 7], [9, 5, 9, 7], [1, 2, 3, 4]]), 9).tolist() == [
        [False, False, False, True],
        [False, False, False, True],
        [True, True, True, True],
    ]


@torch.no_grad()
def test_remembered_images_change_nothing(processor: Any, model: Any, tmp_path: Path) -> None:
    data = Encoded(processor, examples(tmp_path))
    assert RememberedImages.possible(model, data.rows)
    images = RememberedImages(model, data.rows)
    inputs, _ = data.batch([2, 0], "cpu")
    expected = model(**inputs).logits
    with images.of([2, 0]):
        inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        assert torch.equal(model(**inputs).logits, expected)
    assert not torch.equal(model(**inputs).logits, expected)


@torch.no_grad()
def test_prepared_examples_keep_features_in_place_of_pixels(processor: Any, model: Any, tmp_path: Path) -> None:
    inputs, labels = Encoded(processor, examples(tmp_path)).batch([2, 0], "cpu")
    data = Prepared(model, processor, examples(tmp_path))
    assert {row["pixel_values"].untyped_storage().nbytes() for row in data.data.rows} == {4}
    slim, same = data.batch([2, 0], "cpu")
    assert torch.equal(labels, same) and slim["pixel_values"].shape == inputs["pixel_values"].shape
    expected = model(**inputs).logits
    with data.seen([2, 0]):
        assert torch.equal(model(**slim).logits, expected)
    assert not torch.equal(model(**slim).logits, expected), "pictures decide"


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="after_image"):
        LoraSettings(activate="later")
