"""Where the time of a request goes that finds its server idle: on the host, on its way, on the device.

    python -m benchmarks.serving.bench_stages [--shape qwen3vl-8b] [--systems cost csgmv] [--rows FILE]

Each system in turn is asked one thing at a time, nothing of which it has cached: for a token of a text, of a text with
an image, and of a chunk of six frames, which ours answers by a head. Medians, in milliseconds:

- ``host``: images are opened and prepared, the prompt becomes tokens;
- ``queue``: from there to the first batch that holds the request: the link, features to the device, encoding ahead;
- ``device``: that batch, with what of the image encoder was left to it;
- ``back``: its result to the client.

Nothing is recorded: it explains figures of bench_e2e.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_e2e import HEAD, TINY, note, speaker_of
from benchmarks.serving.shape7b import SHAPES
from benchmarks.serving.systems import DEFAULT, SYSTEMS, Server, make_deployment
from benchmarks.serving.traces import RETRIEVAL, VIDEO, Arrival, Workload
from benchmarks.summary import card_name

CASES: dict[str, Workload] = {"text": replace(RETRIEVAL, images=0), "retrieval": RETRIEVAL, "video": VIDEO}
MARKS = ("request_received_ts", "api_server_dispatch_finish_ts", "forward_entry_time", "prefill_finished_time")
STAGES = ("host", "queue", "device", "back")


def stages(server: Server, load: Workload, head: str | None, repeats: int) -> dict[str, Any]:
    """Medians of each stage of a request to an idle server, and of the whole, in milliseconds.

    Args:
        head: what answers, if the server has heads.
        repeats: requests that count; three come before them.
    """
    speaker, found = speaker_of(server, 1), []
    for number in range(repeats + 3):
        body = speaker.body(Arrival(0.0, f"a{number % 2}", load.prompt, 1, 0.0), load.images, head)
        server.flush()
        sent = time.time()
        meta = server.generate({**body, "stream": False})["meta_info"]
        marks = [meta[name] for name in MARKS] + [time.time()]
        found.append([1e3 * (to - at) for at, to in pairwise(marks)] + [1e3 * (marks[-1] - sent)])
    medians = [statistics.median(times) for times in zip(*found[3:], strict=True)]
    return dict(zip((*STAGES, "all"), medians, strict=True))


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each system and case."""
    tiny, shape = args.shape in TINY, TINY.get(args.shape, args.shape)
    with tempfile.TemporaryDirectory() as scratch:
        made = make_deployment(Path(scratch), args.out, 2, 2, [8 if tiny else 64], 8, tiny, shape)
        made = replace(made, attention=args.attention, more=("--enable-metrics",))
        for system in args.systems:
            server = Server(SYSTEMS[system].server, made)
            try:
                if failure := server.wait(args.limit):
                    note(failure)
                    continue
                for case, load in CASES.items():
                    head = HEAD if case == "video" and server.name == "ours" else None
                    yield {"system": system, "case": case, **stages(server, load, head, args.repeats)}
                note(f"encoder {server.state().get('encoder', {})}")
            finally:
                server.stop()


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["cost", "csgmv"])
    parser.add_argument("--shape", choices=(*SHAPES, *TINY), default="7b")
    parser.add_argument("--attention", default=DEFAULT, help="backend of the servers; else they choose")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a server may take to start")
    parser.add_argument("--out", type=Path, default=Path("runs/stages"), help="where the servers' logs go")
    parser.add_argument("--rows", type=Path, help="where the rows go, as JSON lines")
    args = parser.parse_args(argv)
    for row in run(args):
        times = ", ".join(f"{name} {row[name]:.1f}" for name in (*STAGES, "all"))
        note(f"{row['system']:8s} {row['case']:9s} {times} ms")
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps({**row, "shape": args.shape, "card": card_name()}) + "\n")


if __name__ == "__main__":
    main()
