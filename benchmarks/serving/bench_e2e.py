"""End to end: servers, traffic over HTTP, and what users of it would see, ours against stock SGLang and the policies
of others.

    python -m benchmarks.serving.bench_e2e --quick                       # cost against csgmv, one cell, one GPU
    python -m benchmarks.serving.bench_e2e --systems cost vlora unmerged merged dlora csgmv triton --skews .1 .6 .9
    python -m benchmarks.serving.bench_e2e --workload retrieval video --heads   # closed questions: by heads
    python -m benchmarks.serving.bench_e2e --systems cost csgmv off --uniform
    python -m benchmarks.serving.bench_e2e --plan --skews .6 --rates 8 24   # every policy; then --plan --recorded
    python -m benchmarks.serving.bench_e2e --shape llava-7b --heads --workload retrieval video  # or qwen3vl-8b, 3b
    python -m benchmarks.serving.bench_e2e --systems cost vllm --vllm-python PATH    # vLLM's server, of that Python
    python -m benchmarks.serving.bench_e2e --shape tiny --quick          # a check of all of it, on a laptop

Weights are random; latency depends on shapes alone. Every system of a cell gets the same trace, one after the other,
from an empty prefix cache. ``--together 2`` keeps the servers of two systems up at once on one device: the idle one
takes memory and no time, and half of the starts' minutes are saved. All servers choose their attention themselves, as
users run them; ``--attention`` gives SGLang's and ours one. Where vLLM does not start with the vision tower, it serves
the language model, with words for an image (``words`` of the row). Rows go to ``OUT/e2e-WORKLOAD.jsonl`` with a plot
beside it, figures to the summary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.serving.policy_grid import MEANS, POLICIES, TAILS, over_best, over_unmerged
from benchmarks.serving.replay import replay, summarize
from benchmarks.serving.shape7b import MOST, SHAPES, adapter_numbers, base_numbers
from benchmarks.serving.systems import DEFAULT, DLORA, SYSTEMS, Deployment, Server, make_deployment
from benchmarks.serving.traces import RETRIEVAL, VIDEO, Speaker, Workload, trace, without_adapters
from benchmarks.summary import SUMMARY, card_name, record

WORKLOADS = {"retrieval": RETRIEVAL, "video": VIDEO}
RESULTS = SUMMARY.parent / "serving"
UNIFORM_PROMPT, UNIFORM_STEPS = 256, 64
TINY = {"tiny": "7b", "tiny-llava": "llava-7b", "tiny-qwen3vl": "qwen3vl-8b"}
"""Small models -> the shape whose code they run."""
HEAD = "answer"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with ``--quick`` and ``--shape tiny`` resolved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["cost", "csgmv"])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["retrieval"], help="one after the other")
    parser.add_argument("--heads", action="store_true", help="of video, ours answers by a head, the others generate")
    parser.add_argument("--shape", choices=(*SHAPES, *TINY), default="7b")
    parser.add_argument("--attention", default=DEFAULT, help="backend of SGLang's servers and ours; else they choose")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH", help="the Python that has vLLM")
    parser.add_argument("--vllm-words", action="store_true", help="vLLM serves the language model alone")
    parser.add_argument("--rates", nargs="+", type=float, default=[4.0, 8.0, 12.0], help="requests per second")
    parser.add_argument("--skews", nargs="+", type=float, default=[0.1, 0.6, 0.9], help="share of the hottest adapter")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--slots", type=int, help="adapters on the device at once; by default all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64], help="of the adapters, in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a trace")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uniform", action="store_true", help="also throughput of a full uniform batch, closed loop")
    parser.add_argument("--plan", action="store_true", help="every policy; the figures plan.*, in place of the others")
    parser.add_argument("--quick", action="store_true", help="one cell: skew 60 %%, one rate, 30 s")
    parser.add_argument("--together", type=int, default=1, help="servers up at once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a server may take to start")
    parser.add_argument("--recorded", action="store_true", help="measure nothing: the figures of the rows in OUT")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    if args.plan:
        args.systems = list(POLICIES)
    if args.quick:
        args.skews, args.rates, args.seconds, args.together = [0.6], args.rates[1:2] or args.rates, 30.0, 2
    args.tiny, args.model = args.shape in TINY, TINY.get(args.shape, args.shape)
    if args.tiny:
        args.adapters, args.ranks, args.max_batch = min(args.adapters, 4), [8], 8
        args.rates, args.seconds = [2.0], 6.0
    args.slots = min(args.slots or args.adapters, args.adapters)
    return args


def cells(args: argparse.Namespace) -> Iterable[tuple[str, Workload]]:
    """The workload and the traffic of every cell."""
    for name, skew, rate in itertools.product(args.workload, args.skews, args.rates):
        load = replace(WORKLOADS[name], arrivals="azure", rate=rate, adapters=args.adapters)
        yield name, replace(load, skew=skew, seed=args.seed)


def by_head(name: str, args: argparse.Namespace) -> bool:
    """Whether our systems answer a workload by a head: its questions must be closed ones."""
    return args.heads and name == "video"


def speaker_of(server: Server, seed: int) -> Speaker:
    """Who speaks to a server."""
    made = server.deployment
    return Speaker(made.model, seed, made.words, made.mark)


def requests_of(
    load: Workload, seconds: float, speaker: Speaker, system: str, heads: bool
) -> list[tuple[float, dict]]:
    """The trace as this system gets it."""
    arrivals = list(trace(load, seconds))
    if system == "off":
        arrivals = without_adapters(arrivals)
    head = HEAD if heads and SYSTEMS[system].server == "ours" else None
    return [(a.at, speaker.body(a, load.images, head)) for a in arrivals]


def warm_up(server: Server, systems: Sequence[str], args: argparse.Namespace) -> None:
    """Load every adapter, and let every batch size and mode compile what it needs, outside of any measurement."""
    names: list[str | None] = [f"a{n}" for n in range(args.adapters)] if server.name != "off" else [None]
    modes = ("unmerged", "mixture", "merged") if server.name == "ours" else ("",)
    speaker = speaker_of(server, 999)
    for mode in modes:
        server.set({f"vlora_mode:{mode}": 1} if mode else {})
        for size in (1, 2, 4, 8, 16, 32, 64):
            if size <= args.max_batch:
                adapters = [names[n % len(names)] for n in range(size)]
                server.generate(batch_body(speaker, adapters, 32 if args.tiny else UNIFORM_PROMPT, 4))
    firsts = dict(reversed(list(cells(args))))
    for system, (name, first) in itertools.product(systems, firsts.items()):
        server.set(SYSTEMS[system].settings)
        load, heads = replace(first, seed=args.seed + 1000), by_head(name, args)
        due = requests_of(load, 3.0, speaker, system, heads)
        asyncio.run(replay(server.url, due or requests_of(load, 10.0, speaker, system, heads)[:1], server.api))


def batch_body(speaker: Speaker, adapters: Sequence[str | None], prompt: int, tokens: int) -> dict[str, Any]:
    """One body with a text request per adapter, every prompt new."""
    return {
        "input_ids": [speaker.ids(prompt) for _ in adapters],
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
        # A server without LoRA refuses the field, even with nothing but the base model in it.
        **({"lora_path": list(adapters)} if any(adapters) else {}),
    }


def measure(server: Server, system: str, name: str, load: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """One row: a trace of a workload served by one system."""
    server.set(SYSTEMS[system].settings)
    server.flush()
    due = requests_of(load, args.seconds, speaker_of(server, args.seed), system, by_head(name, args))
    before = server.state().get("batches_by_mode", {})
    switches = switch_counts(server)
    row = summarize(asyncio.run(replay(server.url, due, server.api)))
    after = server.state().get("batches_by_mode", {})
    ran = {mode: count - before[mode] for mode, count in after.items()}
    return {
        "system": system,
        "shape": args.shape,
        "attention": args.attention,
        "words": server.deployment.words,
        "workload": name,
        "heads": by_head(name, args) and SYSTEMS[system].server == "ours",
        "skew": load.skew,
        "rate": load.rate,
        "adapters": args.adapters,
        "slots": args.slots,
        "ranks": args.ranks,
        "max_batch": args.max_batch,
        "seconds": args.seconds,
        "seed": args.seed,
        **row,
        "cost_error": (server.state().get("plan") or {}).get("cost_error", {}),
        "mode_share": {mode: count / max(1, sum(ran.values())) for mode, count in ran.items()},
        "switches": switch_counts(server) - switches,
    }


def switch_counts(server: Server) -> int:
    """Mode switches so far."""
    return sum(kind["count"] for kind in server.state().get("switches", {}).values())


def uniform_cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Systems and numbers of adapters of the closed-loop cases; every batch is full."""
    spread = [n for n in (2, 4, 8, 16, 32, 64) if n <= args.adapters]
    ours = [("unmerged", n) for n in spread] + [("cost", 1)]
    servers = {SYSTEMS[s].server for s in args.systems}
    return [
        case for case in [*ours, ("csgmv", min(8, args.adapters)), ("off", 0)] if SYSTEMS[case[0]].server in servers
    ]


