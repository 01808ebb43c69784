"""Time of a mode switch over the linears of a 7B model, as a share of copy bandwidth, and whether switching drifts.

    python -m benchmarks.kernels.bench_switch [--search] [--fp8] [--dry-run] [--summary FILE]

The times that count are of direct switches A to B, one launch over all layers. ``--search`` also times other ways to
cut the work. ``--fp8`` measures folding into FP8 weights instead: whether it drifts, which a CPU can tell, and on a
GPU a switch beside one of bfloat16 weights. ``--dry-run`` runs everything on tiny shapes, on the CPU if there is no
GPU, and records nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path

import torch

from benchmarks.summary import RESULTS, SUMMARY, record
from vlora_sgl.kernels.merge import (
    FoldTable,
    FoldTarget,
    MergeTable,
    MergeTarget,
    MergeTile,
    merge_reference,
    ulp_distance,
)
from vlora_sgl.kernels.merge.kernel import TILES
from vlora_sgl.lora.mode_switcher import MergeOperand, ModeSwitcher, base_copies
from vlora_sgl.scaled import E4M3, Scaled, quantise

ATTENTION = frozenset({"qkv_proj", "o_proj"})
DEFAULT = TILES[2]
CANDIDATES = tuple(
    MergeTile(rows, columns, steps, 4, stages)
    for rows, columns, steps, stages in (
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (64, 128, 4, 3),
        (64, 128, 16, 3),
        (64, 128, 32, 3),
        (64, 64, 16, 4),
    )
)
Shapes = dict[str, tuple[tuple[int, ...], int]]


def shapes(hidden: int, kv: int, intermediate: int) -> Shapes:
    """Group -> (rows of each slice, columns)."""
    return {
        "qkv_proj": ((hidden, kv, kv), hidden),
        "o_proj": ((hidden,), hidden),
        "gate_up_proj": ((intermediate, intermediate), hidden),
        "down_proj": ((hidden,), intermediate),
    }


def shard(layout: Shapes) -> Shapes:
    """What one of two tensor-parallel ranks holds: half the rows, or half the columns of o and down."""
    by_columns = ("o_proj", "down_proj")
    return {
        group: (slices, k // 2) if group in by_columns else (tuple(n // 2 for n in slices), k)
        for group, (slices, k) in layout.items()
    }


def build(layers: int, layout: Shapes, slots: int, max_rank: int, device: torch.device) -> list[MergeTarget]:
    """Random weights and adapters of realistic size, distinct per layer."""
    torch.manual_seed(1)
    modules = [(group, *layout[group]) for group in layout for _ in range(layers)]
    weights = [torch.randn(sum(n), k, device=device, dtype=torch.bfloat16).mul_(k**-0.5) for _, n, k in modules]
    targets = []
    for (group, slices, k), weight, base_weights in zip(modules, weights, base_copies(weights, "device"), strict=True):
        lora_a = torch.randn(slots, len(slices) * max_rank, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)
        lora_b = torch.randn(slots, sum(slices), max_rank, device=device, dtype=torch.bfloat16).mul_(0.02)
        row = 0
        for index, size in enumerate(slices):
            rows = slice(row, row + size)
            targets.append(MergeTarget(group, group, weight[rows], base_weights[rows], lora_a, lora_b[:, rows], index))
            row += size
    return targets


def fold(targets: Sequence[MergeTarget], blocks: bool = False) -> MergeTable:
    """The same weights in FP8, with a scale for each row, or for 128 x 128 elements where the shape has whole ones."""
    made = []
    for t in targets:
        n, k = t.weight.shape
        block = (128, 128) if blocks and not n % 128 else (1, k)
        base = quantise(t.base_weights, block, E4M3)
        weight = Scaled(base.weight.clone(), base.scale.clone(), block)
        made.append(FoldTarget(t.name, t.group, weight, base, t.lora_a, t.lora_b, t.slice_index))
    return MergeTable([], folded=FoldTable(made))


def milliseconds(work: Callable[[int], object], repeats: int, device: torch.device) -> float:
    """Median time of one call, after three to warm up."""
    times = []
    for i in range(repeats + 3):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # half a millisecond of lead, so that no launch waits for the host
            begin.record()
            work(i)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work(i)
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes read plus written per second by a large device-to-device copy."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / (milliseconds(lambda _: target.copy_(source), 20, device) / 1e3)


def switch(table: MergeTable, groups: frozenset[str], rank: int, i: int) -> None:
    """A switch to the adapter in slot 0 or 1, in turn; rank 0 stands for unmerging."""
    if rank:
        table.merge(groups, slot=i % 2, rank=rank, scaling=2.0)
    else:
        table.restore(groups)


def time_switches(
    targets: list[MergeTarget], tiles: Sequence[MergeTile], ranks: tuple[int, ...], repeats: int, bandwidth: float
) -> list[dict]:
    """One row per tile, set of targets and rank, where rank 0 is an unmerge."""
    rows = []
    for tile in tiles:
        table = MergeTable(targets, tile)
        for name, groups in (("all_linear", table.groups), ("attention", ATTENTION)):
            for rank in (0, *ranks):
                work = partial(switch, table, groups, rank)
                ms = milliseconds(work, repeats, table.device)
                moved = table.nbytes(groups)
                share = moved / (ms / 1e3) / bandwidth
                found = {"targets": name, "rank": rank, "tile": asdict(tile), "ms": ms, "share_of_copy": share}
                rows.append(found)
                shape = "x".join(map(str, astuple(tile)))
                print(f"{shape:<14} {name:<10} rank {rank:>2}: {ms:.3f} ms, {100 * share:.1f} % of a copy", flush=True)
    return rows


def worst_ulp(targets: list[MergeTarget], rank: int) -> int:
    """Distance from float64 of one merged target, in the result's ulps, where the sum does not cancel."""
    table = MergeTable(targets)
    table.merge(table.groups, slot=1, rank=rank, scaling=2.0)
    target = targets[0]
    a, b = target.operands(1, rank)
    exact = merge_reference(target.base_weights, a, b, 2.0)
    addends = target.base_weights.abs() + 2.0 * (b.float().abs() @ a.float().abs())
    distance = ulp_distance(target.weight, exact)[exact.abs() > addends * 2.0**-8]
    table.restore(table.groups)
    return int(distance.max())


