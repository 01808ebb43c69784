"""The token router, its kernel under the interpreter, and the grouping of routed rows, against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.interpreter import DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.errors import AdapterError
from vlora_sgl.kernels.atmm import make_routing
from vlora_sgl.kernels.atmm.reference import atmm_reference, atmm_torch
from vlora_sgl.routed.regroup import Routed, add_gates, device_tiles, host_groups, others
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import RoutedSpec, read_routed, write_routed
from vlora_sgl.routed.token_router import LIMIT, MAX_MEMBERS, UNIT, Router, prefix_totals, quantised, top_weights

HIDDEN, VOCABULARY = 96, 50


def make_router(members: int, seed: int, context: str = "prefix") -> Router:
    torch.manual_seed(seed)
    router = Router(HIDDEN, members, context)
    with torch.no_grad():
        router.w2.mul_(20)
        router.b2.normal_()
    return router.requires_grad_(False)


def test_votes_are_bounded_and_deaf_to_scale() -> None:
    router = make_router(3, 0)
    x = torch.randn(40, HIDDEN)
    assert router(x).abs().max() <= LIMIT
    torch.testing.assert_close(router(x), router(x * 7), rtol=1e-3, atol=1e-3)
    assert router(x).argmax(-1).unique().numel() > 1


def test_totals_do_not_depend_on_how_a_prompt_was_cut() -> None:
    votes = quantised(torch.randn(23, 4) * 5)
    whole = prefix_totals(votes, torch.zeros(23, dtype=torch.int64), torch.zeros(23, 4, dtype=torch.int64))
    before = torch.zeros(1, 4, dtype=torch.int64)
    for start, end in ((0, 9), (9, 10), (10, 23)):
        first = torch.zeros(end - start, dtype=torch.int64)
        part = prefix_totals(votes[start:end], first, before.expand(end - start, -1))
        assert torch.equal(part, whole[start:end])
        before = part[-1:]


def test_top_weights_take_the_best_and_break_ties_by_order() -> None:
    totals = torch.tensor([[5, 5, 1], [1, 9, 9], [3, 2, 1]]) * UNIT
    one = top_weights(totals, torch.ones(3), 1)
    assert one.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    two = top_weights(totals, torch.tensor([1, 1, 2]), 2)
    wanted = torch.tensor([1.5, 1.0]).softmax(0)
    torch.testing.assert_close(two, torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [wanted[0], wanted[1], 0]]))


def tables_with(specs: list[RoutedSpec], requests: int = 8, length: int = 16) -> RouterTables:
    tables = RouterTables(4, HIDDEN, VOCABULARY, 64, torch.device(DEVICE))
    slots = torch.randperm(requests * length, generator=torch.Generator().manual_seed(1)).int() + 1
    tables.bind(slots.view(requests, length).to(DEVICE), requests * length + 1)
    for spec in specs:
        tables.put(spec)
    return tables


SPECS = [
    RoutedSpec(("a", "b", "c"), router=make_router(3, 1)),
    RoutedSpec(("a", "b"), ranges=((0, 20, 0), (30, 40, 1)), modalities={"image": 1}),
    RoutedSpec(("a", "b", "c", "d"), router=make_router(4, 2, "token"), top_k=2),
]


def spec_weights(spec: RoutedSpec, x: torch.Tensor, ids: list[int], kinds: list[int]) -> list[list[float]]:
    """The weights of one sequence's tokens by a loop in float64, from the definition."""
    found = []
    total = np.zeros(len(spec.members))
    for t in range(len(x)):
        row = [0.0] * len(spec.members)
        if spec.router is None:
            member = spec.modalities.get(("text", "image", "video")[kinds[t]])
            if kinds[t] == 0:
                member = next((m for first, end, m in reversed(spec.ranges) if first <= ids[t] < end), member)
            if member is not None:
                row[member] = 1.0
        else:
            vote = quantised(spec.router.cpu()(x[t])).numpy().astype(np.float64) / UNIT
            total = total + vote if spec.router.context == "prefix" else vote
            mean = total / (t + 1 if spec.router.context == "prefix" else 1)
            best = sorted(range(len(row)), key=lambda k: (-mean[k], k))[: spec.top_k]
            scale = sum(np.exp(mean[k] - mean[best[0]]) for k in best)
            for k in best:
                row[k] = float(np.exp(mean[k] - mean[best[0]]) / scale)
        found.append(row)
    return found


