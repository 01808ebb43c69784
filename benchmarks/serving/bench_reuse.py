"""What the prefix cache saves: N adapters on the same image, and rounds of a conversation about one.

::

    python -m benchmarks.serving.bench_reuse --summary results/summary.json      # 7B shape, random weights, a GPU
    python -m benchmarks.serving.bench_reuse --tiny --summary /tmp/summary.json  # the same on a laptop: a check

- ``reuse.shared8_ttft_ratio``: mean TTFT (time to first token) of 8 requests, one adapter each, about one image of
  1,024 tokens that is new to the server: ordinary adapters (``forked``: each computes the image's KV itself), over
  activated adapters (which start behind the image and share its KV). Both in our server.
- ``reuse.shared8_image_tokens_computed``: image tokens computed for those 8 activated ones, over the image's.
- ``reuse.shared8_ttft_vs_sglang``: the same requests, stock SGLang over our activated adapters.
- ``reuse.round2_image_tokens_computed``: image tokens that the second round of a conversation computes, by the
  server's own counters.

The requests are all in the scheduler's queue before it starts, and times count from there: preprocessing the images
takes the client's process the same time everywhere. Before them the prefix cache is emptied, the CUDA allocator's is
not, and their adapters are on the device. Stock SGLang runs in a process of its own, with the same model and adapters;
there every adapter computes a KV of its own (as in vLLM, whose block hashes contain the adapter's id). A case's values
are of different images; medians are reported, all values are in the rows.

``--heads`` measures what bench_heads measures too, on the same engine: a start of 7B shape costs a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serving import bench_heads
from benchmarks.serving.client import Client, images, request
from benchmarks.serving.shape7b import build_engine, build_stock_engine, engine_options, make_adapters, make_model
from benchmarks.summary import record
from vlora_sgl.heads.store import save_heads

SYSTEMS = ("ours", "stock")
COUNTS = (1, 2, 4, 8, 16, 32)
ORDINARY = 8
"""Ordinary adapters in our server: enough for the comparison that the figure is about."""
ROUNDS = 10
MORE = "yes<|im_end|>\n<|im_start|>user\nIs there a cat?<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters and a 64-token image")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--adapters", nargs="+", type=int, default=list(COUNTS), help="how many ask about one image")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="of each case, one more to warm up")
    parser.add_argument("--limit", type=float, help="seconds for each system, its start included; what is done counts")
    parser.add_argument("--heads", action="store_true", help="also, on our engine, what bench_heads measures")
    parser.add_argument("--seconds", type=int, default=4, help="with --heads: of each throughput and trial of streams")
    parser.add_argument("--summary", type=Path, required=True, help="file to append the figures to")
    parser.add_argument("--rows", type=Path, help="file to write all measured values to")
    parser.add_argument("--plot", type=Path, help="file to draw them to")
    parser.add_argument("--measure", choices=SYSTEMS, help=argparse.SUPPRESS)  # of the process of one system
    args = parser.parse_args()
    if args.measure:
        with args.rows.open("w", buffering=1) as file:
            for row in measure(args.measure, args):
                file.write(json.dumps({"system": args.measure, **row}) + "\n")
        return
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for row in itertools.chain.from_iterable(rows_of(system, args) for system in args.systems):
        rows.append(row)
        print(json.dumps(row), flush=True)
        found = [(row["figure"], row["value"], row["unit"], row["higher_is_better"])] if "figure" in row else []
        for name, value, unit, higher_is_better in [*found, *(f for f in figures(rows) if f[0] not in known)]:
            print(f"{name}: {value:.4g} {unit}", flush=True)
            record(name, value, unit, higher_is_better, summary=args.summary)
            known.add(name)
        if args.rows:
            args.rows.parent.mkdir(parents=True, exist_ok=True)
            args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.plot:
        plot([row for row in rows if row.get("case") in ("shared", "rounds")], args.plot)


def rows_of(system: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one system in a process of its own; rows come as they are measured, until its time is up."""
    with tempfile.NamedTemporaryFile("r") as answer:
        command = [sys.executable, "-m", "benchmarks.serving.bench_reuse", "--measure", system]
        command += ["--rows", answer.name, "--summary", str(args.summary), "--rank", str(args.rank)]
        command += ["--repeats", str(args.repeats), "--adapters", *map(str, args.adapters)]
        command += ["--seconds", str(args.seconds)]
        command += [f"--{flag}" for flag in ("tiny", "heads") if getattr(args, flag)]
        process = subprocess.Popen(command, start_new_session=True)
        until = time.monotonic() + (args.limit or float("inf"))
        line, ended = "", False
        try:
            while not ended:
                ended = process.poll() is not None  # before the last look at the file
                while (more := answer.readline()) != "":
                    line += more
                    if line.endswith("\n"):
                        yield json.loads(line)
                        line = ""
                if time.monotonic() > until:
                    print(f"{system}: stopped after {args.limit:.0f} s", file=sys.stderr)
                    return
                time.sleep(0.2)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the engine's processes are in its group


