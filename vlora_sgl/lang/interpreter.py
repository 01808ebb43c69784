"""Runs programs: SGLang's stream executor, with the adapter as part of its state and errors that name a line."""

from __future__ import annotations

import contextvars
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tqdm import tqdm

from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.errors import Location, ProgramCancelled, ProgramError, VLoraError
from vlora_sgl.lang import _upstream as up
from vlora_sgl.lang.ir import (
    AMBIENT,
    INHERIT,
    AdapterChoice,
    SglAdapter,
    SglHead,
    SglImages,
    SglTypedGen,
    SglTypedSelect,
    Statement,
    effective,
)
from vlora_sgl.lang.media import ImageSource, VideoSource, image_url, is_url, sample_frames
from vlora_sgl.lang.values import Label

T = TypeVar("T")

_MACHINERY = (str(Path(__file__).parent), str(Path(up.tracer.__file__).parent), contextmanager.__code__.co_filename)
"""Files whose frames are never the program's own."""


class ForkPrefix:
    """What the branches of a fork have in common, computed at most once for the adapter in force at the fork.

    A branch of that adapter computes it before its first request, and its sisters wait for that. Branches of other
    adapters do not use it: they would have to compute it anew, or (adapters that activate after the image) share it
    through the server, which holds back all but one of the requests that need it.
    """

    def __init__(self, parent: Executor, adapter: AdapterId) -> None:
        self.adapter = adapter
        self.text = parent.text_
        self.images = list(parent.images_)
        self._lock = threading.Lock()
        self._computed = False

    def compute(self, branch: Executor) -> None:
        """Compute it, as a request of ``branch``, unless it is there."""
        with self._lock:
            if not self._computed:
                branch.backend.prefill(branch, self.text, self.images)
                self._computed = True


