"""The operator on experts: a token's choices gathered on the device, against the float64 row loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.test_activation import silu_and_mul
from tests.kernels.test_activation import tiles as activation_tiles
from tests.kernels.test_atmm import check, tiles
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import (
    Group,
    Pairs,
    atmm,
    atmm_reference,
    atmm_silu_and_mul,
    atmm_torch,
    expert_tiles,
    make_routing,
)
from vlora_sgl.kernels.atmm.expert_tiles import are_many
from vlora_sgl.kernels.atmm.experts import device_experts, host_experts
from vlora_sgl.kernels.devices import HOPPER_SHARED
from vlora_sgl.lora.backend import AtmmBackend
from vlora_sgl.lora.expert_layers import ExpertLinear

EXPERTS, R, K = 5, 16, 48
RANKS, SCALINGS = [16, 0, 5, 8], [0.5, 0.0, 2.0, 1.0]
TUPLES: list[Pairs] = [
    *(((slot, 1.0),) for slot in (0, 2, 3)),
    *(((one, 1.0), (other, -1.0)) for one, other in ((0, 2), (2, 0), (0, 3), (3, 2))),
]
PARTS: dict[str, tuple[int, ...]] = {"down": (0, 40), "gate-up": (0, 24, 48)}
# tokens, choices of each, (tokens, pairs)
BATCHES: dict[str, tuple[int, int, list[tuple[Any, Pairs]]]] = {
    "one-token": (1, 2, [([0], ((0, 1.0),))]),
    "base-rows-between": (23, 2, [(range(1, 20, 3), ((0, 1.0),)), ([0, 5, 22], ((3, 1.0),))]),
    "two-slots-a-row": (40, 3, [(range(0, 40, 2), ((0, 1.0), (2, -1.0))), (range(1, 39, 2), ((2, -1.0),))]),
    "one-choice": (9, 1, [(range(9), ((2, 0.5),))]),
    "base-only": (3, 2, []),
    "many": (700, 1, [(range(0, 700, 7), ((3, 1.0),)), (range(1, 700, 7), ((0, 1.0), (3, -1.0)))]),
    "many-tuples": (300, 2, [(range(i, 300, 9), pairs) for i, pairs in enumerate(TUPLES)]),
}
CHOICES = ("spread", "all-of-one", "some-of-none", "none")
LAUNCHES = {"one-launch": 1 << 30, "counted": 0}
"""Choices up to which one launch gathers them."""


def make_case(parts: str, batch: str, choices: str) -> Any:
    """Poisoned slots of experts, a batch's groups, its choices and their weights."""
    offsets, (tokens, top_k, named) = PARTS[parts], BATCHES[batch]
    torch.manual_seed(len(batch) + len(choices))
    c, slots = len(offsets) - 1, len(RANKS)
    a, b = torch.full((slots, EXPERTS, c * R, K), torch.nan), torch.full((slots, EXPERTS, offsets[-1], R), torch.nan)
    for slot, rank in enumerate(RANKS):
        a[slot, :, : c * rank] = torch.randn(EXPERTS, c * rank, K) * K**-0.5
        b[slot, :, :, :rank] = torch.randn(EXPERTS, offsets[-1], rank)
    groups: list[Group] = [(np.array(list(rows), dtype=np.int32), pairs) for rows, pairs in named]
    rest = sorted(set(range(tokens)) - {t for rows, _ in groups for t in rows.tolist()})
    groups.append((np.array(rest, dtype=np.int32), ()))
    ids = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(tokens)]).int()
    if choices == "all-of-one":
        ids[:, 0] = 3
    elif choices == "some-of-none":
        ids[torch.rand(ids.shape) < 0.4] = -1
    elif choices == "none":
        ids[:] = -1
    return offsets, a, b, groups, ids, 0.1 + torch.rand(tokens, top_k)


def exact_of(y: Any, x: Any, a: Any, b: Any, groups: Any, ids: Any, offsets: Any, gates: Any) -> torch.Tensor:
    """Row by row: each choice applies its token's pairs, of the expert that it is."""
    top_k, virtual = ids.shape[1], []
    for tokens, pairs in groups:
        for row in (tokens[:, None] * top_k + np.arange(top_k)).reshape(-1).tolist():
            expert = int(ids.reshape(-1)[row])
            weight = float(gates[row])
            own = tuple((slot * EXPERTS + expert, w * weight) for slot, w in pairs) if expert >= 0 else ()
            virtual.append((np.array([row], dtype=np.int32), own))
    ranks, scalings = np.repeat(RANKS, EXPERTS).tolist(), np.repeat(SCALINGS, EXPERTS).tolist()
    return atmm_reference(y, x, a.flatten(0, 1), b.flatten(0, 1), virtual, ranks, scalings, offsets)