def measure(system: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start one system's engine and measure it; rows come as they are measured."""
    most = max(args.adapters)
    kinds = {"forked": most} if system == "stock" else {"forked": min(ORDINARY, most), "activated": most}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make_model(root / "model", args.tiny)
        names = [f"{kind}{number}" for kind, count in kinds.items() for number in range(count)]
        adapters = make_adapters(root / "adapters", model, names, args.rank)
        for name, path in adapters.items():
            if name.startswith("activated"):
                save_heads(path, [], invocation="after_image")
            elif system == "ours":
                bench_heads.give_head(path, model)
        options = engine_options(model, adapters, args.rank, args.tiny)
        options |= {"max_loras_per_batch": most + 1, "max_total_tokens": 65536}
        engine = (build_engine if system == "ours" else build_stock_engine)(**options)
        try:
            client, tokens = Client(engine), 64 if args.tiny else 1024
            first, *more = sorted(args.adapters, key=lambda n: (n != 8, n))  # what the figures are of comes first
            yield from shared(client, [kind for kind, top in kinds.items() if first <= top], first, tokens, args)
            yield from rounds(client, list(kinds), tokens, args)
            if args.heads and system == "ours":
                yield from bench_heads.measure(client, names[: kinds["forked"]], args)
            for count in more:
                yield from shared(client, [kind for kind, top in kinds.items() if count <= top], count, tokens, args)
        finally:
            engine.shutdown()


def shared(
    client: Client, kinds: list[str], count: int, tokens: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """N adapters on one image, all in the queue at once. The image is new, or the encoder alone has seen it."""
    fresh = images(tokens)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for repeat, kind in itertools.product(range(args.repeats + 1), kinds):
        picture = next(fresh)
        names = [f"{kind}{number}" for number in range(count)]
        requests = [request([picture], name, 1) for name in names]
        client.ask(*(request([], name, 1) for name in names))  # loads the adapters: the other kind had their slots
        for image in ("new", "encoded"):
            client.forget_prefixes()
            answers = client.ask(*requests, hold=True)
            if all(answer.meta_info["cached_tokens"] for answer in answers):
                raise RuntimeError("every request found a prefix: the cache was not emptied before them")
            if repeat:
                found.setdefault((kind, image), []).append(counts(answers))
    for (kind, image), values in found.items():
        yield {"case": "shared", "kind": kind, "adapters": count, "image": image, **columns(values)}


def rounds(client: Client, kinds: list[str], tokens: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A conversation about one image, round after round, the answers so far in the prompt."""
    fresh = images(tokens)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat, kind in itertools.product(range(min(args.repeats, 3) + 1), kinds):
        one = request([next(fresh)], f"{kind}0", 1)
        for number in range(1, ROUNDS + 1):
            answers = client.ask(one, hold=True)
            if repeat:
                found.setdefault((kind, number), []).append(counts(answers))
            one = {**one, "prompt": one["prompt"] + MORE}
    for (kind, number), values in found.items():
        yield {"case": "rounds", "kind": kind, "round": number, **columns(values)}


def counts(answers: list[Any]) -> dict[str, float]:
    """Mean TTFT in seconds, and tokens that had to be computed; image tokens where the server counts."""
    found = {
        "seconds": round(statistics.mean(answer.seconds for answer in answers), 5),
        "tokens_computed": sum(a.meta_info["prompt_tokens"] - a.meta_info["cached_tokens"] for a in answers),
    }
    if "reuse" in answers[0].meta_info.get("vlora", {}):
        reuse = [answer.meta_info["vlora"]["reuse"] for answer in answers]
        found["image_tokens"] = reuse[0]["prompt_image_tokens"]
        found["image_tokens_computed"] = sum(r["prompt_image_tokens"] - r["cached_image_tokens"] for r in reuse)
    return found


def columns(values: list[dict[str, float]]) -> dict[str, list[float]]:
    """The values of several runs, by name."""
    return {name: [value[name] for value in values] for name in values[0]}


def figures(rows: list[dict[str, Any]]) -> list[tuple[str, float, str, bool]]:
    """Name, value, unit and direction of what the rows allow to say."""

    def one(system: str, **wanted: Any) -> Any:
        for row in rows:
            if row["system"] == system and wanted.items() <= row.items():
                return row
        return None

    eight = {"case": "shared", "adapters": 8, "image": "new"}
    stock, ordinary = one("stock", **eight), one("ours", kind="forked", **eight)
    activated = one("ours", kind="activated", **eight)
    found = []
    if ordinary is not None and activated is not None:
        found.append(("reuse.shared8_ttft_ratio", _ratio(ordinary, activated), "ratio", True))
        share = max(activated["image_tokens_computed"]) / activated["image_tokens"][0]
        found.append(("reuse.shared8_image_tokens_computed", share, "images", False))
    if stock is not None and activated is not None:
        found.append(("reuse.shared8_ttft_vs_sglang", _ratio(stock, activated), "ratio", True))
    second = [row for row in rows if row["system"] == "ours" and row.get("round") == 2]
    if len(second) > 1:  # of both kinds
        computed = max(itertools.chain.from_iterable(row["image_tokens_computed"] for row in second))
        found.append(("reuse.round2_image_tokens_computed", computed, "tokens", False))
    return found


def _ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    return statistics.median(slow["seconds"]) / statistics.median(fast["seconds"])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """TTFT by adapters on one new image, and tokens computed by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left_rows = [row for row in rows if row["case"] == "shared" and row["image"] == "new"]
    right_rows = [row for row in rows if row["case"] == "rounds"]
    for axis, chosen, along, value in (
        (left, left_rows, "adapters", "seconds"),
        (right, right_rows, "round", "tokens_computed"),
    ):
        for system, kind in dict.fromkeys((row["system"], row["kind"]) for row in chosen):
            line = [row for row in chosen if (row["system"], row["kind"]) == (system, kind)]
            points = sorted((row[along], statistics.median(row[value])) for row in line)
            style = "--" if system == "stock" else "-"
            axis.plot(
                *zip(*points, strict=True), style, marker="o", label=f"{system}, {kind.replace('forked', 'ordinary')}"
            )
    left.set(xlabel="adapters on one image", ylabel="mean TTFT (s)", yscale="log", xscale="log")
    left.set_xticks(ticks := sorted({row["adapters"] for row in left_rows}), [str(tick) for tick in ticks])
    right.set(xlabel="round", ylabel="prompt tokens computed", yscale="log")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    drawing.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
