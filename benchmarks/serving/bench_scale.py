"""Several replicas behind one replica router: throughput, adapter loads, and what a killed replica takes with it.

::

    python -m benchmarks.serving.bench_scale throughput loss --summary FILE   # a 7B shape, a replica on every GPU
    python -m benchmarks.serving.bench_scale affinity --tiny --summary FILE   # four small servers, any machine
    python -m benchmarks.serving.bench_scale throughput loss --tiny           # a check on a laptop; records nothing

throughput
    Output tokens per second of the cluster, asked through the replica router, over the mean of its replicas, asked
    alone and directly. Closed loop, as many requests per replica in every case, 60 % of them to the hottest adapter.
affinity
    Adapters loaded into device slots for one trace, by what the servers count themselves, with four times as many
    adapters as a replica has slots: the same replicas behind the replica router with round robin and with affinity.
loss
    A replica is killed (SIGKILL) under load. Every request that fails must be one that it had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests

from benchmarks.serving.systems import ROOT, Deployment, Server, free_port, make_deployment
from benchmarks.serving.traces import RETRIEVAL, Speaker, trace
from benchmarks.summary import SUMMARY, record
from vlora_sgl.cluster.replica_router import REPLICA_HEADER

SKEW = 0.6
PARTS = ("throughput", "affinity", "loss")


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        max_batch: requests that a replica runs at once.
        workers: requests under way at a time, per replica.
        prompt: mean prompt length, tokens.
        output: mean output length.
        warm: seconds before anything counts.
        seconds: seconds that count.
    """

    max_batch: int
    workers: int
    prompt: float
    output: float
    warm: float
    seconds: float


FULL, TINY = Size(32, 48, 256.0, 200.0, 5.0, 12.0), Size(8, 12, 24.0, 12.0, 3.0, 8.0)


