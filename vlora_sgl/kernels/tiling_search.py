"""Offline search for the tiles of a model on this machine's GPU (V-LoRA, algorithm 2).

    python -m vlora_sgl.kernels.tiling_search --model qwen2.5-vl-7b --ranks 16 64 --budget 600

For every projection of the model, rank and number of rows: take the tiles that are powers of two and fit the chip,
prune them by a roofline estimate, compile what is left in parallel, check each against float64 (at most four times
torch's own same-dtype error), time it with a cold L2 cache, and keep the best. What won on the shapes that the table
has is tried first, so a further model needs few candidates (``--limit 4``). Results are saved after every key, so that
a search that is stopped goes on where it was; ``--budget`` stops it by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import triton
from tqdm import tqdm
from triton.runtime.errors import OutOfResources

from vlora_sgl.core import JsonDict
from vlora_sgl.kernels import tiling
from vlora_sgl.kernels.atmm import DENSE_MAX_ROWS, Group, Routing, atmm_torch, launch, make_routing
from vlora_sgl.kernels.atmm.expert_tiles import ONE_LAUNCH
from vlora_sgl.kernels.atmm.experts import device_experts, host_experts
from vlora_sgl.kernels.atmm.launch import FIRST, ScaledInput, Tiles
from vlora_sgl.kernels.tiling import Tile, pack
from vlora_sgl.scaled import E4M3, quantise

L2_BYTES = 50 << 20
MAX_ERROR_RATIO = 4.0
READ_RATE = 3.0e12  # bytes per second from device memory, and from L2: the roofline of the pruning step
CACHE_RATE = 5.5e12
SHARED_BYTES = 227 << 10
SCALED = ("scaled_shrink", "scaled")
"""On a weight in e4m3: for cards of Hopper's kind, and asked for by name."""
BASES = ("linear_shrink", "linear", *SCALED)
"""Operations with a base GEMM."""
PARTNER = {**{first: end for end, first in reversed(FIRST.items())}, **FIRST}
"""The other launch that an operation is timed with."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One wrapped linear: ``offsets`` bounds its stacked outputs, ``k`` is its input width.

    Of all experts' linears of a kind ``experts`` says how many there are, ``choices`` how many of them a token takes,
    and ``share`` how many of its choices have one row of the input: all of gate_up's, one of down's.
    """

    name: str
    offsets: tuple[int, ...]
    k: int
    experts: int = 1
    choices: int = 1
    share: int = 1

    @property
    def n(self) -> int:
        return self.offsets[-1]

    @property
    def is_gate_up(self) -> bool:
        """Whether an activation may follow that takes two halves."""
        return len(self.offsets) == 3 and 2 * self.offsets[1] == self.n


def projections(hidden: int, intermediate: int, heads: int, kv_heads: int) -> tuple[Projection, ...]:
    """The four wrapped linears of a Llama- or Qwen-shaped layer."""
    head = hidden // heads
    q, kv = heads * head, kv_heads * head
    return (
        Projection("qkv_proj", (0, q, q + kv, q + 2 * kv), hidden),
        Projection("o_proj", (0, hidden), q),
        Projection("gate_up_proj", (0, intermediate, 2 * intermediate), hidden),
        Projection("down_proj", (0, hidden), intermediate),
    )


def experts_of(hidden: int, inner: int, count: int, choices: int) -> tuple[Projection, ...]:
    """The two kinds of linears of a mixture-of-experts layer, each expert's of an inner size."""
    return (
        Projection("experts.gate_up_proj", (0, inner, 2 * inner), hidden, count, choices, choices),
        Projection("experts.down_proj", (0, hidden), inner, count, choices),
    )


