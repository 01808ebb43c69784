"""Kernel workloads: rows with adapters by popularity on the projections of a 7B layer, inputs never cached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vlora_sgl.kernels.atmm import Group, atmm_torch, make_routing
from vlora_sgl.kernels.tiling_search import L2_BYTES, MODELS, Projection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROJECTIONS = {p.name: p for p in MODELS["qwen2.5-vl-7b"]}


def rows_by_adapter(popularity: str, rows: int, adapters: int) -> list[int]:
    """How many rows each adapter has; the names are Punica's.

    ``distinct`` and ``uniform`` share evenly, ``zipf`` falls as 1 / i^1.5, ``skewed`` gives one adapter half of the
    rows, ``identical`` gives one adapter all.
    """
    if popularity == "identical":
        return [rows]
    adapters = min(adapters, rows)
    if popularity in ("distinct", "uniform"):
        weights = np.ones(adapters)
    elif popularity == "zipf":
        weights = 1.0 / np.arange(1, adapters + 1) ** 1.5
    elif popularity == "skewed":
        weights = np.r_[max(1, adapters - 1), np.ones(adapters - 1)]
    else:
        raise ValueError(f"popularity must be distinct, uniform, zipf, identical or skewed, got {popularity!r}")
    spare = rows - adapters  # each adapter has a row of its own
    shares = np.floor(weights / weights.sum() * spare).astype(int)
    shares[: spare - shares.sum()] += 1
    return [int(1 + share) for share in shares]


@dataclass(frozen=True)
class Workload:
    """One shape: ``ranks`` are dealt out to the adapters in turn, so that several make a mixed pool."""

    projection: str
    rows: int
    adapters: int
    popularity: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        ranks = "/".join(map(str, self.ranks))
        return f"{self.projection} rows={self.rows} adapters={self.adapters} {self.popularity} r={ranks}"

    @property
    def phase(self) -> str:
        """decode (one row a request) or prefill."""
        return "decode" if self.rows <= 64 else "prefill"


class Inputs:
    """Tensors of a workload in enough copies that none is in the L2 cache when its turn comes.

    Attributes:
        x, y, a, b: one tensor per copy, as in ``kernels.atmm``; every adapter scales by 0.5.
        lengths: rows of each adapter; rows are in adapter order.
    """

    scaling = 0.5

    def __init__(self, load: Workload, copies: int | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        p: Projection = PROJECTIONS[load.projection]
        self.load, self.offsets, self.k, self.n = load, p.offsets, p.k, p.n
        self.parts = len(p.offsets) - 1
        self.lengths = rows_by_adapter(load.popularity, load.rows, load.adapters)
        self.slots, self.rank = max(load.adapters, len(self.lengths)), max(load.ranks)
        self.ranks = [load.ranks[i % len(load.ranks)] for i in range(self.slots)]
        self.copies = copies or max(2, min(64, math.ceil(2 * L2_BYTES / self.touched_bytes)))
        generator = torch.Generator(DEVICE).manual_seed(0)

        def rand(*shape: int, scale: float = 1.0) -> list[torch.Tensor]:
            options = {"generator": generator, "device": DEVICE, "dtype": dtype}
            return [torch.randn(shape, **options).mul_(scale) for _ in range(self.copies)]

        self.x, self.y = rand(load.rows, self.k), rand(load.rows, self.n)
        self.a = rand(self.slots, self.parts * self.rank, self.k, scale=self.k**-0.5)
        self.b = rand(self.slots, self.n, self.rank, scale=self.rank**-0.5)

    @cached_property
    def groups(self) -> list[Group]:
        """Row groups of ATMM's routing."""
        ends = np.cumsum(self.lengths)
        return [
            (np.arange(end - length, end, dtype=np.int32), ((slot, 1.0),))
            for slot, (length, end) in enumerate(zip(self.lengths, ends, strict=True))
        ]

    @property
    def touched_bytes(self) -> float:
        """What must move once: x, y twice, and A and B of the adapters in use."""
        low = sum(self.ranks[: len(self.lengths)])
        weights = low * (self.parts * self.k + self.n)
        return 2.0 * (self.load.rows * (self.k + 2 * self.n) + weights)

    def exact(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float64 answer, the same in plain torch matmuls of the dtype) of copy 0 for some rows."""
        number_of = {int(t): i for i, t in enumerate(rows.tolist())}
        groups = []
        for numbers, pairs in self.groups:
            kept = [number_of[t] for t in numbers.tolist() if t in number_of]
            groups.append((np.asarray(kept, dtype=np.int32), pairs))
        routing = make_routing(groups, len(rows), self.ranks, [self.scaling] * self.slots, "cpu", dense=True)
        answers = []
        for kind in (torch.float64, self.x[0].dtype):
            y, x, a, b = (t.to(kind) for t in (self.y[0][rows], self.x[0][rows], self.a[0], self.b[0]))
            answers.append(atmm_torch(y.clone(), x, a, b, routing, self.offsets))
        return answers[0], answers[1]


def grid(quick: bool) -> list[Workload]:
    """The workloads: decode and prefill, one to 64 adapters, ranks 8 to 128 and mixed."""
    shapes = [
        (1, 1, "identical"),
        (8, 8, "distinct"),
        (32, 1, "identical"),
        (32, 8, "uniform"),
        (32, 8, "zipf"),
        (64, 16, "skewed"),
        (64, 64, "distinct"),
        (256, 8, "uniform"),
        (1024, 8, "zipf"),
        (8192, 1, "identical"),
        (8192, 8, "uniform"),
    ]
    ranks: list[tuple[int, ...]] = [(16,), (64,)]
    if not quick:
        shapes += [
            (2, 2, "distinct"),
            (16, 4, "uniform"),
            (128, 16, "zipf"),
            (512, 32, "skewed"),
            (2048, 64, "uniform"),
        ]
        shapes += [(4096, 16, "zipf"), (8192, 64, "zipf")]
        ranks += [(8,), (32,), (128,)]
    loads = [
        Workload(name, *shape, rank)
        for name in PROJECTIONS
        for rank in ranks
        for shape in shapes
        if not (shape[1] == 64 and max(rank) > 64)
    ]
    mixed = [(32, 8, "uniform"), (1024, 8, "zipf")]
    return loads + [Workload(name, *shape, (8, 16, 32, 64)) for name in PROJECTIONS for shape in mixed]
