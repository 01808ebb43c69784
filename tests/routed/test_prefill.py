"""Routing of prefill rows by kernels against plain code; under the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.support import interpreter
from tests.support.interpreter import kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import Group, Pairs, Routing, make_routing
from vlora_sgl.kernels.atmm.row_routing import grouped_tables, slot_word
from vlora_sgl.routed.regroup import Dispatch, Routed, device_tiles, put
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import RoutedSpec
from vlora_sgl.routed.token_router import MAX_MEMBERS, UNIT, Router, prefix_totals, quantised, top_weights

VOCABULARY, BLOCK, SEQUENCES = 50, 64, 8
DEVICE = torch.device(interpreter.DEVICE)


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__, "test_kernel") > 10


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
    slots = torch.randperm(SEQUENCES * 2 * rows).int() + 1
    tables.bind(slots.view(SEQUENCES, 2 * rows).to(DEVICE), SEQUENCES * 2 * rows + 1)
    tables.totals.random_(-30 * UNIT, 30 * UNIT)
    for spec in specs:
        tables.put(spec)
    return tables


def make_batch(
    owners: list[int], lengths: list[int], learned: set[int], tables: RouterTables, rng: np.random.Generator
) -> tuple[RoutedRows, torch.Tensor]:
    """Sequences of these routed adapters (-1: none), some with tokens before the batch; every row's KV slot."""
    n, count = sum(lengths), len(lengths)
    starts = np.cumsum([0, *lengths])[:-1]
    prefix = np.where(np.arange(count) % 3 == 1, 0, rng.integers(1, n + 1, count))
    request = rng.permutation(SEQUENCES)[:count]
    columns = [np.repeat(column, lengths) for column in (owners, starts, request, prefix)]
    routed, first, request, prefix = columns
    out = tables.req_to_token.cpu().numpy()[request, prefix + np.arange(n) - first].astype(np.int64)
    named = tuple(dict.fromkeys(one for one in owners if one >= 0))
    words = [routed, rng.integers(0, 3, n), first, request, prefix, [one for one in named if one in learned]]
    on_device = put([np.asarray(column, dtype=np.int32) for column in words], DEVICE)
    return RoutedRows(*on_device, indices=named), torch.from_numpy(out).to(DEVICE)


def make_specs(hidden: int) -> list[RoutedSpec]:
    """Rules of every kind, and learned routed adapters of 1 to 16 members that give a token up to four of them."""

    def learned(members: int, top_k: int, context: str) -> RoutedSpec:
        names = tuple(map(str, range(members)))
        return RoutedSpec(names, router=make_router(hidden, members, context), top_k=top_k)

    names = tuple(map(str, range(16)))
    rules = {"ranges": ((0, 20, 0), (10, 30, 15), (40, 50, 1)), "modalities": {"image": 1}}
    return [
        learned(2, 1, "token"),
        RoutedSpec(names, **rules),
        learned(16, 4, "prefix"),
        RoutedSpec(names[:3], modalities={"text": 2, "video": 0}),
        learned(5, 3, "token"),
        RoutedSpec(names, **rules, positions=((0, 3, 2), (5, 90, 7), (6, 8, 0))),
        learned(8, 2, "prefix"),
        learned(1, 1, "prefix"),
        learned(4, 4, "token"),
    ]