@pytest.mark.parametrize("index", range(len(SPECS)))
def test_weights_of_two_sequences_in_chunks_equal_the_definition(index: int) -> None:
    spec, generator = SPECS[index], torch.Generator().manual_seed(7)
    tables = tables_with(SPECS)
    lengths = [11, 6]
    x = [torch.randn(n, HIDDEN, generator=generator) for n in lengths]
    ids = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    kinds = [torch.randint(0, 2, (n,), generator=generator).tolist() for n in lengths]
    got: list[list[list[float]]] = [[], []]
    for cut in ([(0, 4), (0, 6)], [(4, 11), (6, 6)]):  # the second round finds the first one's votes beside the KV
        rows = []
        for i, (start, end) in enumerate(cut):
            rows += [(i, t, start) for t in range(start, end)]
        where = [0 if i == 0 else cut[0][1] - cut[0][0] for i, _, _ in rows]
        requests = torch.tensor([3 + i for i, _, _ in rows])
        out = torch.stack([tables.req_to_token[r, t] for r, (_, t, _) in zip(requests, rows, strict=True)])
        part = RoutedRows(
            index,
            torch.arange(len(rows), device=DEVICE),
            torch.tensor([kinds[i][t] for i, t, _ in rows], device=DEVICE),
            torch.tensor(where, device=DEVICE),
            requests.to(DEVICE),
            torch.tensor([start for _, _, start in rows], device=DEVICE),
        )
        hidden = torch.stack([x[i][t] for i, t, _ in rows]).to(DEVICE)
        tokens = torch.tensor([ids[i][t] for i, t, _ in rows], device=DEVICE)
        weights = tables.weights_of(part, hidden, tokens, out.to(DEVICE)).cpu()
        for (i, _, _), row in zip(rows, weights.tolist(), strict=True):
            got[i].append(row)
    for i in range(2):
        np.testing.assert_allclose(got[i], spec_weights(spec, x[i], ids[i], kinds[i]), atol=1e-4)


@kernels
def test_kernel_equals_torch() -> None:
    """Six decode steps of eight rows (three routed adapters and none), by the kernel and by ``weights_of``."""
    kernel, plain = tables_with(SPECS), tables_with(SPECS)
    generator = torch.Generator().manual_seed(3)
    routed = [0, -1, 2, 0, 1, 2, -1, 1]
    members = {0: [(2, 2.0), (5, 0.5), (1, 1.0)], 1: [(4, 1.5), (3, 1.0)], 2: [(1, 1.0), (2, 1.0), (3, 3.0), (0, 1.0)]}
    requests = torch.arange(8, device=DEVICE)
    for step in range(6):
        x = torch.randn(8, HIDDEN, generator=generator).to(DEVICE)
        ids = torch.randint(0, VOCABULARY, (8,), generator=generator).to(DEVICE)
        seq_lens = torch.full((8,), step + 1, device=DEVICE)
        out = kernel.req_to_token[requests, step].long()
        gates = torch.full((8, 6), 0.25, device=DEVICE)
        kernel.refresh(routed, members)
        kernel.route_decode(gates, x, ids, requests, seq_lens, out)
        wanted = torch.full((8, 6), 0.25)
        for index in range(3):
            rows = torch.tensor([r for r, m in enumerate(routed) if m == index], device=DEVICE)
            place = torch.arange(len(rows), device=DEVICE)
            part = RoutedRows(index, rows, torch.zeros_like(rows), place, requests[rows], torch.full_like(rows, step))
            weights = plain.weights_of(part, x, ids, out).cpu()
            for row, weight in zip(rows.tolist(), weights, strict=True):
                for k, (slot, scaling) in enumerate(members[index]):
                    wanted[row, slot] += weight[k] * scaling
        # A vote may round differently by one unit in 4096, from another order of summation.
        torch.testing.assert_close(gates.cpu(), wanted, atol=2e-3, rtol=1e-3)
        assert (kernel.totals - plain.totals).abs().max() <= step + 1
    assert len(set(routed)) == 4


