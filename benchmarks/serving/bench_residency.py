"""More adapters than device slots: the cost, beside slots for all of them and beside stock SGLang (``residency.*``).

    python -m benchmarks.serving.bench_residency --cases all few --out DIR --summary FILE       # five minutes of a GPU
    python -m benchmarks.serving.bench_residency --cases waiting stock --out DIR --summary FILE    # then these
    python -m benchmarks.serving.bench_residency --shape tiny --out DIR --summary FILE          # a check on a laptop

Retrieval traffic, 60 % to the hottest of 64 adapters of rank 64, eight requests a second for a minute. The servers of
a run are up together and are asked one after the other. Rows go to ``DIR/residency.jsonl``; a case that has one there
is not run again, and figures are of all of them: a run that was cut short goes on.

- ``residency.slots16_of_64_throughput``, ``residency.slots16_of_64_ttft_p99``: 16 slots over slots for all.
- ``residency.ahead_ttft_p99``: the same slots, over batches that wait for their adapters (``--vlora-fetch-ahead 0``).
- ``residency.vs_sglang``, ``residency.vs_vllm``: latency per token over stock SGLang's and vLLM's with as many slots.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving import bench_e2e
from benchmarks.serving.bench_e2e import deployed, describe, measure, note, warm_up
from benchmarks.serving.systems import SYSTEMS, Server
from benchmarks.summary import SUMMARY, card_name, record

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A server: the system on it, whether it has slots for all adapters, and more flags."""

    system: str
    all_slots: bool = False
    more: tuple[str, ...] = ()


CASES = {
    "all": Case("cost", all_slots=True),
    "few": Case("cost"),
    "waiting": Case("cost", more=("--vlora-fetch-ahead", "0")),
    "stock": Case("csgmv"),
    "vllm": Case("vllm"),
}
# Figure -> what is compared, "few" over which case, whether higher is better.
FIGURES = {
    "slots{slots}_of_{adapters}_throughput": ("tokens_per_second", "all", True),
    "slots{slots}_of_{adapters}_ttft_p99": ("ttft_p99", "all", False),
    "ahead_ttft_p99": ("ttft_p99", "waiting", False),
    "vs_sglang": ("token_latency", "stock", False),
    "vs_vllm": ("token_latency", "vllm", False),
}


def figures(rows: Mapping[str, Row]) -> dict[str, tuple[float, bool]]:
    """Figure -> its value and whether higher is better, as far as there are rows by case."""
    found = {}
    for name, (what, other, higher) in FIGURES.items():
        if {"few", other} <= rows.keys():
            full = name.format(**rows["few"])
            found[f"residency.{full}"] = rows["few"][what] / rows[other][what], higher
    return found


def serve(names: Sequence[str], scratch: Path, args: argparse.Namespace) -> Iterator[Row]:
    """A row of each case, on servers that are up together."""
    made, servers = deployed(scratch, args), {}
    (load,) = (load for _, load in bench_e2e.cells(args))
    try:
        for name in names:
            case = CASES[name]
            slots = args.adapters if case.all_slots else args.slots
            own = replace(made, slots=slots, more=case.more, out=args.out / name)
            own.out.mkdir(parents=True, exist_ok=True)
            servers[name] = Server(SYSTEMS[case.system].server, own)
        with ThreadPoolExecutor(len(names)) as pool:
            failures = dict(zip(names, pool.map(lambda name: servers[name].wait(args.limit), names), strict=True))
        for name in names:
            if failures[name]:
                note(failures[name])
                continue
            warm_up(servers[name], [CASES[name].system], args)
            row = measure(servers[name], CASES[name].system, "retrieval", load, args)
            slots = (servers[name].state().get("plan") or {}).get("slots", {})
            yield {**row, "case": name, "slots": servers[name].deployment.slots, "residency": slots}
    finally:
        for server in servers.values():
            server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write rows, record figures. Returns 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["all", "few", "waiting", "stock"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    options, rest = parser.parse_known_args(argv)
    one = ["--adapters", "64", "--slots", "16", "--skews", ".6", "--rates", "8", "--seconds", "60"]
    args = bench_e2e.parse([*one, "--out", str(options.out), *rest])
    args.slots = min(args.slots, max(1, args.adapters - 2))  # the tiny shape has four
    path = options.out / "residency.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    missing = [name for name in options.cases if name not in rows]
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            for row in serve(missing, Path(scratch), args):
                note(f"{row['case']:8s} {describe(row)} {row['residency']}")
                rows[row["case"]] = row
                with path.open("a") as file:
                    file.write(json.dumps({**row, "card": card_name(), "date": time.strftime("%Y-%m-%d")}) + "\n")
    for name, (value, higher) in figures(rows).items():
        note(f"{name}: {value:.4f}")
        record(name, value, "ratio", higher, summary=options.summary)
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