class Executor(up.StreamExecutor):
    """Executes one state's statements, in order, on a thread of its own.

    Over SGLang's executor: the adapter in force is part of the state and survives ``fork``; every statement knows its
    line; after a failure the remaining statements are skipped, never left unaccounted for (SGLang's executor stops
    counting there, and a later ``sync`` waits for ever); a run can be cancelled.

    Args:
        backend: a :class:`vlora_sgl.lang.endpoint.Endpoint`.
        adapter: the adapter that statements use until one says otherwise.
    """

    def __init__(
        self,
        backend: up.BaseBackend,
        arguments: dict[str, object],
        default_sampling_para: up.SglSamplingParams,
        chat_template: object = None,
        stream: bool = False,
        use_thread: bool = True,
        adapter: AdapterId = None,
    ) -> None:
        # The worker thread starts in the base class's constructor, so what it uses comes first.
        self.adapter = adapter
        self.error_: Exception | None = None
        self.location: Location | None = None
        self.requests = 0
        self.in_flight: str | None = None
        self._cancelled = threading.Event()
        self._converters: dict[str, tuple[Callable[[str], object], Location | None]] = {}
        self._children: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._shared_prefix: ForkPrefix | None = None
        self._forked_with = 0, 0
        super().__init__(backend, arguments, default_sampling_para, chat_template, stream, use_thread=use_thread)

    # Statements

    def submit(self, expr: up.SglExpr | str) -> None:
        """Queue a statement (or run it here, without a thread)."""
        node = up.SglConstantText(expr) if isinstance(expr, str) else expr
        if not isinstance(node, up.SglExpr):
            raise TypeError(f"a program appends text or nodes such as vlora.gen(), got {type(expr).__name__}")
        location = _caller()
        self._check_carried(node, location)
        self._init_var_event(node)
        statement = Statement(node, location, AMBIENT.get())
        if self.use_thread:
            self.queue.put(statement)
        else:
            self._execute(statement)

    def _check_carried(self, node: up.SglExpr, location: Location) -> None:
        """Refuse what no request could carry: the place of an image without one, and SGLang's videos.

        Raises:
            ProgramError: says what to append instead.
        """
        if isinstance(node, up.SglExprList):
            for part in node.expr_list:
                self._check_carried(part, location)
        elif isinstance(node, up.SglVideo):
            raise ProgramError("a program shows a video by vlora.video(), not by SGLang's own node", location)
        elif isinstance(node, up.SglConstantText) and self.chat_template.image_token in str(node.value):
            marker = self.chat_template.image_token
            raise ProgramError(f"text must not hold an image's marker {marker!r}; append vlora.image(...)", location)

    def _init_var_event(self, expr: up.SglExpr) -> None:
        if isinstance(expr, SglHead):
            self.variable_event[expr.name] = threading.Event()
            if self.stream:
                self.stream_var_event[expr.name] = threading.Event()
        else:
            super()._init_var_event(expr)

    def _thread_worker_func(self) -> None:
        while (statement := self.queue.get()) is not None:
            try:
                if self.error_ is None:
                    self._execute(statement)
            except Exception as error:
                self.error_ = error
            finally:
                if self.error_ is not None:
                    self._release_waiters()
                self.queue.task_done()
                if self.stream_text_event:
                    self.stream_text_event.set()
        self.queue.task_done()
        self.is_finished = True
        self._release_waiters()

    def _release_waiters(self) -> None:
        for event in (*list(self.variable_event.values()), *list((self.stream_var_event or {}).values())):
            event.set()
        if self.stream_text_event:
            self.stream_text_event.set()

    def _execute(self, other: up.SglExpr) -> None:
        if isinstance(other, Statement):
            self._execute_statement(other)
        elif isinstance(other, SglAdapter):
            self.adapter = other.name
        elif isinstance(other, SglImages):
            self._execute_images(other)
        elif isinstance(other, SglHead):
            with self._using(other.adapter):
                self._execute_head(other)
        elif isinstance(other, (SglTypedGen, SglTypedSelect)):
            with self._using(other.adapter):
                super()._execute(other)
        else:
            super()._execute(other)

    def _execute_statement(self, statement: Statement) -> None:
        self.location = statement.location
        try:
            if self._cancelled.is_set():
                raise ProgramCancelled("the run was cancelled")
            if statement.ambient is not INHERIT and _changes_adapter(statement.expr):
                raise ProgramError("inside `with vlora.adapter(...)` nest a `with`, do not append an adapter")
            with self._using(statement.ambient):
                self._execute(statement.expr)
        except ProgramError as error:
            error.locate(statement.location)
            raise
        except Exception as error:
            kind = "" if isinstance(error, VLoraError) else f"{type(error).__name__}: "
            raise ProgramError(f"{kind}{error}", statement.location) from error

    @contextmanager
    def _using(self, adapter: AdapterChoice) -> Iterator[None]:
        if adapter is INHERIT:
            yield
            return
        before, self.adapter = self.adapter, adapter
        try:
            yield
        finally:
            self.adapter = before

    def _execute_images(self, expr: SglImages) -> None:
        sources: Sequence[ImageSource]
        if expr.num_frames is None:
            sources = [cast(ImageSource, expr.source)]
        else:
            sources = sample_frames(cast(VideoSource, expr.source), expr.num_frames)
        for source in sources:
            url = image_url(source)
            self.images_.append((source, url))
            if not is_url(source):
                # SGLang's message format adds the data: prefix itself.
                self.cur_images.append((source, url.partition(",")[2]))
            self.text_ += self.chat_template.image_token

    def _execute_concatenate_and_append_text(self, expr: up.SglConcateAndAppend) -> None:
        """Append what branches wrote and were shown, in order.

        Raises:
            ProgramError: a branch ended a turn that it did not begin, or left one open.
        """
        for branch in (state.stream_executor for state in expr.states):
            branch.sync()
            if branch.cur_role != self.cur_role:
                open_, here = branch.cur_role or "none", self.cur_role or "none"
                raise ProgramError(f"a branch must end in the turn it is appended to: {here}; it is in {open_}")
            images, messages = branch._forked_with
            self._execute_fill(branch.text_[branch.fork_start_text_pos :])
            self.images_ += branch.images_[images:]
            self.messages_ += branch.messages_[messages:]

    def _execute_gen(self, expr: up.SglGen) -> None:
        convert = expr.convert if isinstance(expr, SglTypedGen) else None
        if convert is not None and expr.name is not None:
            self._converters[expr.name] = (convert, self.location)
        self._compute_shared_prefix()
        super()._execute_gen(expr)

    def _execute_select(self, expr: up.SglSelect) -> None:
        self._compute_shared_prefix()
        super()._execute_select(expr)
        if isinstance(expr, SglTypedSelect) and expr.label and expr.name is not None:
            probabilities = self.meta_info[expr.name]["probabilities"]
            self.variables[expr.name] = Label(self.variables[expr.name], probabilities)

    def _execute_head(self, expr: SglHead) -> None:
        self._compute_shared_prefix()
        value, meta_info = self.backend.head(self, expr.head, expr.task)
        self.text_ += str(value)
        name = expr.name
        self.variables[name] = value
        self.meta_info[name] = meta_info
        self.variable_event[name].set()
        if self.stream_var_event:
            self.stream_var_event[name].set()

    def _compute_shared_prefix(self) -> None:
        prefix, self._shared_prefix = self._shared_prefix, None
        if prefix is not None and prefix.adapter == self.adapter:
            prefix.compute(self)

    # Variables and errors

    def get_var(self, name: str) -> Any:
        """The typed value of a variable, waiting for it.

        Raises:
            ProgramError: the program failed before it was set, its text does not convert, or nothing sets it.
        """
        if name in self.variable_event:
            self.variable_event[name].wait()
        if name not in self.variables:
            self.sync()
        if name not in self.variables:
            self.raise_error()
            raise ProgramError(f"the program sets no variable {name!r}; it sets {', '.join(self.variables) or 'none'}")
        return self._typed(name)

    def _typed(self, name: str) -> Any:
        value = self.variables[name]
        if name not in self._converters:
            return value
        convert, location = self._converters[name]
        try:
            return [convert(one) for one in value] if isinstance(value, list) else convert(value)
        except ValueError as error:
            raise ProgramError(f"the answer {value!r} of {name!r} does not convert: {error}", location) from error

    def typed_variables(self) -> dict[str, object]:
        """All variables set so far, each with its typed value."""
        return {name: self._typed(name) for name in list(self.variables)}

    def set_var(self, name: str, value: object) -> None:
        self._converters.pop(name, None)
        super().set_var(name, value)

    def raise_error(self) -> None:
        if self.error_ is not None:
            raise self.error_

    # Forks and cancelling

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> list[Executor]:
        """Copies of this state, each with the adapter in force here; what they have in common is computed once."""
        # SGLang asks for the text before the statements that write it have run, and may skip the prefix.
        self.sync()
        self.raise_error()
        adapter = effective(INHERIT, self.adapter)
        prefix = ForkPrefix(self, adapter) if size > 1 and self.text_ else None
        copies = []
        for _ in range(size):
            copy = Executor(
                self.backend,
                self.arguments,
                self.default_sampling_para,
                self.chat_template,
                self.stream,
                adapter=adapter,
            )
            copy._shared_prefix = prefix
            copy.variables = dict(self.variables)
            copy.meta_info = dict(self.meta_info)
            copy._converters = dict(self._converters)
            copy.text_ = self.text_
            copy.messages_ = list(self.messages_)
            copy.cur_role = self.cur_role
            copy.cur_role_begin_pos = self.cur_role_begin_pos
            copy.fork_start_text_pos = len(self.text_)
            copy.images_ = list(self.images_)
            copy.cur_images = list(self.cur_images)
            copy._forked_with = len(self.images_), len(self.messages_)
            self._children.add(copy)
            copies.append(copy)
        return copies

    def cancel(self) -> None:
        """Stop: abort the request in flight and skip every statement after it, in forks too."""
        self._cancelled.set()
        request = self.in_flight
        if request is not None:
            self.backend.abort(request)
        for child in list(self._children):
            child.cancel()

    def is_cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled.is_set()