@starter
def test_kernel_interpreted() -> None:
    assert passed_interpreted(__file__, "test_kernel_equals_torch or test_routed_rows_join_the_others") == 5


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("top_k", [1, 2])
def test_routed_rows_join_the_others(rows: int, top_k: int) -> None:
    """Groups (a CPU's), gates and tiles (a GPU's) all mean the same: a loop over rows in float64 says what."""
    rng = np.random.default_rng(rows + top_k)
    slots, r, k_dim, n = 6, 4, 24, 20
    ranks, scalings = [4, 4, 2, 4, 3, 4], [1.0, 0.5, 2.0, 1.0, 1.5, 1.0]
    a = torch.randn(slots, r, k_dim)
    b = torch.randn(slots, n, r)
    for slot, rank in enumerate(ranks):
        a[slot, rank:], b[slot, :, rank:] = 0, 0
    x, y = torch.randn(rows, k_dim), torch.randn(rows, n)
    owner = rng.integers(0, 4, rows)  # 0: base, 1: slot 5, 2: a routed adapter of 1, 2, 4, 3: another of 0, 3
    routed = {2: ([1, 2, 4], ((5, -1.0),)), 3: ([0, 3], ((5, -1.0),))}
    groups = [
        (np.flatnonzero(owner == 0).astype(np.int32), ()),
        (np.flatnonzero(owner == 1).astype(np.int32), ((5, 1.0),)),
    ]
    exact = list(groups)
    parts = []
    for who, (members, always) in routed.items():
        numbers = np.flatnonzero(owner == who).astype(np.int32)
        votes = torch.from_numpy(rng.normal(size=(len(numbers), len(members))) * UNIT).long()
        weights = top_weights(votes, torch.ones(len(numbers)), top_k)
        parts.append(Routed(torch.from_numpy(numbers.astype(np.int64)), weights, members, top_k, always))
        groups.append((numbers, tuple((slot, 0.0) for slot in members)))
        for row, weight in zip(numbers, weights.tolist(), strict=True):
            pairs = tuple((slot, w) for slot, w in zip(members, weight, strict=True) if w) + always
            exact.append((np.asarray([row], dtype=np.int32), pairs))
    offsets = [0, n]
    wanted = atmm_reference(y, x, a, b, exact, ranks, scalings, offsets)
    routed = np.flatnonzero(owner >= 2)
    rest = others(groups, rows, routed)

    routing = make_routing(groups, rows, ranks, scalings, "cpu", dense=False)
    on_host = make_routing(groups, rows, ranks, scalings, "cpu")
    on_host.groups = host_groups(parts, rest)
    torch.testing.assert_close(atmm_torch(y.clone(), x, a, b, on_host, offsets).double(), wanted, atol=1e-4, rtol=1e-4)

    dense = make_routing([(numbers, pairs) for numbers, pairs in groups], rows, ranks, scalings, "cpu", dense=True)
    for part in parts:
        add_gates(dense, part)
    assert dense.gates is not None
    gates = np.zeros((rows, slots))
    for numbers, pairs in exact:
        for slot, weight in pairs:
            gates[numbers, slot] += weight * scalings[slot]
    gates[routed, 5] += 1.0  # "always" is the host's to add
    np.testing.assert_allclose(dense.gates.numpy(), gates, atol=1e-5)

    if not INTERPRETED:  # a kernel makes the tiles: run by test_kernel_interpreted; on a GPU see test_prefill
        return
    tiles = device_tiles(routing, parts, rest)
    assert tiles.tile_rows is not None and tiles.tile_slots is not None and tiles.tile_gates is not None
    assert tiles.n_tiles is not None and int(tiles.n_tiles) <= len(tiles.tile_rows)
    found, seen = y.double(), np.zeros(rows, dtype=int)
    for t in range(int(tiles.n_tiles)):
        for lane, row in enumerate(tiles.tile_rows[t].tolist()):
            if row < 0:
                continue
            seen[row] += 1
            for p, word in enumerate(tiles.tile_slots[t].tolist()):
                if word:
                    slot, rank = word & 0xFFFF, word >> 16
                    assert rank == ranks[slot]
                    delta = b[slot].double() @ (a[slot].double() @ x[row].double())
                    found[row] += float(tiles.tile_gates[t, p, lane]) * delta
    assert (seen == 1).all()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_written_routed_adapter_reads_back(tmp_path: Path) -> None:
    router = make_router(2, 5)
    write_routed(tmp_path, ["a", "b"], router, top_k=2)
    spec = read_routed(tmp_path, "m", HIDDEN, VOCABULARY)
    assert spec.members == ("a", "b") and spec.top_k == 2 and spec.router is not None
    x = torch.randn(5, HIDDEN)
    assert torch.equal(spec.router(x), router(x))
    write_routed(tmp_path, ["a", "b"], make_router(2, 6), top_k=2)
    assert read_routed(tmp_path, "m", HIDDEN, VOCABULARY).canonical() != spec.canonical()


