"""What an export gains: latency against the share of requests for the hot adapter (figure 3 of the scheme).

::

    python -m benchmarks.serving.bench_export --summary results/summary.json      # 7B shape, random weights, a GPU
    python -m benchmarks.serving.bench_export --tiny --summary /tmp/summary.json  # a check on a laptop

Three adapters, one of them hot; 400 tokens of prompt, 128 of answer, Poisson arrivals, 10 a second. ``stock`` is stock
SGLang with the three adapters; ``exported`` is stock SGLang on the exported model, where a hot request names no
adapter and the cold ones are deltas of twice the rank; ``ours`` (``--ours``) is vlora_sgl on the same. Latency depends
on shapes alone: bases and adapters have random weights, and the exported model has the base's. The engines share a
card and take turns with the same arrivals; an idle one takes memory and no time.

- ``bake.hot1_latency_vs_sglang``: mean latency of ``exported`` over ``stock``, only hot requests, median over repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.serving.shape7b import engine_options, make_adapters, make_model
from benchmarks.summary import record
from tests.support.engine_runs import Arrival, EngineProcess

HOT = "hot"
COLD = ("cold1", "cold2")
FIGURE = "bake.hot1_latency_vs_sglang"  # as its older rows in summary.json are called


def arrivals(share: float, exported: bool, args: argparse.Namespace, seed: int) -> list[Arrival]:
    """The requests of one run: the same times, prompts and adapters for both sides, named as each side names them.

    Exactly ``share`` of them, rounded, are for the hot adapter; the others take turns.
    """
    draw = random.Random(seed)
    hot = set(draw.sample(range(args.requests), round(share * args.requests)))
    at, found = 0.0, []
    for number in range(args.requests):
        at += draw.expovariate(args.rate)
        name = HOT if number in hot else COLD[number % len(COLD)]
        request = {
            "input_ids": [draw.randrange(100, 250) for _ in range(args.prompt)],
            "lora_path": None if exported and name == HOT else name,
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": args.answer},
        }
        found.append((at, request))
    return found


def options_of(model: Path, adapters: dict[str, Path], rank: int, tiny: bool) -> dict[str, Any]:
    """Of one engine; two or three of them share a card."""
    options = engine_options(model, adapters, rank, tiny)
    if not tiny:
        options |= {"cuda_graph_bs_decode": [1, 2, 4, 8, 12, 16, 24], "max_total_tokens": 32768}
    return options


def measure(engines: dict[str, EngineProcess], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per share, repeat and engine; the engines take turns, and who begins changes."""
    for engine in engines.values():
        engine.ready()
    for name, engine in engines.items():  # compiles what the run needs
        for share in (0.5, 1.0):
            engine.play(arrivals(share, name != "stock", args, seed=999))
    rows = []
    runs = [(share, n) for share in args.shares for n in range(args.repeats if share == 1.0 else 1)]
    for turn, (share, repeat) in enumerate(runs):
        for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
            engines[name].flush()
            times = engines[name].play(arrivals(share, name != "stock", args, seed=turn))
            first, last = zip(*times, strict=True)
            rows.append(
                {
                    "engine": name,
                    "share": share,
                    "repeat": repeat,
                    "latency": statistics.mean(last),
                    "latency_p95": sorted(last)[int(0.95 * (len(last) - 1))],
                    "ttft": statistics.mean(first),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def ratios(rows: Sequence[dict[str, Any]], engine: str, share: float, key: str = "latency") -> list[float]:
    """An engine's figure over stock's, per repeat."""
    values: dict[str, list[float]] = {"stock": [], engine: []}
    for row in rows:
        if row["share"] == share and row["engine"] in values:
            values[row["engine"]].append(row[key])
    return [ours / stock for ours, stock in zip(values[engine], values["stock"], strict=True)]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency and TTFT (time to first token) against the share of hot requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axis, key, title in zip(axes, ("latency", "ttft"), ("latency", "TTFT"), strict=True):
        for engine in dict.fromkeys(row["engine"] for row in rows):
            shares = sorted({row["share"] for row in rows})
            of = [[r[key] for r in rows if r["engine"] == engine and r["share"] == share] for share in shares]
            axis.plot(shares, [1e3 * statistics.median(values) for values in of], marker="o", label=engine)
        axis.set(xlabel="share of hot requests", ylabel=f"mean {title} (ms)", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with ``--tiny`` resolved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters instead of 7B")
    parser.add_argument("--ours", action="store_true", help="also vlora_sgl on the exported model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.4, 0.8, 1.0])
    parser.add_argument("--requests", type=int, default=40, help="of one run")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3, help="of the runs with only hot requests")
    parser.add_argument("--rows", type=Path, help="where the rows go, with a plot beside them")
    parser.add_argument("--summary", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.tiny:
        args.shares, args.requests, args.prompt, args.answer, args.repeats = [0.0, 1.0], 6, 32, 8, 2
    return args


def main() -> None:
    """Write models and adapters, start the engines together, measure, record."""
    args = parse()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        root = Path(scratch)
        model = make_model(root / "model", args.tiny)
        adapters = make_adapters(root, model, (HOT, *COLD), args.rank)
        deltas = make_adapters(root / "deltas", model, COLD, 2 * args.rank)
        plain, twice = (
            options_of(model, a, r, args.tiny) for a, r in ((adapters, args.rank), (deltas, 2 * args.rank))
        )
        engines = {"stock": EngineProcess(plain, stock=True), "exported": EngineProcess(twice, stock=True)}
        if args.ours:
            engines["ours"] = EngineProcess(twice)
        for engine in engines.values():
            stack.enter_context(engine)
        rows = measure(engines, args)
    found = ratios(rows, "exported", 1.0)
    print(f"{FIGURE}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
    for share in args.shares:
        print(f"share {share}: " + ", ".join(f"{e} {statistics.median(ratios(rows, e, share)):.3f}" for e in engines))
    record(FIGURE, statistics.median(found), "ratio", higher_is_better=False, summary=args.summary)
    if args.rows:
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plot(rows, args.rows.with_suffix(".png"))


if __name__ == "__main__":
    main()
