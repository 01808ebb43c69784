"""The one gate of requests: every field's type, range and fit, checked where all routes come together.

SGLang checks a request's types only where a route has a schema, and the scheduler trusts what reaches it: a wrong type
there ends the server. ``check_request`` looks at SGLang's own request objects, which every route (``/generate``,
OpenAI's, Anthropic's, Ollama's, ours) and ``Engine`` build, before anything else reads them.

A test holds the tables against SGLang's classes: a field that a new release adds has no entry, and fails it.
"""

from __future__ import annotations

import dataclasses
import re
import re._constants as op
import re._parser as regex_parser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import GenerateReqInput
from vlora_sgl.combined import FORM, are_scales, is_combined, parts, written
from vlora_sgl.errors import RequestError
from vlora_sgl.managers.checks import (
    ANYTHING,
    BOOLEAN,
    NOTHING,
    Check,
    integer,
    json_value,
    list_of,
    number,
    one_of,
    shown,
    string,
    table_of,
    token_ids,
)

INT32, INT64 = 2**31 - 1, 2**63 - 1
NAME = string(1024)
ADAPTER = Check(
    f"an adapter's name, {NAME.expects}, or of several as one {FORM}",
    lambda value: _is_adapter(value),
)
MAX_BATCH = 4096
"""Prompts that one request may hold."""

