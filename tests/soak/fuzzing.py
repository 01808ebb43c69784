"""``make soak``, its second part: thousands of requests that nobody should send; records what they did.

    python -m tests.soak.fuzzing --requests 5000 --seed 3
    python -m tests.soak.fuzzing --replicas 2       # through a replica router, where no request may take a replica
    python -m tests.soak.fuzzing --family llava     # another model than the tiny Qwen2.5-VL; records nothing

Any fault ends it with status 1, once the figures are recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import requests

from benchmarks import summary
from tests.conftest import Server, TinyModel, free_port, serve
from tests.soak.__main__ import say
from tests.support import served_families
from tests.support.fuzz import seeds
from tests.support.fuzz.calls import Calls
from tests.support.fuzz.leftovers import Before
from tests.support.fuzz.run import REFERENCE, Fuzzer, Tally
from tests.support.lora_adapters import tiny_adapter
from tests.support.tiny_random import make_adapter, make_model
from vlora_sgl.heads import ClassifyHead, DetectHead, save_heads

CLIENTS = 6
START_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzzing", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all that is sent")
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--replicas", type=int, default=0, help="so many behind a replica router; records nothing")
    parser.add_argument("--family", choices=served_families.FAMILIES, help="of the model; records nothing")
    parser.add_argument("--logs", type=Path, help="directory that keeps what the servers printed")
    parser.add_argument("--summary", type=Path, default=summary.SUMMARY, help="file that takes the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tiny = make_tiny(root, args.family)
        say(f"seed {args.seed}")
        tally = fuzz_cluster(tiny, root, args) if args.replicas else fuzz_server(tiny, root, args)
        if args.logs is not None:
            args.logs.mkdir(parents=True, exist_ok=True)
            for log in (*root.glob("*.txt"), *root.glob("*.log")):
                shutil.copy(log, args.logs)
    say(str(tally))
    for fault in tally.faults:
        say(fault)
    if not (args.replicas or args.family):
        record(tally, args.summary)
    if tally.faults:
        raise SystemExit(1)


def make_tiny(root: Path, family: str | None) -> TinyModel:
    """A model with adapters A and B, each with heads."""
    if family is None:
        model = make_model(root / "model")
        adapters = {name: make_adapter(root / name, model, seed) for seed, name in enumerate("AB", 1)}
    else:
        seeds.IMAGE = served_families.FAMILIES[family].shown
        model, reference = served_families.save(family, root / "model")
        adapters = {name: root / name for name in "AB"}
        for seed, path in enumerate(adapters.values(), 1):
            towers = r".*(visual|vision_tower|vision_model).*"
            adapts = {
                "target_modules": ["q_proj", "down_proj"],
                "exclude_modules": towers,
                **served_families.FAMILIES[family].adapts,
            }
            tiny_adapter(served_families.load(family, reference), path, seed=seed, **adapts)
    config = json.loads((model / "config.json").read_text())
    text = next((config[part] for part in ("text_config", "llm_config") if part in config), config)
    for path in adapters.values():
        save_heads(
            path, [ClassifyHead("x", text["hidden_size"], ["a", "b"]), DetectHead("f", text["hidden_size"], ["a"])]
        )
    return TinyModel(model, adapters)


def fuzz_server(tiny: TinyModel, root: Path, args: argparse.Namespace) -> Tally:
    """One server; what it left behind are faults too."""
    flags = ["--max-loras-per-batch", "7", "--max-lora-rank", "64", "--enable-metrics"]
    with serve(tiny, root / "log.txt", *flags, "--vlora-adapter-root", str(root)) as server:
        before = Before.of(server)
        tally = fuzz(server, root, args, server.url, lambda: server.process.poll() is None)
        if not tally.ended:
            tally.wrong += before.faults()
            say(f"{before.growth:+.0f} MB")
        return tally


def fuzz(server: Server, root: Path, args: argparse.Namespace, described: str, lives: object) -> Tally:
    """Send the requests."""
    description = requests.get(f"{described}/openapi.json", timeout=60).json()
    spoiled = root / "spoiled"
    spoiled.mkdir()
    calls = Calls(description, args.seed, server.model.adapters["B"], spoiled, server.adapters)
    fuzzer = Fuzzer(server.url, lives, CLIENTS, REFERENCE)  # type: ignore[arg-type]
    return fuzzer.run(calls.call, range(args.first, args.first + args.requests), args.seconds)


def fuzz_cluster(tiny: TinyModel, root: Path, args: argparse.Namespace) -> Tally:
    """Replicas behind their router: each must have started once at the end."""
    with cluster(tiny, root, args.replicas) as server:

        def replicas() -> list[dict[str, object]]:
            found: list[dict[str, object]] = requests.get(f"{server.url}/cluster", timeout=60).json()["replicas"]
            return found

        def lives() -> bool:
            return server.process.poll() is None and all(one["serving"] and one["starts"] == 1 for one in replicas())

        return fuzz(server, root, args, str(replicas()[0]["url"]), lives)


@contextlib.contextmanager
def cluster(tiny: TinyModel, root: Path, count: int) -> Iterator[Server]:
    """``launch_cluster`` on a free port, once every replica serves."""
    port = free_port()
    command = [sys.executable, "-m", "vlora_sgl.launch_cluster", "--port", str(port), "--replicas", str(count)]
    command += ["--log-dir", str(root), "--model-path", str(tiny.path), "--enable-lora", "--max-lora-rank", "64"]
    command += ["--vlora-adapter-root", str(root), "--skip-server-warmup", "--lora-paths"]
    command += [f"{name}={path}" for name, path in tiny.adapters.items()]
    path = os.pathsep.join([str(summary.ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, cwd=summary.ROOT, env={**os.environ, "PYTHONPATH": path})
    server = Server(f"http://127.0.0.1:{port}", tiny, tuple(tiny.adapters), root / "log.txt", process)
    try:
        wait_for_replicas(server, count)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def wait_for_replicas(server: Server, count: int) -> None:
    """Return once so many serve."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(requests.RequestException):
            replicas = requests.get(f"{server.url}/cluster", timeout=30).json()["replicas"]
            if sum(one["serving"] for one in replicas) == count:
                return
        time.sleep(0.3)
    raise SystemExit(f"{count} replicas did not serve within {START_S} s")


def record(tally: Tally, where: Path) -> None:
    """The figures that the project is held to."""
    figures = {
        "robust.fuzz_requests": (tally.requests, "requests", True),
        "robust.servers_ended": (int(bool(tally.ended)), "servers", False),
        "robust.hangs": (len(tally.hangs), "requests", False),
        "robust.wrong_5xx": (len(tally.wrong_5xx), "requests", False),
    }
    for name, (value, unit, higher) in figures.items():
        summary.record(name, value, unit, higher, summary=where)
        print(f"{name} = {value} {unit}", flush=True)


if __name__ == "__main__":
    main()
