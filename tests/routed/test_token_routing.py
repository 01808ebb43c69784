"""The token router, its kernel under the interpreter, and the grouping of routed rows, against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.interpreter import DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.errors import AdapterError
from vlora_sgl.kernels.atmm import atmm, atmm_linear, atmm_silu_and_mul, make_routing
from vlora_sgl.kernels.atmm.reference import atmm_reference, atmm_torch
from vlora_sgl.routed.regroup import Dispatch, Routed, add_gates, device_tiles, host_groups, others
from vlora_sgl.routed.router_tables import VOTE_BYTES, RoutedRows, RouterTables
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
    assert torch.equal((top_weights(totals, torch.ones(3), 3) != 0).sum(1), torch.tensor([3, 3, 3]))
    torch.testing.assert_close(two, torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [wanted[0], wanted[1], 0]]))


def tables_with(specs: list[RoutedSpec], requests: int = 8, length: int = 16) -> RouterTables:
    tables = RouterTables(len(specs) + 1, HIDDEN, VOCABULARY, 64, torch.device(DEVICE))
    slots = torch.randperm(requests * length, generator=torch.Generator().manual_seed(1)).int() + 1
    tables.bind(slots.view(requests, length).to(DEVICE), requests * length + 1)
    for spec in specs:
        tables.put(spec)
    return tables


def test_votes_of_a_cache_too_large_for_them_are_left_out() -> None:
    kinds = {context: RoutedSpec(("a", "b"), router=make_router(2, 1, context)) for context in ("prefix", "token")}
    by_rule = RoutedSpec(("a",), ranges=((0, 20, 0),))
    tables = tables_with([])
    assert not any(tables.lacks_votes(spec) for spec in kinds.values())
    tables.bind(tables.req_to_token, VOTE_BYTES // 128 + 1)
    assert tables.lacks_votes(kinds["prefix"]) and not len(tables.totals)
    assert not tables.lacks_votes(kinds["token"]) and not tables.lacks_votes(by_rule)


LETTERS = tuple("abcdefghijklmnop")
SPECS = [
    RoutedSpec(("a", "b", "c"), router=make_router(3, 1)),
    RoutedSpec(("a", "b"), ranges=((0, 20, 0), (30, 40, 1)), modalities={"image": 1}),
    RoutedSpec(("a", "b", "c", "d"), router=make_router(4, 2, "token"), top_k=2),
    RoutedSpec(LETTERS, router=make_router(16, 3), top_k=4),
    RoutedSpec(LETTERS[:5], modalities={"image": 4, "text": 0}, positions=((2, 5, 1), (4, 6, 2), (9, 20, 3))),
]


def spec_weights(spec: RoutedSpec, x: torch.Tensor, ids: list[int], kinds: list[int]) -> list[list[float]]:
    """The weights of one sequence's tokens by a loop in float64, from the definition."""
    found = []
    total = np.zeros(len(spec.members))
    for t in range(len(x)):
        row = [0.0] * MAX_MEMBERS
        if spec.router is None:
            member = spec.modalities.get(("text", "image", "video")[kinds[t]])
            if kinds[t] == 0:
                member = next((m for first, end, m in reversed(spec.ranges) if first <= ids[t] < end), member)
            member = next((m for first, end, m in reversed(spec.positions) if first <= t < end), member)
            if member is not None:
                row[member] = 1.0
        else:
            vote = quantised(spec.router.cpu()(x[t])).numpy().astype(np.float64) / UNIT
            total = total + vote if spec.router.context == "prefix" else vote
            mean = total / (t + 1 if spec.router.context == "prefix" else 1)
            best = sorted(range(len(mean)), key=lambda k: (-mean[k], k))[: spec.top_k]
            scale = sum(np.exp(mean[k] - mean[best[0]]) for k in best)
            for k in best:
                row[k] = float(np.exp(mean[k] - mean[best[0]]) / scale)
        found.append(row)
    return found


def batch_of(index: int, cut: list[tuple[int, int]], kinds: list[list[int]]) -> RoutedRows:
    """Rows [start, end) of each sequence, request 3 and on."""
    rows = [(i, t, start) for i, (start, end) in enumerate(cut) for t in range(start, end)]
    lengths = [end - start for start, end in cut]
    columns = [
        [index] * len(rows),
        [kinds[i][t] for i, t, _ in rows],
        np.repeat(np.cumsum([0, *lengths])[:-1], lengths),
        [3 + i for i, _, _ in rows],
        [start for _, _, start in rows],
        [index] if SPECS[index].router is not None else [],
    ]
    return RoutedRows(*(torch.tensor(np.asarray(c), dtype=torch.int32, device=DEVICE) for c in columns), (index,))


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
        batch, rows = batch_of(index, cut, kinds), [(i, t) for i, (a, b) in enumerate(cut) for t in range(a, b)]
        out = torch.stack([tables.req_to_token[3 + i, t] for i, t in rows])
        hidden = torch.stack([x[i][t] for i, t in rows]).to(DEVICE)
        tokens = torch.tensor([ids[i][t] for i, t in rows], device=DEVICE)
        weights = tables.weights_of(batch, hidden, tokens, out.to(DEVICE)).cpu()
        for (i, _), row in zip(rows, weights.tolist(), strict=True):
            got[i].append(row)
    for i in range(2):
        np.testing.assert_allclose(got[i], spec_weights(spec, x[i], ids[i], kinds[i]), atol=1e-4)


