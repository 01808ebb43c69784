"""The command and the page: how soon the command answers, how large the page is, what it costs a step to be watched.

    python -m benchmarks.serving.bench_page           # seconds, on any machine: cli.start_ms, page.kilobytes
    python -m benchmarks.serving.bench_page --step    # minutes, on a GPU: page.step_overhead

``--step`` decodes a full batch of eight adapters on a server of ours (7B shape; ``--tiny`` to try it on a CPU), and
counts its steps while ``GET /vlora/live`` is read and while it is not, in turn. Steps get longer as answers do, so
each stretch is of an answer's same steps. ``page.step_overhead`` is what a watched step takes longer, over 5 ms: the
median over pairs of stretches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import requests

from benchmarks.serving.systems import Server, make_deployment
from benchmarks.summary import SUMMARY, record
from vlora_sgl import page
from vlora_sgl.managers.live import WATCHED_S

STEP_S = 0.005
"""The step that the overhead is a share of."""
ADAPTERS, ROWS, START_S = 8, 32, 900.0


def start_seconds(repeats: int) -> list[float]:
    """Wall seconds of the process of a command that needs no engine; the first is not counted."""
    command = [sys.executable, "-m", "vlora_sgl.cli", "ps", "--help"]
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


@contextlib.contextmanager
def watching(url: str) -> Iterator[None]:
    """Somebody looks at the page of a server meanwhile."""
    left = threading.Event()

    def look() -> None:
        with requests.get(f"{url}/vlora/live", stream=True, timeout=60) as answer:
            for _ in answer.iter_lines():
                if left.is_set():
                    return

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        left.set()
        thread.join()


@contextlib.contextmanager
def decoding(server: Server, rows: int, tokens: int) -> Iterator[None]:
    """So many rows of all adapters decode meanwhile, from their first tokens on.

    Raises:
        RuntimeError: a row was refused, or ended before the rest.
    """
    names, done, early = list(server_adapters(server)), threading.Event(), list[str]()

    def ask(number: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        ids = [100 + number] * 16
        body = {"input_ids": ids, "lora_path": names[number % len(names)], "sampling_params": sampling}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=600)
        if not done.is_set():
            early.append(answer.text[:200])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(rows)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        done.set()
        requests.post(f"{server.url}/abort_request", json={"rid": "", "abort_all": True}, timeout=60)
        for thread in threads:
            thread.join()
        if early:  # whatever else that led to
            raise RuntimeError(f"{len(early)} of {rows} rows did not decode all the time: {early[0]}")


def server_adapters(server: Server) -> Iterator[str]:
    """Names of its adapters."""
    yield from (row["name"] for row in requests.get(f"{server.url}/lora_adapters", timeout=60).json()["adapters"])


def step_seconds(server: Server, stretch: float) -> float:
    """Mean seconds of a step over a stretch, by the server's count of its steps."""
    begin, before = time.perf_counter(), steps_of(server)
    time.sleep(stretch)
    after = steps_of(server)
    return (time.perf_counter() - begin) / (after - before)


def steps_of(server: Server) -> int:
    """Steps so far."""
    return sum(server.state()["batches_by_mode"].values())


def step_overhead(args: argparse.Namespace) -> float:
    """What a watched step takes longer, over 5 ms: the median over pairs of stretches."""
    with tempfile.TemporaryDirectory() as scratch:
        ranks, slots = [8 if args.tiny else 64], ADAPTERS + 1
        made = make_deployment(
            Path(scratch), Path(scratch) / "out", ADAPTERS, slots, ranks, ROWS, args.tiny, language=True
        )
        held = ROWS * (args.tokens + 64)  # of all rows, from the first step on
        server = Server("ours", made if args.tiny else replace(made, more=("--max-total-tokens", str(held))))
        try:
            if why := server.wait(START_S):
                raise SystemExit(why)
            rows = 4 if args.tiny else ROWS
            stretch_of(server, rows, args, watched=False)  # what starts late is not counted
            pairs = [stretches(server, rows, args, bool(number % 2)) for number in range(2 * args.rounds)]
        finally:
            server.stop()
    for plain, watched in pairs:
        print(f"step {1000 * plain:.3f} ms, watched {1000 * watched:.3f} ms", flush=True)
    return statistics.median(watched - plain for plain, watched in pairs) / STEP_S


def stretches(server: Server, rows: int, args: argparse.Namespace, watched_first: bool) -> tuple[float, float]:
    """Seconds of a step that nobody watches, and of one that somebody does, one after the other."""
    found = {watched: stretch_of(server, rows, args, watched) for watched in (watched_first, not watched_first)}
    return found[False], found[True]


def stretch_of(server: Server, rows: int, args: argparse.Namespace, watched: bool) -> float:
    """Seconds of a step over a stretch, of answers that have just begun."""
    time.sleep(1 + WATCHED_S)  # nobody has watched for long enough
    with watching(server.url) if watched else contextlib.nullcontext(), decoding(server, rows, args.tokens):
        return step_seconds(server, args.stretch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="starts of the command")
    parser.add_argument("--step", action="store_true", help="measure page.step_overhead instead")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try --step on a CPU")
    parser.add_argument("--stretch", type=float, default=5.0, help="seconds of each")
    parser.add_argument("--rounds", type=int, default=4, help="of two pairs of stretches, in both orders")
    parser.add_argument("--tokens", type=int, default=4_000, help="of each row, more than a stretch needs")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="file to append the figures to")
    args = parser.parse_args()
    if args.step:
        overhead = step_overhead(args)
        print(f"page.step_overhead: {overhead:.2%} of a step of {1000 * STEP_S:g} ms")
        record("page.step_overhead", overhead, "ratio", False, summary=args.summary)
        return
    seconds = start_seconds(args.repeats)
    size = sum(len(page.content(path)) for path in page.FILES) / 1024
    # The least, as timeit has it: the rest is what else the machine does.
    print(f"cli.start_ms: {1000 * min(seconds):.0f} (median {1000 * statistics.median(seconds):.0f})")
    print(f"page.kilobytes: {size:.1f}")
    record("cli.start_ms", 1000 * min(seconds), "ms", False, summary=args.summary)
    record("page.kilobytes", size, "KiB", False, summary=args.summary)


if __name__ == "__main__":
    main()
