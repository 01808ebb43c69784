"""What each mode costs in the running server: a 7B-shaped model, against LoRA off and stock SGLang.

::

    python -m benchmarks.serving.bench_modes --rank 64 --summary FILE    # 8 adapters on all linears; a GPU of 80 GB
    python -m benchmarks.serving.bench_modes --rank 16 --summary FILE    # 32 adapters, nothing recorded
    python -m benchmarks.serving.bench_modes --tiny --summary FILE       # a check on a laptop

Three engines live on one card at a time: ours with LoRA, ours without, stock SGLang with its default LoRA backend.
Each round runs every case on each, so that drifting clocks hit all alike; a ratio is the median over rounds. A decode
step has 32 rows, a prefill step 32 prompts of 128 tokens; both are timed on the device from the end of one step to the
end of the next (``engine_runs``), host work included where the device waits for it. Weights and text are random.

- ``modes.merged_vs_off.*``, ``modes.unused_vs_off.*``: step time without LoRA over that of merged rows, and of base
  rows beside adapters that nobody asked for.
- ``modes.mixture60_vs_unmerged``: prefill step time unmerged over that in mixture mode, with 60 % of the rows on the
  merged adapter and the others spread over the rest; ``.decode``: of a decode step.
- ``modes.unmerged8_vs_stock.*``: stock SGLang's step time over ours, 8 adapters, unmerged.
- ``switch.in_server_ms``: mean time of a direct switch from one adapter to another, between two steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.shape7b import PROJECTIONS, engine_options, make_adapters, make_model
from benchmarks.summary import RESULTS, record
from tests.support.engine_runs import EngineProcess, decode_seconds, prefill_seconds
from vlora_sgl.core import AdapterId

HOT_SHARES = (10, 30, 50, 60, 70, 90)


@dataclass(frozen=True)
class Case:
    """One kind of batch.

    Attributes:
        name: as the results spell it.
        engine: which engine runs it.
        adapters: the adapter of every row.
        mode: forced on ours.
    """

    name: str
    engine: str
    adapters: tuple[AdapterId, ...]
    mode: str = "unmerged"


@dataclass(frozen=True)
class Load:
    """Size of every batch: rows, tokens of each prompt, and output tokens of each row of a decode run."""

    rows: int
    prompt: int
    outputs: int
    prefills: int = 7  # steps of a prefill run; the first is short of requests that are still on their way


def spread(names: list[str], rows: int) -> tuple[str, ...]:
    """Row i gets adapter i modulo their number."""
    return tuple(names[i % len(names)] for i in range(rows))


def hot_rows(names: list[str], rows: int, percent: int) -> tuple[str, ...]:
    """``percent`` of the rows on the first adapter, the rest over the others, in a fixed random order."""
    hot = round(rows * percent / 100)
    mixed = [*[names[0]] * hot, *spread(names[1:], rows - hot)]
    random.Random(percent).shuffle(mixed)
    return tuple(mixed)


def cases_of(names: list[str], rows: int, stock: bool, attention: str) -> list[Case]:
    """All cases, in the order a round runs them."""
    none: tuple[AdapterId, ...] = (None,) * rows
    one, eight, every = (spread(names[:n], rows) for n in (1, 8, len(names)))
    cases = [
        Case("off", "off", none),
        Case("unused", "ours", none),
        Case("merged", "ours", one, "merged"),
        Case("unmerged1", "ours", one),
        Case("unmerged1_attention", "ours", (attention,) * rows),
        Case("unmerged8", "ours", eight),
    ]
    if len(names) > 8:
        cases.append(Case(f"unmerged{len(names)}", "ours", every))
    for percent in HOT_SHARES:
        mixed = hot_rows(names[:8], rows, percent)
        cases.append(Case(f"hot{percent}_unmerged", "ours", mixed))
        cases.append(Case(f"hot{percent}_mixture", "ours", mixed, "mixture"))
    if stock:
        cases += [
            Case("stock_unused", "stock", none),
            Case("stock_unmerged1", "stock", one),
            Case("stock_unmerged8", "stock", eight),
            Case("stock_hot60", "stock", hot_rows(names[:8], rows, 60)),
        ]
        if len(names) > 8:
            cases.append(Case(f"stock_unmerged{len(names)}", "stock", every))
    return cases


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids below the tiny tokenizer's size."""
    choose = random.Random(seed)
    return [[choose.randrange(20, 250) for _ in range(length)] for _ in range(count)]


def run_case(engine: EngineProcess, case: Case, load: Load, seed: int) -> dict[str, float]:
    """Seconds of a decode step and of a prefill step."""
    if case.engine == "ours":
        engine.force_mode(case.mode)
    lora = {} if case.engine == "off" else {"lora_path": list(case.adapters)}
    greedy = {"temperature": 0, "ignore_eos": True}
    answers = engine.generate(
        input_ids=prompts(load.rows, load.prompt, seed),
        sampling_params={**greedy, "max_new_tokens": load.outputs},
        **lora,
    )
    filled = engine.generate(
        input_ids=prompts(load.rows * load.prefills, load.prompt, seed + 1),
        sampling_params={**greedy, "max_new_tokens": 1},
        **({"lora_path": lora["lora_path"] * load.prefills} if lora else {}),
    )
    return {
        "decode": decode_seconds(answers.steps, load.rows),
        "prefill": prefill_seconds(filled.steps, load.rows, load.rows * load.prompt),
    }