@kernels
@pytest.mark.parametrize("dense", [True, False])
def test_kernel_of_decode_equals_torch(dense: bool) -> None:
    """Six decode steps of eight rows (five routed adapters and none), by the kernel and by ``weights_of``."""
    kernel, plain = tables_with(SPECS), tables_with(SPECS)
    generator = torch.Generator().manual_seed(3)
    routed = [0, -1, 2, 3, 1, 2, 4, 1]
    members = {0: [(2, 2.0), (5, 0.5), (1, 1.0)], 1: [(4, 1.5), (3, 1.0)], 2: [(1, 1.0), (2, 1.0), (3, 3.0), (0, 1.0)]}
    members[3] = [(slot, 0.1 + slot) for slot in range(5, 21)]
    members[4] = [(slot, 0.5) for slot in (9, 2, 7, 1, 0)]
    requests, slots = torch.arange(8, device=DEVICE), 21
    owner = torch.tensor(routed, dtype=torch.int32, device=DEVICE)
    for step in range(6):
        x = torch.randn(8, HIDDEN, generator=generator).to(DEVICE)
        ids = torch.randint(0, VOCABULARY, (8,), generator=generator).to(DEVICE)
        seq_lens = torch.full((8,), step + 1, device=DEVICE)
        out = kernel.req_to_token[requests, step].long()
        gates = torch.full((8, slots), 0.25, device=DEVICE)
        weights = kernel.weights[:8].fill_(torch.nan)
        kernel.refresh(routed, members)
        kernel.route_decode(gates if dense else None, x, ids, requests, seq_lens, out)
        every = torch.arange(8, dtype=torch.int32, device=DEVICE)
        learned = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
        batch = RoutedRows(
            owner, torch.zeros_like(every), every, every, torch.full_like(every, step), learned, (0, 1, 2, 3, 4)
        )
        own = plain.weights_of(batch, x, ids, out)
        wanted = torch.full((8, slots), 0.25)
        for row, weight in enumerate(own.cpu()):
            for k, (slot, scaling) in enumerate(members.get(routed[row], ())):
                wanted[row, slot] += weight[k] * scaling
        # A vote may round differently by one unit in 4096, from another order of summation.
        if dense:
            torch.testing.assert_close(gates.cpu(), wanted, atol=2e-3, rtol=1e-3)
        else:
            torch.testing.assert_close(weights[owner >= 0], own[owner >= 0], atol=1e-3, rtol=1e-3)
            assert weights[owner < 0].isnan().all()
        assert (kernel.totals - plain.totals).abs().max() <= step + 1


@starter
def test_kernel_interpreted() -> None:
    assert passed_interpreted(__file__, "test_kernel or test_routed_rows") == 2 + len(FORMS)


FORMS = {  # of two routed adapters, members and top_k
    "one of few": ((3, 1), (2, 1)),
    "two": ((3, 2), (2, 2)),
    "four of four": ((4, 4), (2, 1)),
    "four of sixteen": ((16, 4), (5, 3)),
    "three and one of sixteen": ((7, 3), (16, 1)),
}


# The interpreter takes every form in a batch of one size, the host in both.
SIZED = [(form, rows) for i, form in enumerate(FORMS) for rows in (24, 90) if not INTERPRETED or (rows == 24) == i % 2]


