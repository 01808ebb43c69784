"""Engines of a benchmark, each in a process of its own, with a clock in their schedulers.

Several live on one card at a time, so that a benchmark interleaves their runs and drifting clocks hit all alike. The
clock notes one CUDA event behind every step on the stream it runs on; a step's time is from the event before it to its
own, which is what a client waits for when the device is never idle.

    with EngineProcess(options) as ours, EngineProcess(stock_options, stock=True) as stock:
        ours.ready(), stock.ready()
        steps = ours.generate(input_ids=..., lora_path=..., sampling_params=...).steps
        decode_seconds(steps, rows=32)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.serving.shape7b import plain_adapter_loading
from vlora_sgl.defaults import CPU_DEFAULTS
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.server_args import VLoraArgs

ROOT = Path(__file__).parents[2]

Arrival = tuple[float, dict[str, Any]]
"""When a request comes, in seconds, and its arguments of ``Engine.generate``."""


@dataclass(frozen=True)
class Step:
    """One step of a scheduler.

    Attributes:
        kind: ``prefill`` or ``decode``.
        rows: requests in it.
        tokens: tokens it computed.
        seconds: from the end of the step before it to its end; 0 for the first.
        plan: request ids, mode and merged adapter, as planned; empty for stock SGLang.
    """

    kind: str
    rows: int
    tokens: int
    seconds: float
    plan: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Run:
    """Answers of one call, its wall time, and the steps behind it, per tensor-parallel rank."""

    answers: list[dict[str, Any]]
    seconds: float
    ranks: list[list[Step]]

    @property
    def steps(self) -> list[Step]:
        """Rank 0's."""
        return self.ranks[0]


def decode_seconds(steps: Sequence[Step], rows: int) -> float:
    """Median time of a decode step of ``rows`` rows that came straight after another.

    Raises:
        ValueError: fewer than three such steps.
    """
    return _median_repeated(steps, "decode", rows, rows)


def prefill_seconds(steps: Sequence[Step], rows: int, tokens: int) -> float:
    """Median time of a prefill step of ``rows`` rows and ``tokens`` tokens that came straight after another one.

    Raises:
        ValueError: fewer than three such steps.
    """
    return _median_repeated(steps, "prefill", rows, tokens)


def _median_repeated(steps: Sequence[Step], kind: str, rows: int, tokens: int) -> float:
    wanted = (kind, rows, tokens)
    shapes = [(s.kind, s.rows, s.tokens) for s in steps]
    times = [s.seconds for i, s in enumerate(steps) if i and shapes[i] == shapes[i - 1] == wanted]
    if len(times) < 3:
        raise ValueError(f"{len(times)} repeated steps of (kind, rows, tokens) {wanted}; there were {shapes}")
    return statistics.median(times)


# In the scheduler's process


