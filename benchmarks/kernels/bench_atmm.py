"""ATMM against its peers, kernels alone: correctness first, then cold-L2 medians with p20 and p80, plots and figures.

    python -m benchmarks.kernels.bench_atmm --quick --summary results/summary.json    # an H100, about 150 s cold
    python -m benchmarks.kernels.bench_atmm                                           # the whole grid, tuner and all

What is timed is the operator alone, ``y += LoRA(x)`` on rows that a base layer has computed; every peer has to agree
with float64 first. Inputs rotate through copies, so that none is in the L2 cache; a time is a CUDA graph's over its
calls. Kernels are compiled beforehand in parallel processes. ``peers.py`` says who the peers are. The figures:

- ``atmm.decode|prefill.vs_best_sglang``: geometric mean of min(csgmv, triton) / ATMM, as shipped;
  ``…vs_tuned_sglang``: of csgmv with tuned tiles / ATMM, over the shapes that were tuned.
- ``atmm.worst_vs_best_peer``: the largest ATMM / best peer over all shapes.
- ``atmm.vs_slora_style`` and so on: geometric means over all shapes that the baseline was timed on.
- ``atmm.decode32x8.floor_share``: of a layer's four base linears with 8 adapters of rank 64 on 32 rows
  (``atmm_linear``): the bytes that must move at the rate of a device copy, over the time.
- ``atmm.spread_vs_best_peer``: p99 / p50 of latency over the mixed decode shapes of a projection (geometric mean over
  projections), over the least of the peers'.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peers, workloads
from benchmarks.kernels.bench_switch import copy_bandwidth
from benchmarks.kernels.workloads import Inputs, Workload, grid
from benchmarks.summary import RESULTS, git_revision, package_versions, record, running_command
from vlora_sgl.kernels import tiling
from vlora_sgl.kernels.atmm import atmm_linear, launch, make_routing
from vlora_sgl.kernels.tiling_search import MAX_ERROR_RATIO, measure

SGLANG = ("csgmv", "triton")
BASELINES = ("slora_style", "punica_style", "dlora_style")
# Decode kernels of a program per row would take seconds on a long prompt.
ROWWISE_LIMIT = 1024
TUNED_RANKS = ((64,),)


def names_for(load: Workload, wanted: Sequence[str]) -> list[str]:
    """The operators that are timed on a workload."""
    return [name for name in wanted if name != "slora_style" or load.rows <= ROWWISE_LIMIT]


def tuned_loads(loads: Sequence[Workload], quick: bool) -> dict[tuple[str, str, int], Workload]:
    """(projection, phase, rank) -> the workload csgmv is tuned on: 8 adapters, 32 rows or 8,192 (1,024 if quick)."""
    rows = {"decode": 32, "prefill": 1024 if quick else 8192}
    found = {}
    for load in loads:
        if len(load.ranks) == 1 and (not quick or load.ranks in TUNED_RANKS):
            found[load.projection, load.phase, load.ranks[0]] = Workload(
                load.projection, rows[load.phase], 8, "uniform", load.ranks
            )
    return found


# Compiling, in processes of their own


def _warm(load: Workload, wanted: tuple[str, ...]) -> list[str]:
    """Run every operator of a workload once; returns what failed."""
    failed = []
    inputs = Inputs(load, copies=1)
    for name in wanted:
        try:
            peers.PEERS[name](inputs)(0)
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot be built is reported and left out
            failed.append(f"{name} on {load.label}: {type(error).__name__}: {str(error)[:200]}")
    return failed


def _warm_tuned(load: Workload, configs: list[tuple[str, peers.Config]]) -> None:
    kernels = peers.CsgmvKernels(Inputs(load, copies=1))
    for kind, config in configs:
        try:
            getattr(kernels, kind)(0, config)
            torch.cuda.synchronize()
        except Exception:  # what does not compile or fit is no candidate; the tuner skips it too
            continue


def compile_all(loads: Sequence[Workload], wanted: Sequence[str], tuned: Sequence[Workload], args: Any) -> list[str]:
    """Fill Triton's disk cache. Returns what failed."""
    space = [("shrink", c) for c in peers.shrink_space(args.quick)] + [
        ("expand", c) for c in peers.expand_space(args.quick)
    ]
    # One row class compiles like another of the same tile; the longest workloads stand for all.
    kinds = {(load.projection, tiling.bucket(min(load.rows, 65)), load.ranks, load.adapters): load for load in loads}
    failed: list[str] = []
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_warm_tuned, load, space[i::4]) for load in tuned for i in range(4)]
        jobs += [pool.submit(_warm, load, tuple(names_for(load, wanted))) for load in kinds.values()]
        for job in jobs:
            failed += job.result() or []
    return failed