MODELS = {
    "qwen2.5-vl-3b": projections(2048, 11008, 16, 2),
    "qwen2.5-vl-7b": projections(3584, 18944, 28, 4),
    "qwen3-vl-8b": projections(4096, 12288, 32, 8),
    "llava-1.5-7b": projections(4096, 11008, 32, 32),
    "llava-1.5-13b": projections(5120, 13824, 40, 40),
    # An image encoder, of whose q, k and v an adapter has one pair; SGLang pads the inner size to whole eights.
    "qwen2.5-vl-vision": (
        Projection("visual.qkv", (0, 3840), 1280),
        Projection("visual.proj", (0, 1280), 1280),
        Projection("visual.gate_up_proj", (0, 3424, 6848), 1280),
        Projection("visual.down_proj", (0, 1280), 3424),
        Projection("visual.merger", (0, 5120), 5120),
    ),
    "qwen3-30b-a3b": (
        Projection("qkv_proj", (0, 4096, 4608, 5120), 2048),
        Projection("o_proj", (0, 2048), 4096),
        *experts_of(2048, 768, 128, 8),
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One key of the table: an operation on one projection, rank, number of rows and of slots.

    Of experts, rows are choices, and slots those of all experts: so the kernels see them.
    """

    op: str
    projection: Projection
    rank: int
    rows: int
    slots: int
    pairs: int
    dtype: torch.dtype

    @property
    def key(self) -> int:
        parts = len(self.projection.offsets) - 1
        shape = (self.projection.n, self.projection.k, self.rank, self.rows, self.slots)
        return pack(self.op, *shape, parts=parts, pairs=self.pairs, dtype=self.dtype)

    @property
    def label(self) -> str:
        return f"{self.op} {self.projection.name} r={self.rank} rows={self.rows} slots={self.slots} pairs={self.pairs}"


def bytes_and_flops(job: Job) -> tuple[float, float]:
    """The floor of a job: bytes that must move once (x, y, h, weights in use) and operations."""
    p, size = job.projection, job.dtype.itemsize
    low = (len(p.offsets) - 1) * job.rank
    a, b = job.slots * low * p.k, job.slots * p.n * job.rank
    x, y, h = job.rows // p.share * p.k, job.rows * p.n, job.rows * job.pairs * low
    elements = {
        "linear": x + y + a + b + p.n * p.k,
        "linear_shrink": x + y + a + b + p.n * p.k,
        "scaled": x + y + a + b + (x + p.n * p.k) / size,
        "scaled_shrink": x + y + a + b + (x + p.n * p.k) / size,
        "shrink": x + a + h,
        "expand": h + b + 2 * y,
        "grouped_shrink": x + a + h,
        "grouped_expand": h + b + 2 * y,
        "grouped_write": h + b + y,
        "grouped_silu": h + b + 1.5 * y,
    }[job.op]
    flops = 2.0 * job.rows * job.pairs * {"s": low * p.k, "e": job.rank * p.n}["s" if "shrink" in job.op else "e"]
    if job.op in BASES:
        flops = 2.0 * job.rows * (p.n * p.k + job.pairs * (low * p.k + job.rank * p.n))
    return float(elements * size), flops


def candidates(job: Job) -> list[Tile]:
    """Tiles that fit the chip, pruned by the roofline estimate to those within half as much again of the best."""
    block_m = 64 if job.rows > DENSE_MAX_ROWS else max(16, 1 << tiling.bucket(job.rows))
    if job.op == "expand":
        deep = itertools.product((16, 32, 64, 128), (2, 4, 8))
        return _with_own(job, (Tile(block_m, n, 0, 1, 4, stages) for n, stages in deep if stages <= max(2, job.slots)))
    if job.op in ("grouped_expand", "grouped_write"):
        spans = itertools.product((64, 128, 256), (4, 8), (1, 4, 16))
        return _with_own(job, (Tile(block_m, n, 0, 1, warps, 2, run=run) for n, warps, run in spans))
    if job.op == "grouped_silu":  # two accumulators: 128 columns need 8 warps
        shapes = itertools.product(((32, 4), (64, 4), (64, 8), (128, 8)), ((1, 2), (4, 2), (4, 3), (16, 2), (16, 3)))
        return _with_own(job, (Tile(block_m, n, 0, 1, w, stages, run=run) for (n, w), (run, stages) in shapes))
    if job.op in ("linear", "scaled"):
        return _linears(job, block_m)
    grouped = job.op == "grouped_shrink"
    ranked: list[tuple[float, Tile]] = []
    narrow = min(64, 16 * (len(job.projection.offsets) - 1)) if grouped else 16
    # Beside a base GEMM a small program leaves more of that one's room on the multiprocessor; of many programs (of
    # experts) one fills its pipeline while others work.
    rooms: tuple[int, ...] = (100 << 10, 48 << 10) if job.op in BASES else (100 << 10,)
    if job.projection.experts > 1:
        rooms = (100 << 10, 56 << 10, 32 << 10)
    sizes = itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8, 16), rooms)
    for n, k, split, room in sizes:
        stage = (block_m + n) * k * job.dtype.itemsize
        # As deep a pipeline as lets two programs share a multiprocessor; else one program alone.
        stages = min(6, room // stage + 1)
        stages = stages if stages >= 3 else min(4, SHARED_BYTES // stage)
        programs = _programs(job, n) * split
        if stages < 2 or n < narrow or job.projection.k < 2 * k * split or (split > 1 and programs > 1056):
            continue
        cost = _estimate(job, n, split, stages * stage)
        ranked.append((cost, Tile(block_m, n, k, split, 4 if n <= 64 else 8, stages)))
    return _pruned(job, ranked)


def _linears(job: Job, block_m: int) -> list[Tile]:
    """Base GEMM and expand in one launch: what keeps enough bytes under way on each multiprocessor."""
    ranked = []
    size = 1 if job.op == "scaled" else job.dtype.itemsize
    steps = [bytes_ // size for bytes_ in (128, 256, 512)]
    for n, k, split, share in itertools.product((32, 64, 128), steps, (1, 2, 3, 4, 6, 8), (1, 2, 3)):
        stage = (block_m + n) * k * size
        stages = min(8, SHARED_BYTES // share // stage)
        programs = math.ceil(job.projection.n / n) * split
        if stages < 3 or job.projection.k < 3 * k * split or (split > 1 and programs > 3000):
            continue
        x = min(job.rows, 64) * job.projection.k * job.dtype.itemsize
        moved, _ = bytes_and_flops(job)
        waves = programs / (132 * share)
        idle = math.ceil(waves) / waves if waves > 0.8 else 1.25 / waves
        cost = max(moved / READ_RATE, (moved + programs / split * x) / CACHE_RATE) * idle**0.5 + 0.4e-6 * split
        for warps in (4, 8) if n == 128 else (4,):
            ranked.append((cost, Tile(block_m, n, k, split, warps, stages)))
    return _pruned(job, ranked)


def _pruned(job: Job, ranked: list[tuple[float, Tile]]) -> list[Tile]:
    """Best estimate first, without those more than half as dear again."""
    ranked.sort(key=lambda item: item[0])
    return _with_own(job, (tile for cost, tile in ranked if cost <= 1.5 * ranked[0][0]))


def _with_own(job: Job, tiles: Iterable[Tile]) -> list[Tile]:
    """The built-in tile before all others: a search must not end below where it started."""
    return list(dict.fromkeys([tiling.default_tile(tiling.unpack(job.key)), *tiles]))


def _programs(job: Job, block_n: int) -> int:
    parts, rp = len(job.projection.offsets) - 1, launch.rank_pad(job.rank)
    low = math.ceil(parts * rp / block_n)
    if job.op == "grouped_shrink":
        return math.ceil(job.pairs * parts * rp / block_n) * math.ceil(job.rows / 64)
    return low * job.slots


def _estimate(job: Job, block_n: int, split: int, shared: int) -> float:
    """Seconds of a shrink by the roofline: A once, x through L2 once per column tile, and half-empty waves."""
    p, low = job.projection, (len(job.projection.offsets) - 1) * job.rank
    moved = (job.rows * (p.k + job.pairs * low) + job.slots * low * p.k) * job.dtype.itemsize
    programs = _programs(job, block_n)
    x = min(job.rows, 64) * job.projection.k * job.dtype.itemsize
    cached = moved + programs * x
    resident = 132 * max(1, min(8, SHARED_BYTES // shared))
    waves = programs * split / resident
    idle = (
        1.0
        if waves >= 4
        else math.ceil(waves) / waves
        if waves > 1
        else min(4.0, max(1.0, 0.8 / (programs * split / 132)))
    )
    return max(moved / READ_RATE, cached / CACHE_RATE) * idle + 0.3e-6 * split


class Case:
    """Inputs of a job, in enough copies that none is in the L2 cache when its turn comes."""

    def __init__(self, job: Job, copies: int | None = None) -> None:
        p, device = job.projection, torch.device("cuda")
        parts = len(p.offsets) - 1
        moved, _ = bytes_and_flops(job)
        self.job, self.copies = job, copies or max(2, min(24, math.ceil(3 * L2_BYTES / moved)))
        generator = torch.Generator(device).manual_seed(job.key & 0x7FFFFFFF)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=job.dtype)

        self.x = [rand(job.rows // p.share, p.k) for _ in range(self.copies)]
        self.y = [rand(job.rows, p.n) for _ in range(self.copies)]
        self.a = [rand(job.slots, parts * job.rank, p.k).mul_(p.k**-0.5) for _ in range(self.copies)]
        self.b = [rand(job.slots, p.n, job.rank).mul_(job.rank**-0.5) for _ in range(self.copies)]
        self.w = [rand(p.n, p.k).mul_(p.k**-0.5) for _ in range(self.copies)] if job.op in BASES else []
        self.scaled: list[ScaledInput | None] = [None] * self.copies
        if job.op in SCALED:
            numbers = [quantise(w, (1, p.k), E4M3) for w in self.w]
            inputs = [quantise(x, (1, p.k), E4M3) for x in self.x]
            self.w = [one.weight for one in numbers]
            self.scaled = [
                ScaledInput(x.weight, x.scale.view(-1), one.scale.view(-1))
                for x, one in zip(inputs, numbers, strict=True)
            ]
        self.routing, self.reference = routings(job, device)

    def run(
        self, tile: Tile, i: int, other: Tile | None = None, start: launch.Start = launch.launched
    ) -> torch.Tensor:
        """The operation on copy ``i``, with ``other`` for the launch beside it (the expand of a shrink, and so on).

        The result is in place on y where the operation accumulates.
        """
        job = self.job
        other = other or tiling.default_tile(tiling.unpack(replace(job, op=PARTNER[job.op]).key))
        tiles = Tiles(job.op, other, tile) if job.op in FIRST else Tiles(PARTNER[job.op], tile, other)
        operands = (self.y[i], self.x[i], self.a[i], self.b[i], self.routing, job.projection.offsets)
        weight = self.w[i] if self.w else None
        return launch.run(tiles, operands, weight=weight, scaled=self.scaled[i], start=start)

    def base(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """The base GEMM of copy ``i``, computed in a type."""
        if (scaled := self.scaled[i]) is None:
            return F.linear(self.x[i].to(dtype), self.w[i].to(dtype))
        wide = scaled.numbers.to(dtype) * scaled.scale[:, None].to(dtype)
        return F.linear(wide, self.w[i].to(dtype) * scaled.weight_scale[:, None].to(dtype))


def routings(job: Job, device: torch.device) -> tuple[Routing, Routing]:
    """What a job's rows apply, every slot about as many of them: for the kernels, and for torch.

    Tokens choose experts at random and their choices have weight 1.
    """
    p = job.projection
    slots, rows = job.slots // p.experts, job.rows // p.choices
    groups: list[Group] = []
    for s, own in enumerate(np.array_split(np.arange(rows, dtype=np.int32), min(slots, rows))):
        other = ((s + 1) % slots, -0.5)
        groups.append((own, (((s, 1.0), other) if job.pairs == 2 else ((s, 1.0),))))
    grouped, tables = job.op.startswith("grouped"), ([job.rank] * slots, [0.5] * slots, device)
    routing = make_routing(groups, rows, *tables, dense=not grouped, tuples=p.experts > 1)
    if p.experts == 1:
        return routing, Routing(rows, slots, groups, routing.ranks, routing.places, routing.scalings)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, p.experts, generator=generator).topk(p.choices).indices.int()
    of_tokens, of_choices = device_experts(routing, ids.to(device), torch.ones(ids.shape, device=device), p.experts)
    return of_tokens if p.share > 1 else of_choices, host_experts(routing, ids, p.experts, p.share)


def compile_only(job: Job, tile: Tile) -> bool:
    """Fill Triton's cache with a job's kernels for a tile; False where it does not fit the chip."""
    try:
        case = _WORKER.get(job) or Case(job, copies=1)
        _WORKER.clear()
        _WORKER[job] = case
        case.run(tile, 0, start=launch.compiled)
    except Exception:  # whatever the compiler refuses is no candidate
        return False
    return True


_WORKER: dict[Job, Case] = {}


def error_ratio(case: Case, run: Callable[[int], torch.Tensor]) -> float:
    """max |out - float64| over torch's own same-dtype error, on poisoned outputs where the operation writes them."""
    job, offsets = case.job, case.job.projection.offsets
    x, a, b = case.x[0], case.a[0], case.b[0]
    writes = job.op in (*BASES, "grouped_write", "grouped_shrink")
    start = torch.zeros_like(case.y[0]) if writes else case.y[0].clone()
    if case.w:
        exact = case.base(0, torch.float64)
        own = case.base(0, torch.float32 if job.op in SCALED else job.dtype).to(job.dtype)
    else:
        exact, own = start.double(), start.clone()
    exact = atmm_torch(exact, x.double(), a.double(), b.double(), case.reference, offsets)
    own = atmm_torch(own, x, a, b, case.reference, offsets)
    if job.op == "grouped_silu":
        exact, own = silu_and_mul(exact), silu_and_mul(own)
    saved = case.y[0].clone()
    if writes:
        case.y[0].fill_(float("nan"))
    out = run(0).double()
    case.y[0].copy_(saved)
    floor = (own.double() - exact).abs().max().item()
    worst = (out - exact).abs().max().item()
    return math.inf if math.isnan(worst) else worst / max(floor, 1e-30)


def silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    """The activation behind gate and up: [M, I] of [M, 2 I]."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def measure(run: Callable[[int], object], copies: int, rounds: int = 5) -> tuple[float, float, float]:
    """(median, p20, p80) microseconds of one call, over replays of a graph of ``copies`` calls on cold inputs."""
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    ordered = sorted(times)
    return statistics.median(ordered), ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]


def jobs_of(
    shapes: Sequence[Projection], ranks: Sequence[int], rows: Sequence[int], slots: Sequence[int], dtype: torch.dtype
) -> Iterator[Job]:
    """The keys of a model, decode before prefill, each operation's expand before what needs it.

    Args:
        rows: of tokens; slots: of adapters.
    """
    for tokens, adapters, rank, p in itertools.product(rows, slots, ranks, shapes):
        count, s = tokens * p.choices, adapters * p.experts
        if p.experts > 1:
            # What joins behind experts' linears accumulates, or is in the activation of many choices.
            end = "grouped_silu" if p.is_gate_up and count > ONE_LAUNCH else "grouped_expand"
            for op in ("grouped_shrink", end):
                yield Job(op, p, rank, count, s, 1, dtype)
        elif count <= DENSE_MAX_ROWS:
            for op in (*BASES, "shrink", "expand"):
                yield Job(op, p, rank, count, s, 1, dtype)
        else:
            activation = ("grouped_silu",) if p.is_gate_up else ()
            for op in ("grouped_shrink", "grouped_write", "grouped_expand", *activation):
                yield Job(op, p, rank, count, s, 1, dtype)


def search(
    jobs: Sequence[Job], path: Path, budget: float, workers: int, limit: int, say: Callable[[str], None] = print
) -> list[JsonDict]:
    """Fill the table at ``path`` with the best tile of each job; jobs whose key it has are skipped.

    Returns:
        One row per job done in this call: label, tile, time, floor, number of candidates.
    """
    began = time.monotonic()
    done: dict[int, tuple[Tile, JsonDict]] = {}
    if path.exists():
        for row in json.loads(path.read_text())["entries"]:
            done[int(row["key"], 16)] = (
                Tile(**row["tile"]),
                {k: v for k, v in row.items() if k not in ("key", "tile")},
            )
    todo = [job for job in jobs if job.key not in done]
    won = winners(done)
    results = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        compiled: list[tuple[Job, list[Tile], list[Future[bool]]]] = []
        for job in todo:
            tiles = with_winners(job, won)[:limit]
            compiled.append((job, tiles, [pool.submit(compile_only, job, tile) for tile in tiles]))
        for job, tiles, futures in tqdm(compiled, desc="tiling search", unit="key"):
            if time.monotonic() - began > budget:
                say(f"budget of {budget:.0f} s is spent; run again to go on")
                for _, _, rest in compiled:
                    for future in rest:
                        future.cancel()
                break
            fits = [tile for tile, future in zip(tiles, futures, strict=True) if future.result()]
            row = _best(job, fits, done)
            if row is None:
                say(f"no tile passed: {job.label}")
                continue
            tile = row.pop("tile")
            done[job.key] = (tile, row)
            results.append({**row, "tile": tile})
            say(f"{job.label}: {row['us']:.1f} us, floor {row['floor_us']:.1f} us, {tile}")
            rows = [(key, t, about) for key, (t, about) in done.items()]
            tiling.TilingTable.save(path, rows, device=torch.cuda.get_device_name(0), torch=torch.__version__)
    return results


ACROSS_SHAPES = ("op", "dtype", "pairs", "rank", "rows", "slots")
"""Fields of a key that decide more of a tile than the projection's shape does."""


def winners(done: Mapping[int, tuple[Tile, object]]) -> dict[tuple[int, ...], list[Tile]]:
    """Tiles of a table by what their keys have in common across shapes."""
    won: dict[tuple[int, ...], list[Tile]] = {}
    for key, (tile, _) in done.items():
        fields = tiling.unpack(key)
        won.setdefault(tuple(fields[name] for name in ACROSS_SHAPES), []).append(tile)
    return won


def with_winners(job: Job, won: Mapping[tuple[int, ...], Sequence[Tile]]) -> list[Tile]:
    """The built-in tile, what won on other models' shapes, and then the other candidates: so few need be tried."""
    fields = tiling.unpack(job.key)
    found = won.get(tuple(fields[name] for name in ACROSS_SHAPES), ())
    own, *rest = candidates(job)
    return list(dict.fromkeys([own, *(t for t in found if t.block_k * t.split_k <= job.projection.k), *rest]))


def _best(job: Job, tiles: Sequence[Tile], done: dict[int, tuple[Tile, JsonDict]]) -> JsonDict | None:
    case = Case(job)
    partner = done.get(replace(job, op=PARTNER[job.op]).key)
    other = partner[0] if partner else None
    timed = []
    for tile in tiles:
        run = partial(case.run, tile, other=other)
        try:
            if error_ratio(case, run) <= MAX_ERROR_RATIO:
                timed.append((measure(run, case.copies), tile))
        except OutOfResources:  # what the compiler takes the chip may still refuse
            continue
    if not timed:
        return None
    (median, p20, p80), tile = min(timed, key=lambda item: item[0][0])
    moved, flops = bytes_and_flops(job)
    row: JsonDict = {"label": job.label, "tile": tile, "us": round(median, 2), "p20": round(p20, 2)}
    row |= {
        "p80": round(p80, 2),
        "floor_us": round(max(moved / READ_RATE, flops / 8e14) * 1e6, 2),
        "tried": len(timed),
    }
    if job.op == "linear":
        base = measure(lambda i: case.base(i, job.dtype), case.copies)[0]
        row |= {"base_us": round(base, 2)}
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="may be given more than once")
    parser.add_argument("--config", type=Path, help="a Hugging Face config.json instead of a known model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256, 1024, 8192])
    parser.add_argument("--slots", type=int, nargs="+", default=[8])
    plain = [op for op in tiling.OPS if op not in SCALED]
    parser.add_argument(
        "--ops", nargs="+", default=plain, choices=tiling.OPS, help=f"also {' '.join(SCALED)}, on Hopper"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds after which the search stops")
    parser.add_argument("--limit", type=int, default=24, help="candidates per key that survive the pruning")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    parser.add_argument("--output", type=Path, help="the table to write, by default the shipped one of this device")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the search times kernels: it needs a CUDA device")
    shapes: list[Projection] = []
    for model in args.model or ():
        shapes += [p for p in MODELS[model] if p not in shapes]
    if args.config:
        config = json.loads(args.config.read_text())
        config = config.get("text_config", config)
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        shapes += projections(*(config[name] for name in names))
    if not shapes:
        parser.error("give --model or --config")
    path = (
        args.output or tiling.TABLES / f"{tiling.table_name(torch.cuda.get_device_name(0), triton.__version__)}.json"
    )
    jobs = list(jobs_of(shapes, args.ranks, args.rows, args.slots, getattr(torch, args.dtype)))
    jobs = [job for job in jobs if job.op in args.ops]
    began = time.monotonic()
    results = search(jobs, path, args.budget, args.workers, args.limit, tqdm.write)
    print(f"{len(results)} of {len(jobs)} keys in {(time.monotonic() - began) / 60:.1f} minutes -> {path}")


if __name__ == "__main__":
    main()