def switch_seconds(engine: EngineProcess, names: list[str], switches: int) -> float:
    """Mean device time of a direct switch between two adapters of all linears."""
    engine.force_mode("merged")

    def total() -> tuple[int, float]:
        direct = engine.state()["switches"]["direct"]
        return direct["count"], direct["seconds"]

    def visit(i: int) -> None:
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2}
        engine.generate(input_ids=prompts(1, 8, i), lora_path=[names[i % 2]], sampling_params=params)

    visit(0), visit(1)
    (count, seconds), _ = total(), [visit(i) for i in range(switches)]
    more, later = total()
    assert more - count == switches, f"{more - count} direct switches, expected {switches}"
    return (later - seconds) / switches


def options_of(model: Path, adapters: dict[str, Path], rank: int, load: Load, tiny: bool) -> dict[str, Any]:
    """Engine options that let three engines share a card: a small KV pool, one decode graph."""
    options = engine_options(model, adapters, rank, tiny)
    options |= {
        "chunked_prefill_size": load.rows * load.prompt,
        "max_running_requests": load.rows * load.prefills,
        "max_total_tokens": 2 * load.rows * (load.prompt + load.outputs),
        "disable_radix_cache": True,
    }
    if not tiny:
        options |= {"cuda_graph_bs_decode": [load.rows], "mem_fraction_static": 0.96}
    return options


def without_lora(options: dict[str, Any]) -> dict[str, Any]:
    """The same engine without LoRA."""
    lora = ("enable_lora", "lora_paths", "max_loras_per_batch", "max_lora_rank")
    return {name: value for name, value in options.items() if name not in lora}


def measure(args: argparse.Namespace, root: Path) -> tuple[list[dict[str, Any]], float]:
    """Step times of all rounds (the first, which warms up, left out), and the time of a switch."""
    load = Load(4, 16, 8) if args.tiny else Load(32, 128, 48)
    model = make_model(root / "model", args.tiny)
    names = [f"a{i}" for i in range(args.adapters)]
    adapters = make_adapters(root, model, names, args.rank)
    adapters |= make_adapters(root, model, ["attention"], args.rank, PROJECTIONS[:4])
    options = options_of(model, adapters, args.rank, load, args.tiny)
    with ExitStack() as stack:
        engines = {
            "ours": EngineProcess(options),
            "off": EngineProcess(without_lora(options)),
            **({} if args.tiny else {"stock": EngineProcess(options, stock=True)}),
        }
        for engine in engines.values():
            stack.enter_context(engine)
        for engine in engines.values():
            engine.ready()
        cases = cases_of(names, load.rows, "stock" in engines, "attention")
        rows = []
        for turn in range(args.rounds + 1):
            for i, case in enumerate(cases):
                times = run_case(engines[case.engine], case, load, 1000 * turn + 10 * i)
                if turn:
                    rows.append({"round": turn, "case": case.name, **times})
        return rows, switch_seconds(engines["ours"], names, 4 if args.tiny else 20)


def medians(rows: list[dict[str, Any]], kind: str, above: str, below: str) -> tuple[float, float, float]:
    """Median, least and greatest over rounds of one case's time over another's."""
    by = {(row["case"], row["round"]): row[kind] for row in rows}
    ratios = [by[above, turn] / by[below, turn] for turn in sorted({row["round"] for row in rows})]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters instead of 7B")
    parser.add_argument("--rank", type=int, default=64, choices=(16, 64))
    parser.add_argument("--adapters", type=int, help="how many; 8 by default, 32 at rank 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--summary", type=Path, required=True, help="where figures go (rank 64 only)")
    parser.add_argument("--rows", type=Path, help="where the raw rows go")
    args = parser.parse_args()
    args.adapters = args.adapters or (8 if args.tiny or args.rank == 64 else 32)
    with tempfile.TemporaryDirectory() as scratch:
        rows, switch = measure(args, Path(scratch))
    path = args.rows or RESULTS / f"modes_r{args.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rank": args.rank, "switch_seconds": switch, "rows": rows}, indent=1) + "\n")
    for name in dict.fromkeys(row["case"] for row in rows):
        times = {kind: [row[kind] for row in rows if row["case"] == name] for kind in ("decode", "prefill")}
        shown = (f"{kind} {1e3 * statistics.median(t):8.3f} ms (to {1e3 * max(t):.3f})" for kind, t in times.items())
        print(f"{name:<20} {', '.join(shown)}", flush=True)
    print(f"direct switch in the server: {1e3 * switch:.3f} ms")
    figures = [
        (f"modes.{c}_vs_off.{kind}", kind, "off", c) for c in ("merged", "unused") for kind in ("decode", "prefill")
    ]
    figures += [
        ("modes.mixture60_vs_unmerged", "prefill", "hot60_unmerged", "hot60_mixture"),
        ("modes.mixture60_vs_unmerged.decode", "decode", "hot60_unmerged", "hot60_mixture"),
    ]
    if any(row["case"] == "stock_unmerged8" for row in rows):
        for kind in ("decode", "prefill"):
            figures.append((f"modes.unmerged8_vs_stock.{kind}", kind, "stock_unmerged8", "unmerged8"))
    for name, kind, above, below in figures:
        middle, least, most = medians(rows, kind, above, below)
        print(f"{name}: {middle:.4f} ({least:.4f} to {most:.4f})")
        if args.rank == 64 and not args.tiny:
            record(name, middle, "ratio", True, summary=args.summary)
    if args.rank == 64 and not args.tiny:
        record("switch.in_server_ms", 1e3 * switch, "ms", False, summary=args.summary)


if __name__ == "__main__":
    main()
