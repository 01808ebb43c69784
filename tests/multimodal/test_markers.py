"""As many images as markers, for the ways in which SGLang's processors describe markers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.multimodal.processors.base_processor import MultimodalSpecialTokens
from sglang.srt.multimodal.processors.internvl import InternVLProcessor

from tools.tiny.build import build_tokenizer
from vlora_sgl import _sgl
from vlora_sgl.errors import RequestError
from vlora_sgl.managers.tokenizer_manager import VLoraTokenizerManager
from vlora_sgl.multimodal.markers import Markers
from vlora_sgl.multimodal.words import Words, plain

TOKENIZER = build_tokenizer(["What does this mean?"])
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<image>", "<IMG_CONTEXT>", "<|image_1|>"]})
TOKENIZER.add_tokens(["[IMG]"])
IDS = {token: TOKENIZER.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|video_pad|>", "<IMG_CONTEXT>")}
OWN = SimpleNamespace(tokenizer=TOKENIZER)


def qwen() -> Any:
    """A marker of three tokens, of which the one in the middle may be there for every patch."""
    tokens = MultimodalSpecialTokens(
        image_token="<|vision_start|><|image_pad|><|vision_end|>",
        image_token_id=IDS["<|image_pad|>"],
        image_token_regex=re.compile(r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>"),
        video_token_id=IDS["<|video_pad|>"],
    )
    return SimpleNamespace(mm_tokens=tokens.build(OWN))


def internvl() -> Any:
    """A marker that is text, and places the missing ones itself."""
    assert hasattr(InternVLProcessor, _sgl.PLACES_MARKERS)
    found = SimpleNamespace(
        mm_tokens=MultimodalSpecialTokens(image_token="<image>", image_token_id=IDS["<IMG_CONTEXT>"]).build(OWN)
    )
    setattr(found, _sgl.PLACES_MARKERS, None)
    return found


def llava() -> Any:
    """One that says nothing of markers; the model's configuration has the token."""
    return SimpleNamespace(hf_config=SimpleNamespace(image_token_index=TOKENIZER.convert_tokens_to_ids("<image>")))


def numbered() -> Any:
    """An expression alone."""
    return SimpleNamespace(mm_tokens=MultimodalSpecialTokens(image_token_regex=re.compile(r"<\|image_\d+\|>")))


MARKER = {qwen: "<|vision_start|><|image_pad|><|vision_end|>", internvl: "<image>", llava: "<image>"}
MARKER[numbered] = "<|image_7|>"
WORDS = {make: Words(TOKENIZER, Markers(make(), TOKENIZER).patterns) for make in MARKER}
BARE = {qwen: "<|image_pad|>", internvl: "<IMG_CONTEXT>"}


def check(make: Any, text: str | None, images: int, ids: list[int] | None = None) -> Any:
    data = ["data:,"] * images or None
    request = SimpleNamespace(text=text, input_ids=ids, image_data=data, video_data=None, audio_data=None)
    Markers(make(), TOKENIZER).check(request, WORDS[make])
    return request


@pytest.mark.parametrize("make", MARKER)
def test_both_numbers_are_named(make: Any) -> None:
    for markers in range(3):
        for images in range(3):
            text = "a" + MARKER[make] * markers + "?"
            if markers == images or (make is internvl and markers < images):
                check(make, text, images)
                continue
            for given_ in ({"text": text}, {"text": None, "ids": TOKENIZER.encode(text)}):
                if make is numbered and "ids" in given_ and not images:
                    continue  # ids that say nothing but text, and no images: they are text
                with pytest.raises(RequestError, match=f"got {markers} and {images} images"):
                    check(make, images=images, **given_)


@pytest.mark.parametrize("make", BARE)
def test_a_place_outside_a_marker_is_refused(make: Any) -> None:
    for text, images in ((BARE[make], 0), (BARE[make], 1), (MARKER[make] + BARE[make], 1), (BARE[make] * 2, 1)):
        if make is internvl and (text, images) == (BARE[make], 1):
            continue  # what its chat template writes
        with pytest.raises(RequestError):
            check(make, text, images)


def test_a_place_that_a_template_writes_for_a_marker_becomes_one() -> None:
    request = check(internvl, "<IMG_CONTEXT>\nWhat is this? <IMG_CONTEXT>", 2)
    assert request.text == "<image>\nWhat is this? <image>"
    coded = WORDS[internvl].coded("what is <IMG_CONTEXT>?")
    request = check(internvl, "<IMG_CONTEXT>" + coded, 1)
    assert plain(request.text) == "<image>what is <IMG_CONTEXT>?", "a user's words stay words"


@pytest.mark.parametrize("make", MARKER)
@given(pieces=st.lists(st.sampled_from(["<", "|", "image", "_pad|>", "<image>", "<|image_3|>", "<IMG_CONTEXT>", " "])))
def test_a_users_words_hold_no_marker(make: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    coded = WORDS[make].coded(text)
    assert plain(coded) == text
    check(make, coded, 0)
    check(make, coded + MARKER[make], 1)


@pytest.mark.parametrize("make", MARKER)
def test_ids_that_spell_a_marker_reach_the_processor_as_words(make: Any) -> None:
    spelled = TOKENIZER(MARKER[make], split_special_tokens=True)["input_ids"]
    ids = [*TOKENIZER.encode(MARKER[make]), *spelled]
    if make in (internvl, numbered):
        return  # there, text is a marker
    request = check(make, None, 1, ids)
    assert plain(request.text) == MARKER[make] * 2 and request.text.count(MARKER[make]) == 1


def test_preprocessed_images_and_models_that_do_not_see_are_let_be() -> None:
    request = SimpleNamespace(text="x", input_ids=None, image_data=[{"format": "processor_output"}], video_data=None)
    Markers(qwen(), TOKENIZER).check(request, WORDS[qwen])
    Markers(None, TOKENIZER).check(SimpleNamespace(text="<|image_pad|>", image_data=None), WORDS[qwen])
    Markers(qwen(), None).check(SimpleNamespace(text="<|image_pad|>", image_data=None), WORDS[qwen])


def test_prompts_that_are_tokenized_together_are_checked_one_by_one() -> None:
    manager: Any = VLoraTokenizerManager.__new__(VLoraTokenizerManager)
    manager.is_generation, manager.markers, manager.words = True, Markers(qwen(), TOKENIZER), WORDS[qwen]
    batch = GenerateReqInput(text=["What?", MARKER[qwen]], sampling_params={})
    batch.normalize_batch_and_arguments()
    with pytest.raises(RequestError, match="got 1 and 0 images"):
        manager._validate_batch_tokenization_constraints(2, batch)