def measure_uniform(server: Server, system: str, adapters: int, args: argparse.Namespace) -> dict:
    """Seconds of a decode step and of a prefill of a full batch with its rows spread over ``adapters``.

    A step is the difference of two runs over the tokens between them; medians of five, every prompt new.
    """
    server.set(SYSTEMS[system].settings)
    speaker, prompt = speaker_of(server, args.seed), 32 if args.tiny else UNIFORM_PROMPT
    names = [f"a{n % adapters}" if adapters else None for n in range(args.max_batch)]

    def seconds(tokens: int) -> float:
        server.flush()
        body = batch_body(speaker, names, prompt, tokens)
        start = time.perf_counter()
        server.generate(body)
        return time.perf_counter() - start

    seconds(UNIFORM_STEPS)  # the policy settles
    pairs = [(seconds(1), seconds(1 + UNIFORM_STEPS)) for _ in range(5)]
    steps = [(long - short) / UNIFORM_STEPS for short, long in pairs]
    return {
        "system": system,
        "shape": args.shape,
        "attention": args.attention,
        "workload": "uniform",
        "adapters": adapters,
        "ranks": args.ranks,
        "rows": args.max_batch,
        "decode_step": statistics.median(steps),
        "decode_spread": [min(steps), max(steps)],
        "prefill": statistics.median(short for short, _ in pairs),
        "prefill_spread": [min(s for s, _ in pairs), max(s for s, _ in pairs)],
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows, each as soon as it is measured."""
    with tempfile.TemporaryDirectory() as scratch:
        deployment = deployed(Path(scratch), args)
        names = list(dict.fromkeys(SYSTEMS[s].server for s in args.systems))
        for first in range(0, len(names), args.together):
            yield from serve(names[first : first + args.together], deployment, Path(scratch) / "words", args)


def deployed(scratch: Path, args: argparse.Namespace, language: bool = False) -> Deployment:
    """The model and the adapters of the command line; ``language``: the language model alone."""
    sizes = args.adapters, args.slots, args.ranks, args.max_batch, args.tiny, args.model
    made = make_deployment(scratch, args.out, *sizes, language)
    policy = DLORA if "dlora" in args.systems else None
    return replace(made, policy=policy, attention=args.attention, vllm_python=args.vllm_python)


def start(
    name: str, deployment: Deployment, words: Path, args: argparse.Namespace, servers: dict[str, Server]
) -> None:
    """Have a server answer, among ``servers``; vLLM's without the vision tower where it does not start with it.

    Args:
        words: where a language model alone may be written to.
    """
    if name == "vllm" and args.vllm_words and deployment.sees:
        deployment = deployed(words, args, language=True)
    servers[name] = Server(name, deployment)
    if not (failure := servers[name].wait(args.limit)):
        return
    note(failure)
    servers.pop(name).stop()
    if name == "vllm" and deployment.sees:
        note("vllm once more, without the vision tower: words stand for images")
        start(name, deployed(words, args, language=True), words, args, servers)


def serve(
    names: Sequence[str], deployment: Deployment, words: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of the systems on these servers; the servers are up together and stopped at the end."""
    begun = time.perf_counter()
    servers: dict[str, Server] = {}
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: start(name, deployment, words, args, servers), names))
        note(f"{', '.join(servers)} up after {time.perf_counter() - begun:.0f} s")
        systems = [s for s in args.systems if SYSTEMS[s].server in servers]
        for server in servers.values():
            warm_up(server, [s for s in systems if SYSTEMS[s].server == server.name], args)
        note(f"warm after {time.perf_counter() - begun:.0f} s")
        for (name, load), system in itertools.product(cells(args), systems):
            yield measure(servers[SYSTEMS[system].server], system, name, load, args)
        for system, adapters in uniform_cases(args) if args.uniform else ():
            if SYSTEMS[system].server in servers:
                yield measure_uniform(servers[SYSTEMS[system].server], system, adapters, args)
    finally:
        for server in servers.values():
            server.stop()


