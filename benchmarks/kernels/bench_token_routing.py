"""A routed adapter against one pass per adapter, on linears of a 7B model (MoLoRA, arXiv:2603.15965, tables 3 to 8).

    python -m benchmarks.kernels.bench_token_routing [--summary FILE] [--rows FILE]
    TRITON_INTERPRET=1 python -m benchmarks.kernels.bench_token_routing --dry-run     # without a GPU: equality only

K passes: what an engine without routed adapters does for tokens of K adapters. Every token goes through the pass of
every adapter (which tokens of a pass are kept costs nothing here). One pass: a routed adapter with K members, the
token router's network included. Both are the LoRA part alone, of all layers (the token router decides once for all of
them); the base GEMMs would only dilute the ratio. ``k1_over_single`` is with the base GEMMs: a routed adapter with
top_k 1 over the same rows on one adapter. Access patterns differ in which member the tokens want; members stay
resident. ``speedup_k4`` is the worse of interleaved and separated tokens at the size of the paper's tables,
``speedup_k4.rowsN`` the worst pattern at N rows, the others the worst of all rows and patterns:

- ``whole_model_k4``: K passes with the base GEMMs, each through all linears of the model, over one routed pass
  (tables 5 and 7; no attention, which the passes would have K times too);
- ``k4_over_k1``: four members a token over one, with the base GEMMs (table 16);
- ``random_over_equal``: random shares of the members over equal ones (table 9);
- ``split_k4``, ``split_at_boundaries_k4``: rows gathered by adapter, or at every change of adapter, a pass for each,
  over one routed pass (table 6); ``paged_k4``: K passes, each adapter copied from the host before its own (table 4);
- ``indirect_over_direct``: rows gathered in order of their adapters, applied and scattered back, over kernels that
  read them in place (table 2).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.summary import SUMMARY, card_name, record
from vlora_sgl.kernels.atmm import DENSE_MAX_ROWS, Pairs, Routing, atmm, atmm_linear, make_routing
from vlora_sgl.routed.regroup import Dispatch, Routed, device_tiles
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import RoutedSpec
from vlora_sgl.routed.token_router import Router

SLOTS, RANK = 8, 64
PATTERNS = ("uniform", "zipf", "bursty", "adversarial", "separated")
TABLE_ROWS, TABLE_PATTERNS = 2048, ("adversarial", "separated")
"""Of the paper's tables 3 and 6: 2,048 tokens, as many for each adapter, interleaved or separated."""
Layer = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]]


def build_layers(
    layers: int, hidden: int, kv: int, intermediate: int, device: torch.device, dtype: torch.dtype
) -> Layer:
    """(weight, a, b, offsets) of the four linears of every layer."""
    wide = {
        "qkv": (hidden, (0, hidden, hidden + kv, hidden + 2 * kv)),
        "o": (hidden, (0, hidden)),
        "gate_up": (hidden, (0, intermediate, 2 * intermediate)),
        "down": (intermediate, (0, hidden)),
    }
    layer: Layer = []
    for k, offsets in [*wide.values()] * layers:
        n, parts = offsets[-1], len(offsets) - 1

        def random(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)

        weight = random(n, k, scale=k**-0.5)
        a, b = random(SLOTS, parts * RANK, k, scale=k**-0.5), random(SLOTS, n, RANK, scale=0.1)
        layer.append((weight, a, b, offsets))
    return layer


