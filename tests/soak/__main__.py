"""``make soak``: ten minutes of wear on a server with few slots and little KV memory; records three figures.

Any answer that is lost or wrong, anything that is stuck afterwards, is an error, and nothing is recorded for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from benchmarks import summary
from tests.conftest import Server, TinyModel, serve
from tests.soak import phases
from tests.support.tiny_random import make_adapter, make_model

SLOTS, IN_MEMORY = 4, 7
FLAGS = ("--max-loras-per-batch", SLOTS, "--max-loaded-loras", IN_MEMORY, "--max-running-requests", 12)
FLAGS += ("--max-total-tokens", 6144, "--chunked-prefill-size", 256)
CLIENTS = 6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="requests of the latency phase")
    parser.add_argument("--seconds", type=float, default=200, help="length of the churn")
    parser.add_argument("--cycles", type=int, default=1000, help="adapters loaded, used and unloaded")
    parser.add_argument("--growth-seconds", type=float, default=270, help="at most so long for them")
    parser.add_argument("--summary", type=Path, default=summary.SUMMARY, help="file that takes the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_model(root / "model")
        paths = {name: make_adapter(root / name, model, seed) for seed, name in enumerate("ABCDEFGHXY", start=1)}
        tiny = TinyModel(model, {name: paths[name] for name in "ABCD"})
        with serve(tiny, root / "log.txt", *map(str, FLAGS)) as server:
            soak(server, paths, root, args)


def soak(server: Server, paths: dict[str, Path], root: Path, args: argparse.Namespace) -> None:
    """All phases, on a server that holds A to D."""

    def record(name: str, value: float, unit: str) -> None:
        summary.record(name, value, unit, False, summary=args.summary)
        print(f"{name} = {value:.4g} {unit}", flush=True)

    say(f"churn for {args.seconds:.0f} s: {CLIENTS} clients, 3 in 10 hang up, an operator changes adapters")
    bad = root / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_bytes((paths["X"] / "adapter_config.json").read_bytes())
    save_file({k: t * float("nan") for k, t in load_file(paths["X"] / phases.WEIGHTS).items()}, bad / phases.WEIGHTS)
    contents = {name: paths[name] for name in "XY"}
    prompts = [phases.question(number) for number in range(4)]
    expected = phases.quiet_answers(server, prompts, contents, "ABCD")
    tally = phases.Churn(server, expected, prompts, "coming", contents, bad).run(args.seconds, CLIENTS)
    say(", ".join(f"{kind} {count}" for kind, count in sorted(tally.outcomes.items())))
    left = phases.users_left(server)
    if left:
        tally.faults.append(f"stuck: adapters still have users: {left}")
    for fault in tally.faults[:20]:
        say(fault)
    if "coming" in phases.adapters(server):
        phases.unload(server, "coming").raise_for_status()
    record("soak.requests_lost", len(tally.faults), "requests")

    for name in "EFGH":
        phases.load(server, name, paths[name]).raise_for_status()
    say(f"first tokens: {args.rounds} requests over 8 adapters, {SLOTS - 1} slots, {IN_MEMORY} in memory")
    seconds = phases.first_token_seconds(server, "ABCDEFGH", args.rounds)
    say(phases.tiers_in_ms(seconds))
    record(
        "coldload.host_hit_over_device_hit", float(np.median(seconds["host"]) / np.median(seconds["device"])), "ratio"
    )

    say(f"{args.cycles} times: load under a new name, one request, unload")
    every = max(1, args.cycles // 40)
    warm = phases.load_use_unload(server, paths["X"], root, args.cycles // 10, every)
    samples = phases.load_use_unload(server, paths["X"], root, args.cycles, every, args.growth_seconds)
    say(f"resident MB every {every}, warming up: {_round(warm)}; then: {_round(samples)}")
    record("soak.memory_growth_mb_per_1000", phases.growth_per_1000(samples, every), "MB")
    if tally.faults:
        raise SystemExit(f"soak: {len(tally.faults)} faults, the first: {tally.faults[0]}")


def say(text: str) -> None:
    """One line, with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _round(values: list[float]) -> list[int]:
    return [round(value) for value in values]


if __name__ == "__main__":
    main()