def drift(table: MergeTable, switches: int, adapters: int = 8) -> float:
    """Share of 100 checks over random switches that found every bit as a fresh merge (or none) leaves it."""
    switcher = ModeSwitcher(table)
    groups = [frozenset(switcher.table.groups), ATTENTION]
    operands = [MergeOperand(str(i), i, 8 * (1 + i % 8), 0.5 + i / 8, groups[i % 2]) for i in range(adapters)]

    def bits() -> list[torch.Tensor]:
        if table.folded is None:
            return [t.weight.view(torch.int16).clone() for t in table.targets]
        parts = [part for t in table.folded.targets for part in (t.weight.weight, t.weight.scale)]
        return [part.view(torch.uint8).clone() for part in parts]

    expected = {-1: bits()}
    for i, operand in enumerate(operands):
        switcher.restore()
        switcher.merge(operand)
        expected[i] = bits()
    choose, good, checks = random.Random(7), 0, 0
    for step in range(switches):
        i = choose.randrange(-1, adapters)
        _ = switcher.restore() if i < 0 else switcher.merge(operands[i])
        if (step + 1) % max(1, switches // 100) == 0:
            checks += 1
            good += all(torch.equal(x, y) for x, y in zip(bits(), expected[i], strict=True))
    switcher.restore()
    restored = all(torch.equal(x, y) for x, y in zip(bits(), expected[-1], strict=True))
    return good / checks if restored else 0.0


def compare_fp8(args: argparse.Namespace, device: torch.device) -> None:
    """Fold into FP8 weights: whether switches drift, and on a GPU their time beside that of bfloat16 weights."""
    small, count = shapes(256, 64, 512), 100 if args.dry_run else 10_000
    shares = [drift(fold(build(1, small, 8, 64, device), blocks), count // 2) for blocks in (False, True)]
    print(f"bit-identical {min(shares):.3f}")
    if args.dry_run:
        return
    record("fp8.cycles_bit_identical", min(shares), "ratio", True, summary=args.summary)
    if device.type == "cuda":
        plain = MergeTable(build(28, shapes(3584, 512, 18944), 2, 64, device))
        times = []
        for table in (plain, fold(plain.targets)):
            times.append(milliseconds(partial(switch, table, table.groups, 64), 20, device))
            print(f"{times[-1]:.3f} ms", flush=True)
        record("fp8.switch_over_bf16", times[1] / times[0], "ratio", False, summary=args.summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="time other tiles than the default too")
    parser.add_argument("--fp8", action="store_true", help="fold into FP8 weights instead")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, nothing recorded")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--rows", type=Path, default=RESULTS / "switch.json", help="where the raw rows go")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.fp8:
        compare_fp8(args, device)
        return
    if device.type == "cpu" and not args.dry_run:
        parser.error("needs a GPU; try --dry-run")
    layout = shapes(64, 16, 128) if args.dry_run else shapes(3584, 512, 18944)
    layers = 2 if args.dry_run else 28
    targets = build(layers, layout, 2, 64, device)
    bandwidth = copy_bandwidth(device, 1 << (20 if args.dry_run else 32))
    tiles = (DEFAULT, *CANDIDATES) if args.search else (DEFAULT,)
    rows = time_switches(targets, tiles, (16, 64), 3 if args.dry_run else 20, bandwidth)
    default = [row for row in rows if row["tile"] == asdict(DEFAULT)]
    chosen = {(row["targets"], row["rank"]): row for row in default}
    ulp = worst_ulp(targets, 64)
    del targets
    (half,) = (
        row["ms"]
        for row in time_switches(build(layers, shard(layout), 2, 64, device), (DEFAULT,), (64,), 20, bandwidth)
        if (row["targets"], row["rank"]) == ("all_linear", 64)
    )
    identical = drift(MergeTable(build(2, shapes(256, 64, 512), 8, 64, device)), 100 if args.dry_run else 10_000)
    print(f"copy {bandwidth / 1e12:.2f} TB/s; worst distance from float64 {ulp} ulp; bit-identical {identical:.3f}")
    if args.dry_run:
        return
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text(json.dumps({"copy_bytes_per_s": bandwidth, "worst_ulp": ulp, "rows": rows}, indent=1) + "\n")

    def write(name: str, value: float, unit: str, higher: bool) -> None:
        record(name, value, unit, higher, summary=args.summary)

    write("switch.all_linear_r64_ms", chosen["all_linear", 64]["ms"], "ms", False)
    write("switch.attention_r64_ms", chosen["attention", 64]["ms"], "ms", False)
    write("switch.bandwidth_share", chosen["all_linear", 64]["share_of_copy"], "ratio", True)
    write("switch.tp2_shard_over_whole", half / chosen["all_linear", 64]["ms"], "ratio", False)
    write("switch.cycles_bit_identical", identical, "ratio", True)


if __name__ == "__main__":
    main()