class ProgramState(up.ProgramState):
    """What a program appends to, and what a run returns: the text so far and the variables it set."""

    stream_executor: Executor
    ret_value: object = None

    @property
    def current_adapter(self) -> AdapterId:
        """The adapter in force after the statements so far (waits for them)."""
        self.sync()
        return self.stream_executor.adapter

    def system(self, expr: up.SglExpr | str | None = None) -> AbstractContextManager[None]:
        """A system turn around ``expr``, or around a ``with`` block."""
        return cast(AbstractContextManager[None], super().system(expr))

    def user(self, expr: up.SglExpr | str | None = None) -> AbstractContextManager[None]:
        """A user turn around ``expr``, or around a ``with`` block."""
        return cast(AbstractContextManager[None], super().user(expr))

    def assistant(self, expr: up.SglExpr | str | None = None) -> AbstractContextManager[None]:
        """A turn of the model around ``expr``, or around a ``with`` block."""
        return cast(AbstractContextManager[None], super().assistant(expr))

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> StateGroup:
        """Branches that continue from here in parallel, each with a copy of everything, the adapter included."""
        executors = self.stream_executor.fork(size, position_ids_offset)
        return StateGroup([ProgramState(executor) for executor in executors], self)

    def get(self, name: str, kind: type[T]) -> T:
        """``state[name]``, checked to be a ``kind``, so that an editor knows what it may do with it.

        Raises:
            ProgramError: the variable holds something else.
        """
        value = self[name]
        if not isinstance(value, kind):
            raise ProgramError(f"variable {name!r} is a {type(value).__name__}, not a {kind.__name__}: {value!r}")
        return value

    def variables(self) -> dict[str, Any]:
        """Every variable the program set, typed.

        Raises:
            ProgramError: the program failed.
        """
        self.sync()
        self.stream_executor.raise_error()
        return self.stream_executor.typed_variables()

    def cached_tokens(self, name: str) -> int:
        """How many prompt tokens of the request behind a variable came from the prefix cache."""
        return int(self.get_meta_info(name)["cached_tokens"])

    def get_meta_info(self, name: str) -> JsonDict:
        """What the server said about the request behind a variable: tokens, cache, timings, finish reason."""
        self.stream_executor.get_var(name)
        return cast(JsonDict, super().get_meta_info(name))

    def text(self) -> str:
        """The whole text, prompts and answers.

        Raises:
            ProgramError: the program failed.
        """
        text = super().text()
        self.stream_executor.raise_error()
        return str(text)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text, or of one variable, as they are generated (``run(stream=True)``).

        Raises:
            ProgramError: the program failed; what came before has been yielded.
        """
        said = False
        try:
            for piece in super().text_iter(var_name):
                said = said or bool(piece)
                yield piece
            if var_name is not None and not said and not self.error():
                yield str(self.stream_executor.get_var(var_name))  # it had ended before anybody listened
        except KeyError:
            self.stream_executor.get_var(cast(str, var_name))
        self.stream_executor.raise_error()

    def cancel(self) -> None:
        """Stop the run: abort its request and skip the rest. Its variables then raise ProgramCancelled."""
        self.stream_executor.cancel()

    def __repr__(self) -> str:
        error = self.error()
        return f"ProgramState({self.stream_executor.text_!r}{f', error={error!r}' if error else ''})"


class StateGroup(up.ProgramStateGroup):
    """The branches of a fork."""

    states: list[ProgramState]
    src_state: ProgramState

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Wait for the branches and bring their results into the state they came from.

        ``gather_variable`` makes each new variable a list with one value per branch, in order; ``concate_and_append``
        appends the branches' texts, with the images in them.

        Raises:
            ProgramError: a branch failed, or what it wrote cannot be appended where the state is.
        """
        for state in self.states:
            state.sync()
            state.stream_executor.raise_error()
        if mode == "gather_variable":
            source = self.src_state.stream_executor
            known = set(source.variables)
            gathered: dict[str, list[object]] = {}
            for state in self.states:
                for name, value in state.stream_executor.typed_variables().items():
                    if name not in known:
                        gathered.setdefault(name, []).append(value)
            for name, values in gathered.items():
                source.set_var(name, values)
            for state in self.states:
                state.stream_executor.end()
        else:
            super().join(mode)
            self.src_state.stream_executor.raise_error()

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