@kernels
@pytest.mark.parametrize(
    ("hidden", "owners", "lengths"),
    [
        (96, [0], [1]),
        (40, [2], [63]),
        (100, [6, -1, 6, 6], [1, 64, 30, 65]),
        (300, [1, 5, 3], [65, 3, 70]),
        (33, [2, 6, 2, 0, 5, -1, 4, 7], [10, 20, 5, 17, 40, 16, 1, 33]),
        (160, [8, 8, 2, 2], [16, 15, 300, 2]),
        (7, [-1, 4, 1, -1], [20, 50, 11, 7]),
        (8, [7, 7, 3], [1, 1, 1]),
    ],
)
def test_kernel_weights_equal_torch(hidden: int, owners: list[int], lengths: list[int]) -> None:
    """Of all routed adapters at once; also the vote totals, those outside the batch untouched."""
    torch.manual_seed(hidden)
    n, specs = sum(lengths), make_specs(hidden)
    tables = make_tables(specs, hidden, n)
    learned = {index for index, spec in enumerate(specs) if spec.router is not None}
    batch, out = make_batch(owners, lengths, learned, tables, np.random.default_rng(n))
    wide = torch.randn(n, hidden + 3, device=DEVICE)
    x, ids = wide[:, :hidden], torch.randint(-5, VOCABULARY + 5, (n,), device=DEVICE)
    before = tables.totals.clone()
    got, got_totals = tables.route_prefill(batch, x, ids, out), tables.totals.clone()
    tables.totals.copy_(before)
    wanted = tables.weights_of(batch, x, ids, out)
    assert got.shape == wanted.shape == (n, MAX_MEMBERS) and got.dtype == torch.float32
    assert torch.equal(got[batch.routed < 0], torch.zeros_like(got[batch.routed < 0]))
    written = torch.zeros(len(before), dtype=torch.bool, device=DEVICE)
    for index in batch.indices:
        rows, spec = torch.nonzero(batch.routed == index)[:, 0], specs[index]
        if spec.router is None:
            assert torch.equal(got[rows], wanted[rows])
            assert len(spec.positions) or len(rows) < 50 or (got[rows].sum(1) == 0).any()
            continue
        written[out[rows]] = spec.router.context == "prefix"
        members = len(spec.members)
        place = (rows - batch.first[rows] + 1)[:, None]
        # A vote may round differently by one unit in 4096, from another order of summation: close calls may differ.
        if spec.router.context == "prefix":
            assert ((got_totals - tables.totals)[out[rows], :members].abs() <= place).all()
            check_totals(got_totals, before, batch, rows, out, tables, members)
            total, count = got_totals[out[rows], :members], (batch.prefix[rows][:, None] + place)[:, 0]
        else:
            total, count = quantised(spec.router(x[rows])), torch.ones_like(rows)
        sharp = top_weights(total, count, spec.top_k)
        ordered = (total.double() / (UNIT * count[:, None])).sort(dim=1, descending=True).values
        clear = torch.ones(len(rows), dtype=torch.bool, device=DEVICE)
        if spec.top_k < members:
            clear = ordered[:, spec.top_k - 1] - ordered[:, spec.top_k] > 1e-3
        assert clear.float().mean() > 0.9
        close = {"atol": 2e-6, "rtol": 2e-6} if spec.router.context == "prefix" else {"atol": 2e-3, "rtol": 1e-3}
        torch.testing.assert_close(got[rows][clear, :members], sharp[clear], **close)
        assert ((got[rows] != 0).sum(1) == spec.top_k).all() and not got[rows, members:].any()
    assert torch.equal(got_totals[~written], before[~written])


def check_totals(
    got: torch.Tensor, before: torch.Tensor, batch: RoutedRows, rows: torch.Tensor, out: torch.Tensor,
    tables: RouterTables, members: int,
) -> None:  # fmt: skip
    """From the kernels' own votes the rest is exact."""
    slots, first = out[rows], torch.searchsorted(rows, batch.first[rows].long())
    votes = got[slots, :members].clone()
    follows = first != torch.arange(len(rows), device=DEVICE)
    votes[follows] -= got[slots, :members][torch.nonzero(follows)[:, 0] - 1]
    last = tables.req_to_token[batch.request[rows].long(), (batch.prefix[rows].long() - 1).clamp(min=0)].long()
    known = before[last, :members] * (batch.prefix[rows] > 0)[:, None]
    votes[~follows] -= known[~follows]
    assert votes.abs().max() <= 30 * UNIT
    assert torch.equal(prefix_totals(votes, first, known), got[slots, :members])


