"""Two tensor-parallel ranks against one: time of a mode switch, and of steps in every mode, 7B shape, random weights.

::

    python -m benchmarks.serving.bench_tp --summary FILE           # two GPUs of 80 GB
    python -m benchmarks.serving.bench_tp --tiny --summary FILE    # a check on a laptop, over gloo

Both engines are up at once (the one rank shares a card with one of the two) and take turns. A switch works on each
rank's shard alone, so it should take half the time; ``scale.tp2_switch_over_tp1`` is the ratio. Answers cannot be
compared here, because random weights differ from shard to shard: tests/e2e/test_tensor_parallel.py does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.serving.bench_modes import Case, Load, options_of, run_case, spread, switch_seconds
from benchmarks.serving.shape7b import make_adapters, make_model
from benchmarks.summary import record
from tests.support.engine_runs import EngineProcess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters instead of 7B")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--switches", action="store_true", help="only the time of a switch, not of steps")
    parser.add_argument("--summary", type=Path, required=True)
    args = parser.parse_args()
    load = Load(4, 16, 8) if args.tiny else Load(32, 128, 48)
    names = ["a0", "a1", "a2", "a3"]
    cases = [
        Case("merged", "ours", spread(names[:1], load.rows), "merged"),
        Case("unmerged4", "ours", spread(names, load.rows)),
        Case("mixture", "ours", (*spread(names[:1], load.rows // 2), *spread(names, load.rows // 2)), "mixture"),
    ]
    cases = [] if args.switches else cases
    times: dict[tuple[int, str, str], list[float]] = {}
    switches: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        root = Path(scratch)
        model = make_model(root / "model", args.tiny)
        adapters = make_adapters(root, model, names, args.rank)
        options = options_of(model, adapters, args.rank, load, args.tiny)
        cores = {1: {}, 2: {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if args.tiny else {}}
        engines = {
            ranks: stack.enter_context(EngineProcess({**options, "tp_size": ranks}, environment=cores[ranks]))
            for ranks in (1, 2)
        }
        for engine in engines.values():
            engine.ready()
        for turn in range(args.rounds + 1):
            for ranks, engine in engines.items():
                seconds = switch_seconds(engine, names, 4 if args.tiny else 10)
                for i, case in enumerate(cases):
                    for kind, value in run_case(engine, case, load, 1000 * turn + 10 * i).items():
                        if turn:
                            times.setdefault((ranks, case.name, kind), []).append(value)
                if turn:
                    switches[ranks].append(seconds)
    for (ranks, name, kind), values in sorted(times.items()):
        print(
            f"TP {ranks} {name:<10} {kind:<8} {1e3 * statistics.median(values):8.3f} ms (to {1e3 * max(values):.3f})"
        )
    ratios = [two / one for one, two in zip(switches[1], switches[2], strict=True)]
    one, two = (1e3 * statistics.median(switches[ranks]) for ranks in (1, 2))
    ratio = statistics.median(ratios)
    print(f"switch: TP 1 {one:.3f} ms, TP 2 {two:.3f} ms, ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if not args.tiny:
        record("scale.tp2_switch_over_tp1", ratio, "ratio", False, summary=args.summary)
        for kind in () if args.switches else ("decode", "prefill"):
            merged = {ranks: statistics.median(times[ranks, "merged", kind]) for ranks in (1, 2)}
            record(f"scale.tp2_step_over_tp1.{kind}", merged[2] / merged[1], "ratio", False, summary=args.summary)


if __name__ == "__main__":
    main()