def run_program(
    program: up.SglFunction,
    backend: up.BaseBackend,
    args: Sequence[object],
    kwargs: dict[str, object],
    sampling: up.SglSamplingParams,
    *,
    adapter: AdapterId = None,
    stream: bool = False,
    use_thread: bool = True,
) -> ProgramState:
    """Start a program and return its state: finished submitting, unless streaming; its requests may still run."""
    arguments = {**program.bind_arguments, **kwargs}
    state = ProgramState(Executor(backend, arguments, sampling, None, stream, use_thread, adapter))
    # A `with vlora.adapter(...)` around the call is the program's initial adapter, not one around its statements.
    context = contextvars.copy_context()
    context.run(AMBIENT.set, INHERIT)
    if stream:
        threading.Thread(target=context.run, args=(_run_streaming, state, program, args, arguments)).start()
    else:
        context.run(_run_function, state, program, args, arguments)
    return state


def _run_function(
    state: ProgramState, program: up.SglFunction, args: Sequence[object], kwargs: dict[str, object]
) -> None:
    try:
        state.ret_value = program.func(state, *args, **kwargs)
    finally:
        state.stream_executor.end()


def _run_streaming(
    state: ProgramState, program: up.SglFunction, args: Sequence[object], kwargs: dict[str, object]
) -> None:
    # Nobody waits for this thread, so the error goes where the reader of the stream looks for it.
    try:
        _run_function(state, program, args, kwargs)
    except Exception as error:
        state.stream_executor.error_ = error
        state.stream_executor._release_waiters()


