"""What fetching the next weight into the L2 cache saves: the linears of a decode step of a 7B, with pauses between.

    python -m benchmarks.kernels.bench_prefetch              # a Hopper GPU of 80 GB, half a minute

28 layers, weights of their own, so that none is cached by chance; 32 rows. In place of attention (``--long``
microseconds) and of norms and activations (``--short``) the device sleeps. A captured graph is replayed with each
amount of prefetch, for the library's linears and for ours with 8 adapters of rank 64; the amounts take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.summary import SUMMARY, record
from vlora_sgl.kernels.atmm import atmm_linear, make_routing
from vlora_sgl.kernels.atmm.launch import library_linear
from vlora_sgl.kernels.tiling_search import MODELS
from vlora_sgl.model_executor.weight_prefetch import WeightPrefetch

AMOUNTS, ROWS, SLOTS, RANK = (0, 8, 16, 32, 48), 32, 8, 64
RECORDED = 32
PAUSE_AFTER = {"qkv_proj": "long", "o_proj": "short", "gate_up_proj": "short", "down_proj": "short"}


class Step:
    """The linears of a decode step, to be captured.

    Args:
        layers: how many.
        pauses: cycles the device sleeps, for ``long`` and ``short``.
    """

    def __init__(self, layers: int, pauses: dict[str, int]) -> None:
        self.pauses, shapes = pauses, MODELS["qwen2.5-vl-7b"]
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = {p.k: torch.randn(ROWS, p.k, **kind) for p in shapes}
        self.linears = [(p, torch.randn(p.n, p.k, **kind).mul_(p.k**-0.5)) for p in shapes * layers]
        self.pools = {
            p.name: (
                torch.randn(SLOTS, (len(p.offsets) - 1) * RANK, p.k, **kind).mul_(p.k**-0.5),
                torch.randn(SLOTS, p.n, RANK, **kind),
            )
            for p in shapes
        }
        groups = [
            (rows.astype(np.int32), ((s, 1.0),)) for s, rows in enumerate(np.array_split(np.arange(ROWS), SLOTS))
        ]
        self.routing = make_routing(groups, ROWS, [RANK] * SLOTS, [1.0] * SLOTS, "cuda")
        self.side = torch.cuda.Stream()

    def run(self, adapters: bool, limit: int) -> None:
        """All linears, each of which fetches ``limit`` bytes of the next one's weight."""
        following = [weight for _, weight in self.linears[1:]]
        ahead = [WeightPrefetch(weight, limit, self.side) for weight in [*following, None]]
        for (p, weight), one in zip(self.linears, ahead, strict=True):
            x = self.x[p.k]
            if adapters:
                atmm_linear(x, weight, None, *self.pools[p.name], self.routing, p.offsets)
            else:
                library_linear(x, weight, None)
            if limit:
                one.fetch()
            torch.cuda._sleep(self.pauses[PAUSE_AFTER[p.name]])

    def capture(self, adapters: bool, limit: int) -> torch.cuda.CUDAGraph:
        """A graph of ``run``."""
        self.run(adapters, limit)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(adapters, limit)
        return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Time of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=float, default=15.0, help="microseconds of an attention")
    parser.add_argument("--short", type=float, default=4.0, help="of a norm or an activation")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    clock = 1.7e3  # cycles of a microsecond, about
    step = Step(args.layers, {"long": int(args.long * clock), "short": int(args.short * clock)})
    cases = [(adapters, amount) for adapters in (False, True) for amount in AMOUNTS]
    graphs = {case: step.capture(case[0], case[1] << 20) for case in cases}
    times: dict[tuple[bool, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case, graph in graphs.items():
            times[case].append(milliseconds(graph))
    for adapters in (False, True):
        name = "ours, 8 adapters" if adapters else "the library's"
        middle = {amount: statistics.median(times[adapters, amount]) for amount in AMOUNTS}
        row = ", ".join(f"{amount} MiB {value:.3f}" for amount, value in middle.items())
        ratio = middle[RECORDED] / middle[0]
        print(f"{name}: {row} ms; {RECORDED} MiB takes {ratio:.3f} of none", flush=True)
        figure = f"prefetch.{'adapters8' if adapters else 'base'}_over_none"
        record(figure, ratio, "ratio", False, summary=args.summary)


if __name__ == "__main__":
    main()
