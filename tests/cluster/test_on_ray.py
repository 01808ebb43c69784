"""A fleet on Ray Serve: what is killed is started again, and loses what it had begun at most."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vlora_sgl
from tests.conftest import free_port
from tests.support.ray_fleets import RayFleet, fault, ray_cluster, streams

WHY = "Ray is not installed: pip install 'vlora-sgl[cluster]'"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=WHY)
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of which there are many
ADAPTERS = [f"a{n}" for n in range(8)]
ON_DEMAND = ["--on-demand", *(f"{name}=/{name}" for name in ADAPTERS)]


@needs_ray
@pytest.mark.timeout(240)
def test_a_fleet_serves_and_starts_a_killed_server_again() -> None:
    with ray_cluster(free_port(), cpus=2) as fleet:
        fleet.deploy(["--replicas", "2", *ON_DEMAND])
        fleet.wait(2)
        counts = asyncio.run(streams(fleet.url, ADAPTERS, 24, 0.5, 5, 0.05))
        assert counts == {"whole": 24}
        fleet.order("load", lora_name="n", lora_path="/n")
        counts = asyncio.run(streams(fleet.url, [*ADAPTERS, "n"], 36, 1.0, 20, 0.05, lambda: fleet.kill("server")))
        assert counts["whole"] + counts["error"] == 36 and counts["error"] < 18
        fleet.wait(2, seconds=30)


@pytest.fixture(scope="class")
def fleet() -> Iterator[RayFleet]:
    with ray_cluster(free_port(), hosts=1) as made:
        made.deploy(["--replicas", "2", *ON_DEMAND])
        made.wait(2, fronts=2)
        yield made


class TestKilled:
    """One fleet, which is gone when the next test has Ray for itself."""

    @needs_ray
    @pytest.mark.slow
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("part", ["server", "actor", "front", "directory", "host"])
    def test_a_part_that_is_killed_loses_nothing_that_had_not_begun(self, fleet: RayFleet, part: str) -> None:
        asyncio.run(streams(fleet.url, ADAPTERS, 80, 1.0, 1, 0.0))
        time.sleep(1)
        before = fleet.state()
        fleet.order("load", lora_name=f"before-{part}", lora_path="/x")
        new = {"lora_name": f"meanwhile-{part}", "lora_path": "/y"}
        counts, seconds = fault(fleet, part, ADAPTERS, lambda: fleet.order("load", **new))
        print(f"{part}: {dict(counts)}, all serve after {seconds:.1f} s")
        assert seconds < 30
        lost = sum(count for end, count in counts.items() if end.startswith("lost"))
        if part in ("front", "host"):  # its own connections break, as those of any balancer's
            assert counts["whole"] > 75 and not any(": 5" in end for end in counts)
        else:
            assert lost == counts["cut"] == 0
        assert part != "directory" or counts == {"whole": 300}
        asyncio.run(streams(fleet.url, [f"before-{part}", f"meanwhile-{part}"], 20, 0.5, 1, 0.0))
        after = fleet.state()
        assert {name: after["homes"][name] for name in ADAPTERS} == {name: before["homes"][name] for name in ADAPTERS}


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_load_starts_replicas_and_ends_them_without_a_lost_request() -> None:
    """And an adapter leaves a home at most once while replicas come, and once for each replica that goes."""
    ends: list[Any] = []
    stop, watched = threading.Event(), threading.Event()
    left = {"up": Counter[str](), "down": Counter[str]()}
    way = ["up"]

    def ask(fleet: RayFleet, number: int) -> None:
        while not stop.is_set():
            counts = asyncio.run(streams(fleet.url, [ADAPTERS[number % 8]], 1, 0.0, 10, 0.1))
            ends.extend(counts.elements())

    def watch(fleet: RayFleet) -> None:
        before: dict[str, list[int]] = {}
        while not watched.wait(0.2):
            homes = fleet.state()["homes"]
            left[way[0]].update(name for name in homes if not {*before.get(name, ())} <= {*homes[name]})
            before = homes

    with ray_cluster(free_port(), cpus=3) as fleet:
        flags = ["--replicas", "1", "--max-replicas", "3", "--target-load", "8", *ON_DEMAND]
        fleet.deploy(flags, up_s=1.0, down_s=3.0)
        fleet.wait(1)
        threads = [threading.Thread(target=ask, args=(fleet, n)) for n in range(20)]
        watcher = threading.Thread(target=watch, args=(fleet,))
        for thread in (*threads, watcher):
            thread.start()
        fleet.wait(3)
        time.sleep(5)
        stop.set()
        for thread in threads:
            thread.join()
        stop.clear()
        way[0] = "down"
        last = threading.Thread(target=ask, args=(fleet, 0))
        last.start()
        fleet.wait(1)
        stop.set()
        last.join()
        watched.set()
        watcher.join()
    assert set(ends) == {"whole"}, ends
    print({name: dict(counts) for name, counts in left.items()})
    assert max(left["up"].values(), default=0) <= 1 and max(left["down"].values(), default=0) <= 2, left


def test_a_cluster_of_one_host_does_not_import_ray() -> None:
    code = "import sys, vlora_sgl.launch_cluster as l; l.parse(['--model-path', 'm']); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_module_knows_ray_and_by_its_public_names() -> None:
    package = Path(vlora_sgl.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else names
            if any(module.split(".")[0] == "ray" for module in modules):
                found.add(path.relative_to(package).as_posix())
                assert not any(part.startswith("_") for name in [*modules, *names] for part in name.split("."))
    assert found == {"cluster/on_ray.py"}
