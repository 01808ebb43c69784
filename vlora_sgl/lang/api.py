"""The verbs of the language. ``import vlora_sgl as vlora`` gives all of them."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ProgramError, RequestError
from vlora_sgl.lang import _upstream as up
from vlora_sgl.lang.endpoint import Backend, as_endpoint
from vlora_sgl.lang.interpreter import BatchRun, ProgramState, run_program
from vlora_sgl.lang.ir import (
    INHERIT,
    AdapterChoice,
    Adapters,
    SglAdapter,
    SglHead,
    SglImages,
    SglTypedGen,
    SglTypedSelect,
    effective,
)
from vlora_sgl.lang.media import ImageSource, VideoSource
from vlora_sgl.lang.scoring import sequence_probability
from vlora_sgl.lang.tracer import TracerState, trace_program
from vlora_sgl.lang.values import Boxes, Count

P = ParamSpec("P")
_T = TypeVar("_T")

Stop = str | Sequence[str]
Arguments = Mapping[str, object] | Sequence[object]

_BOXES_REGEX = r"(<box>\([0-9]{1,3},[0-9]{1,3}\),\([0-9]{1,3},[0-9]{1,3}\)</box>)+"


class Function(up.SglFunction, Generic[P]):
    """A program: a Python function whose first parameter ``s`` is the state it appends to.

    Calling it runs it on the default backend. Generation is greedy unless a temperature is given.

    Raises:
        TypeError: a parameter has the name of an option of :meth:`run`, such as ``adapter``.
    """

    def __init__(self, func: Callable[..., object], bind_arguments: Mapping[str, object] | None = None) -> None:
        super().__init__(func, bind_arguments=dict(bind_arguments or {}))
        if taken := _RUN_OPTIONS & set(self.arg_names):
            raise TypeError(f"{func.__name__}: {', '.join(sorted(taken))} would hide an option of run(); rename it")
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__
        self.__wrapped__ = func

    def bind(self, **kwargs: object) -> Function[...]:
        """The same program with some arguments given.

        Raises:
            TypeError: it has no parameter of that name.
        """
        if unknown := set(kwargs) - set(self.arg_names):
            raise TypeError(f"{self.__name__} has no parameter {', '.join(sorted(unknown))}; it has {self.arg_names}")
        return Function(self.func, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState:
        """Run on the default backend; inside a traced program, trace."""
        return cast(ProgramState, super().__call__(*args, **kwargs))

    def run(
        self,
        *args: object,
        backend: Backend | None = None,
        adapter: AdapterChoice = INHERIT,
        stream: bool = False,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: Stop = (),
        stop_token_ids: Sequence[int] = (),
        stop_regex: Stop = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        use_thread: bool = True,
        **kwargs: object,
    ) -> ProgramState:
        """Run the program and return its state; reading a variable waits for it.

        Args:
            *args, **kwargs: the program's own arguments.
            backend: a Runtime, an Engine or a server's address; by default the one of ``set_default_backend``.
            adapter: the adapter in force at the start; by default that of a ``with vlora.adapter(...)`` around.
            stream: run in the background and let ``state.text_iter()`` yield pieces.
            use_thread: False runs every request at its statement, which is easier to step through.
            The rest are defaults for every ``gen`` of the program, as in SGLang.

        Raises:
            ConfigError: there is no backend.
            ProgramError: a statement failed (raised when its result is read, if it runs in the background).
        """
        sampling = _sampling(locals())
        endpoint = as_endpoint(backend)
        start = effective(adapter, None)
        return run_program(self, endpoint, args, kwargs, sampling, adapter=start, stream=stream, use_thread=use_thread)

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """:meth:`run`, awaited to its end; cancelling the task cancels the run and its request.

        Raises:
            ProgramError: a statement failed.
        """
        state = await asyncio.to_thread(self.run, *args, **kwargs)
        try:
            await asyncio.to_thread(state.sync)
        except asyncio.CancelledError:
            state.cancel()
            raise
        state.stream_executor.raise_error()
        return state

    def start_batch(
        self,
        batch_kwargs: Sequence[Arguments],
        *,
        backend: Backend | None = None,
        adapter: AdapterChoice = INHERIT,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: Stop = (),
        stop_token_ids: Sequence[int] = (),
        stop_regex: Stop = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
    ) -> BatchRun:
        """Start many runs and return at once; see :meth:`run_batch` for the arguments.

        The result tells which runs are done (``as_completed``), cancels single ones (``cancel``) and waits for all
        (``results``).
        """
        return BatchRun(
            self,
            as_endpoint(backend),
            [self._named(arguments) for arguments in batch_kwargs],
            _sampling(locals()),
            adapter=effective(adapter, None),
            num_threads=num_threads,
            progress_bar=progress_bar,
        )

    def run_batch(
        self,
        batch_kwargs: Sequence[Arguments],
        *,
        generator_style: bool = False,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per entry, in parallel, and return the states in the order of the entries.

        No run is lost to another: one that failed holds its error (``state.error()``) and raises it when read.

        Args:
            batch_kwargs: the arguments of each run, by name or in order.
            generator_style: yield each state in turn, as soon as it and those before it are done.
            options: as in :meth:`start_batch` (``num_threads`` runs at a time, ``progress_bar``, sampling defaults).

        Raises:
            TypeError: an entry does not fit the program's parameters.
        """
        run = self.start_batch(batch_kwargs, **options)
        return run.in_order() if generator_style else run.results()

    def trace(self, *, backend: Backend | None = None, **kwargs: object) -> TracerState:
        """The program's statements without running them; parameters not given stand for themselves."""
        return trace_program(self, kwargs, None if backend is None else as_endpoint(backend))

    def _named(self, arguments: Arguments) -> dict[str, object]:
        named = dict(
            arguments.items() if isinstance(arguments, Mapping) else zip(self.arg_names, arguments, strict=False)
        )
        optional = set(self.arg_names[len(self.arg_names) - len(self.arg_defaults) :])
        missing = set(self.arg_names) - optional - set(named) - set(self.bind_arguments)
        if len(named) < len(arguments) or missing or set(named) - set(self.arg_names):
            raise TypeError(f"{self.__name__}({', '.join(self.arg_names)}) cannot be run with {arguments!r}")
        return named


