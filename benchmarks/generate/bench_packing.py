"""Adapters that the packer needs beyond the fewest possible: on thousands of worlds with known answers, and for real.

    python -m benchmarks.generate.bench_packing [--real CONFIG] [--worlds N] [--summary FILE]

``--real`` trains every order of every subset of a configuration's data sets, so it wants a small configuration.
The figure is the worst case over all of them. Rows go to benchmarks/results/generation/packing.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.summary import RESULTS, SUMMARY, record
from tests.support.fewest_by_trying_all import fewest_by_trying_all
from tests.support.worlds import KINDS, random_world
from vlora_sgl.generate.fusion import fuse_by_search, fuse_greedily, packing_bound
from vlora_sgl.generate.ledger import Ledger


def stubbed(kind: str, worlds: int) -> dict[str, Any]:
    """How far search and the paper's fusion in random order lie above the optimum, over ``worlds`` random worlds."""
    search: Counter[int] = Counter()
    greedy: Counter[int] = Counter()
    trainings = [0.0, 0.0]
    for seed in tqdm(range(worlds), desc=kind):
        n = 2 + seed % 5
        world, floors = random_world(kind, n, seed)
        optimum = fewest_by_trying_all(world.names, Ledger(world, floors))
        for k, into in enumerate((search, greedy)):
            world.asked.clear()
            ledger = Ledger(world, floors)
            if k == 0:
                packing = fuse_by_search(world.names, ledger, extra=3 * n)
            else:
                packing = fuse_greedily(random.Random(seed).sample(world.names, n), ledger)
            assert not any(ledger.broken(sequence) for sequence in packing)
            into[len(packing) - optimum] += 1
            trainings[k] += ledger.trainings / n / worlds
    return {
        "case": f"stub: {kind}",
        "instances": worlds,
        "search_over_optimum": dict(sorted(search.items())),
        "random_order_over_optimum": dict(sorted(greedy.items())),
        "search_trainings_per_data_set": round(trainings[0], 2),
        "random_order_trainings_per_data_set": round(trainings[1], 2),
    }


def real(path: Path) -> dict[str, Any]:
    """The same on the real trainer, on one configuration; every training is shared by all three."""
    from vlora_sgl.generate.learner import Learner
    from vlora_sgl.generate.run import identity
    from vlora_sgl.generate.sources import load_run

    config, datasets = load_run(path)
    names = [one.spec.name for one in datasets]
    bars = {one.spec.name: one.bar(config.confidence) for one in datasets}
    ledger = Ledger(Learner(config, datasets), bars, config.output / "ledger.jsonl", identity(config, datasets))
    extra = 3 * len(names) if config.extra is None else config.extra
    packing = fuse_by_search(names, ledger, extra, probe=config.probe > 0)
    trainings, bound = ledger.trainings, packing_bound(names, ledger)
    greedy = fuse_greedily(random.Random(config.seed).sample(names, len(names)), ledger)
    optimum = fewest_by_trying_all(names, ledger)
    return {
        "case": f"real: {path.name}",
        "data_sets": names,
        "packing": packing,
        "bound": bound,
        "optimum": optimum,
        "search_over_optimum": {len(packing) - optimum: 1},
        "random_order_over_optimum": {len(greedy) - optimum: 1},
        "trainings": trainings,
        "trainings_of_all_orders": ledger.trainings,
        "steps": [{"learnt": list(s), "accuracy": a, "broken": ledger.broken(s)} for s, a in ledger.steps.items()],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1000, help="random worlds of each kind")
    parser.add_argument("--real", type=Path, help="configuration of a small real case")
    parser.add_argument("--rows", type=Path, default=RESULTS / "generation" / "packing.jsonl")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    rows = [stubbed(kind, args.worlds) for kind in KINDS]
    if args.real:
        rows.append(real(args.real))
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    worst = max(max(row["search_over_optimum"]) for row in rows)
    record("generation.adapters_over_optimum", worst, "adapters, worst case", False, summary=args.summary)
    for row in rows:
        print(row["case"], row["search_over_optimum"], "random order:", row["random_order_over_optimum"])


if __name__ == "__main__":
    main()