BOOLEANS = (
    *("stream", "use_audio_in_video", "return_text_in_logprobs", "return_flat_raw_top_logprobs", "log_metrics"),
    *("return_flat_raw_top_logprobs_b64", "return_routed_experts", "return_indexer_topk", "background", "no_logs"),
    *("require_reasoning", "return_bytes", "return_entropy", "return_prompt_token_ids", "is_cross_encoder_request"),
    "return_pooled_hidden_states",
)
INTERNAL = (
    *("positional_embed_overrides", "embed_overrides", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank", "http_worker_ipc", "encoder_urls"),
    *("need_wait_for_mm_inputs", "num_items_assigned", "mm_data_mooncake"),
)
"""Fields that SGLang's own processes write for each other."""

MEDIA = ("image_data", "video_data", "audio_data")
LONG_REPEAT = 64
"""A stop expression may repeat one thing more often than this, and no second one."""

STOP_CHARS = 1 << 14
"""Characters of all stops of a request together: they are looked for after every token."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        vocabulary: token ids are below it.
        context: tokens of a prompt.
        text_chars: characters of a prompt's text.
        n: answers to one prompt.
        top_logprobs: alternatives per token.
        images: images, videos and sounds of one prompt, each kind by itself.
        videos: whether videos can be decoded here.
        labels: names that ``custom_labels`` may have: those of the metrics; ``None`` where nothing is measured.
    """

    vocabulary: int
    context: int
    text_chars: int
    n: int = 128
    top_logprobs: int = 128
    images: int = 64
    videos: bool = True
    labels: frozenset[str] | None = None


@dataclass(frozen=True)
class _Field:
    """How one field of a request is checked.

    Attributes:
        check: what one prompt's value must be.
        batched: a batch may give a list with one entry a prompt.
        shared: such a list may also be what ``check`` takes, for every prompt.
        alone: what a request of a single prompt may have instead.
    """

    check: Check
    batched: bool = False
    shared: bool = False
    alone: Check | None = None


def _is_encoded(value: object) -> bool:
    """Whether a video would have to be decoded: a file, an address or bytes, as such or in an object."""
    inner = value.get("url", value.get("data")) if isinstance(value, dict) else getattr(value, "url", value)
    return isinstance(inner, str | bytes)


_MEDIUM = Check(
    "an image (or video, or sound) or a list of them",
    lambda value: isinstance(value, str | bytes | dict) or not isinstance(value, bool | int | float | list),
)
_DECODED = Check(
    "frames or features: videos cannot be decoded here, which torchcodec or decord would do",
    lambda value: not isinstance(value, bool | int | float | list) and not _is_encoded(value),
)


def _media(one: Check, most: int) -> _Field:
    """A prompt's images, videos or sounds, ``one`` of which is checked so."""
    several = list_of(one, most)
    # SGLang takes a prompt that gets several answers for a batch of one.
    return _Field(one | several, batched=True, alone=list_of(several, 1, 1))


def _fields(limits: Limits) -> dict[str, _Field]:
    """The table for both of SGLang's request classes."""
    text = _Field(NAME)
    ids = token_ids(limits.vocabulary, limits.context)
    rows = list_of(number(-3e38, 3e38), 1 << 16, 1)
    return {
        "rid": _Field(NAME, batched=True),
        "session_id": text,
        "text": _Field(string(limits.text_chars) | list_of(string(limits.text_chars), 2), batched=True),
        "input_ids": _Field(ids, batched=True),
        "input_embeds": _Field(list_of(rows, limits.context, 1), batched=True),
        **dict.fromkeys(MEDIA, _media(_MEDIUM, limits.images)),
        **({} if limits.videos else {"video_data": _media(_DECODED, limits.images)}),
        "mm_hashes": _Field(ANYTHING),  # taken out: clients do not say what an image is
        "sampling_params": _Field(ANYTHING),  # has a table of its own
        "return_logprob": _Field(BOOLEAN, batched=True),
        "logprob_start_len": _Field(integer(-1, INT32), batched=True),
        "top_logprobs_num": _Field(integer(0, limits.top_logprobs), batched=True),
        "token_ids_logprob": _Field(ids | list_of(ids, 0), batched=True, shared=True),
        "return_sampling_mask": _Field(BOOLEAN, batched=True),
        "return_hidden_states": _Field(BOOLEAN | one_of(("last", "full")), batched=True),
        "routed_experts_start_len": _Field(integer(0, INT32)),
        "modalities": _Field(list_of(one_of(("image", "multi-images", "video", "audio")), MAX_BATCH), batched=True),
        "session_params": _Field(json_value(64), batched=True),
        "lora_path": _Field(ADAPTER, batched=True),
        "lora_id": _Field(ANYTHING),  # overwritten: names alone choose adapters
        "custom_logit_processor": _Field(string(1 << 20), batched=True),
        "routed_dp_rank": _Field(integer(0, 1 << 16)),
        **dict.fromkeys(("routing_key", "conversation_id"), text),
        "max_thinking_tokens": _Field(integer(0, INT32)),
        "priority": _Field(integer(-INT32, INT32)),
        "extra_key": _Field(string(1 << 16), batched=True),
        "custom_labels": _Field(_labels(limits.labels)),
        "external_trace_header": _Field(table_of(string(1 << 13), 64)),
        "received_time": _Field(number(0, 1e18)),
        **dict.fromkeys(
            ("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
            _Field(integer(1, 1 << 10)),
        ),
        "images_config": _Field(json_value(256)),
        "multi_item_delimiter_indices": _Field(list_of(integer(0, INT32), limits.context), batched=True),
        "dimensions": _Field(integer(1, 1 << 20)),
        "embed_override_token_id": _Field(integer(0, limits.vocabulary - 1)),
        **dict.fromkeys(BOOLEANS, _Field(BOOLEAN)),
        **dict.fromkeys(INTERNAL, _Field(NOTHING)),
    }


def _labels(known: frozenset[str] | None) -> Check:
    """The check of ``custom_labels``: the metrics raise for one that they do not have, in the middle of a step."""
    values = table_of(NAME, 64)
    if known is None:
        return values
    names = ", ".join(sorted(known)) or "none"
    return Check(
        f"{values.expects}, with names of --tokenizer-metrics-allowed-custom-labels ({names})",
        lambda value: values.fits(value) and known.issuperset(value),  # type: ignore[arg-type]
    )


def _sampling(limits: Limits) -> dict[str, Check]:
    """The table for ``sampling_params``; SGLang's own ``verify`` checks how they go together."""
    words = string(1 << 12, 1)
    grammar = string(1 << 18)
    return {
        "max_new_tokens": integer(0, INT32),
        "min_new_tokens": integer(0, INT32),
        "stop": words | list_of(words, 256),
        "stop_token_ids": list_of(integer(0, INT32), 4096),
        "stop_regex": words | list_of(words, 64),
        "temperature": number(0, 1e6),
        "top_p": number(0, 1),
        "top_k": integer(-1, INT32),
        "min_p": number(0, 1),
        "frequency_penalty": number(-2, 2),
        "presence_penalty": number(-2, 2),
        "repetition_penalty": number(0, 2),
        "n": integer(1, limits.n),
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), grammar),
        **dict.fromkeys(
            ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), BOOLEAN
        ),
        "stream_interval": integer(1, INT32),
        "logit_bias": table_of(number(-1e6, 1e6), 4096),
        "sampling_seed": integer(-INT64, INT64),
        "custom_params": table_of(json_value(1024), 256),
    }


