"""The cost table of an H200, from the step times that ``bench_modes`` and ``bench_step`` measured in served engines.

    python -m benchmarks.serving.table_from_modes benchmarks/results/modes_r64.json \\
        --steps benchmarks/results/kernels/step-h200.json --save FILE

``bench_modes`` tells prefills and stock csgmv, ``bench_step`` what our decode steps cost today. Those are full batches
of one size: they tell what adapters and modes add; they do not tell a step's fixed part from its part per token. That
division is assumed. Decode: a token's share as in the H100 table, and the KV cache's bytes over the copy bandwidth.
Prefill: fixed parts as there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.bench_modes import cases_of
from vlora_sgl.managers.policies.cost_fit import least_absolute
from vlora_sgl.managers.policies.cost_table import CostTable, PhaseCosts, lora_work, save_tables, shipped

ROWS, PROMPT, CONTEXT = 32, 128, 160.0
"""What ``bench_modes`` runs: rows, prompt tokens, and mean context of a row while it decodes."""

STEP_CONTEXT = 288.0
"""Mean context of a row while ``bench_step`` decodes."""

KV_BYTES, BANDWIDTH = 57344, 4.3e12
TERMS = ("lora_fixed", "lora_per_slot", "lora_per_pair", "lora_per_undo")


def phase_costs(
    times: dict[str, float], engine: str, off: float, unused: float, tokens: int, shape: PhaseCosts, context: float
) -> PhaseCosts:
    """Coefficients of one phase of one operator.

    Args:
        times: median seconds by case.
        engine: ``ours`` or ``stock``.
        off: seconds without LoRA.
        unused: seconds of base rows where adapters could be served.
        tokens: of each row.
        shape: the assumed parts: ``fixed`` (prefill) or ``per_token`` (decode).
        context: what ``per_context`` is multiplied by.
    """
    features, seconds = [], []
    for case in cases_of([f"a{n}" for n in range(8)], ROWS, True, "attention"):
        if case.engine != engine or case.name not in times or "attention" in case.name:
            continue
        groups = {adapter: tokens * count for adapter, count in Counter(case.adapters).items()}
        merged = None if case.mode == "unmerged" else case.adapters[0] if case.mode == "merged" else "a0"
        pairs, slots, undone = lora_work(groups, merged)
        if pairs:
            features.append([1.0, slots, pairs, undone])
            seconds.append(times[case.name] - unused)
    # All full batches have the same tokens, so one of the two terms that they share is the H100 table's.
    known = TERMS.index("lora_fixed" if tokens > 1 else "lora_per_pair")
    matrix, target = np.array(features, dtype=float), np.array(seconds)
    target -= getattr(shape, TERMS[known]) * matrix[:, known]
    free = [column for column in range(len(TERMS)) if column != known]
    found = np.full(len(TERMS), getattr(shape, TERMS[known]))
    found[free] = least_absolute(matrix[:, free] / target[:, None], np.ones(len(target)))
    return replace(
        shape,
        fixed=shape.fixed or off - shape.per_token * ROWS - shape.per_context * context,
        per_token=shape.per_token or (off - shape.fixed) / (ROWS * tokens),
        lora_enabled=unused - off if tokens == 1 else 0.0,
        lora_enabled_per_token=(unused - off) / (ROWS * tokens) if tokens > 1 else 0.0,
        **dict(zip(TERMS, map(float, found), strict=True)),
    )


def decode_costs(steps: dict[str, Any], like: PhaseCosts) -> PhaseCosts:
    """Our decode steps, as ``bench_step`` has them: base rows, one adapter, eight, and eight that take one out again.

    Args:
        steps: its rows.
        like: has the assumed parts: ``per_token``, ``per_context`` and ``lora_per_pair``.
    """
    seconds = {row["case"]: row["step_ms"] / 1e3 for row in steps["rows"] if row["engine"] == "ours"}
    one, eight, mixture = (seconds[case] - seconds["base"] for case in ("one", "eight", "mixture"))
    base, per_slot = seconds["base"], (eight - one) / 7
    # In the mixture all rows but the first adapter's apply two slots, of the same eight.
    per_undo = max(0.0, mixture - eight - 28 / 32 * ROWS * like.lora_per_pair) / 7
    return replace(
        like,
        fixed=base - like.per_token * ROWS - like.per_context * ROWS * STEP_CONTEXT,
        lora_enabled=0.0,
        lora_fixed=one - per_slot - ROWS * like.lora_per_pair,
        lora_per_slot=per_slot,
        lora_per_undo=per_undo,
    )


def tables(measured: dict[str, Any], steps: dict[str, Any]) -> dict[str, CostTable]:
    """Both tables, of the rows of ``bench_modes`` and of ``bench_step``."""
    found = {}
    for operator, like in shipped("h100-7b").items():
        engine, prefix = ("ours", "") if operator == "atmm" else ("stock", "stock_")
        phases = {}
        for phase, tokens in (("decode", 1), ("prefill", PROMPT)):
            names = dict.fromkeys(row["case"] for row in measured["rows"])
            times = {n: statistics.median(r[phase] for r in measured["rows"] if r["case"] == n) for n in names}
            unused = max(times["off"], times["merged" if engine == "ours" else f"{prefix}unused"])
            shape = getattr(like, phase)
            if phase == "decode":
                shape = replace(shape, fixed=0.0, per_context=KV_BYTES / BANDWIDTH)
            else:
                shape = replace(shape, per_token=0.0)
            if phase == "decode" and operator == "atmm":
                phases[phase] = decode_costs(steps, replace(shape, lora_per_pair=like.decode.lora_per_pair))
                continue
            phases[phase] = phase_costs(times, engine, times["off"], unused, tokens, shape, ROWS * CONTEXT)
        switch = measured["switch_seconds"]
        found[operator] = replace(
            like,
            device="NVIDIA H200",
            prefill=phases["prefill"],
            decode=phases["decode"],
            merge=switch,
            unmerge=switch,
            provenance="fitted by benchmarks.serving.table_from_modes to bench_modes, one H200, 2026-11-28: 22 kinds "
            "of full batches (32 rows; prompts of 128 tokens) in served engines, ours and stock csgmv in one run, and "
            "the switch between two steps; our decode steps to bench_step, one H200, 2026-11-29 (32 rows; prompts of "
            "256 tokens). Assumed, not measured: how a step divides into a fixed part and a part per "
            "token (as in h100-7b), loads (50 GB/s link, 2.5 GB/s disk).",
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, show, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="rows of bench_modes, rank 64")
    parser.add_argument("--steps", type=Path, required=True, help="rows of bench_step, rank 64")
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args(argv)
    found = tables(json.loads(args.measured.read_text()), json.loads(args.steps.read_text()))
    save_tables(args.save, found)
    for operator, table in found.items():
        for phase in ("decode", "prefill"):
            costs = getattr(table, phase)
            print(operator, phase, {name: f"{getattr(costs, name):.3g}" for name in costs.__slots__})


if __name__ == "__main__":
    main()