_PARAMETERS = inspect.signature(Function.run).parameters.values()
_RUN_OPTIONS = {parameter.name for parameter in _PARAMETERS if parameter.kind is parameter.KEYWORD_ONLY}


@overload
def function(func: Callable[Concatenate[ProgramState, P], object]) -> Function[P]: ...
@overload
def function(func: None = None) -> Callable[[Callable[Concatenate[ProgramState, P], object]], Function[P]]: ...
def function(func: Callable[..., object] | None = None) -> object:
    """Make a program of a function whose first parameter is ``s``."""
    return Function if func is None else Function(func)


def set_default_backend(backend: Backend | None) -> None:
    """Let every program run on this Runtime, Engine or server address unless told otherwise."""
    up.global_config.default_backend = None if backend is None else as_endpoint(backend)


def adapter(name: Adapters) -> SglAdapter:
    """Use an adapter for what follows: ``s += adapter("a")``, or ``with adapter("a"):`` for a block.

    Args:
        name: a loaded adapter; several as one with a scale for each, ``{"a": 0.7, "b": 0.3}``; or None for the base
            model.

    Raises:
        RequestError: scales that no combination can have.
    """
    return SglAdapter(name)


def image(source: ImageSource) -> SglImages:
    """An image at this place of the prompt: a file, an address, bytes, a Pillow image or an array [H, W, 3]."""
    return SglImages(source)