class StepClock:
    """Notes the steps of one scheduler."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int, int, Any, tuple[Any, ...]]] = []

    def note(self, scheduler: Any, batch: Any) -> None:
        """Call behind ``run_batch``, on its thread."""
        prefill = batch.forward_mode.is_extend()
        tokens = int(sum(batch.extend_lens)) if prefill else len(batch.reqs)
        manager = getattr(scheduler, "lora_manager", None)
        plan = getattr(manager, "plan", None)
        said = () if plan is None else (list(plan.requests), str(plan.mode), plan.merged_adapter)
        self.notes.append(("prefill" if prefill else "decode", len(batch.reqs), tokens, self._now(scheduler), said))

    @staticmethod
    def _now(scheduler: Any) -> Any:
        import torch

        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream())
        return event

    def take(self) -> list[Step]:
        """The steps since the last call."""
        notes, self.notes = self.notes, []
        steps = []
        for i, (kind, rows, tokens, mark, plan) in enumerate(notes):
            if isinstance(mark, float):
                seconds = mark - notes[i - 1][3] if i else 0.0
            else:
                mark.synchronize()
                seconds = notes[i - 1][3].elapsed_time(mark) / 1e3 if i else 0.0
            steps.append(Step(kind, rows, tokens, seconds, plan))
        return steps


def install_clock(scheduler_class: Any) -> None:
    """Give SGLang's scheduler, or ours in its place, the clock and the calls that ``EngineProcess`` makes."""
    clock = StepClock()
    inner = scheduler_class.run_batch

    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, batch, *args, **kwargs)
        if not batch.forward_mode.is_idle():
            clock.note(self, batch)
        return result

    def write_steps(self: Any, path: str) -> None:
        rows = [dataclasses.asdict(step) for step in clock.take()]
        Path(f"{path}.{self.ps.tp_rank}").write_text(json.dumps(rows))

    def force_mode(self: Any, mode: str) -> None:
        self.planning.change(dataclasses.replace(self.planning.args, mode=mode))

    def poison(self: Any, adapter: str, what: str, value: float) -> None:
        """Spoil what the loader has let through: an adapter's scale, or some of its weights in host memory."""
        manager = self.lora_manager
        (found,) = (manager.loras[uid] for uid, ref in manager.lora_refs.items() if ref.lora_name == adapter)
        if what == "scale":
            found.scaling = value
            return
        for layer in found.layers:
            for weight in layer.weights.values():
                weight.view(-1)[::7] = value

    scheduler_class.poison = poison
    scheduler_class.run_batch = run_batch
    scheduler_class.write_steps = write_steps
    scheduler_class.force_mode = force_mode


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of vlora_sgl's engine, with the clock."""
    from vlora_sgl import _sgl, plugin
    from vlora_sgl.startup import processes

    plugin.install()
    plain_adapter_loading()
    install_clock(_sgl.Scheduler)
    processes.run_scheduler(*args, **kwargs)


