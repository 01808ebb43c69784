"""A server that is told to stop: it ends within its limit, with status 0, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.conftest import Server, TinyModel, serve

pytestmark = pytest.mark.e2e

LIMIT_S = 14
LONG = {"temperature": 0, "max_new_tokens": 12000, "ignore_eos": True}
ROUTES = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"model": "A", "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"model": "A", "messages": [{"role": "user", "content": "a"}], "stream": True},
    "/v1/vision/classify": {"model": "A", "input": []},
    "/v1/messages": {"model": "A", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"model": "A", "messages": [{"role": "user", "content": "a"}]},
    "/load_lora_adapter": {"lora_name": "C", "lora_path": "/nowhere"},
}


def shared_memory() -> set[str]:
    """What is in shared memory, less what other programs make there all the time."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("sglang", "sgl_shm", "psm_"))}


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; who had no parent left may not be fetched by anybody."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave_hanging(server: Server, body: str, sent: int) -> socket.socket:
    """A client that sends so much of a request to /generate, and then neither sends nor reads."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body.encode()[:sent])
    return client


def ask(server: Server, **body: Any) -> str:
    """What became of a request: its reason to finish, its status, or that the connection broke."""
    try:
        answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
        return answer.json()["meta_info"]["finish_reason"]["type"] if answer.ok else str(answer.status_code)
    except requests.RequestException:
        return "broken"


def read_stream(server: Server, begun: threading.Event) -> str:
    """How a stream ends that is read to its end."""
    last = ""
    try:
        with requests.post(
            f"{server.url}/generate",
            json={"text": "a", "lora_path": "A", "stream": True, "sampling_params": LONG},
            stream=True,
            timeout=60,
        ) as answer:
            for line in answer.iter_lines():
                begun.set()
                last = line.decode().removeprefix("data: ") if b"meta_info" in line else last
        return str(json.loads(last)["meta_info"]["finish_reason"]["type"])
    except requests.RequestException:
        return "broken"


@pytest.fixture
def own_server(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that takes four requests at a time, with a temporary directory of its own."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # answers that nothing else ends
    flags = ["--context-length", "16384", "--max-running-requests", "4", "--vlora-drain-seconds", str(LIMIT_S)]
    with serve(tiny_model, tmp_path / "log.txt", *flags) as server:
        yield server


def test_sigterm_with_stuck_clients_streams_and_a_full_queue(own_server: Server, tmp_path: Path) -> None:
    server, before = own_server, shared_memory()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    stuck = json.dumps({"text": "a", "lora_path": "B", "stream": True, "sampling_params": LONG})
    hanging = [leave_hanging(server, stuck, len(stuck)), leave_hanging(server, stuck, 20)]
    begun = threading.Event()
    with ThreadPoolExecutor(16) as pool:
        stream = pool.submit(read_stream, server, begun)
        assert begun.wait(30)
        short: Future[str] = pool.submit(
            ask, server, text="b", lora_path="A", sampling_params={**LONG, "max_new_tokens": 60}
        )
        time.sleep(1)
        queued = [pool.submit(ask, server, text="c", lora_path="AB"[i % 2], sampling_params=LONG) for i in range(8)]
        time.sleep(1)

        told = time.monotonic()
        for process in (server.process, *processes):  # as a service manager tells all processes of a service
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.2)
        for path, body in ROUTES.items():
            answer = requests.post(f"{server.url}{path}", json=body, timeout=5)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "StoppingError"), path
        assert requests.get(f"{server.url}/health", timeout=5).status_code == 503
        assert time.monotonic() - told < LIMIT_S / 2

        assert server.process.wait(LIMIT_S + 2) == 0
        assert time.monotonic() - told < LIMIT_S + 1
        assert short.result(5) == "length"  # it had time
        assert {stream.result(5), *(one.result(5) for one in queued)} == {"abort"}
    for client in hanging:
        client.close()
    # Nothing is left.
    time.sleep(0.5)  # for the one that watches shared memory, which ends last
    assert not [process for process in processes if lives(process)]
    assert shared_memory() <= before
    assert not [path for path in (tmp_path / "tmp").rglob("*") if not path.is_dir()]
    log = server.log.read_text()
    assert "Traceback" not in log and "leaked" not in log, log
