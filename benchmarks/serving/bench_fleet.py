"""A fleet on Ray, on this machine: what its fronts cost, what affinity saves, what kills lose.

    python -m benchmarks.serving.bench_fleet                # all of it, some ten minutes on two cores
    python -m benchmarks.serving.bench_fleet cost

Replicas are stubs, whose own work is not counted. Writes ``fleet.*`` to the summary.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence

import aiohttp
import requests

from benchmarks.summary import record
from tests.conftest import free_port
from tests.support.ray_fleets import RayFleet, fault, ray_cluster, streams

EVENTS, PAUSE_S, AT_A_TIME = 64, 0.02, 32
ADAPTERS = [f"a{n}" for n in range(32)]
ON_DEMAND = ["--on-demand", *(f"{name}=/{name}" for name in ADAPTERS)]
HOT_SHARE, REQUESTS, SLOTS = 0.6, 1500, 8


def used(fleet: RayFleet) -> float:
    """Seconds of a core that the fleet's parts have used, without the servers."""
    parts = [process for part in ("front", "directory", "actor") for process in fleet.processes(part)]
    return sum(sum(process.cpu_times()[:2]) for process in parts)


def work(fleet: RayFleet, requests: int, events: int, at_a_time: int = AT_A_TIME) -> float:
    """Seconds of a core for so many streams, less what the parts use when nothing is asked."""
    began, before = time.monotonic(), used(fleet)
    time.sleep(5)
    idle = (used(fleet) - before) / (time.monotonic() - began)

    async def ask() -> None:
        places = asyncio.Semaphore(at_a_time)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def one(number: int) -> None:
                body = {"text": "x", "lora_path": ADAPTERS[number % 8], "stream": True, "events": events}
                async with places, client.post(f"{fleet.url}/generate", json=body | {"every": PAUSE_S}) as answer:
                    assert answer.status == 200 and (await answer.read()).endswith(b"[DONE]\n\n")

            await asyncio.gather(*(one(number) for number in range(requests)))

    began, before = time.monotonic(), used(fleet)
    asyncio.run(ask())
    return used(fleet) - before - idle * (time.monotonic() - began)


def cost() -> None:
    """CPU of a streamed event and of a request; and of a request of four fronts over that of one that is as busy."""
    with ray_cluster(free_port(), cpus=2) as fleet:
        busy = {}
        for fronts in (1, 4):
            fleet.deploy(["--replicas", "2", "--fronts", str(fronts), *ON_DEMAND])
            fleet.wait(2, fronts=fronts)
            work(fleet, 64, 1)
            if fronts == 1:
                short, whole = work(fleet, 1024, 1) / 1024, work(fleet, 512, EVENTS) / 512
                print(f"{short * 1e3:.2f} ms a request, {whole * 1e3:.2f} ms with {EVENTS} events")
                record("fleet.event_us", (whole - short) / (EVENTS - 1) * 1e6, "us", higher_is_better=False)
                record("fleet.request_ms", short * 1e3, "ms", higher_is_better=False)
            streamed = AT_A_TIME * fronts // 4
            busy[fronts] = work(fleet, 16 * streamed, EVENTS, streamed) / (16 * streamed)
            print(f"{fronts} fronts, {streamed} streams: {busy[fronts] * 1e3:.2f} ms with {EVENTS} events")
        record("fleet.fronts4_cost_over_1", busy[4] / busy[1], "ratio", higher_is_better=False)


def affinity() -> None:
    """Adapters brought to slots by turns, over those with affinity, behind two fronts."""
    loads = {}
    with ray_cluster(free_port(), cpus=4) as fleet:
        for routing in ("round_robin", "affinity"):
            slots = ["--max-loras-per-batch", str(SLOTS + 1)]
            fleet.deploy(["--replicas", "4", "--fronts", "2", "--routing", routing, *slots, *ON_DEMAND])
            fleet.wait(4, fronts=2)
            rng = random.Random(0)
            asked = [ADAPTERS[0] if rng.random() < HOT_SHARE else rng.choice(ADAPTERS[1:]) for _ in range(REQUESTS)]
            ends = asyncio.run(streams(fleet.url, asked, REQUESTS, 30.0, 2, 0.05))
            assert ends == {"whole": REQUESTS}, ends
            lines = requests.get(f"{fleet.url}/metrics", timeout=60).text.splitlines()
            loads[routing] = sum(int(line.split()[1]) for line in lines if line.startswith("stub:slot_loads"))
    print(loads)
    record("fleet.affinity_load_cut", loads["round_robin"] / loads["affinity"], "ratio", higher_is_better=True)


def faults() -> None:
    """Requests that had not begun and were lost, and the longest time until all serve again."""
    lost, recovery = 0, 0.0
    with ray_cluster(free_port(), hosts=1) as fleet:
        fleet.deploy(["--replicas", "2", *ON_DEMAND])
        fleet.wait(2, fronts=2)
        for part in ("server", "actor", "directory", "front", "host"):
            ends, seconds = fault(fleet, part, ADAPTERS[:8])
            print(f"{part}: {dict(ends)}, all serve after {seconds:.1f} s", flush=True)
            # Connections to a front that was killed are that front's; answers are nobody's.
            own = "lost: " if part not in ("front", "host") else "lost: 5"
            lost += sum(count for end, count in ends.items() if end.startswith(own))
            recovery = max(recovery, seconds)
    record("fleet.lost", lost, "requests", higher_is_better=False)
    record("fleet.recovery_s", recovery, "s", higher_is_better=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is named, or all."""
    parts: dict[str, Callable[[], None]] = {"cost": cost, "affinity": affinity, "faults": faults}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*parts], metavar="PART", help=f"of {', '.join(parts)}")
    for part in parser.parse_args(argv).parts:
        parts[part]()


if __name__ == "__main__":
    main()