REFUSED = {
    "no kind": ({"format": 1}, "router"),
    "unknown key": ({"format": 1, "router": "vocabulary", "members": ["a"], "rages": []}, "rages"),
    "twice": ({"format": 1, "router": "vocabulary", "members": ["a", "a"]}, "members"),
    "too many": ({"format": 1, "router": "vocabulary", "members": [str(i) for i in range(MAX_MEMBERS + 1)]}, "8"),
    "range": (
        {"format": 1, "router": "vocabulary", "members": ["a"], "ranges": [{"from": 4, "to": 99, "member": "a"}]},
        "vocabulary",
    ),
    "stranger": ({"format": 1, "router": "vocabulary", "members": ["a"], "modalities": {"image": "b"}}, "'b'"),
    "sound": ({"format": 1, "router": "vocabulary", "members": ["a"], "modalities": {"sound": "a"}}, "modalities"),
    "top_k": ({"format": 1, "router": "learned", "members": ["a", "b"], "top_k": 3}, "top_k"),
    "no weights": ({"format": 1, "router": "learned", "members": ["a", "b"]}, "vlora_router.safetensors"),
    "no entry": ({"format": 1, "router": "compositional", "adapters": {"acme": {"text": "a"}}}, "acme"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_routed_adapters_are_refused_by_name(name: str, tmp_path: Path) -> None:
    data, word = REFUSED[name]
    (tmp_path / "vlora_routed.json").write_text(json.dumps(data))
    with pytest.raises(AdapterError, match=word):
        read_routed(tmp_path, "m", HIDDEN, VOCABULARY)


def test_a_compositional_directory_is_one_routed_adapter_per_adapter(tmp_path: Path) -> None:
    table = {"acme": {"text": "at", "image": "ai"}, "globex": {"text": "g", "image": "g"}}
    data = {"format": 1, "router": "compositional", "adapters": table}
    (tmp_path / "vlora_routed.json").write_text(json.dumps(data))
    acme = read_routed(tmp_path, "shop/acme", HIDDEN, VOCABULARY)
    assert acme.members == ("at", "ai") and acme.modalities == {"text": 0, "image": 1}
    assert read_routed(tmp_path, "globex", HIDDEN, VOCABULARY).members == ("g",)
