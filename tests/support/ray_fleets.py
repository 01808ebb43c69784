"""Fleets on Ray in this machine: hosts that are none, replicas without an engine, and the processes of each part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import psutil
import requests

from tests.support.replicas import ADMIN
from tests.support.stub_server import PROGRAM

START_S = 120.0
PARTS = {"front": "ServeReplica:vlora:Front", "directory": "ServeReplica:vlora:Directory"}
PARTS |= {"actor": "ServeReplica:vlora:Server", "server": "tests.support.stub_server"}
"""What the command line of a part's process has in it."""


class RayFleet:
    """One that runs.

    Attributes:
        hosts: Ray's nodes but for the head.
        url: of the fronts, which share a port.
    """

    def __init__(self, cluster: Any, hosts: list[Any], port: int) -> None:
        self.cluster, self.hosts, self.url = cluster, hosts, f"http://127.0.0.1:{port}"

    def deploy(self, flags: Sequence[str], **options: Any) -> None:
        """Run a fleet with these flags, in the place of the last one; returns when it serves."""
        from ray import serve

        from vlora_sgl.cluster import on_ray

        port = self.url.rpartition(":")[2]
        flags = ["--model-path", "m", "--port", port, "--admin-api-key", ADMIN, *flags]
        serve.run(on_ray.application(flags, PROGRAM, **options), name=on_ray.APP, route_prefix=None)

    def state(self) -> Any:
        """What ``GET /cluster`` says."""
        return requests.get(f"{self.url}/cluster", timeout=30).json()

    def wait(self, serving: int, fronts: int | None = None, seconds: float = START_S) -> float:
        """Until so many replicas serve; how long it took."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            with contextlib.suppress(requests.RequestException, ValueError, KeyError):
                state = self.state()
                served = sum(replica["serving"] for replica in state["replicas"])
                if served == serving and fronts in (None, len(state["fronts"])):
                    return time.monotonic() - began
            time.sleep(0.1)
        raise TimeoutError(f"{serving} replicas did not serve within {seconds:g} s: {state}")

    def processes(self, part: str) -> list[psutil.Process]:
        """Those of a part, oldest first."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if PARTS[part] in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def kill(self, part: str) -> None:
        """Kill one process of a part, or a host."""
        if part == "host":
            self.cluster.remove_node(self.hosts.pop(), allow_graceful=False)
        else:
            os.kill(self.processes(part)[-1].pid, signal.SIGKILL)

    def order(self, verb: str, **fields: Any) -> None:
        """An operator's order, which must be carried out: sent again while the directory is being started again."""
        headers, end = {"Authorization": f"Bearer {ADMIN}"}, time.monotonic() + 30
        while True:
            answer = requests.post(f"{self.url}/{verb}_lora_adapter", json=fields, headers=headers, timeout=60)
            if answer.status_code != 503 or time.monotonic() > end:
                answer.raise_for_status()
                return
            time.sleep(0.5)


@contextlib.contextmanager
def ray_cluster(port: int, hosts: int = 0, cpus: int = 1) -> Iterator[RayFleet]:
    """Ray and its Serve on a head and so many more hosts, each with so many CPUs: a replica takes one."""
    # Without bytecode, its processes compile for longer than Ray waits for them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    each = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=each)
    try:
        more = [cluster.add_node(num_cpus=cpus, object_store_memory=100 * 2**20) for _ in range(hosts)]
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield RayFleet(cluster, more, port)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


async def stream(client: aiohttp.ClientSession, url: str, adapter: str | None, events: int, every: float) -> str:
    """How a streamed request ended: whole, error (an event says that it broke), cut, or lost: before it began."""
    body = {"text": "x", "lora_path": adapter, "stream": True, "events": events, "every": every}
    begun = False
    try:
        async with client.post(f"{url}/generate", json=body, headers={"Connection": "close"}) as answer:
            if answer.status != 200:
                return f"lost: {answer.status} {(await answer.text())[:200]}"
            text = b""
            async for chunk in answer.content.iter_any():
                begun, text = True, text + chunk
    except (aiohttp.ClientError, OSError) as error:
        return "cut" if begun else f"lost: {type(error).__name__}"
    if b'"ReplicaLostError"' in text:
        return "error"
    numbers = [json.loads(event[6:])["n"] for event in text.split(b"\n\n") if event.startswith(b"data: {")]
    assert numbers == [*range(events)] and text.endswith(b"data: [DONE]\n\n"), text
    return "whole"


async def streams(
    url: str, adapters: Sequence[str], count: int, over: float, events: int, every: float,
    at_half: Callable[[], object] = lambda: None,
) -> Counter[str]:  # fmt: skip
    """Start so many streams over some seconds, do something after the first half; how they ended."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        tasks = []
        for number in range(count):
            if number == count // 2:
                await asyncio.get_running_loop().run_in_executor(None, at_half)
            tasks.append(asyncio.create_task(stream(client, url, adapters[number % len(adapters)], events, every)))
            await asyncio.sleep(over / count)
        return Counter(await asyncio.gather(*tasks))


def fault(
    fleet: RayFleet, part: str, adapters: Sequence[str], meanwhile: Callable[[], object] = lambda: None
) -> tuple[Counter[str], float]:
    """Kill a part in the middle of 300 streams of five events a second; how they ended, and the seconds until two
    replicas and two fronts serve again. A host is replaced by another; before that, do something."""
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        fleet.kill(part)

    counts = asyncio.run(streams(fleet.url, adapters, 300, 3.0, 15, 0.2, kill))
    meanwhile()
    if part == "host":
        fleet.hosts.append(fleet.cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20))
        killed.append(time.monotonic())
    fleet.wait(2, fronts=2)
    return counts, time.monotonic() - killed[-1]