def describe(row: dict[str, Any]) -> str:
    """A row in one line; times in milliseconds, modes in percent of the iterations."""
    if row["workload"] == "uniform":
        times = f"{1e3 * row['decode_step']:.3f} a step, prefill {1e3 * row['prefill']:.1f}"
        return f"{row['system']:9s} {row['adapters']:2d} adapters, {row['rows']} rows: {times}"
    ms = {name: 1e3 * row[name] for name in ("token_latency", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")}
    modes = "/".join(f"{100 * share:.0f}" for share in row["mode_share"].values()) or "-"
    return (
        f"{row['system']:9s} skew {row['skew']:.2f} rate {row['rate']:5.1f}: {ms['token_latency']:7.2f} a token, "
        f"TTFT {ms['ttft_p50']:6.1f} p99 {ms['ttft_p99']:6.1f}, ITL {ms['itl_p50']:5.2f} p99 {ms['itl_p99']:5.1f}, "
        f"{row['tokens_per_second']:6.0f} tokens/s, {row['requests']} done, {row['failed']} failed, modes {modes}, "
        f"{row['switches']} switches, cached {row['cached_share']:.2f} {row['first_error']}"
    )


def note(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)


def ranks_of(row: dict[str, Any]) -> list[int]:
    """The ranks of a row's adapters; rows of before 2026-11-29 have one, as ``rank``."""
    return row.get("ranks") or [row["rank"]]


Figure = tuple[str, float, bool]

TIMES = {"ttft_ms": "ttft_p50", "ttft_p99_ms": "ttft_p99", "tpot_ms": "tpot"}
"""Figures in milliseconds, of each of ``NAMES``, and their keys in rows: a median, a percentile, a mean."""
NAMES = {"cost": "vlora", "csgmv": "sglang", "vllm": "vllm"}


def figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """What the rows say under the names of the project's figures: name, ratio or milliseconds, whether higher is
    better."""
    found: list[Figure] = []
    shape = rows[0].get("shape", "7b") if rows else "7b"
    shape = TINY.get(shape, shape)
    # Rows of before 2026-11-29 were all of one attention, which was SGLang's Triton; other families have no others.
    by_default = bool(rows) and rows[0].get("attention") == DEFAULT and SHAPES[shape].family == MOST
    prefix = f"{'default.' * by_default}e2e.{SHAPES[shape].figure}"
    replayed = [r for r in rows if r["workload"] != "uniform" and r["requests"]]
    groups: dict[tuple, dict[str, dict]] = {}
    for r in replayed:
        groups.setdefault((r["workload"], r["skew"], r["rate"], r["adapters"]), {})[r["system"]] = r

    def worst(other: str, keep: Any = lambda key: True, metric: str | None = None) -> float | None:
        ratios = [
            # A head answers in one token what the other generates in several: there a request's latency counts.
            cell["cost"][what] / cell[other][what]
            for key, cell in groups.items()
            if {"cost", other} <= cell.keys() and keep(key)
            for what in [metric or ("mean_latency" if cell["cost"]["heads"] else "token_latency")]
        ]
        return max(ratios, default=None)

    def add(name: str, value: float | None, higher: bool = False) -> None:
        if value is not None:
            found.append((f"{prefix}{name}", value, higher))

    heads, skew60 = any(r["heads"] for r in replayed), "" if by_default else ".skew60"
    retrieval, video = (lambda key, name=name: key[:2] == (name, 0.6) for name in ("retrieval", "video"))
    add(f"retrieval{skew60}_vs_sglang", worst("csgmv", retrieval))
    add(f"retrieval{skew60}_vs_vllm", worst("vllm", retrieval))
    if heads:
        add(f"video_heads{skew60}_vs_sglang", worst("csgmv", video))
    if heads and by_default:
        add("video_p99_vs_sglang", worst("csgmv", video, "p99_latency"))
    for cell in [cell for key, cell in groups.items() if by_default and retrieval(key) and key[2] == 8.0]:
        for (system, peer), (time_of, key) in itertools.product(NAMES.items(), TIMES.items()):
            add(f"retrieval_{time_of}.{peer}", 1e3 * cell[system][key] if system in cell else None)
    add("worst_vs_sglang", worst("csgmv"))
    add("vs_dlora_policy", worst("dlora", lambda key: key[1] == 0.6))
    for name in ("punica", "slora"):  # one policy: they differ in their operators, which ours takes the place of
        add(f"vs_{name}_policy", worst("unmerged", lambda key: key[1] == 0.6))
    full = [{**r, "rank": ranks_of(r)[0]} for r in rows if r["workload"] == "uniform" and len(ranks_of(r)) == 1]
    uniform = {(r["system"], r["adapters"]): r for r in full}
    off, few, many = (uniform.get(case) for case in (("off", 0), ("unmerged", 2), ("unmerged", 64)))
    # A server with slots for 64 says how flat it is; what 8 cost is asked of one with slots for 8.
    eight, one = (None if many else uniform.get(case) for case in (("unmerged", 8), ("cost", 1)))
    if off and eight:
        add(f"uniform8.r{eight['rank']}.decode_vs_off", off["decode_step"] / eight["decode_step"], True)
        add("uniform8.prefill_vs_off", off["prefill"] / eight["prefill"], True)
    if off and one:
        add("one_adapter_vs_off", off["decode_step"] / one["decode_step"], True)
    if off and few and many:
        # What the bytes of more adapters cost, at the rate at which the base model's are read.
        more = min(64, many["rows"]) - 2
        bytes_cost = more * adapter_numbers(many["rank"], shape) / base_numbers(shape) * off["decode_step"]
        add("flat_2_64", (many["decode_step"] - bytes_cost) / few["decode_step"])
    return found


def plan_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """What rows of every policy say of the default one (``policy_grid``), in cells of a skew and a rate."""
    by_rate = [{**row, "load": row["rate"]} for row in rows]
    hottest = max(row["skew"] for row in rows)
    errors = [row["cost_error"]["decode"] for row in rows if "decode" in row["cost_error"]]
    found = [("mean_over_best", over_best(by_rate, MEANS)[0]), ("p99_over_best", over_best(by_rate, TAILS)[0])]
    found += [("skew99_over_unmerged", over_unmerged(by_rate, hottest)[0])] if hottest >= 0.99 else []
    found += [("table_error", statistics.median(errors))] if errors else []
    return [(f"plan.{name}", value, False) for name, value in found]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency (per token; of a request where heads answer) over the rate, a panel per skew; bars of a single rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    skews, rates = sorted({r["skew"] for r in rows}), sorted({r["rate"] for r in rows})
    systems = list(dict.fromkeys(r["system"] for r in rows))
    metric, name = ("mean_latency", "request") if any(r["heads"] for r in rows) else ("token_latency", "token")
    figure, axes = pyplot.subplots(
        1, len(skews), figsize=(4.2 * len(skews) + 2.5, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, skew in zip(axes[0], skews, strict=True):
        cells = {(r["system"], r["rate"]): 1e3 * r[metric] for r in rows if r["skew"] == skew}
        axis.set_title(f"{skew:.0%} to the hottest adapter")
        axis.grid(alpha=0.3, which="both")
        for system in systems:
            line = [(rate, cells[system, rate]) for rate in rates if (system, rate) in cells]
            if len(rates) == 1 and line:
                axis.bar_label(axis.barh(fill(SYSTEMS[system].says, 32), line[0][1]), fmt="%.1f", padding=2)
            elif line:
                axis.plot(*zip(*line, strict=True), marker="o", markersize=4, label=SYSTEMS[system].says)
        if len(rates) == 1:
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.set_xlabel(f"latency per {name}, {rates[0]:g} requests a second, ms")
        else:
            axis.set(xlabel="requests per second", yscale="log")
    if len(rates) > 1:
        axes[0][0].set_ylabel(f"latency per {name}, ms")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", fontsize=7)
    figure.savefig(path, dpi=110)


def results(args: argparse.Namespace, workload: str, kind: str) -> Path:
    """Where rows or the plot of a workload go."""
    what = f"{'plan.' * args.plan}{'default.' * (args.attention == DEFAULT)}{SHAPES[args.model].figure}{workload}"
    return args.out / f"e2e-{what.replace('.', '-')}.{kind}"


def publish(rows: Sequence[dict[str, Any]], card: str, args: argparse.Namespace) -> None:
    """Draw and record what rows of one card say."""
    for name in args.workload:
        if replayed := [row for row in rows if row["workload"] == name]:
            plot(replayed, results(args, name, "png"))
    for name, value, higher in (plan_figures if args.plan else figures)(rows) if rows else ():
        note(f"{name}: {value:.4f}")
        unit = "ms" if name.rpartition(".")[0].endswith("_ms") else "ratio"
        record(name, value, unit, higher, card=card, summary=args.summary)


def publish_recorded(args: argparse.Namespace) -> None:
    """Publish the rows in ``args.out``, of runs in parts or cut short: those of the card that measured last."""
    files = [results(args, name, "jsonl") for name in args.workload]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    card = rows[-1]["card"]
    publish([row for row in rows if row["card"] == card], card, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write rows and plot, record figures. Returns 1 if a request failed."""
    args = parse(argv)
    if args.recorded:
        publish_recorded(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # a time limit: stop the servers, keep what there is
    rows: list[dict[str, Any]] = []
    card = card_name()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for row in run(args):
            note(describe(row))
            name = row["workload"] if row["workload"] in WORKLOADS else args.workload[0]
            with results(args, name, "jsonl").open("a") as file:
                file.write(json.dumps({**row, "card": card, "date": time.strftime("%Y-%m-%d")}) + "\n")
            rows.append(row)
    finally:
        publish(rows, card, args)
    return int(any(r.get("failed") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