@kernels
def test_kernel_weights_of_a_row_are_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    spec = RoutedSpec(("a", "b", "c"), router=make_router(200, 3, "token"), top_k=2)
    tables = make_tables([spec], 200, 90)
    x, ids = torch.randn(90, 200, device=DEVICE), torch.zeros(90, dtype=torch.int64, device=DEVICE)

    def weights(rows: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
        batch = RoutedRows(zeros, zeros, zeros, zeros, zeros, zeros[:1], (0,))
        return tables.route_prefill(batch, x[rows], ids[rows], ids[rows])

    whole = weights(torch.arange(90, device=DEVICE))
    for rows in (torch.tensor([41], device=DEVICE), torch.arange(20, 77, device=DEVICE)):
        assert torch.equal(weights(rows), whole[rows])


def test_equal_contents_lie_on_the_device_once() -> None:
    """A routed adapter more costs memory for what no other has."""
    networks = [make_router(64, 3, "prefix"), make_router(64, 3, "prefix")]
    tables = RouterTables(8, 64, 1000, 0, DEVICE)

    def more(spec: RoutedSpec) -> tuple[int | None, int]:
        before = tables.shared_bytes
        index = tables.put(spec)
        return index, tables.shared_bytes - before

    names, rules = ("a", "b", "c"), ((0, 5, 1), (7, 9, 2))
    first, size = more(RoutedSpec(names, router=networks[0]))
    assert size >= 64 * 64 * 4
    assert more(RoutedSpec(("d", "e", "f"), router=networks[0], top_k=2))[1] == 0
    assert more(RoutedSpec(names, router=networks[1]))[1] == size
    assert more(RoutedSpec(names, ranges=rules))[1] == 1000 and more(RoutedSpec(("x", "y", "z"), ranges=rules))[1] == 0
    assert more(RoutedSpec(names, modalities={"image": 1}, positions=((0, 4, 2),)))[1] == 0
    assert tables.pointers[first].tolist() == tables.pointers[1].tolist() and first is not None
    held = tables.shared_bytes
    tables.remove(first)
    assert tables.shared_bytes == held, "another has it"
    tables.remove(1)
    assert tables.shared_bytes == held - size


Tile = tuple[list[int], list[int], np.ndarray]
"""Rows, slot words and gates [P, rows]."""


def plain_tiles(
    routing: Routing, weights: np.ndarray, owner: np.ndarray, parts: list[Routed], always: Pairs, others: list[Group]
) -> list[list[Tile]]:
    """The tiles of every pass, by a loop over targets in the order in which the host first names them."""
    found: list[list[Tile]] = []
    words = {slot: slot_word(routing.places[slot], routing.ranks[slot]) for slot in range(routing.slots)}
    for number in range(max(part.passes for part in parts)):
        first = always if number == 0 else ()
        known = grouped_tables(others if number == 0 else [], routing.ranks, routing.scalings, routing.places, BLOCK)
        tiles: list[Tile] = []
        for rows, slots, gates in zip(*known, strict=True):
            tiles.append((rows[rows >= 0].tolist(), [w for w in slots.tolist() if w], gates[:, rows >= 0]))
        targets: dict[tuple[int, ...], list[tuple[int, list[float]]]] = {(): []}
        for part in parts:
            for chosen in combinations(part.slots, part.width):
                targets.setdefault(tuple(words[slot] for slot in chosen), [])
        of = {part.index: part for part in parts}
        for row in np.flatnonzero(owner >= 0):
            part = of[owner[row]]
            members = np.flatnonzero(weights[row])[number * part.width :][: part.width]
            if len(members) or number == 0:
                gate = [float(weights[row, k] * np.float32(routing.scalings[part.slots[k]])) for k in members]
                targets[tuple(words[part.slots[k]] for k in members)].append((int(row), gate))
        merged = [float(np.float32(weight * routing.scalings[slot])) for slot, weight in first]
        for named, held in targets.items():
            for start in range(0, len(held), BLOCK):
                tile = held[start : start + BLOCK]
                gates = np.asarray([merged + gate for _, gate in tile], dtype=np.float32).T
                tiles.append(([row for row, _ in tile], [*(words[slot] for slot, _ in first), *named], gates))
        found.append(tiles)
    return found


@kernels
@pytest.mark.parametrize("other", ["none", "base", "wide"])
@pytest.mark.parametrize(
    ("sizes", "always"),  # of each routed adapter: rows, members, top_k
    [
        ([(1, 2, 1)], 0),
        ([(1, 2, 2)], 1),
        ([(63, 8, 1)], 1),
        ([(64, 1, 1)], 0),
        ([(65, 8, 2)], 0),
        ([(200, 3, 1)], 0),
        ([(600, 4, 4)], 2),
        ([(200, 16, 4)], 1),
        ([(130, 16, 1), (40, 10, 3), (70, 5, 4)], 0),
        ([(200, 4, 2), (1, 3, 1), (70, 2, 1)], 1),
        ([(0, 4, 2), (150, 8, 4), (129, 16, 2)], 1),
    ],
)
def test_kernel_tiles_equal_a_loop(sizes: list[tuple[int, int, int]], always: int, other: str) -> None:
    seed = sum(n for n, *_ in sizes)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    extra = 0 if other == "none" else 100
    count, slots = seed + extra, 20
    ranks, scalings = [int(r) for r in rng.integers(1, 65, slots)], rng.uniform(0.1, 2, slots).tolist()
    places = rng.permutation(slots).tolist()
    owner = rng.permutation(np.repeat([*range(len(sizes)), -1], [*(n for n, *_ in sizes), extra])).astype(np.int32)
    rest = np.flatnonzero(owner < 0).astype(np.int32)
    pairs = ((3, 0.5), (1, 1.0), (2, -1.0), (7, 0.25), (6, 2.0)) if other == "wide" else ()
    others = [(rest[:30], pairs), (rest[30:], ())] if extra else []
    merged = tuple((slots - 1 - i, -1.0) for i in range(always))
    weights, parts = torch.zeros(count, MAX_MEMBERS), []
    for index, (n, members, top_k) in enumerate(sizes):
        parts.append(Routed(index, tuple(rng.permutation(slots - always)[:members].tolist()), top_k))
        votes = torch.randint(-9, 9, (n, members)) * UNIT // 4  # many ties
        own = top_weights(votes, torch.ones(n), top_k)
        if top_k == 1:
            own[torch.rand(n) < 0.2] = 0  # of no member
        weights[torch.from_numpy(owner == index), :members] = own
    every = [(np.arange(count, dtype=np.int32), ((0, 0.0),))]
    routing = make_routing(every, count, ranks, scalings, DEVICE, places=places, dense=False)
    on_device = weights.to(DEVICE), torch.from_numpy(owner).to(DEVICE)
    tiles = device_tiles(routing, *on_device, Dispatch(routing, parts, merged, len(parts)), others)
    wanted = plain_tiles(routing, weights.numpy(), owner, parts, merged, others)
    assert len(wanted) == 1 + len(tiles.more)
    for view, expected in zip((tiles, *tiles.more), wanted, strict=True):
        assert view.tile_rows is not None and view.tile_slots is not None and view.tile_gates is not None
        assert view.n_tiles is not None and view.n_tiles.shape == (1,) and view.n_tiles.dtype == torch.int32
        assert view.n_tiles.data_ptr() % 16 == 0
        used = int(view.n_tiles)
        assert used == len(expected) <= len(view.tile_rows) == len(view.tile_slots) == len(view.tile_gates)
        for t, (rows, words, gates) in enumerate(expected):
            assert view.tile_rows[t].tolist() == rows + [-1] * (BLOCK - len(rows))
            found = view.tile_slots[t].tolist()
            assert found[: len(words)] == words and not any(found[len(words) :])
            assert np.array_equal(view.tile_gates[t, : len(words), : len(rows)].cpu().numpy(), gates[: len(words)])
