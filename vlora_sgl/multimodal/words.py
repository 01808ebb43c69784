"""A user's words are words: what a chat's text spells like a special token, or like an image's marker, is neither.

Templates, processors and tokenizers find special tokens and markers by their spelling, wherever it stands. So each
word of a chat that has such a spelling goes through them in a code, which nobody outside this process can write, and
is spelled out again where ids are made of the text: by a twin of the tokenizer that knows the template's special
tokens under other names, so that one pass gives the ids of both. Texts without such words are not touched.
"""

from __future__ import annotations

import copy
import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tokenizers import AddedToken, Tokenizer

from vlora_sgl import _sgl
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import RequestError

_SECRET = f"vlw{secrets.token_hex(12)}x"
_CODE = re.compile(_SECRET + "((?:[0-9a-f]{2})+)z")
_CODED: ContextVar[bool] = ContextVar("vlora_words_stay_coded", default=False)
"""Whether ids that are made now are only to be turned back into the text."""

NOT_WORDS = frozenset({"image_url", "video_url", "audio_url", "input_audio", "role", "type"})
"""Keys of a message whose values no template writes into the prompt."""

_twins: dict[object, Twin] = {}


class Words:
    """Finds the words of a chat that a tokenizer or processor would take for more.

    Args:
        tokenizer: of the model.
        markers: what a processor takes for a marker besides the tokenizer's special tokens (``markers.Markers``).
    """

    def __init__(self, tokenizer: Any, markers: Iterable[re.Pattern[str]] = ()) -> None:
        self._tokenizer, self._special_ids = tokenizer, special_tokens(tokenizer)
        special = sorted(map(str, self._special_ids.values()), key=len, reverse=True)
        spelled = [re.escape(word) for word in special]
        self._spelling = _any_of([*(pattern.pattern for pattern in markers), *spelled])
        self._special = _any_of(spelled)
        self._beginnings = {word[:length] for word in special for length in range(1, len(word))}
        self._longest = max(map(len, special), default=1) - 1
        self._firsts = frozenset(word[0] for word in special)
        fast = isinstance(tokenizer, _sgl.TokenizersBackend)
        self._has_twin = fast and isinstance(tokenizer.backend_tokenizer, Tokenizer)
        if self._has_twin:
            twin_of(tokenizer)  # takes a second for a large vocabulary, while the model loads

    def coded(self, text: str) -> str:
        """A text with a code for each such word, and for its end if a word might go on in what follows.

        Raises:
            RequestError: there are such words, and the model's tokenizer has no twin.
        """
        found = self._spelling.sub(lambda word: _code(word[0]), text)
        if found != text and not self._has_twin:
            word = next(self._spelling.finditer(text))[0]
            raise RequestError(f"this model's tokenizer cannot read {word!r} as words: leave it out")
        coded = found.find("z", found.rfind(_SECRET) + len(_SECRET)) + 1 if found != text else 0
        end = found[max(coded, len(found) - self._longest) :] if self._has_twin else ""
        if self._firsts.isdisjoint(end):
            return found
        begun = next((end[at:] for at in range(len(end)) if end[at:] in self._beginnings), "")
        return found[: len(found) - len(begun)] + _code(begun) if begun else found

    def coded_in(self, value: Any) -> Any:
        """The same for each text in a JSON value; what it had none in is the same object."""
        if isinstance(value, str):
            return self.coded(value)
        if isinstance(value, dict):
            found = {self.coded_in(k): v if k in NOT_WORDS else self.coded_in(v) for k, v in value.items()}
            return value if found == value else found
        if isinstance(value, list | tuple):
            each = type(value)(map(self.coded_in, value))
            return value if each == value else each
        return value

    def of_ids(self, ids: list[int]) -> str:
        """The text of token ids, coded: special tokens are those that are one id. (A marker may be text.)"""
        text = ""
        for is_special, run in itertools.groupby(ids, self._special_ids.__contains__):
            decoded = str(self._tokenizer.decode(list(run)))
            text += decoded if is_special else self._special.sub(lambda word: _code(word[0]), decoded)
        return text


class Twin:
    """A tokenizer that knows another's special tokens under names that nobody can write, and by no others.

    Args:
        tokenizer: a fast one of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = special_tokens(tokenizer)
        named = {index: f"<{_SECRET}{index}>" for index in special}
        self.lock = threading.Lock()
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # Not as special ones: those are what it is asked to split.
        self.backend.add_tokens([_renamed(token, named[index]) for index, token in special.items()])
        self.ids = {self.backend.token_to_id(name): index for index, name in named.items()}
        self._names = {str(token): named[index] for index, token in special.items()}
        spelled = sorted(self._names, key=len, reverse=True)
        self._found = re.compile("|".join([_CODE.pattern, *map(re.escape, spelled)]))

    def text(self, coded: str) -> str:
        """A coded text as this tokenizer reads it: the template's special tokens by name, words as they are."""
        return self._found.sub(lambda one: _word(one) if one[1] else self._names[one[0]], coded)

    def instead_of(self, tokenizer: Any) -> Any:
        """A tokenizer of transformers with the same settings and this backend."""
        twin = copy.copy(tokenizer)
        twin._tokenizer = self.backend
        return twin

    def real(self, ids: Any) -> Any:
        """Ids (a list, lists, or an array) with those of the special tokens, which have others here."""
        if isinstance(ids, list):
            return [self.real(one) if isinstance(one, list) else self.ids.get(one, one) for one in ids]
        for ours, theirs in self.ids.items():
            ids[ids == ours] = theirs
        return ids