class BatchRun:
    """Many runs of one program, some of them at a time; made by :meth:`vlora_sgl.lang.api.Function.start_batch`.

    Every run keeps its place: a run that fails or is cancelled holds its error, the others are untouched.
    """

    def __init__(
        self,
        program: up.SglFunction,
        backend: up.BaseBackend,
        batch: Sequence[dict[str, object]],
        sampling: up.SglSamplingParams,
        *,
        adapter: AdapterId,
        num_threads: int | Literal["auto"],
        progress_bar: bool,
    ) -> None:
        threads = min(64, multiprocessing.cpu_count() * 16) if num_threads == "auto" else num_threads
        self.states: list[ProgramState] = []
        self._pool = ThreadPoolExecutor(max(1, min(threads, len(batch))), thread_name_prefix="vlora-batch")
        self._bar = tqdm(total=len(batch), disable=not progress_bar, unit="program", desc=program.func.__name__)
        self._futures: list[Future[None]] = []
        for arguments in batch:
            # One thread per run is enough: its statements run on the pool's thread.
            known = {**program.bind_arguments, **arguments}
            executor = Executor(backend, known, sampling, use_thread=False, adapter=adapter)
            self.states.append(ProgramState(executor))
        for state in self.states:
            future = self._pool.submit(self._run_one, state, program)
            future.add_done_callback(lambda _: self._bar.update())
            self._futures.append(future)
        self._pool.shutdown(wait=False)

    @staticmethod
    def _run_one(state: ProgramState, program: up.SglFunction) -> None:
        executor = state.stream_executor
        try:
            if executor.is_cancelled():
                raise ProgramCancelled("the run was cancelled")
            contextvars.Context().run(_run_function, state, program, (), executor.arguments)
        except Exception as error:
            executor.error_ = error
        finally:
            executor.is_finished = True
            executor._release_waiters()

    def cancel(self, index: int) -> None:
        """Cancel one run; its state then raises ProgramCancelled, all others go on."""
        self.states[index].cancel()

    def as_completed(self) -> Iterator[int]:
        """Indices of the runs, as they finish."""
        pending = {future: index for index, future in enumerate(self._futures)}
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future)

    def in_order(self) -> Iterator[ProgramState]:
        """States in the order of the arguments, each as soon as it is done."""
        for state, future in zip(self.states, self._futures, strict=True):
            wait([future])
            yield state
        self._bar.close()

    def results(self) -> list[ProgramState]:
        """Wait for all and return their states, in the order of the arguments."""
        wait(self._futures)
        self._bar.close()
        return self.states


def _caller() -> Location:
    """The innermost frame that is not of the language's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _changes_adapter(expr: up.SglExpr) -> bool:
    if isinstance(expr, up.SglExprList):
        return any(_changes_adapter(part) for part in expr.expr_list)
    return isinstance(expr, SglAdapter)
