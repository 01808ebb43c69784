"""All systems over skews and loads, in the simulator: the figures ``policy.cost.*`` and ``plan.*``, rows and a plot.

python -m benchmarks.serving.policy_grid            # the shipped H200 table, three seeds pooled: ten minutes
python -m benchmarks.serving.policy_grid --paper    # figure 19 of V-LoRA, on costs read off the paper

- ``plan.mean_over_best``, ``plan.p99_over_best``: at worst, ``cost`` over the best other policy of a cell, in the time
  to the first token and in the time of a token. Compared are the policies whose latency per token is within 5 % of the
  least: one that keeps half of the requests waiting has fast tokens.
- ``plan.skew99_over_unmerged``: latency per token of ``cost`` over that of never merging, where one adapter has 99 %
  of the requests, at worst over the loads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.serving.simulate import Machine, Report, capacity, runners
from benchmarks.serving.traces import VIDEO, Workload
from benchmarks.summary import SUMMARY, record
from vlora_sgl.managers.policies import Limits
from vlora_sgl.managers.policies.cost_table import CostTable, load_tables, shipped

RESULTS = SUMMARY.parent / "serving"
SKEWS = (0.1, 0.3, 0.6, 0.9, 0.99)
LOADS = (0.3, 0.6, 0.9)
SEEDS = (0, 1, 2)
POLICIES = ("cost", "vlora", "dlora", "merged", "unmerged")
COMPETITIVE = 1.05
MEANS, TAILS = ("ttft", "tpot"), ("ttft_p99", "tpot_p99")
# Traffic that merging is said to be for, beside what the grid has; loads are shares of what never merging finishes.
MERGING: dict[str, tuple[Workload, float]] = {
    "one adapter at a time, 30 s each": (Workload(arrivals="poisson", skew=0.99, turns=30.0), 0.9),
    "one adapter at a time, 5 s each": (Workload(arrivals="poisson", skew=0.99, turns=5.0), 0.9),
    "bursts of one adapter each": (Workload(arrivals="bursts", skew=0.99, turns=10.0), 0.15),
    "a batch job of one adapter": (Workload(arrivals="poisson", skew=1.0), 40.0),
    "six frames, seven tokens, 99 % to one": (replace(VIDEO, skew=0.99), 0.9),
    "six frames, seven tokens, 60 % to one": (replace(VIDEO, skew=0.6), 0.9),
}
PAPER_SKEWS, PAPER_LOADS = (0.3, 0.5, 0.7, 0.9), (0.5, 0.7)

Tables = Mapping[str, CostTable]
Row = dict[str, Any]
Cell = tuple[float, float]


def column(
    tables: Tables,
    machine: Machine,
    limits: Limits,
    load: Workload,
    loads: Sequence[float],
    seconds: float,
    seeds: Sequence[int] = (0,),
) -> list[Row]:
    """One row per load (of ``capacity``) and system, at one skew; seeds are pooled."""
    rows = []
    limit = capacity(tables["atmm"], machine, load, seeds=seeds)
    for share in loads:
        traffic = replace(load, rate=share * limit)
        for system, run in runners(dict(tables), machine, limits).items():
            cell = {"system": system, "skew": load.skew, "load": share, "rate": traffic.rate}
            rows.append(cell | asdict(run(traffic, seconds, seeds)))
    return rows


def cells(rows: Sequence[Row], value: str = "token_latency") -> dict[Cell, dict[str, float]]:
    """A figure, by (skew, load) and system."""
    table: dict[Cell, dict[str, float]] = {}
    for row in rows:
        table.setdefault((row["skew"], row["load"]), {})[row["system"]] = row[value]
    return table


def over_best(rows: Sequence[Row], values: Sequence[str]) -> tuple[float, Cell, str]:
    """The largest quotient of ``cost`` and the best competitive policy in one of these figures, its cell and name."""
    found = []
    for cell, latencies in cells(rows).items():
        others = {s: v for s, v in latencies.items() if s in POLICIES and s != "cost"}
        names = [s for s, v in others.items() if v <= COMPETITIVE * min(others.values())]
        for value in values:
            seconds = cells(rows, value)[cell]
            found.append((seconds["cost"] / min(seconds[s] for s in names), cell, value))
    return max(found)


def over_unmerged(rows: Sequence[Row], skew: float) -> tuple[float, Cell]:
    """The largest quotient of ``cost`` and never merging at one skew, and the cell it is in."""
    return max((c["cost"] / c["unmerged"], cell) for cell, c in cells(rows).items() if cell[0] == skew)


def merging(
    tables: Tables, machine: Machine, limits: Limits, name: str, seconds: float, seeds: Sequence[int]
) -> list[Row]:
    """``cost`` and never merging on one of ``MERGING``."""
    load, share = MERGING[name]
    steady = replace(load, arrivals="poisson", turns=0.0)
    traffic = replace(load, rate=share * capacity(tables["atmm"], machine, steady, seeds=seeds))
    systems = runners(dict(tables), machine, limits)
    # A batch job comes at once and takes as long as it takes.
    length = seconds if share < 1 else 10 / share
    return [
        {
            "system": s,
            "traffic": name,
            "load": share,
            "rate": traffic.rate,
            **asdict(systems[s](traffic, length, seeds)),
        }
        for s in ("cost", "unmerged")
    ]


def worst_vs_best_other(rows: Sequence[Row]) -> tuple[float, Cell]:
    """The largest quotient of ``cost`` and the best other system, and the cell it is in."""
    return max((c["cost"] / min(v for s, v in c.items() if s != "cost"), cell) for cell, c in cells(rows).items())


def worst_vs_sglang(rows: Sequence[Row], skew: float = 0.6) -> tuple[float, Cell]:
    """The largest quotient of ``cost`` and stock SGLang at ``skew`` or more, and the cell it is in."""
    return max((c["cost"] / c["sglang"], cell) for cell, c in cells(rows).items() if cell[0] >= skew)


def starvation(tables: Tables, machine: Machine, limits: Limits, seconds: float) -> Report:
    """The hot adapter alone asks for more than the replica can give; the others ask for a little."""
    load = Workload(arrivals="poisson", skew=0.97, adapters=8, seed=1)
    load = replace(load, rate=1.6 * capacity(tables["atmm"], machine, load))
    return runners(dict(tables), machine, limits)["cost"](load, seconds)


def deadlines(tables: Tables, machine: Machine, limits: Limits, seconds: float) -> dict[str, Report]:
    """A tenth of the requests has a deadline of one second; batch work beside it asks for more than there is."""
    load = Workload(arrivals="poisson", realtime=0.1, deadline=1.0, seed=2)
    load = replace(load, rate=1.5 * capacity(tables["atmm"], machine, load))
    systems = runners(dict(tables), machine, limits)
    return {name: systems[name](load, seconds) for name in ("cost", "unmerged")}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Latency per token over load, one panel per skew."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    skews = sorted({row["skew"] for row in rows})
    shown = [s for s in skews if s in (0.1, 0.3, 0.6, 0.9, 0.99)]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.6 * len(shown), 3.4), sharey=True, layout="constrained")
    table = cells(rows)
    loads = sorted({load for _, load in table})
    for axis, skew in zip(axes, shown, strict=True):
        for system in next(iter(table.values())):
            line = [1e3 * table[skew, load][system] for load in loads]
            style = {"linewidth": 2.4, "zorder": 3} if system == "cost" else {"linestyle": "--", "alpha": 0.85}
            axis.plot(loads, line, marker="o", markersize=3, label=system, **style)
        axis.set(title=f"{skew:.0%} to the hottest of 8", xlabel="load / capacity unmerged", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("latency per token, ms (simulated)")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def rounded(value: Any) -> Any:
    """Four significant digits, so that a re-run changes the raw rows only where something changed."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def paper_table(rows: Sequence[Row]) -> str:
    """Latency per token of the others over V-LoRA's, by skew: figure 19 in numbers."""
    lines = ["skew  load  " + "  ".join(f"{s:>8s}" for s in ("vlora", "dlora", "merged", "unmerged", "cost"))]
    for (skew, load), cell in cells(rows).items():
        ratios = [cell[s] / cell["vlora"] for s in ("vlora", "dlora", "merged", "unmerged", "cost")]
        lines.append(f"{skew:4.1f}  {load:4.2f}  " + "  ".join(f"{r:8.2f}" for r in ratios))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="h200-7b", help="name of a shipped set of cost tables, or a file")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each trace")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--park", action="store_true", help="policies may leave running requests out; no figures")
    parser.add_argument("--paper", action="store_true", help="figure 19: the paper's costs and operators; no figures")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    name = "a100-paper" if args.paper else Path(args.table).stem
    tables = load_tables(Path(args.table)) if args.table.endswith(".json") else shipped(name)
    machine, limits = Machine(can_park=args.park), Limits()
    skews, loads, seeds = (PAPER_SKEWS, PAPER_LOADS, [0]) if args.paper else (SKEWS, LOADS, args.seeds)
    load = Workload(prompt=256, output=200) if args.paper else Workload()
    traffic = [replace(load, skew=skew) for skew in skews]
    one = partial(column, tables, machine, limits, loads=loads, seconds=args.seconds, seeds=seeds)
    other = partial(merging, tables, machine, limits, seconds=args.seconds, seeds=seeds)
    with get_context("spawn").Pool(args.processes) as pool:
        rows = [row for found in pool.imap(one, traffic) for row in found]
        merges = [] if args.paper else [row for found in pool.imap(other, MERGING) for row in found]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"policies-{name}{'-park' if args.park else ''}"
    keep = (
        "system",
        "skew",
        "traffic",
        "load",
        "rate",
        "requests",
        "span",
        "token_latency",
        "p99_latency",
        *MEANS,
        *TAILS,
        "longest_wait",
        "switches",
        "modes",
    )
    lines = [json.dumps({k: rounded(r[k]) for k in keep if k in r}) for r in (*rows, *merges)]
    (args.out / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")
    plot(rows, args.out / f"{stem}.png")
    if args.paper:
        print(paper_table(rows))
        return
    worst, where = worst_vs_best_other(rows)
    print(f"cost over the best other: at worst {worst:.4f} at (skew, load) {where}")
    stock, stock_where = worst_vs_sglang(rows)
    print(f"cost over stock SGLang, skew >= 0.6: at worst {stock:.4f} at {stock_where}")
    print(f"the same over all skews: {worst_vs_sglang(rows, 0.0)}")
    starving = starvation(tables, machine, limits, args.seconds)
    ratio = starving.coldest_wait / limits.wait_bound
    print(f"longest wait of the coldest over the bound: {ratio:.3f}; hot adapter idle {starving.hot_idle_share:.4f}")
    for system, report in deadlines(tables, machine, limits, args.seconds).items():
        print(f"deadline 1 s, {system}: p99 {report.realtime_p99:.3f} s, missed {report.realtime_missed:.4f}")
    mean, tail, hot = over_best(rows, MEANS), over_best(rows, TAILS), over_unmerged(rows, 0.99)
    print(f"cost over the best policy, TTFT and time of a token: means {mean}, p99 {tail}")
    print(f"cost over never merging at 99 %: {hot}")
    for mine, its in zip(merges[::2], merges[1::2], strict=True):
        parts = (f"{what} {mine[what] / its[what]:.3f}" for what in ("token_latency", "ttft", "ttft_p99", "span"))
        print(f"cost over never merging, {mine['traffic']}: {', '.join(parts)}")
    if not args.park:
        figures = {
            "policy.cost.worst_vs_best_other": worst,
            "policy.cost.skew60_vs_sglang": stock,
            "policy.cost.longest_wait_over_bound": ratio,
            "plan.mean_over_best": mean[0],
            "plan.p99_over_best": tail[0],
            "plan.skew99_over_unmerged": hot[0],
        }
        card = f"simulator, costs of {tables['atmm'].device}"
        for figure, value in figures.items():
            record(figure, value, "ratio", False, card=card, summary=args.summary)


if __name__ == "__main__":
    main()