# Timing


def error_ratio(inputs: Inputs, run: peers.Run) -> float:
    """max |out - float64| over torch's own same-dtype error, on up to 64 rows; NaN counts as infinite."""
    rows = torch.arange(inputs.load.rows, device="cuda")
    if len(rows) > 64:
        rows = rows[torch.linspace(0, len(rows) - 1, 64, device="cuda").long()]
    exact, own = inputs.exact(rows)
    saved = inputs.y[0].clone()
    out = run(0)[rows].double()
    inputs.y[0].copy_(saved)
    worst = (out - exact).abs().max().item()
    # Peers round the base's sum and the low-rank product on their way; one unit in the last place is everybody's.
    floor = max((own.double() - exact).abs().max().item(), 2.0**-9 * exact.abs().max().item())
    return math.inf if math.isnan(worst) else worst / floor


def tune(load: Workload, quick: bool) -> tuple[peers.Config, peers.Config]:
    """The best tiles of csgmv's shrink and expand on a workload."""
    inputs = Inputs(load)
    kernels = peers.CsgmvKernels(inputs)

    def best(kind: str, space: Sequence[peers.Config]) -> peers.Config:
        timed = []
        for config in space:
            try:
                timed.append((measure(lambda i, c=config: getattr(kernels, kind)(i, c), inputs.copies, 3)[0], config))
            except Exception:  # as above
                torch.cuda.synchronize()
        return min(timed, key=lambda item: item[0])[1]

    return best("shrink", list(peers.shrink_space(quick))), best("expand", list(peers.expand_space(quick)))