def video(source: VideoSource, num_frames: int = 8) -> SglImages:
    """Frames of a video at this place of the prompt, evenly spread, as consecutive images (V-LoRA, appendix C).

    Args:
        source: a video file (needs PyAV), an animated image, a folder of frames, or the frames.
        num_frames: how many frames to show the model at most.
    """
    return SglImages(source, num_frames)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    adapter: AdapterChoice = INHERIT,
    choices: Sequence[str] | None = None,
    dtype: type[int] | type[float] | type[bool] | type[str] | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, object] | type | None = None,
    stop: Stop | None = None,
    n: int | None = None,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> up.SglExpr:
    """Generate text into variable ``name``.

    Args:
        adapter: who answers, if not the adapter in force.
        choices: answer with one of these, as :func:`select` does.
        dtype: constrain the text to such a value and store the value.
        regex: constrain the text.
        json_schema: constrain the text to JSON of this schema (JSON text, a dict, or a pydantic model) and store what
            it parses to.
        stop: end before any of these texts.
        n: store a list of so many samples; the first goes on in the text.

    Raises:
        re.error: ``regex`` is not a regular expression.
    """
    if choices is not None:
        return select(name, choices, adapter=adapter)
    if regex is not None:
        re.compile(regex)
    sampling = _named_as_sampling(locals()) | {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens}
    sampling["json_schema"] = _schema_text(json_schema)
    convert: Callable[[str], object] | None = json.loads if json_schema is not None else _CONVERTERS.get(dtype)
    return SglTypedGen(name, adapter=adapter, convert=convert, **sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    *,
    adapter: AdapterChoice = INHERIT,
    choices_method: up.ChoicesSamplingMethod = up.token_length_normalized,
) -> up.SglExpr:
    """Answer with the likeliest of the choices; nothing is sampled.

    Raises:
        RequestError: not a list of different texts with something in each.
    """
    _check_choices("select", choices)
    return SglTypedSelect(name, choices, choices_method, adapter=adapter)


def classify(
    name: str, labels: Sequence[str] = (), *, head: str | None = None, adapter: AdapterChoice = INHERIT
) -> up.SglExpr:
    """Answer with a class; the variable is a :class:`~vlora_sgl.lang.values.Label` with probabilities.

    Args:
        labels: the classes, for the language model to choose from.
        head: instead, the adapter's vision head that knows the classes: one prefill pass and no decoding.

    Raises:
        ValueError: not exactly one of ``labels`` and ``head`` is given.
        RequestError: the labels are not a list of different texts with something in each.
    """
    if bool(labels) == (head is not None):
        raise ValueError("classify needs either labels for the language model or the name of a head")
    if head is not None:
        return SglHead(name, head, "classify", adapter=adapter)
    _check_choices("classify", labels)
    return SglTypedSelect(name, labels, sequence_probability, adapter=adapter, label=True)


def count(name: str, *, head: str | None = None, adapter: AdapterChoice = INHERIT) -> up.SglExpr:
    """Answer with a number; the variable is a :class:`~vlora_sgl.lang.values.Count`.

    Args:
        head: let this vision head of the adapter count; without it the language model writes a number.
    """
    if head is not None:
        return SglHead(name, head, "count", adapter=adapter)
    return _task(name, "Count", adapter, _count, max_new_tokens=8, regex=r"[0-9]{1,5}")


def detect(
    name: str,
    target: str | None = None,
    max_tokens: int = 256,
    *,
    head: str | None = None,
    adapter: AdapterChoice = INHERIT,
) -> up.SglExpr:
    """Answer with the boxes of all objects of a kind; the variable is :class:`~vlora_sgl.lang.values.Boxes`.

    Args:
        target: what to box, for the language model, which writes ``<ref>target</ref><box>…</box>``.
        head: instead, the adapter's vision head that finds its objects.

    Raises:
        ValueError: not exactly one of ``target`` and ``head`` is given.
    """
    if (target is not None) == (head is not None):
        raise ValueError("detect needs either a target for the language model or the name of a head")
    if head is not None:
        return SglHead(name, head, "detect", adapter=adapter)
    return _boxes(name, "Detect", cast(str, target), max_tokens, adapter)


