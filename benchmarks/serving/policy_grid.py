"""All systems over skews, loads and seeds, in the simulator: the figures ``policy.cost.*``, rows and a plot.

python -m benchmarks.serving.policy_grid            # the shipped H200 table, three seeds: ten minutes of one core
python -m benchmarks.serving.policy_grid --paper    # figure 19 of V-LoRA, on costs read off the paper
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.serving.simulate import Machine, Report, capacity, runners
from benchmarks.serving.traces import Workload
from benchmarks.summary import SUMMARY, record
from vlora_sgl.managers.policies import Limits
from vlora_sgl.managers.policies.cost_table import CostTable, load_tables, shipped

RESULTS = SUMMARY.parent / "serving"
SKEWS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
SEEDS = (0, 1, 2)
PAPER_SKEWS, PAPER_LOADS = (0.3, 0.5, 0.7, 0.9), (0.5, 0.7)

Tables = Mapping[str, CostTable]
Row = dict[str, Any]
Cell = tuple[float, float, int]


def column(
    tables: Tables, machine: Machine, limits: Limits, load: Workload, loads: Sequence[float], seconds: float
) -> list[Row]:
    """One row per load (of ``capacity``) and system, at one skew and seed."""
    rows = []
    limit = capacity(tables["atmm"], machine, load)
    for share in loads:
        traffic = replace(load, rate=share * limit)
        for system, run in runners(dict(tables), machine, limits).items():
            cell = {"system": system, "skew": load.skew, "load": share, "seed": load.seed, "rate": traffic.rate}
            rows.append(cell | asdict(run(traffic, seconds)))
    return rows


def cells(rows: Sequence[Row]) -> dict[Cell, dict[str, float]]:
    """Latency per token by (skew, load, seed) and system."""
    table: dict[Cell, dict[str, float]] = {}
    for row in rows:
        table.setdefault((row["skew"], row["load"], row["seed"]), {})[row["system"]] = row["token_latency"]
    return table


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
    """Latency per token over load, means over the seeds, one panel per skew."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    skews = sorted({row["skew"] for row in rows})
    shown = [s for s in skews if s in (0.1, 0.3, 0.6, 0.9)]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.6 * len(shown), 3.4), sharey=True, layout="constrained")
    table = cells(rows)
    loads, seeds = (sorted({key[i] for key in table}) for i in (1, 2))
    for axis, skew in zip(axes, shown, strict=True):
        for system in next(iter(table.values())):
            line = [1e3 * statistics.fmean(table[skew, load, int(s)][system] for s in seeds) for load in loads]
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
    for (skew, load, _), cell in cells(rows).items():
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
    traffic = [replace(load, skew=skew, seed=seed) for seed in seeds for skew in skews]
    one = partial(column, tables, machine, limits, loads=loads, seconds=args.seconds)
    with get_context("spawn").Pool(args.processes) as pool:
        rows = [row for found in pool.imap(one, traffic) for row in found]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"policies-{name}{'-park' if args.park else ''}"
    keep = (
        "system",
        "skew",
        "load",
        "seed",
        "rate",
        "token_latency",
        "p99_latency",
        "longest_wait",
        "switches",
        "modes",
    )
    lines = [json.dumps({k: rounded(r[k]) for k in keep}) for r in rows]
    (args.out / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")
    plot(rows, args.out / f"{stem}.png")
    if args.paper:
        print(paper_table(rows))
        return
    worst, where = worst_vs_best_other(rows)
    print(f"cost over the best other: at worst {worst:.4f} at (skew, load, seed) {where}")
    stock, stock_where = worst_vs_sglang(rows)
    print(f"cost over stock SGLang, skew >= 0.6: at worst {stock:.4f} at {stock_where}")
    print(f"the same over all skews: {worst_vs_sglang(rows, 0.0)}")
    starving = starvation(tables, machine, limits, args.seconds)
    ratio = starving.coldest_wait / limits.wait_bound
    print(f"longest wait of the coldest over the bound: {ratio:.3f}; hot adapter idle {starving.hot_idle_share:.4f}")
    for system, report in deadlines(tables, machine, limits, args.seconds).items():
        print(f"deadline 1 s, {system}: p99 {report.realtime_p99:.3f} s, missed {report.realtime_missed:.4f}")
    if not args.park:
        for figure, value in (
            ("worst_vs_best_other", worst),
            ("skew60_vs_sglang", stock),
            ("longest_wait_over_bound", ratio),
        ):
            record(f"policy.cost.{figure}", value, "ratio", False, summary=args.summary)


if __name__ == "__main__":
    main()
