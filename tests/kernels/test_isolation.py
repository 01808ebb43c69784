"""Whatever a slot holds, a row that does not apply it keeps every bit: all entries of the operator, all poisons.

Each call is made twice with one launch, once with ordinary numbers in the slot. On a plain CPU the torch path; the
kernels under Triton's interpreter, in a process of their own; and on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_atmm import FixedTable, tiles
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import (
    Group,
    Routing,
    atmm,
    atmm_linear,
    atmm_reference,
    atmm_silu_and_mul,
    atmm_silu_reference,
    atmm_torch,
    launch,
    make_routing,
)
from vlora_sgl.kernels.tiling import Tile

NAN, INF = float("nan"), float("inf")
POISONED = 1  # the slot
# name: (scaling, A, B): what the slot holds instead; None leaves its own. "large" is finite and overflows in h or y.
POISONS: dict[str, tuple[float | None, float | str | None, float | str | None]] = {
    "scale-nan": (NAN, None, None),
    "scale-inf": (INF, None, None),
    "scale-1e308": (1e308, None, None),
    "a-nan": (None, NAN, None),
    "a-inf": (None, INF, None),
    "a-large": (None, "large", None),
    "b-nan": (None, None, NAN),
    "b-inf": (None, None, -INF),
    "b-large": (None, None, "large"),
    "both-large": (None, "large", "large"),
    "everything": (NAN, NAN, INF),
}
# name: (K, offsets, R, ranks)
SHAPES: dict[str, tuple[int, tuple[int, ...], int, list[int]]] = {
    "one-part": (64, (0, 48), 16, [16, 8, 16]),
    "qkv-unequal-odd-ranks": (96, (0, 40, 56, 72), 24, [24, 5, 0, 16]),
    "gate-up-ragged": (80, (0, 33, 66), 12, [12, 3, 7]),
}
# name: the pairs of each row; slot -1 is the last.
ROUTINGS: dict[str, list[tuple[tuple[int, float], ...]]] = {
    "one-row-of-many": [((POISONED, 1.0),), *[((0, 1.0),)] * 3, *[()] * 3, *[((-1, 1.0),)] * 3],
    "beside-another": [((POISONED, 1.0), (0, -1.0)), ((0, 1.0),), (), ((-1, 1.0), (0, -1.0)), ((0, 1.0), (-1, 2.0))],
    "merged-under-some": [((0, 1.0), (POISONED, -1.0)), ((POISONED, -1.0),), ((0, 1.0),), (), ((-1, 0.5),)],
    "of-weight-zero": [((POISONED, 1.0),), ((POISONED, 0.0), (0, 1.0)), ((POISONED, 0.0),), (), ((-1, 1.0),)],
    "many-rows": [((POISONED, 1.0),) if row % 3 == 0 else ((0, 1.0),) if row % 3 == 1 else () for row in range(40)],
}


def applies(pairs: Sequence[tuple[int, float]]) -> bool:
    return any(slot == POISONED and weight != 0 for slot, weight in pairs)


class Case:
    """Tensors and groups of one shape and routing; ``routing`` and ``slots`` give them with and without poison."""

    def __init__(self, shape: str, routing: str, dtype: torch.dtype) -> None:
        k, self.offsets, r, self.ranks = SHAPES[shape]
        self.rows = [tuple((s % len(self.ranks), w) for s, w in pairs) for pairs in ROUTINGS[routing]]
        torch.manual_seed(0)
        parts, n = len(self.offsets) - 1, self.offsets[-1]
        a = torch.full((len(self.ranks), parts * r, k), NAN)  # past its rank, and where there is no adapter
        b = torch.full((len(self.ranks), n, r), NAN)
        for slot, rank in enumerate(self.ranks):
            a[slot, : parts * rank] = torch.randn(parts * rank, k) * k**-0.5
            b[slot, :, :rank] = torch.randn(n, rank)
        tensors = torch.randn(len(self.rows), k), torch.randn(n, k) * k**-0.5, torch.randn(n), a, b
        self.x, self.w, self.bias, self.a, self.b = (t.to(DEVICE, dtype) for t in tensors)
        self.y = torch.nn.functional.linear(self.x, self.w, self.bias)
        alike: dict[Any, list[int]] = {}
        for row, pairs in enumerate(self.rows):
            alike.setdefault(pairs, []).append(row)
        self.groups: list[Group] = [(np.asarray(rows, dtype=np.int32), pairs) for pairs, rows in alike.items()]
        self.kept = [row for row, pairs in enumerate(self.rows) if not applies(pairs)]
        self.hit = [row for row, pairs in enumerate(self.rows) if applies(pairs)]

    def routing(self, poison: str | None, dense: bool) -> Routing:
        return make_routing(
            self.groups, len(self.rows), self.ranks, self.scalings(poison), DEVICE, dense=dense, block=16
        )

    def scalings(self, poison: str | None) -> list[float]:
        scalings = [0.5 + slot for slot in range(len(self.ranks))]
        if poison is not None and (scale := POISONS[poison][0]) is not None:
            scalings[POISONED] = scale
        return scalings

    def slots(self, poison: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, rank = self.a.clone(), self.b.clone(), self.ranks[POISONED]
        if poison is not None:
            _, in_a, in_b = POISONS[poison]
            for held, value in ((a[POISONED, :rank], in_a), (b[POISONED, :, :rank], in_b)):
                if value is not None:
                    held.fill_(torch.finfo(held.dtype).max / 2 if isinstance(value, str) else value)
        return a, b


Entry = Callable[[Case, torch.Tensor, torch.Tensor, Routing], torch.Tensor]


def linear(table: FixedTable, case: Case, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    return atmm_linear(case.x, case.w, case.bias, a, b, routing, case.offsets, table)


def add(table: FixedTable, case: Case, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    return atmm(case.y.clone(), case.x, a, b, routing, case.offsets, table)


def write(split: int, case: Case, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    shrink, expand = Tile(16, 32, 32, split, 4, 2), Tile(16, 32, 0, 1, 4, 2, run=split)
    y = torch.full_like(case.y, NAN)
    return launch.grouped(y, case.x, a, b, routing, case.offsets, shrink, expand, accumulate=False, bias=case.bias)


def silu(split: int, case: Case, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    shrink, tile = Tile(16, 32, 32, split, 4, 2), Tile(16, 16 if split == 1 else 32, 0, 1, 4, 2, run=split)
    table = FixedTable(grouped_shrink=shrink, grouped_silu=tile)
    return atmm_silu_and_mul(case.y, case.x, a, b, routing, case.offsets, table)


def check(entry: Entry, case: Case, poisons: Iterable[str], dense: bool) -> None:
    """Rows that do not apply the poisoned slot keep every bit; the others show that the poison came through."""
    before = entry(case, *case.slots(None), case.routing(None, dense))
    assert torch.isfinite(before).all()
    for poison in poisons:
        after = entry(case, *case.slots(poison), case.routing(poison, dense))
        assert torch.equal(after[case.kept], before[case.kept]), poison
        assert not case.hit or not torch.equal(after[case.hit], before[case.hit]), poison


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_path(shape: str, routing: str, dtype: torch.dtype) -> None:
    case = Case(shape, routing, dtype)
    check(partial(linear, tiles(1)), case, POISONS, dense=True)
    check(partial(add, tiles(1)), case, POISONS, dense=False)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
@pytest.mark.parametrize("routing", ROUTINGS)
def test_references(routing: str) -> None:
    def plain(reference: Any, case: Case, a: torch.Tensor, b: torch.Tensor, found: Routing) -> torch.Tensor:
        return reference(case.y, case.x, a, b, case.groups, case.ranks, found.scalings, case.offsets)

    for reference in (atmm_reference, atmm_silu_reference):
        check(partial(plain, reference), Case("gate-up-ragged", routing, torch.float32), POISONS, dense=True)


# As in test_atmm: the interpreter multiplies bfloat16 as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
FAMILIES = {"dense": True, "grouped": False}


def some(*indices: int) -> list[str]:
    """All poisons on a GPU; a few under the interpreter, for time, others from case to case."""
    return list(POISONS) if CUDA else list(POISONS)[sum(indices) % 5 :: 5]


def in_time(dtype: torch.dtype, *indices: int) -> int:
    """The number of splits to run a case with: one of the two under the interpreter, for time."""
    if not CUDA and (dtype is torch.float16) != bool(sum(indices) % 2):
        pytest.skip("each case in one type under the interpreter, for time")
    return 1 if dtype is torch.float32 else 3


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", [linear, add])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", ["one-part", "qkv-unequal-odd-ranks"])
def test_kernel(shape: str, routing: str, family: str, entry: Any, dtype: torch.dtype) -> None:
    at = list(SHAPES).index(shape), list(ROUTINGS).index(routing), 2 * FAMILIES[family], entry is add
    split = in_time(dtype, *at)
    check(partial(entry, tiles(split)), Case(shape, routing, dtype), some(*at), FAMILIES[family])


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", [write, silu])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_kernel_of_a_prefill(routing: str, entry: Any, dtype: torch.dtype) -> None:
    at = list(ROUTINGS).index(routing), entry is silu
    split = in_time(dtype, *at)
    check(partial(entry, split), Case("gate-up-ragged", routing, dtype), some(*at), dense=False)


@kernels
@pytest.mark.parametrize(("size", "rows"), [(24, 8), (80, 80)])  # the second takes the grouped kernels
def test_kernel_on_a_graphs_tables(size: int, rows: int) -> None:
    """Tables that are refreshed in place, with padding rows behind the batch."""
    from vlora_sgl.lora.backend import GraphTables

    case = Case("one-part", "of-weight-zero", torch.float32)
    tables = GraphTables(size, range(len(case.ranks)), torch.device(DEVICE))
    x = torch.cat([case.x, case.x.new_ones(rows - len(case.x), case.x.shape[1])])
    kept = [*case.kept, *range(len(case.rows), rows)]

    def run(poison: str | None) -> torch.Tensor:
        tables.refresh([(pairs, 1) for pairs in case.rows], case.ranks, case.scalings(poison))
        y = torch.nn.functional.linear(x, case.w)
        return atmm(y, x, *case.slots(poison), tables.routing(rows), case.offsets, tiles(1))

    before = run(None)
    assert torch.isfinite(before).all()
    for poison in POISONS if CUDA else ("scale-nan", "b-inf", "everything"):
        assert torch.equal(run(poison)[kept], before[kept]), poison


# Rows that a router routes: what it does not choose does not apply, though it is among the row's members.

MEMBERS = [0, POISONED, 2]


def routed_part(top_k: int, rows: int = 70) -> Any:
    """Rows of one routed adapter, each with ``top_k`` of its members chosen."""
    from vlora_sgl.routed.regroup import Routed

    chosen = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(rows)])
    weights = torch.zeros(rows, 3).scatter(1, chosen, torch.full((rows, top_k), 1.0 / top_k))
    return Routed(torch.arange(rows, device=DEVICE), weights.to(DEVICE), MEMBERS, top_k)


def routed_tables(scale: float, top_k: int, rows: int, dense: bool) -> Routing:
    groups: list[Group] = [(np.arange(rows, dtype=np.int32), tuple((slot, 0.0) for slot in MEMBERS))]
    return make_routing(groups, rows, [16, 8, 16], [0.5, scale, 2.0], DEVICE, dense=dense, block=16)


@pytest.mark.parametrize("scale", [NAN, INF, 1e308])
@pytest.mark.parametrize("top_k", [1, 2])
def test_gates_of_routed_rows(scale: float, top_k: int) -> None:
    from vlora_sgl.routed.regroup import add_gates

    part, found = routed_part(top_k), []
    for value in (1.5, scale):
        routing = routed_tables(value, top_k, 70, dense=True)
        add_gates(routing, part)
        assert routing.gates is not None
        found.append(routing.gates)
    before, after = found
    chosen = part.weights != 0
    assert torch.equal(after[~chosen], torch.zeros_like(after[~chosen]))
    kept = ~chosen[:, 1]
    assert kept.any() and torch.equal(after[kept], before[kept])
    assert not torch.isfinite(after[~kept, POISONED]).any()


def check_routed(top_k: int, poisons: Iterable[str], run: Callable[[Case, Any, str | None], torch.Tensor]) -> None:
    case, part = Case("one-part", "many-rows", torch.float32), routed_part(top_k, 40)
    kept, before = part.weights[:, 1] == 0, run(case, part, None)
    assert torch.isfinite(before).all()
    for poison in poisons:
        assert torch.equal(run(case, part, poison)[kept], before[kept]), poison


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
@pytest.mark.parametrize("top_k", [1, 2])
def test_host_groups_of_routed_rows(top_k: int) -> None:
    from vlora_sgl.routed.regroup import host_groups

    def run(case: Case, part: Any, poison: str | None) -> torch.Tensor:
        routing = make_routing([(np.arange(40, dtype=np.int32), ())], 40, case.ranks, case.scalings(poison), "cpu")
        routing.groups = host_groups([part], [])
        return atmm_torch(case.y.clone(), case.x, *case.slots(poison), routing, case.offsets)

    check_routed(top_k, POISONS, run)


@kernels
@pytest.mark.parametrize("top_k", [1, 2])
def test_kernel_on_tiles_of_routed_rows(top_k: int) -> None:
    from vlora_sgl.routed.regroup import device_tiles

    def run(case: Case, part: Any, poison: str | None) -> torch.Tensor:
        groups: list[Group] = [(np.arange(40, dtype=np.int32), tuple((slot, 0.0) for slot in MEMBERS))]
        routing = make_routing(groups, 40, case.ranks, case.scalings(poison), DEVICE, dense=False)
        routing = device_tiles(routing, [part], [])
        return atmm(case.y.clone(), case.x, *case.slots(poison), routing, case.offsets, tiles(1))

    check_routed(top_k, POISONS if CUDA else ["scale-nan", "b-nan", "both-large"], run)


@kernels
@pytest.mark.parametrize("scale", [NAN, INF, 1e30])
def test_kernel_that_routes_a_decode_step(scale: float) -> None:
    """A member that the router does not choose adds nothing to a row's gates."""
    from tests.routed.test_token_routing import HIDDEN, SPECS, VOCABULARY, tables_with

    routed = [0, -1, 2, 0, 1, 2, -1, 1]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, HIDDEN, generator=generator).to(DEVICE)
    ids = torch.randint(0, VOCABULARY, (8,), generator=generator).to(DEVICE)
    requests, seq_lens = torch.arange(8, device=DEVICE), torch.ones(8, dtype=torch.int64, device=DEVICE)
    found = []
    for value in (1.0, scale):
        tables = tables_with(SPECS)
        tables.refresh(routed, {0: [(2, value), (5, 0.5), (1, 1.0)], 1: [(4, value), (3, 1.0)], 2: [(1, 1.0)] * 4})
        gates = torch.full((8, 6), 0.25, device=DEVICE)
        out = tables.req_to_token[requests, 0].long()
        tables.route_decode(gates, x, ids, requests, seq_lens, out)
        found.append(gates)
    before, after = found
    moved = before != after
    moved |= torch.isnan(after)
    assert moved.any() and set(moved.nonzero()[:, 1].tolist()) <= {2, 4}
    chose = before[:, [2, 4]] != 0.25
    assert torch.equal(moved[:, [2, 4]], chose) and not chose.all()


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) == 57