class RequestGate:
    """Checks requests against limits; one per front of an engine.

    Args:
        limits: what one request may ask for.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._fields = _fields(limits)
        self._sampling = _sampling(limits)
        self._defaults: dict[type, dict[str, object]] = {}

    def check(self, request: GenerateReqInput) -> None:
        """Check a request as it came, before SGLang normalises it. A list of one adapter is, for one prompt, that one;
        several adapters as one, with their scales, become their text; one id for several prompts becomes one of each.

        Raises:
            RequestError: names the field, what was expected and what came.
        """
        prompts = self._prompts(request)
        if prompts is None and isinstance(request.lora_path, list) and len(request.lora_path) == 1:
            request.lora_path = request.lora_path[0]
        for name, default in self._defaults_of(request).items():
            value = getattr(request, name)
            if value is None or value is default:
                continue
            field = self._fields.get(name, _Field(NOTHING))
            if name in MEDIA and prompts is not None and isinstance(request, _sgl.EmbeddingReqInput):
                self._check_is_list(name, value, prompts)  # SGLang would take the value's parts for it
            listed = field.batched and isinstance(value, list) and not (field.shared and field.check.fits(value))
            if listed and prompts is not None:
                self._check_list(name, field.check, value, prompts)
            elif prompts is not None or field.alone is None or not field.alone.fits(value):
                field.check.require(name, value)
        if request.lora_path is not None and not isinstance(request.lora_path, str):
            request.lora_path = _as_text(request.lora_path)
        if prompts is not None and isinstance(request, _sgl.EmbeddingReqInput) and isinstance(request.rid, str):
            # As of several prompts to generate from, where SGLang does so itself.
            request.rid = [f"{request.rid}_{i}" for i in range(prompts)]
        self._check_sampling(request.sampling_params, prompts)

    def _defaults_of(self, request: GenerateReqInput) -> dict[str, object]:
        kind = type(request)
        if kind not in self._defaults:
            fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # SGLang's requests are dataclasses
            self._defaults[kind] = {field.name: field.default for field in fields}
        return self._defaults[kind]

    @staticmethod
    def _prompts(request: GenerateReqInput) -> int | None:
        """How many prompts a request holds as a batch; ``None`` for a single one.

        Raises:
            RequestError: no prompt, or several kinds of prompts of different numbers.
        """
        counts: dict[str, int | None] = {}
        for name, depth in (("text", 0), ("input_ids", 1), ("input_embeds", 2)):
            value = getattr(request, name)
            if value is not None:
                counts[name] = len(value) if _nested(value, depth) else None
        if len(set(counts.values())) > 1:
            raise RequestError(f"prompts do not fit together: {counts} (None: a single prompt)")
        found = next(iter(counts.values()), None)
        if found is not None and not 0 < found <= MAX_BATCH:
            raise RequestError(f"a batch must hold 1 to {MAX_BATCH} prompts; got {found}")
        return found

    @staticmethod
    def _check_is_list(name: str, value: object, prompts: int) -> None:
        if not isinstance(value, list):
            raise RequestError(
                f"{name} must be a list with one entry for each of {prompts} prompts; got {shown(value)}"
            )

    @staticmethod
    def _check_list(name: str, check: Check, values: list[object], prompts: int) -> None:
        if len(values) != prompts:
            raise RequestError(f"{name} must have one entry for each of {prompts} prompts; got {len(values)}")
        for index, value in enumerate(values):
            if value is not None:
                check.require(f"{name}[{index}]", value)

    def _check_sampling(self, given: object, prompts: int | None) -> None:
        if isinstance(given, list) and prompts is not None:
            if len(given) != prompts:
                raise RequestError(
                    f"sampling_params must have one entry for each of {prompts} prompts; got {len(given)}"
                )
            for index, one in enumerate(given):
                self._check_one(one, f"sampling_params[{index}]")
        elif given is not None:
            self._check_one(given, "sampling_params")

    def _check_one(self, given: object, where: str) -> None:
        if given is None:
            return
        if not isinstance(given, dict):
            raise RequestError(f"{where} must be an object; got {shown(given)}")
        for name, value in given.items():
            check = self._sampling.get(name)
            if check is None:
                known = ", ".join(sorted(self._sampling))
                raise RequestError(f"{where} has no {shown(name)}; it has {known}")
            if value is not None:
                check.require(f"{where}.{name}", value)
        if (chars := sum(map(len, _texts(given.get("stop"))))) > STOP_CHARS:
            raise RequestError(f"{where}.stop must have at most {STOP_CHARS} characters together; got {chars}")
        for pattern in _texts(given.get("stop_regex")):
            check_stop_regex(pattern, where)
        for key in given.get("logit_bias") or ():
            if not (key.isdecimal() and int(key) < self.limits.vocabulary):
                raise RequestError(
                    f"{where}.logit_bias must have token ids below {self.limits.vocabulary} as keys; got {shown(key)}"
                )


def _is_adapter(value: object) -> bool:
    if not isinstance(value, str) or not is_combined(value):
        return are_scales(value) and all(map(NAME.fits, value)) if isinstance(value, Mapping) else NAME.fits(value)
    try:
        return all(NAME.fits(name) for name, _ in parts(value))
    except RequestError:
        return False


def _as_text(given: Any) -> Any:
    """Adapters as they passed the gate, several as one by their text."""
    if isinstance(given, list):
        return [_as_text(one) for one in given]
    return written(given) if isinstance(given, Mapping) else given


def _nested(value: object, depth: int) -> bool:
    """Whether a value is a list of lists, ``depth`` levels of them below the first."""
    for _ in range(depth):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    return isinstance(value, list)


def _texts(value: object) -> Iterable[str]:
    return [value] if isinstance(value, str) else value if isinstance(value, list) else ()


@lru_cache(maxsize=256)
def check_stop_regex(pattern: str, where: str) -> None:
    """Refuse a pattern that is none, or that takes more than quadratic time: it is matched after every token.

    Raises:
        RequestError: it cannot be compiled; or it refers back, repeats what repeats or branches itself, or has two
            repetitions of more than ``LONG_REPEAT``.
    """
    try:
        re.compile(pattern)
        long = sum(_repeats(regex_parser.parse(pattern), inside=False))
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"{where}.stop_regex must be a regular expression; {shown(pattern)}: {error}") from None
    if long > 1:
        raise RequestError(
            f"{where}.stop_regex must not refer back, nor repeat what repeats or branches itself, and have one "
            f"repetition of more than {LONG_REPEAT} at most; got {shown(pattern)}"
        )


def _repeats(pattern: Iterable[tuple[object, object]], inside: bool) -> Iterator[float]:
    """Of each repetition in a parsed pattern 1 if it is long, infinity if it may take exponential time."""
    for kind, value in pattern:
        repeat = kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
        if kind in (op.GROUPREF, op.GROUPREF_EXISTS) or (inside and (repeat or kind is op.BRANCH)):
            yield float("inf")
        elif repeat:
            yield float(value[1] > LONG_REPEAT)  # type: ignore[index]
        for part in _parts(value):
            yield from _repeats(part, inside or (repeat and value[1] > 1))  # type: ignore[index]


def _parts(value: object) -> Iterator[Iterable[tuple[object, object]]]:
    """The patterns inside one element of a parsed pattern."""
    if isinstance(value, regex_parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
