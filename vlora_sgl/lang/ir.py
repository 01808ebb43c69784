"""The nodes our programs add to SGLang's: adapters, images by content, video frames, typed and head answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from enum import Enum
from types import TracebackType
from typing import Final, Literal

from vlora_sgl.combined import written
from vlora_sgl.core import AdapterId
from vlora_sgl.errors import Location
from vlora_sgl.lang._upstream import ChoicesSamplingMethod, SglExpr, SglGen, SglSelect
from vlora_sgl.lang.media import ImageSource, VideoSource


class _Inherit(Enum):
    INHERIT = "the adapter in force"


INHERIT: Final = _Inherit.INHERIT
"""Stands for "whatever adapter is in force", because None already means the base model."""

AdapterChoice = AdapterId | Literal[_Inherit.INHERIT]

Adapters = AdapterId | Mapping[str, float]
"""A loaded adapter, several as one with a scale for each, or the base model."""

AMBIENT: ContextVar[AdapterChoice] = ContextVar("vlora_ambient_adapter", default=INHERIT)
"""The adapter of the innermost ``with vlora.adapter(...)`` block around the statement being appended."""


def effective(choice: AdapterChoice, fallback: AdapterId) -> AdapterId:
    """The adapter meant by a choice: itself, else that of the ``with`` block around, else ``fallback``."""
    chosen = AMBIENT.get() if choice is INHERIT else choice
    return fallback if chosen is INHERIT else chosen


class SglAdapter(SglExpr):
    """Use an adapter for what follows: appended to a state, or as a ``with`` block around statements."""

    def __init__(self, name: Adapters) -> None:
        super().__init__()
        self.name: AdapterId = written(name) if isinstance(name, Mapping) else name
        self._tokens: list[Token[AdapterChoice]] = []

    def __enter__(self) -> SglAdapter:
        self._tokens.append(AMBIENT.set(self.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        AMBIENT.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"Adapter({self.name!r})"


class SglImages(SglExpr):
    """One image, or the frames sampled from a video, at this place of the prompt."""

    def __init__(self, source: ImageSource | VideoSource, num_frames: int | None = None) -> None:
        super().__init__()
        self.source = source
        self.num_frames = num_frames

    def __repr__(self) -> str:
        name = self.source if isinstance(self.source, str) else type(self.source).__name__
        return f"Image({name})" if self.num_frames is None else f"Video({name}, {self.num_frames} frames)"


class SglTypedGen(SglGen):
    """A generation by a given adapter whose text becomes a typed value.

    Args:
        convert: makes the variable's value of the generated text; a ValueError it raises is the program's error.
    """

    def __init__(
        self,
        name: str | None,
        *,
        adapter: AdapterChoice,
        convert: Callable[[str], object] | None,
        kind: str = "Gen",
        **sampling: object,
    ) -> None:
        super().__init__(name, **sampling)
        self.adapter = adapter
        self.convert = convert
        self.kind = kind

    def __repr__(self) -> str:
        return f"{self.kind}({self.name!r})"


class SglTypedSelect(SglSelect):
    """A choice by a given adapter; the variable's value is made of the decision and its scores."""

    def __init__(
        self,
        name: str | None,
        choices: Sequence[str],
        choices_method: ChoicesSamplingMethod,
        *,
        adapter: AdapterChoice,
        label: bool = False,
    ) -> None:
        super().__init__(name, list(choices), 0.0, choices_method)
        self.adapter = adapter
        self.label = label


class SglHead(SglExpr):
    """An answer by a vision head of the adapter: one prefill pass, no decoding (V-LoRA, section 4.2.2)."""

    def __init__(
        self,
        name: str | None,
        head: str,
        task: Literal["classify", "count", "detect"],
        *,
        adapter: AdapterChoice,
    ) -> None:
        super().__init__()
        self.name = name
        self.head = head
        self.task = task
        self.adapter = adapter

    def __repr__(self) -> str:
        return f"Head({self.name!r}, {self.task} by {self.head!r})"


class Statement(SglExpr):
    """One append of a user's program, with what was in force where it stands."""

    def __init__(self, expr: SglExpr, location: Location, ambient: AdapterChoice) -> None:
        super().__init__()
        self.expr = expr
        self.location = location
        self.ambient = ambient
