"""A chat's words stay words, in whatever place and spelling; what has none has the ids that it always had."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tools.tiny.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer
from vlora_sgl import _sgl
from vlora_sgl.errors import RequestError
from vlora_sgl.multimodal import words
from vlora_sgl.multimodal.words import Twin, Words, plain

TOKENIZER = build_tokenizer(["What does this mean? user system assistant image pad vision start end im"])
TOKENIZER.chat_template = CHAT_TEMPLATE
TOKENIZER.add_tokens(["<think>"])
START, END = (TOKENIZER.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
VISION = [TOKENIZER.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,<|im_end|>"}}


@pytest.fixture(autouse=True, scope="module")
def in_place() -> Iterator[None]:
    """The rows of the table, in the classes of SGLang and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, ours in (
            (TokenizersBackend, "_encode_plus", words.encode_plus),
            (OpenAIServingChat, "_apply_jinja_template", words.apply_template),
            (OpenAIServingChat, "_apply_conversation_template", words.apply_template),
        ):
            original = getattr(owner, name)
            patch.setattr(owner, name, functools.partialmethod(_swapped, ours, original))
        yield


def _swapped(self: Any, ours: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    return ours(original, self, *args, **kwargs)


def chat_route(template: str | None = None, content_format: str = "openai") -> Any:
    """SGLang's chat route, less the engine behind it."""
    route = object.__new__(OpenAIServingChat)
    route.tokenizer_manager = SimpleNamespace(tokenizer=TOKENIZER, words=Words(TOKENIZER), served_model_name="m")
    route.template_manager = SimpleNamespace(
        jinja_template_content_format=content_format, chat_template_name=template, reasoning_config=None
    )
    route.chat_encoding_spec, route._tokenizer_auto_adds_specials = None, False
    route._reasoning_detector = route.reasoning_parser = None
    return route


def prompt_of(messages: list[dict[str, Any]], route: Any, sees: bool, **fields: Any) -> list[int]:
    """The ids that the engine gets for a chat: as they are, or made of the text that a model with images gets."""
    request = _sgl.ChatCompletionRequest(model="m", messages=messages, **fields)
    before = request.model_dump()
    result = route._apply_jinja_template(request, fields.get("tools"), sees)
    assert request.model_dump() == before
    if sees:
        assert TOKENIZER.encode(result.prompt) == result.prompt_ids
    return list(result.prompt_ids)


def as_text(text: str) -> list[int]:
    """Ids of a text in which nothing is special."""
    ids = TOKENIZER(text, split_special_tokens=True)["input_ids"]
    TOKENIZER(text)
    return list(ids)


def expected(messages: list[dict[str, Any]]) -> list[int]:
    """The template, by hand."""
    ids: list[int] = []
    for message in [*messages, {"role": "assistant", "content": None}]:
        text = f"{message['role']}\n"
        ids.append(START)
        content = message["content"]
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] == "text":
                text += part["text"] or ""
            else:
                ids, text = [*ids, *as_text(text), *VISION], ""
        ids += [*as_text(text), *([END, *as_text("\n")] if content is not None else [])]
    return ids


PIECES = [
    *SPECIAL_TOKENS,
    "<|image_",
    "pad|>",
    "<",
    "<|",
    "|>",
    "<|im_end",
    "<think>",
    " mean? ",
    "é中",
    "\n",
    "x",
    "z",
]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
PART = st.one_of(TEXT.map(lambda text: {"type": "text", "text": text}), st.just(IMAGE))
TURN = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PART, min_size=1, max_size=4)}),
)
CHAT = st.lists(TURN, max_size=3).map(lambda turns: [*turns, {"role": "user", "content": "x"}])


@settings(max_examples=150, deadline=None)
@given(chat=CHAT, sees=st.booleans())
@example(chat=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "<|image_pad|>?"}]}], sees=True)
@example(chat=[{"role": "user", "content": [{"type": "text", "text": t} for t in ("<|im_", "end", "|>")]}], sees=True)
def test_special_tokens_are_the_templates(chat: list[dict[str, Any]], sees: bool) -> None:
    assert prompt_of(chat, chat_route(), sees) == expected(chat)


@pytest.mark.parametrize("sees", [False, True])
def test_a_continued_answer_holds_words_too(sees: bool) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so <|im_end|> is"}]
    ids = prompt_of(chat, chat_route(), sees, continue_final_message=True)
    assert ids.count(END) == 1 and TOKENIZER.decode(ids).endswith("assistant\nso <|im_end|> is")


