"""A server's last seconds, step by step; tests/e2e/test_shutdown.py ends a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from vlora_sgl import _sgl
from vlora_sgl.entrypoints.stopping import RefuseWhileStopping
from vlora_sgl.managers import leftovers, shutdown
from vlora_sgl.managers.shutdown import Shutdown, StoppingResponse


@dataclass
class Manager:
    """As much of the tokenizer manager as the end has to do with."""

    rid_to_state: dict[str, object] = field(default_factory=dict)
    gracefully_exit: bool = False
    aborts: bool = True

    def abort_request(self, abort_all: bool) -> None:
        if self.aborts:
            self.rid_to_state.clear()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits that were set for this process, which goes on all the same."""
    found: list[float] = []
    monkeypatch.setattr(shutdown, "end_at_latest", found.append)
    return found


def test_requests_may_end_and_nobody_comes_meanwhile(limits: list[float]) -> None:
    async def scenario() -> None:
        manager = Manager({"a": 1})
        end = Shutdown(manager, 30)
        end.check()
        await end.asked_within(0.01)
        assert not end.asked
        end.ask(signal.SIGTERM)
        assert (limits, end.asked, manager.gracefully_exit) == ([30], True, True)
        await end.asked_within(30)
        with pytest.raises(StoppingResponse, match="has been told to stop") as refused:
            end.check()
        assert refused.value.status_code == 503
        asyncio.get_running_loop().call_later(0.2, manager.rid_to_state.clear)
        began = time.monotonic()
        await end._drain()
        assert 0.1 < time.monotonic() - began < 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("aborts", "least", "most"), [(True, 0.9, 1.4), (False, 1.1, 1.8)], ids=["abort", "does not abort"]
)
def test_what_does_not_end_is_aborted_and_not_waited_for(
    limits: list[float], aborts: bool, least: float, most: float
) -> None:
    async def scenario() -> None:
        end = Shutdown(Manager({"a": 1}, aborts=aborts), 2)
        end.ask(signal.SIGTERM)
        began = time.monotonic()
        await end._drain()
        assert least < time.monotonic() - began < most

    asyncio.run(scenario())
    assert limits == [2]


def test_a_second_signal_waits_for_nobody(limits: list[float]) -> None:
    async def scenario() -> None:
        manager = Manager({"a": 1})
        end = Shutdown(manager, 60)
        for delay in (0.0, 0.1):
            asyncio.get_running_loop().call_later(delay, end.ask, signal.SIGINT)
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await end._drain()
        assert not manager.rid_to_state and time.monotonic() - began < 2

    asyncio.run(scenario())
    assert limits == [60]  # the limit stays


def test_whatever_hangs_a_process_ends_in_time() -> None:
    code = """
import atexit, threading, time
from vlora_sgl.managers import shutdown
threading.Thread(target=time.sleep, args=(60,)).start()
atexit.register(time.sleep, 60)
shutdown.end_at_latest(1)
shutdown.leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_in_a_program_leaves_signals_to_it() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def own(number: int, frame: object) -> None:
        taken.append(number)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # as SGLang does
        Shutdown(Manager(), 30).listen(loop, own)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)

    taken: list[int] = []
    signal.signal(signal.SIGTERM, own)
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [signal.SIGTERM]


@dataclass
class Links:
    """As SGLang's PortArgs: names of links, and more."""

    tokenizer_ipc_name: str
    metrics_ipc_name: str
    nccl_port: int = 1
    tokenizer_worker_ipc_name: str | None = None
    instance_id: str = "test_shutdown"


def test_an_engine_removes_its_own_files_and_the_last_one_the_pixels(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(_sgl, "shm_path_for", lambda name: str(tmp_path / f"loads_{name}"))
    made = [
        Links(f"ipc://{tmp_path}/{name}1", f"ipc://{tmp_path}/{name}2", instance_id=name) for name in ("one", "two")
    ]
    for links in made:
        assert leftovers.remember(lambda links=links: links) is links
    pixels = [f"{_sgl.SHM_PREFIX}_mm_{pid}_0" for pid in (os.getpid(), os.getpid() + 1)]
    names = [*(f"{name}{n}" for name in ("one", "two") for n in "12"), "loads_one", "loads_two", *pixels, "other"]
    for name in names:
        (tmp_path / name).touch()

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    leftovers.remove(made[0])
    assert left() == sorted(name for name in names if "one" not in name)
    leftovers.remove()
    leftovers.remove()
    assert left() == sorted(["other", pixels[1]])


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        *(("POST", path, True) for path in ("/generate", "/v1/chat/completions", "/load_lora_adapter", "/new")),
        *(("GET", path, True) for path in ("/health", "/health_generate")),
        *(("GET", path, False) for path in ("/metrics", "/server_info", "/v1/models")),
        ("POST", "/abort_request", False),
        ("PUT", "/anything", True),
    ],
)
def test_a_server_that_stops_refuses_what_begins_something(method: str, path: str, refused: bool) -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse("fine")

    routes = [Route("/{rest:path}", answer, methods=["GET", "POST", "PUT"])]
    app = Starlette(routes=routes, middleware=[Middleware(RefuseWhileStopping)])
    client = TestClient(app)
    assert client.request(method, path).status_code == 200  # it has not started yet
    end = SimpleNamespace(asked=False)
    app.state.openai_serving_chat = SimpleNamespace(tokenizer_manager=SimpleNamespace(shutdown=end))
    assert client.request(method, path, content=b"x").status_code == 200
    end.asked = True
    said = client.request(method, path, content=b"x")
    assert said.status_code == (503 if refused else 200)
    if refused:
        error = json.loads(said.text)["error"]
        assert (error["type"], error["code"]) == ("StoppingError", 503) and "\n" not in said.text