def time_load(
    load: Workload, wanted: Sequence[str], tuned: dict[Any, Any], skip: set[str], rate: float
) -> dict[str, Any]:
    """One row: microseconds (median, p20, p80) of each operator that agrees with float64."""
    inputs = Inputs(load)
    row: dict[str, Any] = {
        "label": load.label,
        "phase": load.phase,
        "projection": load.projection,
        "rows": load.rows,
        "adapters": load.adapters,
        "popularity": load.popularity,
        "ranks": load.ranks,
        "floor_us": round(inputs.touched_bytes / rate * 1e6, 2),
        "us": {},
        "errors": {},
    }
    builders: dict[str, Callable[[Inputs], peers.Run]] = {name: peers.PEERS[name] for name in names_for(load, wanted)}
    configs = tuned.get((load.projection, load.phase, load.ranks[0])) if len(load.ranks) == 1 else None
    if configs:
        builders["csgmv_tuned"] = lambda own: peers.csgmv_with(own, *configs)
    for name, build in builders.items():
        if name in skip:
            continue
        try:
            run = build(inputs)
            row["errors"][name] = round(error_ratio(inputs, run), 3)
            if row["errors"][name] > MAX_ERROR_RATIO:
                print(f"{name} disagrees with float64 on {load.label}: {row['errors'][name]}", flush=True)
                if name == "atmm":
                    raise SystemExit("ATMM is wrong: nothing is reported")
                continue
            row["us"][name] = [round(t, 2) for t in measure(run, inputs.copies)]
        except NotImplementedError:
            continue
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            print(f"{name} failed on {load.label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            skip.add(name)
    return row


def floor_share(rows: int, adapters: int, rank: int, rate: float) -> float:
    """Share of the memory floor of a layer's linears with adapters (see the module's docstring)."""
    layers, calls, moved = 3, [], 0.0
    for p in workloads.PROJECTIONS.values():
        load = Workload(p.name, rows, adapters, "uniform", (rank,))
        inputs = Inputs(load, copies=layers)
        scalings = [inputs.scaling] * inputs.slots
        routing = make_routing(inputs.groups, rows, inputs.ranks, scalings, "cuda")
        weights = [torch.randn(p.n, p.k, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        moved += inputs.touched_bytes - 2.0 * rows * p.n + 2.0 * p.n * p.k  # y is written, not read
        calls.append((inputs, routing, weights))

    def layer(i: int) -> None:
        for inputs, routing, weights in calls:
            atmm_linear(inputs.x[i], weights[i], None, inputs.a[i], inputs.b[i], routing, inputs.offsets)

    return moved / rate * 1e6 / measure(layer, layers, 9)[0]


# Figures and plots


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def spread(rows: Sequence[dict[str, Any]], name: str) -> float:
    """p99 / p50 of an operator's latency over the decode shapes, geometric mean over projections."""
    ratios = []
    for projection in {row["projection"] for row in rows}:
        own = [
            r["us"][name][0]
            for r in rows
            if r["projection"] == projection and r["phase"] == "decode" and name in r["us"]
        ]
        if len(own) > 1:
            ordered = torch.tensor(own)
            ratios.append(float(ordered.quantile(0.99) / ordered.quantile(0.5)))
    return geomean(ratios)


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, str, bool]]:
    """Name -> (value, unit, higher is better)."""

    def against(peer: Sequence[str], chosen: Sequence[dict[str, Any]]) -> list[float]:
        found = [(min(r["us"][p][0] for p in peer if p in r["us"]), r) for r in chosen if set(peer) & set(r["us"])]
        return [best / r["us"]["atmm"][0] for best, r in found]

    figures: dict[str, tuple[float, str, bool]] = {}
    for phase in ("decode", "prefill"):
        own = [row for row in rows if row["phase"] == phase]
        for figure, peer in (("vs_best_sglang", SGLANG), ("vs_tuned_sglang", ("csgmv_tuned",))):
            if values := against(peer, own):
                figures[f"atmm.{phase}.{figure}"] = geomean(values), "ratio", True
    for name in BASELINES:
        if values := against((name,), rows):
            figures[f"atmm.vs_{name}"] = geomean(values), "ratio", True
    everybody = sorted({name for row in rows for name in row["us"]} - {"atmm"})
    if values := against(everybody, rows):
        figures["atmm.worst_vs_best_peer"] = 1 / min(values), "ratio", False
    spreads = {name: spread(rows, name) for name in ("atmm", *everybody)}
    figures["atmm.spread_vs_best_peer"] = spreads["atmm"] / min(spreads[n] for n in everybody), "ratio", False
    return figures


def plot(rows: Sequence[dict[str, Any]], directory: Path) -> None:
    """Latency against rows (the paper's figure 17) and its spread (figure 18), per operator."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({name for row in rows for name in row["us"]})
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for name in names:
        points: dict[int, list[float]] = {}
        for row in rows:
            if name in row["us"]:
                points.setdefault(row["rows"], []).append(row["us"][name][0])
        xs = sorted(points)
        axes[0].plot(xs, [geomean(points[x]) for x in xs], marker="o", markersize=3, label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="rows", ylabel="us, geometric mean over shapes")
    axes[0].legend(fontsize=7)
    decode = [row for row in rows if row["phase"] == "decode"]
    shares = [[row["us"][name][0] / row["floor_us"] for row in decode if name in row["us"]] for name in names]
    axes[1].boxplot(shares, tick_labels=names, whis=(1, 99))
    axes[1].set(yscale="log", ylabel="time over memory floor, decode shapes")
    axes[1].tick_params(axis="x", rotation=45, labelsize=7)
    figure.tight_layout()
    figure.savefig(directory / "atmm.png", dpi=110)


def table1() -> list[dict[str, Any]]:
    """The paper's table 1 with our shrink: two inputs, static tiles and the tile the search would take."""
    rows = []
    for m, k, r in ((256, 4096, 32), (8192, 4096, 128)):
        x = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        a = [torch.randn(1, r, k, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        b = torch.zeros(1, 64, r, device="cuda", dtype=torch.bfloat16)
        y = torch.zeros(m, 64, device="cuda", dtype=torch.bfloat16)
        tiles = {
            "punica (16, 64, 64)": tiling.Tile(16, 64, 64, 1, 4, 2),
            "config 1 (64, 32, 32)": tiling.Tile(64, 32, 32, 1, 4, 3),
            "config 2 (64, 64, 64)": tiling.Tile(64, 64, 64, 1, 4, 3),
            "ours": tiling.Tile(64, min(r, 64), 128, 8 if m < 1024 else 1, 4, 4),
        }
        for name, tile in tiles.items():
            numbers = torch.arange(m, dtype=torch.int32).numpy()
            routing = make_routing([(numbers, ((0, 1.0),))], m, [r], [1.0], "cuda", dense=False, block=tile.block_m)
            expand = tiling.Tile(tile.block_m, 64, 0, 1, 4, 1)

            both = launch.Tiles("grouped_expand", tile, expand)

            def run(i: int, x=x, a=a, b=b, y=y, routing=routing, both=both) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return launch.run(both, (y, x[i], a[i], b, routing, (0, 64)))

            us = measure(run, 8)
            rows.append({"input": f"{m}x{k}, {k}x{r}", "tile": name, "us": [round(t, 2) for t in us]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and a part of the tuner's space")
    parser.add_argument(
        "--flashinfer", action="store_true", help="time FlashInfer too (nvcc compiles it at first use)"
    )
    parser.add_argument("--vllm", action="store_true", help="time vLLM's kernels too; it must be importable")
    parser.add_argument("--no-tuner", action="store_true", help="leave csgmv_tuned out")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    parser.add_argument("--summary", type=Path, help="where the figures go")
    parser.add_argument("--output", type=Path, default=RESULTS / "kernels", help="directory of the rows and plots")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    began = time.monotonic()
    wanted = [name for name in peers.PEERS if name not in peers.OPTIONAL or getattr(args, name)]
    loads = grid(args.quick)
    plan = {} if args.no_tuner else tuned_loads(loads, args.quick)
    failed = compile_all(loads, wanted, list(plan.values()), args)
    print("\n".join(failed[:20]), f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    tuned = {key: tune(load, args.quick) for key, load in plan.items()}
    print(f"tuned csgmv on {len(tuned)} shapes after {time.monotonic() - began:.0f} s", flush=True)
    rate = copy_bandwidth(torch.device("cuda"), 1 << 32)
    rows: list[dict[str, Any]] = []
    skip: set[str] = set()
    for load in loads:
        rows.append(time_load(load, wanted, tuned, skip, rate))
        times = ", ".join(f"{name} {us[0]}" for name, us in rows[-1]["us"].items())
        print(f"{load.label}: floor {rows[-1]['floor_us']}, {times}", flush=True)
    figures = figures_of(rows)
    figures["atmm.decode32x8.floor_share"] = floor_share(32, 8, 64, rate), "ratio", True
    args.output.mkdir(parents=True, exist_ok=True)
    about = {"card": torch.cuda.get_device_name(0), "versions": package_versions(), "revision": git_revision()}
    about |= {
        "command": running_command(),
        "copy_bytes_per_s": rate,
        "tuned": {" ".join(map(str, k)): v for k, v in tuned.items()},
    }
    about |= {"table1": table1(), "figures": {name: value for name, (value, _, _) in figures.items()}, "rows": rows}
    (args.output / "atmm.json").write_text(json.dumps(about) + "\n")
    plot(rows, args.output)
    for name, (value, unit, higher) in figures.items():
        print(f"{name}: {value:.3f}")
        if args.summary:
            record(name, value, unit, higher, summary=args.summary)
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