@pytest.mark.parametrize(("form", "rows"), SIZED)
def test_routed_rows_join_the_others(rows: int, form: str) -> None:
    """Groups (a CPU's), gates and tiles (a GPU's) all mean the same: a loop over rows in float64 says what."""
    rng = np.random.default_rng(rows + len(form))
    slots, r, k_dim, n = 20, 4, 24, 20
    ranks, scalings = rng.integers(1, 5, slots).tolist(), rng.uniform(0.5, 2, slots).tolist()
    a, b = torch.randn(slots, r, k_dim), torch.randn(slots, n, r)
    for slot, rank in enumerate(ranks):
        a[slot, rank:], b[slot, :, rank:] = 0, 0
    x, y = torch.randn(rows, k_dim), torch.randn(rows, n)
    owner = rng.integers(-2, 2, rows).astype(np.int32)  # -2: base, -1: slot 19, 0 and 1: routed adapters
    always = ((18, -1.0),)
    groups = [
        (np.flatnonzero(owner == -2).astype(np.int32), ()),
        (np.flatnonzero(owner == -1).astype(np.int32), ((19, 1.0),)),
    ]
    exact, parts, weights = list(groups), [], torch.zeros(rows, MAX_MEMBERS)
    for index, (members, top_k) in enumerate(FORMS[form]):
        parts.append(Routed(index, tuple(rng.permutation(18)[:members].tolist()), top_k))
        numbers = np.flatnonzero(owner == index).astype(np.int32)
        votes = torch.from_numpy(rng.normal(size=(len(numbers), members)) * UNIT).long()
        weights[torch.from_numpy(numbers).long(), :members] = top_weights(votes, torch.ones(len(numbers)), top_k)
        groups.append((numbers, (*((slot, 0.0) for slot in parts[-1].slots), *always)))
        for row in numbers:
            pairs = tuple((slot, w) for slot, w in zip(parts[-1].slots, weights[row].tolist(), strict=False) if w)
            exact.append((np.asarray([row], dtype=np.int32), pairs + always))
    offsets = [0, n]
    wanted = atmm_reference(y, x, a, b, exact, ranks, scalings, offsets)
    routed = torch.from_numpy(np.where(owner < 0, -1, owner)).int()
    rest = others(groups, rows, np.flatnonzero(owner >= 0))
    close = {"atol": 1e-4, "rtol": 1e-4}

    on_host = make_routing(groups, rows, ranks, scalings, "cpu")
    on_host.groups = host_groups(weights, routed, parts, always, rest)
    if not INTERPRETED:
        torch.testing.assert_close(atmm_torch(y.clone(), x, a, b, on_host, offsets).double(), wanted, **close)

    dense = make_routing(groups, rows, ranks, scalings, "cpu", dense=True)
    of_members = torch.zeros(2, MAX_MEMBERS, dtype=torch.int64)
    for part in parts:
        of_members[part.index, : len(part.slots)] = torch.tensor(part.slots)
    assert dense.gates is not None
    before = dense.gates.clone()
    add_gates(dense.gates, weights, routed, of_members, torch.tensor(scalings)[of_members])
    gates = np.zeros((rows, slots))
    for numbers, pairs in exact:
        for slot, weight in pairs:
            gates[numbers, slot] += weight * scalings[slot]
    np.testing.assert_allclose(dense.gates.numpy(), gates, atol=1e-5)
    assert not torch.equal(before, dense.gates)

    if not INTERPRETED:  # a kernel makes the tiles: run by test_kernel_interpreted; on a GPU see test_prefill
        return
    routing = make_routing(groups, rows, ranks, scalings, "cpu", dense=False)
    tiles = device_tiles(routing, weights, routed, Dispatch(routing, parts, always, 2), rest)
    assert len(tiles.more) == max(part.passes for part in parts) - 1
    torch.testing.assert_close(atmm(y.clone(), x, a, b, tiles, offsets).double(), wanted, **close)
    weight = torch.randn(n, k_dim)
    base = x.double() @ weight.double().T - y.double()
    torch.testing.assert_close(atmm_linear(x, weight, None, a, b, tiles, offsets).double(), wanted + base, **close)
    wide = torch.cat([a, a.flip(1)], 1), torch.cat([b, b], 1)
    for slot, rank in enumerate(ranks):
        wide[0][slot, :rank], wide[0][slot, rank : 2 * rank] = a[slot, :rank], 2 * a[slot, :rank]
    both = torch.cat([y, y], 1)
    gate, up = wanted, 2 * (wanted - y.double()) + y.double()
    act = atmm_silu_and_mul(both, x, *wide, tiles, (0, n, 2 * n)).double()
    torch.testing.assert_close(act, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("members", "top_k", "width"), [(16, 4, 1), (16, 1, 1), (8, 2, 2), (9, 2, 1), (4, 4, 4)])
def test_members_are_applied_together_where_there_are_few_sets_of_them(members: int, top_k: int, width: int) -> None:
    part = Routed(0, tuple(range(members)), top_k)
    assert (part.width, part.passes) == (width, top_k // width)


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
    "too many": ({"format": 1, "router": "vocabulary", "members": [str(i) for i in range(MAX_MEMBERS + 1)]}, "16"),
    "range": (
        {"format": 1, "router": "vocabulary", "members": ["a"], "ranges": [{"from": 4, "to": 99, "member": "a"}]},
        "vocabulary",
    ),
    "stranger": ({"format": 1, "router": "vocabulary", "members": ["a"], "modalities": {"image": "b"}}, "'b'"),
    "sound": ({"format": 1, "router": "vocabulary", "members": ["a"], "modalities": {"sound": "a"}}, "modalities"),
    "top_k": ({"format": 1, "router": "learned", "members": ["a", "b"], "top_k": 3}, "top_k"),
    "top_k of five": ({"format": 1, "router": "learned", "members": list("abcde"), "top_k": 5}, "1 to 4"),
    "positions": (
        {"format": 1, "router": "vocabulary", "members": ["a"], "positions": [{"from": 9, "to": 3, "member": "a"}]},
        "sequence",
    ),
    "no list": ({"format": 1, "router": "vocabulary", "members": ["a"], "positions": 3}, "list"),
    "many positions": (
        {
            "format": 1,
            "router": "vocabulary",
            "members": ["a"],
            "positions": [{"from": i, "to": i + 1, "member": "a"} for i in range(17)],
        },
        "16 ranges",
    ),
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