def wanted_members(pattern: str, rows: int, members: int, rng: np.random.Generator) -> np.ndarray:
    """[rows] the member every token wants."""
    if pattern == "uniform":
        return rng.integers(0, members, rows)
    if pattern == "zipf":
        share = 1 / np.arange(1, members + 1)
        return rng.choice(members, rows, p=share / share.sum())
    if pattern == "bursty":
        return np.repeat(rng.integers(0, members, -(-rows // 16)), 16)[:rows]
    if pattern == "adversarial":  # every neighbour another
        return np.arange(rows) % members
    return np.sort(np.arange(rows) % members)


class Timer:
    """Times work on the device, as a captured graph if asked, with the L2 cache flushed before each run.

    The device sleeps until the host has launched everything: host time is no part of the result, as in serving, where
    it hides behind the base model's layers, or behind the step before.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.flusher = torch.empty(64 << 20 if device.type == "cuda" else 1, dtype=torch.int32, device=device)

    def times(
        self, work: Callable[[], object], graph: bool, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Milliseconds of every repeat.

        Args:
            before: what is launched ahead of a graph, and timed with it.
        """
        if self.device.type != "cuda":
            work()
            return [1.0, 1.0]
        for _ in range(3):
            work()
        run: Callable[[], object] = work
        if graph:
            captured, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
                with torch.cuda.graph(captured, stream=stream):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            run = captured.replay
        parts = [part for part in (before, run) if part is not None]
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for part in parts:
            part()
        cycles = int(1.5e9 * 2 * (time.perf_counter() - began))  # twice that time, at an H100's base clock
        found = []
        for _ in range(self.repeats):
            self.flusher.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(cycles)
            start.record()
            for part in parts:
                part()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return found


class Case:
    """One batch size, number of members and pattern, ready to run every way."""

    def __init__(
        self, layer: Layer, rows: int, members: int, pattern: str, device: torch.device, seed: int, top_k: int = 1
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layer, self.rows, self.members, self.device, self.top_k = layer, rows, members, device, top_k
        dtype, hidden = layer[0][0].dtype, layer[0][0].shape[1]
        self.inputs = {
            weight.shape[1]: torch.randn(rows, weight.shape[1], device=device, dtype=dtype) for weight, *_ in layer
        }
        first = layer[:4]  # the layers share their outputs, as they would in a model that keeps none
        outputs = [torch.zeros(rows, offsets[-1], device=device, dtype=dtype) for *_, offsets in first]
        self.outputs = outputs * (len(layer) // len(first))
        self.want = wanted_members(pattern, rows, members, rng)
        # The router reads the member off the first components: one network for every pattern, at full cost.
        router = Router(hidden, members, "token")
        with torch.no_grad():
            router.w1.zero_(), router.w2.zero_()
            for m in range(members):
                router.w1[m, m], router.w2[m, m] = 1.0, 20.0
        x = self.inputs[hidden]
        x[:, :members] = 0
        x[torch.arange(rows), torch.from_numpy(self.want).to(device)] = 30.0
        self.tables = RouterTables(1, hidden, 1024, min(rows, DENSE_MAX_ROWS), device)
        self.tables.bind(torch.zeros(rows, 2, dtype=torch.int32, device=device), rows + 1)
        spec = RoutedSpec(tuple(map(str, range(members))), router=router.requires_grad_(False), top_k=top_k)
        self.tables.put(spec)
        zeros, every = (torch.zeros(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device))
        self.batch = RoutedRows(zeros, zeros, every.int(), every.int(), zeros, zeros[:1], (0,))
        self.ids, self.seq_lens, self.out, self.requests = zeros, zeros + 1, every + 1, every
        self.numbers = np.arange(rows, dtype=np.int32)
        self.base = self.routing(tuple((m, 0.0) for m in range(members)))
        self.single = self.routing(((0, 1.0),))
        self.passes = [self.routing(((m, 1.0),)) for m in range(members)]
        self.gates = None if self.base.gates is None else self.base.gates.clone()
        self.tables.refresh([0] * self.tables.max_rows, {0: [(m, 1.0) for m in range(members)]})

    def routing(self, pairs: Pairs, numbers: np.ndarray | None = None) -> Routing:
        """These rows of as many, or all, on these pairs."""
        rows = self.numbers if numbers is None else np.arange(len(numbers), dtype=np.int32)
        return make_routing([(rows, pairs)], len(rows), [RANK] * SLOTS, [1.0] * SLOTS, self.device)

    def route(self) -> Routing:
        """What serving does before the first layer."""
        x = self.inputs[self.layer[0][0].shape[1]]
        if self.gates is not None and self.base.gates is not None:
            self.base.gates.copy_(self.gates)
            self.tables.route_decode(self.base.gates, x, self.ids, self.requests, self.seq_lens, self.out)
            return self.base
        weights = self.tables.route_prefill(self.batch, x, self.ids, self.out)
        parts = [Routed(0, tuple(range(self.members)), self.top_k)]
        return device_tiles(self.base, weights, self.batch.routed, Dispatch(self.base, parts, (), 1), [])

    def lora(self, routing: Routing, layers: int | None = None) -> None:
        """The LoRA part of all linears, added to the outputs."""
        for (weight, a, b, offsets), y in zip(self.layer[:layers], self.outputs[:layers], strict=True):
            atmm(y, self.inputs[weight.shape[1]], a, b, routing, offsets)

    def one_pass(self) -> None:
        """The router, then every token through its own adapter."""
        self.lora(self.route())

    def routed(self, timer: Timer, layers: Callable[[Routing], object], graph: bool = True) -> list[float]:
        """Milliseconds of the router and the layers behind it, as they are served: in a graph, or in that of a prefill
        the layers alone."""
        if not graph or self.gates is not None:
            return timer.times(lambda: layers(self.route()), graph)
        routing = self.route()
        return timer.times(lambda: layers(routing), True, self.route)

    def k_passes(self) -> None:
        """Every token through every adapter, one after the other."""
        for routing in self.passes:
            self.lora(routing)

    def whole(self, routing: Routing) -> None:
        """The linears with their base weights."""
        for weight, a, b, offsets in self.layer:
            atmm_linear(self.inputs[weight.shape[1]], weight, None, a, b, routing, offsets)

    def whole_k_passes(self) -> None:
        """The linears with their base weights, once for every adapter."""
        for routing in self.passes:
            self.whole(routing)

    def split(self, at_boundaries: bool) -> Callable[[], None]:
        """Of one layer: the rows of an adapter gathered, or of a run that wants the same, and a pass for each."""
        bounds = np.flatnonzero(np.diff(self.want)) + 1 if at_boundaries else []
        runs = np.split(self.numbers, bounds) if at_boundaries else []
        groups = runs or [np.flatnonzero(self.want == m) for m in range(self.members)]
        parts = [
            (
                torch.from_numpy(rows.astype(np.int64)).to(self.device),
                self.routing(((int(self.want[rows[0]]), 1.0),), rows),
            )
            for rows in groups
            if len(rows)
        ]

        def run() -> None:
            for rows, routing in parts:
                for (weight, a, b, offsets), y in zip(self.layer[:4], self.outputs[:4], strict=True):
                    own = y[rows]
                    y[rows] = atmm(own, self.inputs[weight.shape[1]][rows], a, b, routing, offsets)

        return run

    def paged(self) -> Callable[[], None]:
        """K passes, each behind the copy of its adapter from pinned memory to the slot that it runs from."""
        pinned = self.device.type == "cuda"
        host = [
            [torch.empty(one[:1].shape, dtype=one.dtype, pin_memory=pinned).copy_(one[m : m + 1]) for one in (a, b)]
            for m in range(self.members)
            for _, a, b, _ in self.layer[:4]
        ]

        def run() -> None:
            for m in range(self.members):
                for i, (_, a, b, _) in enumerate(self.layer):
                    for there, here in zip((a, b), host[4 * m + i % 4], strict=True):
                        there[SLOTS - 1 : SLOTS].copy_(here, non_blocking=True)
                self.lora(slot)

        slot = self.routing(((SLOTS - 1, 1.0),))
        return run

    def indirect(self) -> Callable[[], None]:
        """One pass over rows that were gathered in order of their adapters, scattered back; of one layer."""
        order = np.argsort(self.want, kind="stable")
        groups = [(np.flatnonzero(self.want[order] == m).astype(np.int32), ((m, 1.0),)) for m in range(self.members)]
        used = [group for group in groups if len(group[0])]
        routing = make_routing(used, self.rows, [RANK] * SLOTS, [1.0] * SLOTS, self.device)
        places = torch.from_numpy(order).to(self.device)

        def run() -> None:
            for (weight, a, b, offsets), y in zip(self.layer[:4], self.outputs[:4], strict=True):
                y[places] = atmm(y[places], self.inputs[weight.shape[1]][places], a, b, routing, offsets)

        return run

    def direct(self) -> Callable[[], None]:
        """One pass of one layer, by kernels that read the rows in place."""
        routing = self.route()
        return lambda: self.lora(routing, 4)

    def check(self) -> None:
        """One pass gives every row what its adapters' passes give it. Raises AssertionError otherwise."""

        def delta(work: Callable[[], None]) -> list[torch.Tensor]:
            for y in self.outputs[:4]:
                y.zero_()
            work()
            return [y.clone() for y in self.outputs[:4]]

        x = self.inputs[self.layer[0][0].shape[1]]
        weights = self.tables.weights_of(self.batch, x, self.ids, self.out)
        mine = delta(self.one_pass)
        wanted = [torch.zeros_like(y) for y in self.outputs[:4]]
        for m, routing in enumerate(self.passes):
            for total, y in zip(wanted, delta(lambda r=routing: self.lora(r)), strict=True):  # type: ignore[misc]
                total.add_(weights[:, m : m + 1].to(y.dtype) * y)
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
            assert one.abs().max() > 0
        if self.top_k == 1:
            layer = delta(self.direct())
            for work in (self.split(False), self.split(True), self.indirect()):
                for one, other in zip(delta(work), layer, strict=True):
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


MOST_SEGMENTS = 64
"""Of rows split at every change of adapter: one pass each takes milliseconds of launches alone."""


def measured(case: Case, timer: Timer) -> tuple[dict[str, float], list[float]]:
    """Milliseconds of every way to run a case, and ratios of what is compared; and of each routed pass."""
    time = lambda work, graph=True: statistics.median(timer.times(work, graph))  # noqa: E731
    passes = case.routed(timer, case.lora)
    one, many = statistics.median(passes), time(case.k_passes)
    whole = statistics.median(case.routed(timer, case.whole))
    row = {
        "one_pass_ms": one, "k_passes_ms": many, "speedup": many / one,
        "over_single": whole / time(lambda: case.whole(case.single)), "whole_ms": whole,
        "eager_ms": time(case.one_pass, False), "route_ms": time(case.route, False),
    }  # fmt: skip
    if case.members == 4:
        row["whole_speedup"] = time(case.whole_k_passes) / whole
    if case.members == 4 and case.gates is None:
        direct, segments = time(case.direct(), False), 1 + int((np.diff(case.want) != 0).sum())
        row |= {
            "split_speedup": time(case.split(False), False) / direct,
            "indirect_over_direct": time(case.indirect(), False) / direct,
        }
        row["paged_speedup"] = time(case.paged(), False) / row["eager_ms"]
        if segments <= MOST_SEGMENTS:
            row["boundaries_speedup"] = time(case.split(True), False) / direct
    return row, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no timing, nothing recorded")
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    parser.add_argument("--rows", type=Path, help="where every measurement goes, as JSON")
    parser.add_argument("--recorded", type=Path, help="measure nothing: the figures of these rows")
    args = parser.parse_args()
    if args.recorded:
        rows = json.loads(args.recorded.read_text())
        publish(rows, rows[0]["card"], args.summary)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (32, 16, 48) if args.dry_run else (3584, 512, 18944)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = build_layers(1 if args.dry_run else 28, *shape, device, dtype)
    timer = Timer(device, 2 if args.dry_run else args.repeats)
    results: list[dict[str, Any]] = []
    for rows in (64, 80) if args.dry_run else (64, 256, 1024, TABLE_ROWS):
        pooled: list[float] = []
        for members in (2,) if args.dry_run else (2, 4):
            for pattern in PATTERNS[:1] if args.dry_run or members == 2 else PATTERNS:
                case = Case(layer, rows, members, pattern, device, seed=rows + members)
                case.check()
                row: dict[str, Any] = {"rows": rows, "members": members, "pattern": pattern}
                found, passes = measured(case, timer)
                row |= found
                pooled += passes if members == 4 else []
                said = (f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
                results.append(row)
                print(" ".join(said), flush=True)
        for top_k in () if args.dry_run and rows <= DENSE_MAX_ROWS else (2, 4):
            case = Case(layer, rows, 4, "uniform", device, seed=rows + 4, top_k=top_k)
            case.check()
            row = {"rows": rows, "top_k": top_k}
            row["whole_ms"] = statistics.median(case.routed(timer, case.whole))
            results.append(row)
            print(row, flush=True)
        if not args.dry_run:
            spread = float(np.percentile(pooled, 99) / np.percentile(pooled, 50))
            results.append({"rows": rows, "p99_over_p50": spread})
            print(f"rows={rows} p99/p50 over all patterns, 4 members: {spread:.3f}", flush=True)
    if args.dry_run:
        print("dry run: one pass equals K passes everywhere; nothing recorded")
        return
    card = card_name()
    if args.rows:
        args.rows.write_text(json.dumps([{**row, "card": card} for row in results], indent=1))
    publish(results, card, args.summary)


SPEEDUPS = {
    "whole_model_k4": "whole_speedup",
    "split_k4": "split_speedup",
    "split_at_boundaries_k4": "boundaries_speedup",
    "paged_k4": "paged_speedup",
    "indirect_over_direct": "indirect_over_direct",
}
"""Figures that say how many times longer something else takes than one routed pass, and their keys in rows."""


def _ratios(four: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[tuple[str, float, str, bool]]:
    """Of random to equal shares, and of two and four members a token to one."""
    by = {(row["rows"], row["pattern"]): row for row in four}
    sizes = sorted({row["rows"] for row in four})
    random = max(by[n, "uniform"]["one_pass_ms"] / by[n, "adversarial"]["one_pass_ms"] for n in sizes)
    found = [("random_over_equal", random, "ratio", False)]
    for top_k in sorted({row["top_k"] for row in more}):
        mine = [row for row in more if row["top_k"] == top_k]
        worst = max(row["whole_ms"] / by[row["rows"], "uniform"]["whole_ms"] for row in mine)
        found.append((f"k{top_k}_over_k1", worst, "ratio", False))
    return found


def publish(results: list[dict[str, Any]], card: str, summary: Path) -> None:
    """Record what the rows say."""
    four = [row for row in results if row.get("members") == 4]
    table = [row for row in four if row["rows"] == TABLE_ROWS and row["pattern"] in TABLE_PATTERNS]
    figures = [("speedup_k4", min(row["speedup"] for row in table), "x", True)]
    for rows in sorted({row["rows"] for row in four}):
        worst = min(row["speedup"] for row in four if row["rows"] == rows)
        figures.append((f"speedup_k4.rows{rows}", worst, "x", True))
    figures.append(("k1_over_single", max(row["over_single"] for row in four), "ratio", False))
    if spreads := [row["p99_over_p50"] for row in results if "p99_over_p50" in row]:
        figures.append(("p99_over_p50", max(spreads), "ratio", False))
    for name, key in SPEEDUPS.items():
        if found := [row[key] for row in four if key in row]:
            figures.append((name, min(found), "x", True))
    figures += _ratios(four, [row for row in results if "top_k" in row])
    for name, value, unit, higher in figures:
        print(f"routing.{name}: {value:.4f}")
        record(f"routing.{name}", value, unit, higher, card=card, summary=summary)


if __name__ == "__main__":
    main()