CASES = [
    (list(PARTS)[i % 2], batch, CHOICES[(i + j) % 3], [torch.float32, torch.float16][j % 2], 1 + j % 2, launches)
    for i, batch in enumerate(BATCHES)
    for j, launches in enumerate(LAUNCHES)
]


@kernels
@pytest.mark.parametrize("parts, batch, choices, dtype, split, launches", CASES)
def test_kernel_applies_experts(
    parts: str,
    batch: str,
    choices: str,
    dtype: torch.dtype,
    split: int,
    launches: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens as inputs, and choices with their weights in the gates."""
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", LAUNCHES[launches])
    offsets, a, b, groups, ids, weights = make_case(parts, batch, choices)
    a, b, rows = a.to(dtype), b.to(dtype), ids.numel()
    routing = make_routing(groups, len(ids), RANKS, SCALINGS, DEVICE, dense=None, tuples=True)
    both = device_experts(routing, ids.to(DEVICE), weights.to(DEVICE), EXPERTS, block=16)
    for routed, count, gates in zip(both, (len(ids), rows), (torch.ones(rows), weights.reshape(-1)), strict=True):
        x, y = torch.randn(count, K).to(dtype), torch.randn(rows, offsets[-1]).to(dtype)
        wide = x.repeat_interleave(rows // count, 0)
        exact = exact_of(y, wide, a, b, groups, ids, offsets, gates)
        own = exact_of(y, wide, a, b, groups, ids, offsets, gates).to(dtype).to(DEVICE)
        changed = (exact - y.double()).abs().amax(1) > 1e-3
        assert bool(changed.any()) == (batch != "base-only" and bool((ids >= 0).any()))
        out, before = y.to(DEVICE), y.to(DEVICE).clone()
        atmm(out, x.to(DEVICE), a.flatten(0, 1).to(DEVICE), b.flatten(0, 1).to(DEVICE), routed, offsets, tiles(split))
        check(out, exact.to(DEVICE), own)
        assert torch.equal(out[~changed.to(DEVICE)], before[~changed.to(DEVICE)])


def choices_by_words(groups: list[Group], ids: torch.Tensor, base: bool) -> dict[tuple[Any, ...], set[int]]:
    """What tiles are to hold: the numbers of choices by their slots' words."""
    wanted: dict[tuple[Any, ...], set[int]] = {}
    for tokens, pairs in groups:
        for row in (tokens[:, None] * ids.shape[1] + np.arange(ids.shape[1])).reshape(-1).tolist():
            expert = int(ids.reshape(-1)[row])
            words = tuple(slot * EXPERTS + expert | RANKS[slot] << 16 for slot, _ in pairs) if expert >= 0 else ()
            if words or base:
                wanted.setdefault(words, set()).add(row)
    return wanted


ACTIVATED = [
    (batch, CHOICES[i % 4], [torch.float32, torch.float16][i % 2], 1 + i % 2) for i, batch in enumerate(BATCHES)
]


@kernels
@pytest.mark.parametrize("batch, choices, dtype, split", ACTIVATED)
def test_kernel_activates_experts(batch: str, choices: str, dtype: torch.dtype, split: int) -> None:
    """Every choice's row, where it applies nothing too, and no more of the output than those."""
    offsets, a, b, groups, ids, weights = make_case("gate-up", batch, choices)
    a, b, rows, inner = a.to(dtype), b.to(dtype), ids.numel(), offsets[1]
    routing = make_routing(groups, len(ids), RANKS, SCALINGS, DEVICE, tuples=True)
    routed, _ = device_experts(routing, ids.to(DEVICE), weights.to(DEVICE), EXPERTS, block=16, base=True)
    x, y = torch.randn(len(ids), K).to(dtype), (2 * torch.randn(rows, offsets[-1])).to(dtype)
    added = exact_of(y, x.repeat_interleave(ids.shape[1], 0), a, b, groups, ids, offsets, torch.ones(rows))
    changed = (added - y.double()).abs().amax(1) > 1e-3
    assert bool(changed.any()) == (batch != "base-only" and bool((ids >= 0).any()))
    exact, plain = silu_and_mul(added), silu_and_mul(y.to(DEVICE))
    around = torch.full((rows + 2, inner + 3), torch.nan, dtype=dtype, device=DEVICE)
    out, before = around[1:-1, :inner], y.to(DEVICE)
    flat = a.flatten(0, 1).to(DEVICE), b.flatten(0, 1).to(DEVICE)
    given = atmm_silu_and_mul(before, x.to(DEVICE), *flat, routed, offsets, activation_tiles(split), out=out)
    assert given.data_ptr() == out.data_ptr() and torch.equal(before.cpu(), y)
    check(out, exact.to(DEVICE), silu_and_mul(added.to(dtype)).to(DEVICE))
    torch.testing.assert_close(out[~changed.to(DEVICE)], plain[~changed.to(DEVICE)])
    out.fill_(torch.nan)
    assert around.isnan().all()
    fresh = atmm_silu_and_mul(before, x.to(DEVICE), *flat, routed, offsets, activation_tiles(split))
    check(fresh, exact.to(DEVICE), silu_and_mul(added.to(dtype)).to(DEVICE))


@kernels
def test_kernel_of_the_backend_activates_and_adds() -> None:
    """What a layer's hooks ask of the backend, in a batch with base rows and in one of few choices."""
    offsets, a, b, groups, ids, weights = make_case("gate-up", "base-rows-between", "some-of-none")
    backend, runs = AtmmBackend(len(RANKS), torch.device(DEVICE)), runs_of(groups, len(ids))
    backend.is_moe_lora = True
    backend.route(runs, RANKS, SCALINGS)
    assert not are_many(ids)
    linear = ExpertLinear(torch.empty(EXPERTS, offsets[-1], K), 2, 0, 1, a.to(DEVICE), b.to(DEVICE))
    x, y = torch.randn(len(ids), K), torch.randn(ids.numel(), offsets[-1])
    added = exact_of(y, x.repeat_interleave(ids.shape[1], 0), a, b, groups, ids, offsets, torch.ones(ids.numel()))
    for base in (False, True):
        routed, _ = backend.experts(ids.to(DEVICE), weights.to(DEVICE), EXPERTS, base=base)
        found = backend.add_experts(y.to(DEVICE, copy=True), x.to(DEVICE), linear, routed)
        check(found, added.to(DEVICE), added.float().to(DEVICE))
    out = torch.full((len(y), offsets[1]), torch.nan, device=DEVICE)
    backend.silu_experts(y.to(DEVICE), out, x.to(DEVICE), linear, routed)
    check(out, silu_and_mul(added).to(DEVICE), silu_and_mul(added.float()).to(DEVICE))


def runs_of(groups: list[Group], tokens: int) -> list[Any]:
    """A run for each token."""
    pairs = {t: own for rows, own in groups for t in rows.tolist()}
    return [(pairs[t], 1) for t in range(tokens)]


GATHERED = [
    (batch, block, choices, launches, base)
    for i, batch in enumerate(BATCHES)
    for j, (launches, base) in enumerate([("one-launch", False), ("counted", False), ("counted", True)])
    for block, choices in ((16, CHOICES[(i + j) % 4]), (64, "some-of-none"))
]


@kernels
@pytest.mark.parametrize("batch, block, choices, launches, base", GATHERED)
def test_kernel_gathers_rows_of_the_same_slots_and_expert(
    batch: str, block: int, choices: str, launches: str, base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row that applies anything, with ``base`` each that does not, lies in one tile, and no tile in two."""
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", LAUNCHES[launches])
    poison(monkeypatch)
    _, _, _, groups, ids, weights = make_case("down", batch, choices)
    routing = make_routing(groups, len(ids), RANKS, SCALINGS, DEVICE, tuples=True)
    both = device_experts(routing, ids.to(DEVICE), weights.to(DEVICE), EXPERTS, block, base=base)
    assert routing.tuples is not None
    of_rows, gates_of = routing.tuples.rows.tolist(), routing.tuples.gates.cpu()
    for routed, factors in zip(both, (torch.ones(ids.numel()), weights.reshape(-1)), strict=True):
        assert routed.tile_rows is not None and routed.tile_slots is not None and routed.tile_gates is not None
        assert routed.n_tiles is not None
        used, wanted = int(routed.n_tiles), choices_by_words(groups, ids, base)
        assert used == sum(-(-len(rows) // block) for rows in wanted.values()) <= len(routed.tile_rows)
        found: dict[tuple[Any, ...], list[int]] = {}
        for t, (rows, words) in enumerate(
            zip(routed.tile_rows[:used].tolist(), routed.tile_slots[:used].tolist(), strict=True)
        ):
            inside = [row for row in rows if row >= 0]
            assert inside == rows[: len(inside)] == sorted(inside), "what is past the rows is past the tile's end"
            assert set(rows[len(inside) :]) <= {-1}
            found.setdefault(tuple(word for word in words if word), []).extend(inside)
            if any(words):
                tuples = [of_rows[row // ids.shape[1]] for row in inside]
                expected = gates_of[tuples].T * factors[inside]
                assert torch.equal(routed.tile_gates[t, :, : len(inside)].cpu(), expected)
        assert {words: sorted(rows) for words, rows in found.items()} == {w: sorted(r) for w, r in wanted.items()}


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the routing's tables are allocated in has numbers that would be noticed."""
    original = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        found = original(self, *sizes, **options)
        return found.fill_(torch.nan if found.dtype.is_floating_point else 1 << 20)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@kernels
def test_kernel_gathers_the_same_in_long_and_in_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's rows are the same, tile by tile; which tiles it takes is not said."""
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", 0)
    _, _, _, groups, ids, weights = make_case("down", "many-tuples", "all-of-one")
    routing = make_routing(groups, len(ids), RANKS, SCALINGS, DEVICE, tuples=True)
    found = []
    for few in (0, 1 << 30):
        monkeypatch.setattr(expert_tiles, "FEW_KEYS", few)
        tiles, _ = device_experts(routing, ids.to(DEVICE), weights.to(DEVICE), EXPERTS, 16, base=True)
        assert tiles.tile_rows is not None and tiles.tile_slots is not None and tiles.n_tiles is not None
        used = slice(int(tiles.n_tiles))
        pairs = zip(tiles.tile_slots[used].tolist(), tiles.tile_rows[used].tolist(), strict=True)
        found.append(sorted((words, rows) for words, rows in pairs))
    assert found[0] == found[1]


@starter
def test_experts_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == len(CASES) + len(ACTIVATED) + len(GATHERED) + 2


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parts", PARTS)
def test_the_same_with_torch(parts: str, batch: str, choices: str) -> None:
    offsets, a, b, groups, ids, _ = make_case(parts, batch, choices)
    routing, rows = make_routing(groups, len(ids), RANKS, SCALINGS, "cpu"), ids.numel()
    for share in (ids.shape[1], 1):
        routed = host_experts(routing, ids, EXPERTS, share)
        x, y = torch.randn(rows // share, K), torch.randn(rows, offsets[-1])
        exact = exact_of(y, x.repeat_interleave(share, 0), a, b, groups, ids, offsets, torch.ones(rows))
        out = atmm_torch(y.clone(), x, a.flatten(0, 1), b.flatten(0, 1), routed, offsets)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


KERNELS = {
    "expert_tiles_kernel": {"CHUNK": expert_tiles.CHUNK},
    "count_keys_kernel": {"CHUNK": 256},
    "place_keys_kernel": {"STEP": 32},
    "fill_tiles_kernel": {"CHUNK": 256, "COMPARED": expert_tiles.COMPARED},
}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("tuples, pairs, block", [(2, 1, 16), (32, 2, 64)])
@pytest.mark.parametrize("name", KERNELS)
def test_tiles_compile_for_a_hopper(name: str, tuples: int, pairs: int, block: int) -> None:
    """Without one: the interpreter lets variables change their types."""
    kernel: Any = getattr(expert_tiles, name)
    known: dict[str, Any] = {"EXPERTS": 128, "TOP_K": 8, "PAIRS": pairs, "TUPLES": tuples, "BLOCK": block}
    known |= {"BASE": pairs == 2, **KERNELS[name]}
    constants = {constant: value for constant, value in known.items() if constant in kernel.arg_names}
    floats, numbers, signature = ("gates_in", "gates_out", "weights", "gates"), ("n", "tuples", "chunks"), {}
    for argument in kernel.arg_names:
        pointer = "*fp32" if argument in floats else "*i32"
        signature[argument] = "constexpr" if argument in constants else "i32" if argument in numbers else pointer
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(one),): v for one, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.metadata.shared <= HOPPER_SHARED
    assert ".local." not in compiled.asm["ptx"]


@pytest.mark.skipif(not CUDA, reason="waits are a GPU's")
@pytest.mark.parametrize("launches", LAUNCHES)
def test_no_wait_for_the_host(launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph serves the next batch's choices."""
    monkeypatch.setattr(expert_tiles, "ONE_LAUNCH", LAUNCHES[launches])
    offsets, a, b, groups, ids, weights = make_case("down", "many", "spread")
    routing = make_routing(groups, len(ids), RANKS, SCALINGS, DEVICE, tuples=True)
    ids, weights, a, b = ids.cuda(), weights.cuda(), a.flatten(0, 1).cuda(), b.flatten(0, 1).cuda()
    x, y = torch.randn(len(ids), K).cuda(), torch.randn(ids.numel(), offsets[-1]).cuda()

    def step() -> torch.Tensor:
        return atmm(y.clone(), x, a, b, device_experts(routing, ids, weights, EXPERTS)[0], offsets)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        ids.copy_((ids + 1) % EXPERTS)
        graph.replay()
        assert torch.equal(captured, step())
