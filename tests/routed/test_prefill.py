"""Routing of prefill rows by kernels against plain code; under the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.support import interpreter
from tests.support.interpreter import kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import Group, Routing, make_routing
from vlora_sgl.kernels.atmm.row_routing import grouped_tables, slot_word
from vlora_sgl.routed.regroup import Routed, device_tiles, put
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import RoutedSpec
from vlora_sgl.routed.token_router import UNIT, Router, prefix_totals, quantised, top_weights

VOCABULARY, BLOCK = 50, 64
DEVICE = torch.device(interpreter.DEVICE)


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__, "test_") > 10


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What nobody has written holds NaN, or an integer's largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_router(hidden: int, members: int, context: str) -> Router:
    router = Router(hidden, members, context)
    with torch.no_grad():
        router.w2.mul_(20)
        router.b2.normal_()
    return router.requires_grad_(False).to(DEVICE)


def make_tables(specs: list[RoutedSpec], hidden: int, rows: int) -> RouterTables:
    tables = RouterTables(len(specs) + 1, hidden, VOCABULARY, 0, DEVICE)
    slots = torch.randperm(8 * 2 * rows).int() + 1
    tables.bind(slots.view(8, 2 * rows).to(DEVICE), 8 * 2 * rows + 1)
    tables.totals.random_(-30 * UNIT, 30 * UNIT)
    for spec in specs:
        tables.put(spec)
    return tables


def make_part(
    index: int, rows: int, n: int, sequences: int, tables: RouterTables, rng: np.random.Generator
) -> tuple[RoutedRows, torch.Tensor]:
    """n of a batch's rows in some sequences, each with tokens before the batch or without; every row's KV slot."""
    starts = np.concatenate([[0], np.sort(rng.integers(0, n + 1, sequences - 1)), [n]])
    length = np.diff(starts)
    first, place = np.repeat(starts[:-1], length), np.arange(n)
    prefix = np.repeat(np.where(np.arange(sequences) % 3 == 1, 0, rng.integers(1, rows, sequences)), length)
    request = np.repeat(rng.permutation(8)[:sequences], length)
    numbers = np.sort(rng.permutation(rows)[:n])
    out = np.zeros(rows, dtype=np.int64)
    out[numbers] = tables.req_to_token.cpu().numpy()[request, prefix + place - first]
    columns = [numbers, rng.integers(0, 3, n), first, request, prefix]
    return RoutedRows(index, *put(columns, DEVICE)), torch.from_numpy(out).to(DEVICE)


@kernels
@pytest.mark.parametrize(
    ("n", "hidden", "members", "top_k", "context", "sequences"),
    [
        (1, 96, 2, 1, "prefix", 1),
        (63, 40, 3, 2, "prefix", 4),
        (64, 100, 8, 1, "prefix", 1),
        (65, 300, 5, 2, "prefix", 8),
        (200, 96, 4, 1, "prefix", 3),
        (300, 33, 2, 2, "prefix", 2),
        (1, 96, 8, 2, "token", 1),
        (63, 300, 2, 2, "token", 1),
        (65, 7, 6, 1, "token", 2),
        (200, 160, 7, 2, "token", 3),
        (64, 96, 1, 1, "token", 3),
        (1, 8, 3, 1, "table", 1),
        (65, 8, 8, 1, "table", 2),
        (200, 8, 2, 1, "table", 2),
    ],
)
def test_kernel_weights_equal_torch(
    n: int, hidden: int, members: int, top_k: int, context: str, sequences: int
) -> None:
    """Also the vote totals, those outside the batch untouched."""
    torch.manual_seed(n + members)
    rng = np.random.default_rng(n)
    names = tuple(map(str, range(members)))
    table = RoutedSpec(names, ranges=((0, 20, 0), (10, 30, members - 1), (40, 50, 1)), modalities={"image": 1})
    spec = (
        table if context == "table" else RoutedSpec(names, router=make_router(hidden, members, context), top_k=top_k)
    )
    specs = [RoutedSpec(("x", "y"), router=make_router(hidden, 2, "token")), spec]  # the second: its place is not zero
    rows = n + 7
    tables = make_tables(specs, hidden, rows)
    part, out = make_part(1, rows, n, sequences, tables, rng)
    wide = torch.randn(rows, hidden + 3, device=DEVICE)
    x, ids = wide[:, :hidden], torch.randint(-5, VOCABULARY + 5, (rows,), device=DEVICE)
    before = tables.totals.clone()
    got, got_totals = tables.route_prefill(part, x, ids, out), tables.totals.clone()
    tables.totals.copy_(before)
    wanted = tables.weights_of(part, x, ids, out)
    assert got.shape == wanted.shape and got.dtype == torch.float32
    if context == "table":
        assert torch.equal(got, wanted) and torch.equal(got_totals, before)
        assert n == 1 or (got.sum(1) == 0).any()
        return
    # A vote may round differently by one unit in 4096, from another order of summation: close calls may then differ.
    slots = out[part.rows]
    place = (torch.arange(n, device=DEVICE) - part.first + 1)[:, None]
    if context == "prefix":
        assert ((got_totals - tables.totals)[slots, :members].abs() <= place).all()
        others = torch.ones(len(before), dtype=torch.bool, device=DEVICE)
        others[slots] = False
        assert torch.equal(got_totals[others], before[others])
        # From the kernels' own votes the rest is exact.
        votes = got_totals[slots, :members].clone()
        follows = part.first != torch.arange(n, device=DEVICE)
        votes[follows] -= got_totals[slots, :members][torch.nonzero(follows)[:, 0] - 1]
        last = tables.req_to_token[part.request, (part.prefix - 1).clamp(min=0)].long()
        known = before[last, :members] * (part.prefix > 0)[:, None]
        votes[~follows] -= known[~follows]
        assert votes.abs().max() <= 30 * UNIT
        assert torch.equal(prefix_totals(votes, part.first, known), got_totals[slots, :members])
        total, count = got_totals[slots, :members], part.prefix + place[:, 0]
    else:
        assert torch.equal(got_totals, before)
        total, count = quantised(spec.router(x[part.rows])), torch.ones_like(part.rows)
    sharp = top_weights(total, count, top_k)
    ordered = (total.double() / (UNIT * count[:, None])).sort(dim=1, descending=True).values
    clear = torch.ones(n, dtype=torch.bool, device=DEVICE)
    if top_k < members:
        clear = ordered[:, top_k - 1] - ordered[:, top_k] > 1e-3
    assert clear.float().mean() > 0.9
    close = {"atol": 2e-6, "rtol": 2e-6} if context == "prefix" else {"atol": 2e-3, "rtol": 1e-3}
    torch.testing.assert_close(got[clear], sharp[clear], **close)
    assert ((got != 0).sum(1) == top_k).all()


@kernels
def test_a_rows_weights_are_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    spec = RoutedSpec(("a", "b", "c"), router=make_router(200, 3, "token"), top_k=2)
    tables = make_tables([spec], 200, 90)
    x, ids = torch.randn(90, 200, device=DEVICE), torch.zeros(90, dtype=torch.int64, device=DEVICE)

    def weights(rows: torch.Tensor) -> torch.Tensor:
        part = RoutedRows(0, rows, rows, rows, rows, rows)
        return tables.route_prefill(part, x, ids, ids)

    whole = weights(torch.arange(90, device=DEVICE))
    for rows in (torch.tensor([41], device=DEVICE), torch.arange(20, 77, device=DEVICE)):
        assert torch.equal(weights(rows), whole[rows])


def plain_tiles(
    routing: Routing, parts: list[Routed], others: list[Group]
) -> tuple[list[list[int]], list[list[int]], list[np.ndarray]]:
    """(tile_rows, tile_slots without zeros at the end, tile_gates) by a loop over tuples."""
    known = grouped_tables(others, routing.ranks, routing.scalings, routing.places, BLOCK)
    rows, slots, gates = known[0].tolist(), known[1].tolist(), list(known[2])
    for part in parts:
        members = range(len(part.slots))
        for named in combinations(members, 2) if part.top_k == 2 else [(), *((k,) for k in members)]:
            weights = part.weights.cpu().numpy()
            mine = [i for i, row in enumerate(weights) if tuple(np.flatnonzero(row)) == named]
            used = [slot for slot, _ in part.always] + [part.slots[k] for k in named]
            for start in range(0, len(mine), BLOCK):
                tile = mine[start : start + BLOCK]
                rows.append([int(part.rows[i]) for i in tile] + [-1] * (BLOCK - len(tile)))
                slots.append([slot_word(routing.places[slot], routing.ranks[slot]) for slot in used])
                one = [np.float32(weight * routing.scalings[slot]) for slot, weight in part.always for _ in tile]
                one += [weights[i, k] * np.float32(routing.scalings[part.slots[k]]) for k in named for i in tile]
                gates.append(np.reshape(np.asarray(one, dtype=np.float32), (len(used), len(tile))))
    return rows, slots, gates


def routed(
    n: int, rows: list[int], slots: list[int], top_k: int, always: tuple[tuple[int, float], ...], base: float
) -> Routed:
    """n of these rows with random weights, a share of them of no member."""
    numbers, rest = sorted(rows[:n]), len(slots)
    votes = torch.randint(-9, 9, (n, rest)) * UNIT // 4  # many ties
    weights = top_weights(votes, torch.ones(n), top_k)
    if top_k == 1:
        weights[torch.rand(n) < base] = 0
    return Routed(torch.tensor(numbers, dtype=torch.int64).to(DEVICE), weights.to(DEVICE), slots, top_k, always)


@kernels
@pytest.mark.parametrize("other", ["none", "base", "wide"])
@pytest.mark.parametrize(
    "sizes",  # of each part: rows, members, top_k, always
    [
        [(1, 2, 1, 0)],
        [(1, 2, 2, 1)],
        [(63, 8, 1, 1)],
        [(64, 1, 1, 0)],
        [(65, 8, 2, 0)],
        [(200, 3, 1, 0)],
        [(1300, 4, 1, 2)],
        [(200, 4, 2, 1), (1, 3, 1, 1), (70, 2, 1, 0)],
        [(0, 4, 2, 1), (600, 8, 2, 1), (129, 7, 1, 1)],
    ],
)
def test_kernel_tiles_equal_a_loop(sizes: list[tuple[int, int, int, int]], other: str) -> None:
    seed = sum(n for n, *_ in sizes)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    extra = 0 if other == "none" else 100
    count = seed + extra
    slots, numbers = 12, rng.permutation(count).tolist()
    ranks, scalings = [int(r) for r in rng.integers(1, 65, slots)], rng.uniform(0.1, 2, slots).tolist()
    places = rng.permutation(slots).tolist()
    rest = np.sort(np.asarray([numbers.pop() for _ in range(extra)], dtype=np.int32))
    pairs = ((3, 0.5), (1, 1.0), (2, -1.0), (7, 0.25), (6, 2.0)) if other == "wide" else ()
    others = [(rest[:30], pairs), (rest[30:], ())] if extra else []
    parts = []
    for n, members, top_k, always in sizes:
        chosen = rng.permutation(slots)[: members + always].tolist()
        merged = tuple((slot, -1.0) for slot in chosen[members:])
        parts.append(routed(n, [numbers.pop() for _ in range(n)], chosen[:members], top_k, merged, 0.2))
    every = [(np.arange(count, dtype=np.int32), ((0, 0.0),))]
    routing = make_routing(every, count, ranks, scalings, DEVICE, places=places, dense=False)
    tiles = device_tiles(routing, parts, others)
    rows, words, gates = plain_tiles(routing, parts, others)
    assert tiles.tile_rows is not None and tiles.tile_slots is not None and tiles.tile_gates is not None
    assert tiles.n_tiles is not None and tiles.n_tiles.shape == (1,) and tiles.n_tiles.dtype == torch.int32
    used = int(tiles.n_tiles)
    assert used == len(rows) <= len(tiles.tile_rows)
    assert len(tiles.tile_rows) == len(tiles.tile_slots) == len(tiles.tile_gates)
    assert tiles.tile_rows[:used].tolist() == rows
    for t in range(used):
        found = tiles.tile_slots[t].tolist()
        assert found[: len(words[t])] == words[t] and not any(found[len(words[t]) :])
        wanted = np.zeros(tiles.tile_gates.shape[1:], dtype=np.float32)
        wanted[: gates[t].shape[0], : gates[t].shape[1]] = gates[t]
        assert np.array_equal(tiles.tile_gates[t].cpu().numpy(), wanted)