def run_stock_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of stock SGLang, with the clock."""
    from vlora_sgl import _sgl

    plain_adapter_loading()
    install_clock(_sgl.Scheduler)
    _sgl.run_scheduler_process(*args, **kwargs)


# In the engine's process


def _build(options: dict[str, Any], vlora: VLoraArgs | None) -> Any:
    if vlora is not None:
        from vlora_sgl.engine import Engine
        from vlora_sgl.startup import processes

        class TimedEngine(Engine):
            run_scheduler_process_func = processes.WithEnvironment(run_scheduler)

        return TimedEngine(vlora=vlora, **options)
    from vlora_sgl import _sgl

    class TimedStockEngine(_sgl.Engine):
        run_scheduler_process_func = staticmethod(run_stock_scheduler)

    defaults = {**CPU_DEFAULTS, "lora_backend": "torch_native"} if is_plain_cpu() else {}
    return TimedStockEngine(**{"log_level": "error", "enable_multimodal": True, **defaults, **options})


class _Worker:
    """Answers ``EngineProcess``'s calls."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.ranks = engine.server_args.tp_size

    def generate(self, **request: Any) -> Run:
        start = time.perf_counter()
        answers = self.engine.generate(**request)
        seconds = time.perf_counter() - start
        return Run(answers if isinstance(answers, list) else [answers], seconds, self._steps())

    def _steps(self) -> list[list[Step]]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "steps"
            self.engine.collective_rpc("write_steps", path=str(path))
            ranks = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(self.ranks)]
        return [[Step(**{**row, "plan": tuple(row["plan"])}) for row in rows] for rows in ranks]

    def play(self, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
        return self.engine.loop.run_until_complete(_play(self.engine, arrivals))

    def flush(self) -> None:
        self.engine.flush_cache()

    def force_mode(self, mode: str) -> None:
        self.engine.collective_rpc("force_mode", mode=mode)

    def poison(self, adapter: str, what: str, value: float) -> None:
        self.engine.collective_rpc("poison", adapter=adapter, what=what, value=value)

    def ask_each(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
        answers = self.engine.loop.run_until_complete(_ask_each(self.engine, requests))
        self._steps()  # they are not the next call's
        return answers

    def state(self) -> dict[str, Any]:
        return dict(self.engine.get_server_info()["internal_states"][0]["vlora"])

    def unload(self, name: str) -> str | None:
        result = self.engine.unload_lora_adapter(name)
        return None if result.success else result.error_message

    def load(self, name: str, path: str) -> str | None:
        result = self.engine.load_lora_adapter(name, path)
        return None if result.success else result.error_message


async def _play(engine: Any, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    begin = time.perf_counter()

    async def one(at: float, request: dict[str, Any]) -> tuple[float, float]:
        await asyncio.sleep(begin + at - time.perf_counter())
        start, first = time.perf_counter(), 0.0
        async for _ in await engine.async_generate(stream=True, **request):
            first = first or time.perf_counter()
        return first - start, time.perf_counter() - start

    return await asyncio.gather(*(one(at, request) for at, request in arrivals))


async def _ask_each(engine: Any, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
    async def one(request: dict[str, Any]) -> dict[str, Any] | str:
        try:
            return dict(await engine.async_generate(**request))
        except Exception as error:
            return f"{type(error).__name__}: {getattr(error, 'detail', error)}"

    return await asyncio.gather(*map(one, requests))


def serve() -> None:
    """The process behind ``EngineProcess``: its argument is the file descriptor of the link."""
    link = Connection(int(sys.argv[1]))
    options, vlora = link.recv()
    worker = _Worker(_build(options, vlora))
    link.send((True, None))
    while (message := link.recv()) is not None:
        method, kwargs = message
        try:
            link.send((True, getattr(worker, method)(**kwargs)))
        except Exception as error:
            link.send((False, f"{type(error).__name__}: {error}"))
    worker.engine.shutdown()


class EngineProcess:
    """One engine. Its start goes on in the background until ``ready`` is called.

    Args:
        options: ``ServerArgs`` fields.
        vlora: our settings.
        stock: run stock SGLang without anything of ours.
        environment: variables for its processes.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        vlora: VLoraArgs | None = None,
        stock: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        # Not a multiprocessing child: on a CPU the engine forks its processes, which those must not.
        code = "from tests.support.engine_runs import serve; serve()"
        self._link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
                | (environment or {}),
            )
        self._link.send((options, None if stock else vlora or VLoraArgs()))
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> Self:
        """Wait until it serves.

        Raises:
            RuntimeError: it ended instead.
        """
        if not self._ready:
            self._receive()
            self._ready = True
        return self

    def generate(self, **request: Any) -> Run:
        """``Engine.generate`` with these arguments, and the steps it took."""
        return self._call("generate", **request)

    def play(self, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
        """Send requests at their times, whether or not others are done: seconds to first and last token of each."""
        return self._call("play", arrivals=arrivals)

    def ask_each(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
        """Requests of their own, sent together: the answer of each, or its error."""
        return self._call("ask_each", requests=requests)

    def poison(self, adapter: str, what: str, value: float) -> None:
        """Spoil a loaded adapter's ``scale`` or ``weights`` behind the loader; ours only."""
        self._call("poison", adapter=adapter, what=what, value=value)

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._call("flush")

    def force_mode(self, mode: str) -> None:
        """From now on run every batch in this mode (``--vlora-mode``); ours only."""
        self._call("force_mode", mode=mode)

    def state(self) -> dict[str, Any]:
        """``internal_states[0]["vlora"]`` of ``/server_info``; ours only."""
        return self._call("state")

    def load(self, name: str, path: Path) -> str | None:
        """Load an adapter. Returns the refusal, if any."""
        return self._call("load", name=name, path=str(path))

    def unload(self, name: str) -> str | None:
        """Unload an adapter. Returns the refusal, if any."""
        return self._call("unload", name=name)

    def close(self) -> None:
        """End it, whatever it does."""
        if self._ready and self._process.poll() is None:
            self._link.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        if self._process.poll() is None:
            from vlora_sgl import _sgl

            _sgl.kill_process_tree(self._process.pid)
            self._process.wait(10)

    def _call(self, method: str, /, **kwargs: Any) -> Any:
        self.ready()
        self._link.send((method, kwargs))
        return self._receive()

    def _receive(self) -> Any:
        try:
            good, value = self._link.recv()
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            raise RuntimeError(f"the engine's process ended with {self._process.returncode}") from None
        if not good:
            raise RuntimeError(value)
        return value
