"""The launcher's command line, and processes that are watched: a small server in the place of the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from vlora_sgl import launch_cluster
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.supervisor import Supervisor
from vlora_sgl.errors import ConfigError
from vlora_sgl.launch_cluster import deal_devices, environment_of, free_ports, main, parse

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_servers_flags_pass_as_they_are() -> None:
    argv = ["--replicas", "3", "--model-path", "m", "--tp", "2", "--port", "7", "--lora-paths", "a=1", "b=2"]
    args = parse([*argv, "--max-loras-per-batch=5", "--on-demand", "c=/c=d"])
    assert args.server == ("--model-path", "m", "--tp", "2", "--lora-paths", "a=1", "b=2", "--max-loras-per-batch=5")
    assert (args.replicas, args.port, args.ranks, args.slots, args.known) == (3, 7, 2, 4, {"c": "/c=d"})
    assert parse(["--model-path", "m"]).slots == 7


def test_shares_are_what_a_cluster_says_of_itself(tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    for content in ({"shares": {"a": 2}, "homes": {}}, {"a": 2}):
        file.write_text(json.dumps(content))
        assert parse(["--shares", str(file)]).shares == {"a": 2.0}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--replicas", "0"], "needs a replica"),
        (["--replica-limit", "0"], "at least 1; got 0"),
        (["--on-demand", "a"], "NAME=DIR; got 'a'"),
        (["--shares", "/nowhere"], "--shares /nowhere"),
        (["--replica-devices", "0"], "names 1 replicas' devices for 2"),
        (["--max-replicas", "4"], "--max-replicas is for several hosts: it needs --ray"),
        (["--fronts", "2"], "--fronts is for several hosts"),
        (["--ray", "--join", "http://a"], "it does not go with --join"),
        (["--ray", "--replica-devices", "0", "1"], "it does not go with --replica-devices"),
        (["--ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 must not be less"),
        (["--ray", "--replicas", "0"], "needs a replica"),
        (["--ray", "--fronts", "0"], "at least 1; got 0 and 64"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--model-path", "m"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_several_hosts_need_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "vlora_sgl.cluster.on_ray", raising=False)
    assert main(["--ray", "auto", "--model-path", "m"]) == 2
    assert "pip install 'vlora-sgl[cluster]'" in capsys.readouterr().err


def test_devices_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cluster, "has_accelerator", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,2")
    assert deal_devices(parse(["--replicas", "2", "--tp-size=2"])) == ["4,5", "6,7"]
    assert deal_devices(parse(["--replicas", "2", "--replica-devices", "0", "0"])) == ["0", "0"]
    with pytest.raises(ConfigError, match="3 replicas of 2 devices each need 6; visible: 5"):
        deal_devices(parse(["--replicas", "3", "--tp", "2"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert deal_devices(parse(["--replicas", "2"])) == [None, None]
    assert environment_of("3", 2)["CUDA_VISIBLE_DEVICES"] == "3"


async def watched(
    command: list[str], story: Callable[[Supervisor, asyncio.Task[None]], Awaitable[None]], port: int
) -> None:
    """Run a story beside a supervisor of ``command``, and see that nothing of it is left."""

    async def ready(replica: Replica) -> None:
        replica.begin({})

    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        replica = Replica(0, f"http://127.0.0.1:{port}", 8)
        supervisor = Supervisor(replica, session, ready, 0.2, command, dict(os.environ))
        task = asyncio.create_task(supervisor.run())
        try:
            await story(supervisor, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (replica.serving, supervisor.process) == (False, None)


def test_a_replica_that_ends_or_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"START_POLL_S": 0.05, "HEALTH_TIMEOUT_S": 0.3, "STOP_S": 0.3, "QUICK_END_S": 0.0}.items():
        monkeypatch.setattr(f"vlora_sgl.cluster.supervisor.{name}", seconds)
    (port,) = free_ports(1)

    async def story(supervisor: Supervisor, task: asyncio.Task[None]) -> None:
        for starts, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP), (3, None)):
            while not (supervisor.replica.serving and supervisor.replica.starts == starts):
                await asyncio.sleep(0.02)
            assert supervisor.process is not None
            if number is not None:
                os.kill(supervisor.process.pid, number)
        last = supervisor.process.pid
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    asyncio.run(watched([sys.executable, "-c", SERVER, str(port)], story, port))


def test_a_server_that_refuses_its_settings_is_not_started_again() -> None:
    (port,) = free_ports(1)

    async def story(supervisor: Supervisor, task: asyncio.Task[None]) -> None:
        with pytest.raises(ConfigError, match="replica 0 refused its settings"):
            await task

    asyncio.run(watched([sys.executable, "-c", "raise SystemExit(2)"], story, port))


DRAINS = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def end(*_):
    time.sleep(0.5)  # requests end, for which it needs its child
    print("child lives" if child.poll() is None else "child is gone", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_replica_ends_its_requests_before_it_ends(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    async def scenario() -> int | None:
        async def ready(replica: Replica) -> None:
            replica.begin({})

        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            replica = Replica(0, f"http://127.0.0.1:{port}", 8)
            command = [sys.executable, "-c", DRAINS, str(port)]
            supervisor = Supervisor(replica, session, ready, 0.2, command, dict(os.environ), tmp_path / "log", 20)
            task = asyncio.create_task(supervisor.run())
            while not replica.serving:
                await asyncio.sleep(0.02)
            process = supervisor.process
            assert process is not None
            (child,) = psutil.Process(process.pid).children()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not replica.serving
            with contextlib.suppress(psutil.NoSuchProcess):
                while child.status() != psutil.STATUS_ZOMBIE:  # killed, and fetched by nobody
                    await asyncio.sleep(0.05)
            return process.returncode

    assert asyncio.run(scenario()) == 0
    assert (tmp_path / "log").read_text() == "child lives\n"


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [([], 30.0), (["--vlora-drain-seconds", "7"], 7.0), (["--vlora-drain-seconds=7.5"], 7.5)],
)
def test_replicas_have_as_long_to_end_as_they_take(flags: list[str], seconds: float) -> None:
    assert parse(["--model-path", "m", *flags]).drain == seconds