def ground(name: str, phrase: str, max_tokens: int = 256, *, adapter: AdapterChoice = INHERIT) -> up.SglExpr:
    """Answer with the boxes of what a phrase refers to; the variable is :class:`~vlora_sgl.lang.values.Boxes`."""
    return _boxes(name, "Ground", phrase, max_tokens, adapter)


def caption(name: str, max_tokens: int = 64, *, adapter: AdapterChoice = INHERIT) -> up.SglExpr:
    """Answer with one line of text about the image."""
    return _task(name, "Caption", adapter, str.strip, max_new_tokens=max_tokens, stop=["\n"])


def system(expr: up.SglExpr | str) -> up.SglExprList:
    """A system turn."""
    return _turn("system", expr)


def user(expr: up.SglExpr | str) -> up.SglExprList:
    """A user turn."""
    return _turn("user", expr)


def assistant(expr: up.SglExpr | str) -> up.SglExprList:
    """A turn of the model."""
    return _turn("assistant", expr)


def _check_choices(kind: str, choices: object) -> None:
    """Refuse what cannot be told apart or scored; a parameter that is traced stands for itself.

    Raises:
        RequestError: says which choice.
    """
    if isinstance(choices, up.SglArgument):
        return
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not choices:
        raise RequestError(f"{kind} needs a list of at least one choice; got {choices!r}")
    seen: list[object] = []
    for choice in choices:
        if not isinstance(choice, str | up.SglArgument):
            raise RequestError(f"{kind}'s choices must be texts; got {choice!r} ({type(choice).__name__})")
        if isinstance(choice, str) and (not choice or choice in seen):
            raise RequestError(f"{kind}'s choices must differ and not be empty; got {choice!r} in {list(choices)!r}")
        seen.append(choice)


def _turn(role: str, expr: up.SglExpr | str) -> up.SglExprList:
    content = up.SglConstantText(expr) if isinstance(expr, str) else expr
    return up.SglExprList([up.SglRoleBegin(role), content, up.SglRoleEnd(role)])


def _task(
    name: str, kind: str, adapter: AdapterChoice, convert: Callable[[str], object], **sampling: object
) -> SglTypedGen:
    return SglTypedGen(name, adapter=adapter, convert=convert, kind=kind, **sampling)


def _boxes(name: str, kind: str, target: str, max_tokens: int, adapter: AdapterChoice) -> SglTypedGen:
    regex = re.escape(f"<ref>{target}</ref>") + _BOXES_REGEX
    return _task(name, kind, adapter, Boxes.parse, max_new_tokens=max_tokens, regex=regex)


def _count(text: str) -> Count:
    return Count(int(text))


def _boolean(text: str) -> bool:
    return text.strip() == "True"


_CONVERTERS: dict[type | None, Callable[[str], object]] = {int: int, float: float, bool: _boolean}


def _schema_text(schema: str | Mapping[str, object] | type | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema)
    if hasattr(schema, "model_json_schema"):
        return json.dumps(schema.model_json_schema())
    raise ProgramError(f"json_schema takes JSON text, a dict or a pydantic model, got {schema!r}")


def _named_as_sampling(arguments: JsonDict) -> JsonDict:
    """Those of a caller's ``locals()`` that SGLang's sampling parameters have by the same name."""
    return {name: arguments[name] for name in up.SglSamplingParams.__dataclass_fields__ if name in arguments}


def _sampling(arguments: JsonDict) -> up.SglSamplingParams:
    """SGLang's sampling parameters out of a caller's ``locals()``."""
    values = _named_as_sampling(arguments)
    for name in ("stop", "stop_token_ids", "stop_regex"):
        # SGLang extends these lists in place, on a copy per request.
        values[name] = [values[name]] if isinstance(values[name], str) else list(values[name])
    return up.SglSamplingParams(**values)