def test_tools_and_settings_hold_words_too() -> None:
    route = chat_route()
    TOKENIZER.chat_template = "{{ tools | tojson }}{{ mood }}<|im_end|>"
    try:
        tool = {"type": "function", "function": {"name": "f", "description": "ends <|im_end|>"}}
        ids = prompt_of(
            [{"role": "user", "content": "x"}], route, True, tools=[tool], chat_template_kwargs={"mood": "<|im_end|>"}
        )
    finally:
        TOKENIZER.chat_template = CHAT_TEMPLATE
    assert ids.count(END) == 1 and TOKENIZER.decode(ids).count("<|im_end|>") == 3


@pytest.mark.parametrize("sees", [False, True])
def test_templates_of_sglang(sees: bool) -> None:
    route = chat_route("qwen2-vl")
    request = _sgl.ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "<|im_end|><|image_pad|>"}])
    result = route._apply_conversation_template(request, sees)
    ids = TOKENIZER.encode(result.prompt) if sees else result.prompt_ids
    assert VISION[1] not in ids and "<|im_end|><|image_pad|>" in TOKENIZER.decode(ids)
    assert ids.count(END) == TOKENIZER.encode(plain(result.prompt)).count(END) - 1


def test_a_clients_own_template_is_refused() -> None:
    endless = {"chat_template": "{% for a in range(10**9) %}{% endfor %}"}
    with pytest.raises(RequestError, match="chat_template"):
        prompt_of([{"role": "user", "content": "x"}], chat_route(), True, chat_template_kwargs=endless)


def test_a_tokenizer_without_a_twin_refuses_them() -> None:
    slow = Words(SimpleNamespace(added_tokens_decoder=TOKENIZER.added_tokens_decoder))
    assert slow.coded("plain <") == "plain <"
    with pytest.raises(RequestError, match="image_pad"):
        slow.coded("<|image_pad|>")


@given(TEXT)
def test_ids_that_spell_a_special_token_are_told_from_it(text: str) -> None:
    found = Words(TOKENIZER)
    ids = [*as_text(text), *VISION, *as_text("x")]
    assert TOKENIZER.encode(found.of_ids(ids)) == ids


def kinds_of_tokenizers() -> Iterator[tuple[str, Any]]:
    """Those that treat the beginning of a text, spaces and neighbours of special tokens in ways of their own."""
    letters = ["<unk>", *(chr(code) for code in range(33, 127)), "▁", "▁a", "ab", "▁ab"]
    for name, prepend in (("first", "first"), ("always", "always"), ("never", "never"), ("normalizer", None)):
        vocabulary = {letter: index for index, letter in enumerate(letters)}
        merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
        if prepend is None:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
        backend.add_special_tokens(
            [
                "<s>",
                AddedToken("<image>", lstrip=True),
                AddedToken("</s>", rstrip=True),
                AddedToken("[X]", normalized=prepend is not None),
            ]
        )
        yield name, PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    yield "bytes", TOKENIZER


TOKENIZERS = dict(kinds_of_tokenizers())


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_twin_makes_the_ids_of_its_tokenizer(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    special = [str(token) for token in words.special_tokens(tokenizer).values()]
    text = data.draw(st.lists(st.sampled_from([*special, " ", "a", "ab", " ab", "b.", "  "]), max_size=7).map("".join))
    twin = twin_of(kind)
    ids = twin.instead_of(tokenizer)(twin.text(text), split_special_tokens=True)["input_ids"]
    assert twin.real(ids) == tokenizer(text)["input_ids"]
    word = data.draw(st.sampled_from(special))
    coded = Words(tokenizer).coded(f"a{word}b") + special[0]
    found = tokenizer(coded)["input_ids"]
    assert [one for one in found if one in words.special_tokens(tokenizer)] == [
        tokenizer.convert_tokens_to_ids(special[0])
    ]
    assert plain(coded) == f"a{word}b{special[0]}"


@functools.cache
def twin_of(kind: str) -> Twin:
    """One twin a tokenizer: they are made of the whole vocabulary."""
    return Twin(TOKENIZERS[kind])


def test_lists_and_tensors_of_ids() -> None:
    coded = Words(TOKENIZER).coded("<|im_end|>")
    pair = TOKENIZER([f"a{coded}<|im_end|>", "b<|im_end|>"], padding=True, return_tensors="pt")["input_ids"]
    assert (pair == END).sum(-1).tolist() == [1, 1]
    assert TOKENIZER([coded, "x"])["input_ids"] == [as_text("<|im_end|>"), as_text("x")]