class Cluster:
    """A running ``launch_cluster``, in a process group of its own.

    Args:
        log: file for what it prints.
        flags: its command line, but for the port.
    """

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "vlora_sgl.launch_cluster", "--port", str(port), *flags]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
            )

    def state(self) -> dict[str, Any]:
        """``GET /cluster``."""
        return dict(requests.get(f"{self.url}/cluster", timeout=10).json())

    def wait(self, replicas: int, seconds: float) -> None:
        """Return once so many replicas serve.

        Raises:
            RuntimeError: they do not.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if sum(replica["serving"] for replica in self.state()["replicas"]) == replicas:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.3)
        logs = [self.log, *sorted(self.log.parent.glob("replica-*.log"))]
        tails = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())
        raise RuntimeError(f"{replicas} replicas did not serve within {seconds:.0f} s\n{tails}")

    def kill(self, number: int) -> None:
        """SIGKILL a replica: its launcher and all its processes."""
        port = self.state()["replicas"][number]["url"].rpartition(":")[2]
        (launcher,) = (child for child in psutil.Process(self.process.pid).children() if port in child.cmdline())
        os.killpg(launcher.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it; it ends its replicas."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def started(log: Path, *flags: str) -> Iterator[Cluster]:
    """A cluster until the end of the block."""
    cluster = Cluster(log, *flags)
    try:
        yield cluster
    finally:
        cluster.stop()


@dataclass(slots=True)
class Outcome:
    """One request.

    Attributes:
        start: when it was sent, seconds since the loop's start.
        end: when its answer was complete or broke off.
        tokens: of its answer.
        replica: which answered, as the replica router says; None if it does not.
        error: why it failed; empty if it did not.
    """

    start: float
    end: float = 0.0
    tokens: int = 0
    replica: int | None = None
    error: str = ""


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], began: float) -> Outcome:
    """Post one request and read its answer to the end, streamed or not."""
    outcome = Outcome(time.perf_counter() - began)
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            header = response.headers.get(REPLICA_HEADER)
            outcome.replica = int(header) if header is not None else None
            last = b""
            if body["stream"]:
                async for line in response.content:
                    last = line[6:] if line.startswith(b"data: {") else last
            else:
                last = await response.read()
            reply = json.loads(last)
            if response.status != 200 or "error" in reply:
                outcome.error = f"{response.status} {reply.get('error', reply)}"[:300]
            else:
                outcome.tokens = reply["meta_info"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.perf_counter() - began
    return outcome


async def closed_loop(
    url: str, bodies: Sequence[dict[str, Any]], workers: int, seconds: float | None
) -> list[Outcome]:
    """Keep ``workers`` requests under way: for ``seconds``, body after body from the first, or for every body once."""
    outcomes: list[Outcome] = []
    left = iter(bodies)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        began = time.perf_counter()

        async def work() -> None:
            for body in left:
                if seconds is not None and time.perf_counter() - began > seconds:
                    return
                outcomes.append(await ask(session, url, body, began))

        await asyncio.gather(*(work() for _ in range(workers)))
    return outcomes


def bodies_of(
    speaker: Speaker, adapters: int, count: int, size: Size, seed: int, stream: bool
) -> list[dict[str, Any]]:
    """The first ``count`` requests of a trace, without their times."""
    load = replace(RETRIEVAL, arrivals="poisson", rate=100.0, adapters=adapters, skew=SKEW, seed=seed)
    load = replace(load, prompt=size.prompt, output=size.output, images=0)
    arrivals = list(trace(load, 2 * count / load.rate))[:count]
    return [{**speaker.body(arrival, 0), "stream": stream} for arrival in arrivals]


def warm_up(cluster: Cluster, speaker: Speaker, adapters: int, size: Size) -> None:
    """Have every replica compile what any mode needs, before anything is measured; all replicas at once."""
    urls = [replica["url"] for replica in cluster.state()["replicas"]]

    def batches(url: str) -> None:
        for rows in (1, size.max_batch // 2, size.max_batch):
            body = {
                "input_ids": [speaker.ids(64) for _ in range(rows)],
                "lora_path": [f"a{row % adapters}" for row in range(rows)],
                "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 4},
            }
            requests.post(f"{url}/generate", json=body, timeout=300).raise_for_status()

    with ThreadPoolExecutor(len(urls)) as pool:
        for mode in ("unmerged", "mixture", "merged", "auto"):
            change = {"server_args": {f"vlora_mode:{mode}": 1}}
            requests.post(f"{cluster.url}/set_internal_state", json=change, timeout=60).raise_for_status()
            list(pool.map(batches, urls))
    # And what prefills of several requests need.
    for url in urls:
        bodies = bodies_of(speaker, adapters, 2 * size.workers, size, 100, stream=False)
        asyncio.run(closed_loop(url, bodies, size.workers, None))


def tokens_per_second(outcomes: Sequence[Outcome], size: Size) -> float:
    """Tokens of the answers that ended in the time that counts.

    Raises:
        RuntimeError: a request failed.
    """
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return sum(o.tokens for o in outcomes if size.warm <= o.end < size.warm + size.seconds) / size.seconds


def measure_throughput(cluster: Cluster, speaker: Speaker, adapters: int, size: Size) -> float:
    """Throughput of all replicas over the mean of each alone."""
    urls = [replica["url"] for replica in cluster.state()["replicas"]]
    often = round(60 * size.workers * (size.warm + size.seconds))

    def run(url: str, replicas: int, seed: int, seconds: float) -> list[Outcome]:
        bodies = bodies_of(speaker, adapters, min(often, 4000) * replicas, size, seed, stream=False)
        return asyncio.run(closed_loop(url, bodies, size.workers * replicas, seconds))

    total = size.warm + size.seconds
    alone = [tokens_per_second(run(url, 1, 1 + n, total), size) for n, url in enumerate(urls)]
    together = run(cluster.url, len(urls), 50, total)
    all_of_them = tokens_per_second(together, size)
    share = dict(sorted(Counter(outcome.replica for outcome in together).items()))
    print(
        f"alone {', '.join(f'{rate:.0f}' for rate in alone)} tokens/s; together {all_of_them:.0f} tokens/s", flush=True
    )
    print(f"requests by replica {share}; homes of the hottest {cluster.state()['homes'].get('a0')}", flush=True)
    return all_of_them / statistics.fmean(alone)


def misses(server: Server) -> int:
    """Uses of an adapter for which the server had to load it into a slot, before or when a batch needed it, so far."""
    slots = server.state()["plan"]["slots"]
    return int(slots["misses"] + slots["ahead"])


def measure_affinity(
    deployment: Deployment, speaker: Speaker, replicas: int, count: int, size: Size
) -> dict[str, int]:
    """Adapter loads of the same requests on the same servers, by routing."""
    loads: dict[str, int] = {}
    with ExitStack() as stack:
        servers = []
        for number in range(replicas):
            out = deployment.out / f"server-{number}"
            out.mkdir(exist_ok=True)
            servers.append(Server("ours", replace(deployment, out=out)))
            stack.callback(servers[-1].stop)
        for server in servers:
            if failure := server.wait(300):
                raise RuntimeError(failure)
        bodies = bodies_of(speaker, len(deployment.adapters), count, size, 7, stream=False)
        for routing in ("round_robin", "affinity"):
            flags = ["--replicas", "0", "--join", *(server.url for server in servers), "--routing", routing]
            flags += ["--max-loras-per-batch", str(deployment.slots + 1)]
            with started(deployment.out / f"router-{routing}.log", *flags) as cluster:
                cluster.wait(replicas, 60)
                before = [misses(server) for server in servers]
                outcomes = asyncio.run(closed_loop(cluster.url, bodies, size.workers * replicas, None))
                each = [misses(server) - b for server, b in zip(servers, before, strict=True)]
            loads[routing] = sum(each)
            failed = sum(bool(outcome.error) for outcome in outcomes)
            share = dict(sorted(Counter(outcome.replica for outcome in outcomes).items()))
            last = max(outcome.end for outcome in outcomes)
            print(f"{routing}: {count} requests in {last:.1f} s, by replica {share}; loads {each}", flush=True)
            if failed:
                raise RuntimeError(next(outcome.error for outcome in outcomes if outcome.error))
    return loads


def measure_loss(cluster: Cluster, speaker: Speaker, adapters: int, size: Size) -> dict[str, int]:
    """Kill the last replica under load. What became of the requests."""
    replicas = len(cluster.state()["replicas"])
    victim = replicas - 1
    # Streams: what began can be lost. More than replicas take at once: the others wait in the router.
    bodies = bodies_of(speaker, adapters, 4000, size, 21, stream=True)
    at = size.warm

    async def run() -> list[Outcome]:
        async def kill() -> None:
            await asyncio.sleep(at)
            await asyncio.to_thread(cluster.kill, victim)

        loop = closed_loop(cluster.url, bodies, 3 * size.workers * replicas, at + size.seconds / 2)
        return (await asyncio.gather(loop, kill()))[0]

    outcomes = asyncio.run(run())
    state = cluster.state()
    failed = [outcome for outcome in outcomes if outcome.error]
    elsewhere = [o for o in failed if o.replica != victim or "ReplicaLostError" not in o.error]
    counts = {
        "requests": len(outcomes),
        "answered after the kill": sum(not o.error and o.end > at for o in outcomes),
        "broken off at the killed replica": len(failed) - len(elsewhere),
        "sent again": state["sent_again"],
        "lost elsewhere": len(elsewhere),
    }
    print("; ".join(f"{name}: {count}" for name, count in counts.items()), flush=True)
    for outcome in elsewhere[:3]:
        print(outcome.error, flush=True)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="a small model; on a CPU if there is no GPU")
    parser.add_argument("--replicas", type=int, help="by default 2; for affinity 4")
    parser.add_argument("--devices", nargs="+", default=[], help="CUDA_VISIBLE_DEVICES of every replica")
    parser.add_argument("--adapters", type=int, default=8, help="of throughput and loss; affinity has 4 times SLOTS")
    parser.add_argument("--slots", type=int, default=8, help="device slots of every replica, for affinity")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1500, help="of the affinity part")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that replicas may take to start")
    parser.add_argument("--out", type=Path, help="where logs go")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    size, rank = (TINY, 8) if args.tiny else (FULL, args.rank)
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch) / "logs"
        adapters = 4 * args.slots if args.parts == ["affinity"] else args.adapters
        slots = args.slots if args.parts == ["affinity"] else adapters
        deployment = make_deployment(Path(scratch), out, adapters, slots, [rank], size.max_batch, args.tiny)
        speaker = Speaker(deployment.model)
        if "affinity" in args.parts:
            if args.parts != ["affinity"]:
                parser.error("affinity runs alone: its servers have fewer slots than adapters")
            loads = measure_affinity(deployment, speaker, args.replicas or 4, args.requests, size)
            # Counts of events: they do not depend on the machine's speed, so the small model's are recorded.
            cut = loads["round_robin"] / max(1, loads["affinity"])
            record("scale.affinity_load_cut", cut, "ratio", True, summary=args.summary)
            return 0
        replicas = args.replicas or 2
        flags = ["--replicas", str(replicas), "--replica-limit", str(2 * size.max_batch), "--log-dir", str(out)]
        flags += ["--replica-devices", *args.devices] if args.devices else []
        with started(out / "cluster.log", *flags, *deployment.flags("ours")) as cluster:
            began = time.monotonic()
            cluster.wait(replicas, args.limit)
            print(f"{replicas} replicas serve after {time.monotonic() - began:.0f} s", flush=True)
            warm_up(cluster, speaker, adapters, size)
            print(f"warm after {time.monotonic() - began:.0f} s", flush=True)
            if "throughput" in args.parts:
                ratio = measure_throughput(cluster, speaker, adapters, size)
                print(f"throughput over one: {ratio:.3f}", flush=True)
                if not args.tiny:
                    record(f"scale.dp{replicas}_throughput", ratio, "ratio", True, summary=args.summary)
            if "loss" in args.parts:
                counts = measure_loss(cluster, speaker, adapters, size)
                record(
                    "scale.requests_lost_elsewhere", counts["lost elsewhere"], "requests", False, summary=args.summary
                )
                if args.tiny:
                    cluster.wait(replicas, args.limit)
                    print("the killed replica serves again", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
