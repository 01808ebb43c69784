"""Shared fixtures. One server serves all end-to-end tests of a session: starting one costs most of a minute."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

with contextlib.suppress(ModuleNotFoundError):  # benchmarks take this module where only they run
    from hypothesis import settings

    # How long an example takes says how busy the machine is, and the first one imports.
    settings.register_profile("without deadlines", deadline=None)
    settings.load_profile("without deadlines")

START_TIMEOUT_S = 240
SERVER_ARGS = "VLORA_TEST_SERVER_ARGS"  # more flags for the server, for a run on another kind of machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run it with --slow"))


@dataclass(frozen=True)
class TinyModel:
    """The tiny random model on disk, and its adapters by name."""

    path: Path
    adapters: dict[str, Path]


@dataclass(frozen=True)
class Server:
    """The running server: where it listens, and what it serves.

    Attributes:
        url: its root.
        model: the files behind it.
        adapters: names that are loaded from the start.
        log: file with everything the server printed.
        process: the launcher's process.
    """

    url: str
    model: TinyModel
    adapters: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]

    def generate(self, timeout: float = 120, **request: Any) -> Any:
        """POST /generate with greedy sampling unless told otherwise; the parsed answer. Raises on any other status."""
        from tests.support.ties import LOGPROBS

        request.setdefault("sampling_params", {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True})
        request = {**LOGPROBS, **request}
        response = requests.post(f"{self.url}/generate", json=request, timeout=timeout)
        assert response.status_code == 200, response.text
        return response.json()

    def flush(self) -> None:
        """Empty the prefix cache, so that a test starts cold."""
        requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Stop the scheduler until all that the block sends (in threads) has reached it.

        It then finds it at once, unless its main thread wakes before the one that reads the socket: see
        ``queued_together``.

        Gives a function that waits until all that was sent so far has: the tokenizer's process is idle again.
        """
        launcher = psutil.Process(self.process.pid)
        # The scheduler and the detokenizer: they have titles of their own where SGLang can set them.
        engine = [
            p for p in launcher.children() if "sglang::" in (line := " ".join(p.cmdline())) or "spawn_main" in line
        ]
        assert len(engine) >= 2

        def arrived() -> None:
            used = -1.0
            while (now := sum(launcher.cpu_times()[:2])) - used > 0.02:
                used = now
                time.sleep(1)

        for process in engine:
            process.suspend()
        try:
            yield arrived
            arrived()
        finally:
            for process in engine:
                process.resume()


def queued_together(answers: Iterable[Any]) -> bool:
    """Whether each request was in the queue before one of them left it; none may have been retracted to it since.

    Needs a server with ``--enable-metrics``.
    """
    times = [meta for answer in answers if "forward_entry_time" in (meta := answer["meta_info"])]
    left = min(meta["forward_entry_time"] for meta in times)
    return all(meta["forward_entry_time"] - meta["queue_time"] <= left for meta in times)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny random Qwen2.5-VL and the adapters A and B."""
    from tests.support.tiny_random import make_adapter, make_model

    root = tmp_path_factory.mktemp("tiny")
    path = make_model(root / "model")
    return TinyModel(path, {name: make_adapter(root / name, path, seed) for seed, name in enumerate("AB", start=1)})


@pytest.fixture(scope="session")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The session's server: it holds six adapters of rank 64 at a time, reads no directory but the tests', and watches
    the folder ``watched``."""
    watched = tmp_path_factory.getbasetemp() / "watched"
    watched.mkdir(exist_ok=True)
    flags = ["--max-loras-per-batch", "7", "--max-lora-rank", "64", "--enable-metrics"]
    for root in (tmp_path_factory.getbasetemp(), Path(__file__).parent.parent):
        flags += ["--vlora-adapter-root", str(root)]
    flags += ["--vlora-adapter-source", str(watched)]
    with serve(tiny_model, tmp_path_factory.mktemp("server") / "log.txt", *flags) as running:
        yield running


@contextlib.contextmanager
def serve(model: TinyModel, log: Path, *flags: str) -> Iterator[Server]:
    """``python -m vlora_sgl.launch_server`` on a free loopback port, once it is healthy."""
    port = free_port()
    command = [sys.executable, "-m", "vlora_sgl.launch_server", "--model-path", str(model.path)]
    command += ["--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in model.adapters.items())]
    command += ["--port", str(port), "--enable-cache-report", *flags, *shlex.split(os.environ.get(SERVER_ARGS, ""))]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=root)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log)
        yield Server(url, model, tuple(model.adapters), log, process)
        if process.poll():  # 0: a test has ended it
            lines = [line[:500] for line in log.read_text().splitlines() if "Capturing" not in line]
            end = "\n".join(lines)[-8000:]
            pytest.fail(f"the server ended with {process.returncode} while it was asked:\n{end}")
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once /health answers 200; fail with the log's end if the process ends first or it takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            if requests.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.3)
    pytest.fail(f"the server was not healthy after {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