def special_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """A tokenizer's special tokens by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {index: token for index, token in added.items() if token.special and str(token)}


def twin_of(tokenizer: Any) -> Twin:
    """A tokenizer's twin; its copies, which SGLang makes one of for each of its threads, have the same."""
    key = tokenizer.name_or_path or tokenizer, len(tokenizer)
    if key not in _twins:
        _twins[key] = Twin(tokenizer)
    return _twins[key]


def plain(text: str) -> str:
    """A text without codes."""
    return _CODE.sub(_word, text) if _SECRET in text else text


def encode_plus(original: Callable[..., Any], self: Any, text: Any, *args: object, **kwargs: object) -> Any:
    """Wraps ``TokenizersBackend._encode_plus``, by which fast tokenizers make ids: words are spelled out here."""
    texts = text if isinstance(text, list) else [text]
    if not any(isinstance(one, str) and _SECRET in one for one in texts) or _CODED.get():
        return original(self, text, *args, **kwargs)
    twin = twin_of(self)
    given: Any = [twin.text(one) if isinstance(one, str) else one for one in texts]
    with twin.lock:
        found = original(
            twin.instead_of(self),
            given if isinstance(text, list) else given[0],
            *args,
            **{**kwargs, "split_special_tokens": True},
        )
    found["input_ids"] = twin.real(found["input_ids"])
    return found


def apply_template(original: Callable[..., Any], self: Any, request: Any, *rest: Any) -> Any:
    """Wraps ``OpenAIServingChat``'s ways of making a prompt of messages: the words of all of them are coded.

    Args:
        self: SGLang's chat route.
        request: OpenAI's request; as it was afterwards.
        rest: the tools, for a template of the model's; whether the model sees.

    Raises:
        RequestError: a template of the client's own, which could run for ever; or see ``Words.coded``.
    """
    given = request.messages, request.chat_template_kwargs
    if "chat_template" in (given[1] or {}):
        raise RequestError("chat_template_kwargs must not hold chat_template: templates are the server's")
    words, sees = self.tokenizer_manager.words, bool(rest[-1])
    try:
        messages = [_coded_message(one, words) for one in given[0]]
        kwargs, others = words.coded_in(given[1]), words.coded_in(rest)
    except RecursionError:
        raise RequestError("messages and tools must not be nested so deeply") from None
    unchanged = all(one is before for one, before in zip(messages, given[0], strict=True))
    if self.chat_encoding_spec is not None or (unchanged and kwargs is given[1] and others is rest):
        return original(self, request, *rest)
    try:
        request.messages, request.chat_template_kwargs = messages, kwargs
        with _staying_coded(sees):  # SGLang makes ids of a text that a model with images gets, and a text of the ids
            result = original(self, request, *others)
    finally:
        request.messages, request.chat_template_kwargs = given
    if sees and result.prompt_ids:
        settings: JsonDict = {"add_special_tokens": False} if self._tokenizer_auto_adds_specials else {}
        result.prompt_ids = self.tokenizer_manager.tokenizer.encode(result.prompt, **settings)
    return result


def _coded_message(message: Any, words: Words) -> Any:
    if message.model_fields_set <= {"role", "content"} and not _has_words(message.content, words):
        return message  # as most are, and this is quick
    given = message.model_dump()
    coded = words.coded_in(given)
    return message if coded is given else type(message).model_validate(coded)


def _has_words(content: Any, words: Words) -> bool:
    if not isinstance(content, list):
        return bool(words.coded_in(content) != content)
    texts = (value for part in content for value in vars(part).values() if isinstance(value, str))
    return any(words.coded(text) != text for text in texts)


@contextmanager
def _staying_coded(coded: bool) -> Iterator[None]:
    token = _CODED.set(coded)
    try:
        yield
    finally:
        _CODED.reset(token)


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{one})" for one in patterns) or "(?!)")


def _code(word: str) -> str:
    return f"{_SECRET}{word.encode().hex()}z"


def _word(code: re.Match[str]) -> str:
    return bytes.fromhex(code[1]).decode()


def _renamed(token: AddedToken, name: str) -> AddedToken:
    same = {key: getattr(token, key) for key in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(name, special=False, **same)
