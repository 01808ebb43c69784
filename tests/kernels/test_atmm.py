"""ATMM against the float64 row loop, under Triton's interpreter (here) and on the GPU (marked)."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hopper import LINEAR, ptx
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels import tiling
from vlora_sgl.kernels.atmm import atmm, atmm_linear, atmm_reference, launch, make_routing, tiles_of
from vlora_sgl.kernels.atmm.dense import dense_linear_kernel
from vlora_sgl.kernels.atmm.row_routing import dense_slots
from vlora_sgl.kernels.tiling import OPS, Tile, TilingTable, default_tile, pack, unpack

# name: (K, offsets, R, ranks, scalings)
SHAPES = {
    "one-part": (64, (0, 48), 16, [16, 8, 16], [1.0, 0.5, 2.0]),
    "qkv-unequal-odd-ranks": (96, (0, 40, 56, 72), 24, [24, 0, 16, 5, 24], [0.5, 0.0, 1.0, 2.0, 0.25]),
    "gate-up-ragged": (80, (0, 33, 66), 12, [12, 3], [1.0, 3.0]),
    "ranks-of-whole-groups": (64, (0, 40, 80), 32, [8, 32, 24], [1.0, 0.5, 2.0]),
    "more-slots-than-a-step-may-use": (32, (0, 24), 16, [16, *[0] * 40, 8], [1.0, *[0.0] * 40, 2.0]),
}
# name: row count, groups as (rows, pairs); what no group names is base-only
ROUTINGS = {
    "one-adapter": (5, [(range(5), [(0, 1.0)])]),
    "base-rows-and-empty-segment": (7, [([1, 3], [(0, 1.0)]), ([], [(0, 1.0)]), ([0], [])]),
    "two-slots-a-row": (18, [(range(0, 18, 2), [(0, 1.0), (-1, -1.0)]), ([1, 3], [(-1, -1.0)])]),
    "gates-per-row": (4, [([t], [(0, 0.25 + t), (-1, 1 - t)]) for t in range(4)]),
    "one-row": (1, [([0], [(-1, 1.0)])]),
    "base-only": (3, [([0, 1, 2], [])]),
}


class FixedTable(TilingTable):
    """The same tile for every key of an operation."""

    def __init__(self, **tiles: Tile) -> None:
        super().__init__({})
        self.tiles = tiles

    def lookup(self, key: int) -> Tile:
        fields = unpack(key)
        return self.tiles.get(OPS[fields["op"]]) or default_tile(fields)


def tiles(split: int) -> FixedTable:
    return FixedTable(
        linear=Tile(16, 32, 32, split, 4, 2),
        linear_shrink=Tile(16, 16, 32, split, 4, 2),
        shrink=Tile(16, 16, 32, split, 4, 2),
        expand=Tile(16, 32, 0, 1, 4, 3),
        grouped_shrink=Tile(16, 32, 32, split, 4, 2),
        grouped_expand=Tile(16, 32, 0, 1, 4, 2, run=2),
        grouped_write=Tile(16, 32, 0, 1, 4, 2, run=split),
    )


def behind_each_other(a: torch.Tensor, b: torch.Tensor, ranks: Any, parts: int) -> Any:
    """The same slots laid out as ``lora.pool`` does, in overlapping views: (a, b, places); the empty take no room."""
    sizes = [-(-rank // 16) * 16 for rank in ranks]
    places, total = [0] * len(ranks), 0
    for slot in sorted(range(len(ranks)), key=lambda slot: sizes[slot]):
        places[slot], total = total // 16, total + sizes[slot]
    k, n, largest, count = a.shape[2], b.shape[1], max(sizes), max(places) + 1
    a_all, b_all = a.new_full((total * parts, k), float("nan")), b.new_full((n, total), float("nan"))
    for slot, rank in enumerate(ranks):
        a_all[16 * places[slot] * parts :][: parts * rank] = a[slot, : parts * rank]
        b_all[:, 16 * places[slot] :][:, :rank] = b[slot, :, :rank]
    views = (
        a_all.as_strided((count, parts * largest, k), (parts * 16 * k, k, 1)),
        b_all.as_strided((count, n, largest), (16, total, 1)),
    )
    return *views, places


def make_case(shape: str, routing: str, dtype: torch.dtype, dense: bool) -> Any:
    """Poisoned pools: whatever lies outside a slot's own rank is NaN, and so are empty slots."""
    k, offsets, r, ranks, scalings = SHAPES[shape]
    rows, named = ROUTINGS[routing]
    last = len(ranks) - 1
    groups = [
        (np.array(list(t), dtype=np.int32), tuple((last if s < 0 else s, w) for s, w in pairs)) for t, pairs in named
    ]
    rest = sorted(set(range(rows)) - {t for t_, _ in groups for t in t_.tolist()})
    groups.append((np.array(rest, dtype=np.int32), ()))
    torch.manual_seed(0)
    parts, n = len(offsets) - 1, offsets[-1]
    a = torch.full((len(ranks), parts * r, k), float("nan"))
    b = torch.full((len(ranks), n, r), float("nan"))
    for s, rank in enumerate(ranks):
        a[s, : parts * rank] = torch.randn(parts * rank, k) * k**-0.5
        b[s, :, :rank] = torch.randn(n, rank)
    x, w, bias = torch.randn(rows, k), torch.randn(n, k) * k**-0.5, torch.randn(n)
    tensors = [t.to(DEVICE, dtype) for t in (x, w, bias, a, b)]
    table = make_routing(groups, rows, ranks, scalings, DEVICE, dense=dense, block=16)
    return *tensors, groups, ranks, scalings, offsets, table


def check(out: torch.Tensor, exact: torch.Tensor, own: torch.Tensor) -> None:
    """At most four times torch's own error in the same dtype (and a few units of its last place)."""
    assert torch.isfinite(out).all(), "an output was left unwritten, or read past a slot's rank"
    floor = (own.double() - exact).abs().max().item() + 4 * torch.finfo(out.dtype).eps * exact.abs().max().item()
    error = (out.double() - exact).abs().max().item()
    assert error <= 4 * floor, f"{error:.3g} is more than four times {floor:.3g}"


def torch_own(y: Any, x: Any, a: Any, b: Any, groups: Any, ranks: Any, scalings: Any, offsets: Any) -> Any:
    """The same in plain torch matmuls of the tensors' dtype, one row group after the other."""
    y = y.clone()
    for rows, pairs in groups:
        t = torch.from_numpy(rows).long().to(y.device)
        for slot, weight in pairs:
            r = ranks[slot]
            for c in range(len(offsets) - 1):
                low = x[t] @ a[slot, c * r : (c + 1) * r].T * (weight * scalings[slot])
                y[t, offsets[c] : offsets[c + 1]] += low @ b[slot, offsets[c] : offsets[c + 1], :r].T
    return y


def run_case(
    shape: str, routing: str, dtype: torch.dtype, dense: bool, table: TilingTable | None, sized: bool = False
) -> None:
    x, w, bias, a, b, groups, ranks, scalings, offsets, route = make_case(shape, routing, dtype, dense)
    equal_a, equal_b = a, b
    base = torch.nn.functional.linear(x, w, bias)
    exact = atmm_reference(base.cpu(), x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets).to(DEVICE)
    own = torch_own(base, x, a, b, groups, ranks, scalings, offsets)
    if sized:
        a, b, places = behind_each_other(a, b, ranks, len(offsets) - 1)
        route = make_routing(
            groups, len(x), ranks, scalings, DEVICE, places=places, dense=route.gates is not None, block=16
        )
    if route.has_adapters:
        assert (exact - base.double()).abs().max() > 0.1, "the adapters must change the output"
    out = base.clone()
    assert atmm(out, x, a, b, route, offsets, table) is out
    check(out, exact, own)
    untouched = [t for rows, pairs in groups if not pairs for t in rows.tolist()]
    assert torch.equal(out[untouched], base[untouched])
    full = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    exact = atmm_reference(full.cpu(), x.cpu(), equal_a.cpu(), equal_b.cpu(), groups, ranks, scalings, offsets).to(
        DEVICE
    )
    check(atmm_linear(x, w, bias, a, b, route, offsets, table), exact, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
def test_torch_path(shape: str, routing: str, dtype: torch.dtype) -> None:
    run_case(shape, routing, dtype, True, None)


@pytest.mark.parametrize("shape", ["qkv-unequal-odd-ranks", "ranks-of-whole-groups"])
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
def test_torch_path_on_slots_of_unequal_sizes(shape: str) -> None:
    run_case(shape, "two-slots-a-row", torch.float32, True, None, sized=True)


# The interpreter multiplies bfloat16 as integers, so kernels run there in float32 and float16.
@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("family", ["dense", "grouped"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, routing: str, family: str, split: int, dtype: Any) -> None:
    if not CUDA and (dtype is torch.float16) != (split == 3):
        pytest.skip("each dtype with one split under the interpreter, for time")
    if not CUDA and (list(SHAPES).index(shape) + list(ROUTINGS).index(routing)) % 2 != (split == 3):
        pytest.skip("every shape with half of the routings in either dtype, for time")
    if not CUDA and (list(SHAPES).index(shape) + list(ROUTINGS).index(routing) // 2) % 2 != (family == "dense"):
        pytest.skip("either family with half of the routings of every shape, for time")
    run_case(shape, routing, dtype, family == "dense", tiles(split))


@kernels
@pytest.mark.parametrize("accumulate", [True, False])
def test_kernel_leaves_rows_past_the_batch_alone(accumulate: bool) -> None:
    """A graph's tables name the rows of its largest batch; a smaller graph's tensors end before them."""
    x, w, bias, a, b, groups, ranks, scalings, offsets, _ = make_case("one-part", "one-adapter", torch.float32, False)
    spare = np.arange(5, 40, dtype=np.int32)
    wide = make_routing([*groups[:1], (spare, ())], 40, ranks, scalings, DEVICE, dense=False, block=16)
    wide.rows = 5
    y = torch.full((40, offsets[-1]), float("nan"), device=DEVICE)
    y[:5] = torch.nn.functional.linear(x, w, bias)
    exact = atmm_reference(y[:5].cpu(), x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets).to(DEVICE)
    end = "grouped_expand" if accumulate else "grouped_write"
    tiles = launch.Tiles(end, Tile(16, 32, 32, 1, 4, 2), Tile(16, 32, 0, 1, 4, 2, run=2))
    base = y[:5].clone()
    launch.run(tiles, (y[:5], x, a, b, wide, offsets))
    assert torch.isnan(y[5:]).all()
    assert torch.allclose(y[:5].double() if accumulate else (y[:5] + base).double(), exact, atol=1e-4)


@kernels
@pytest.mark.parametrize("plan", ["grid", "grouped"])
@pytest.mark.parametrize("shape", ["qkv-unequal-odd-ranks", "ranks-of-whole-groups"])
def test_kernel_on_slots_of_unequal_sizes(shape: str, plan: str) -> None:
    run_case(shape, "two-slots-a-row", torch.float32, plan != "grouped", tiles(3), sized=True)


@kernels
@pytest.mark.parametrize(
    ("ranks", "split", "used"),
    itertools.product([(16,), (16, 5, 9), (32, 24), (32, 7)], [1, 3], [19, 32])
    if CUDA
    else [((16,), 3, 32), ((16, 5, 9), 1, 19), ((32, 24), 1, 32), ((32, 7), 3, 19)],
)
def test_kernel_of_several_slots_of_low_rank_a_step(ranks: tuple[int, ...], split: int, used: int) -> None:
    """An adapter of its own for each of some rows, two for the others, in a pool of more slots than a step may use."""
    slots, k, offsets, r, rows = 36, 32, (0, 24, 40), max(ranks), used + 3
    own_ranks = [ranks[slot % len(ranks)] for slot in range(slots)]
    scalings = [0.5 + slot % 3 for slot in range(slots)]
    groups = [
        (np.array([t], dtype=np.int32), ((slots - 1 - t % used, 1.0), *([(slots - used, -0.5)] if t % 4 == 1 else [])))
        for t in range(1, rows)
    ]
    groups.append((np.array([0], dtype=np.int32), ()))
    torch.manual_seed(0)
    parts, n = len(offsets) - 1, offsets[-1]
    a = torch.full((slots, parts * r, k), float("nan"), device=DEVICE)
    b = torch.full((slots, n, r), float("nan"), device=DEVICE)
    for slot in range(slots - used, slots):
        rank = own_ranks[slot]
        a[slot, : parts * rank] = torch.randn(parts * rank, k) * k**-0.5
        b[slot, :, :rank] = torch.randn(n, rank)
    x, w, bias = (torch.randn(*size, device=DEVICE) for size in ((rows, k), (n, k), (n,)))
    route = make_routing(groups, rows, own_ranks, scalings, DEVICE, most_dense=dense_slots(r))
    assert route.gates is not None and route.active_most == 32
    base = torch.nn.functional.linear(x, w, bias)
    own = torch_own(base, x, a, b, groups, own_ranks, scalings, offsets)
    for out, from_ in ((atmm_linear(x, w, bias, a, b, route, offsets, tiles(split)), None), (base.clone(), base)):
        if from_ is not None:
            atmm(out, x, a, b, route, offsets, tiles(split))
        y = torch.nn.functional.linear(x.double(), w.double(), bias.double()) if from_ is None else from_
        exact = atmm_reference(y.cpu(), x.cpu(), a.cpu(), b.cpu(), groups, own_ranks, scalings, offsets)
        assert (exact - y.cpu().double()).abs().max() > 0.1
        check(out.cpu(), exact, own.cpu())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("rank", [8, 32])
def test_steps_of_several_slots_load_wide_on_a_hopper(rank: int) -> None:
    """Not number by number, which the compiler does where it does not see that neighbours have one slot."""
    padded = launch.rank_pad(rank)
    several = {"R": rank, "RP": padded, "ACTIVE": 32, "ACTIVE_P": 32, "GROUP": 64 // padded, "BK": 64}
    code = ptx(dense_linear_kernel, {**LINEAR, **several, "x_scale": None, "w_scale": None}, {}, stages=3)
    assert "cp.async.cg.shared.global" in code and "ld.global.b16" not in code


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) > 30


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["dense", "grouped"])
def test_graph_replay_equals_eager_bit_for_bit(family: str) -> None:
    x, w, bias, a, b, _, _, _, offsets, route = make_case(
        "qkv-unequal-odd-ranks", "two-slots-a-row", torch.bfloat16, family == "dense"
    )
    table = tiles(3)
    eager = atmm_linear(x, w, bias, a, b, route, offsets, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atmm_linear(x, w, bias, a, b, route, offsets, table)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.parametrize("pairs", [((1, 1.0),), ((7, 1.0),)], ids=["empty-slot", "no-such-slot"])
def test_routing_to_a_missing_adapter_is_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match="slot"):
        make_routing([(np.arange(2, dtype=np.int32), pairs)], 2, [4, 0], [1.0, 0.0], "cpu")


def test_a_row_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 of 2"):
        make_routing([(np.array([0], dtype=np.int32), ())], 2, [4], [1.0], "cpu")


def test_misfitting_tensors_are_refused_with_both_shapes() -> None:
    route = make_routing([(np.arange(2, dtype=np.int32), ((0, 1.0),))], 2, [4], [1.0], "cpu")
    a, b = torch.zeros(1, 4, 8), torch.zeros(1, 6, 4)
    with pytest.raises(ValueError, match=r"x must be \[2, 8\].*got \(2, 9\)"):
        atmm(torch.zeros(2, 6), torch.zeros(2, 9), a, b, route, (0, 6))
    with pytest.raises(ValueError, match="offsets must rise"):
        atmm(torch.zeros(2, 6), torch.zeros(2, 8), a, b, route, (0, 5))
    with pytest.raises(ValueError, match="dtype"):
        atmm(torch.zeros(2, 6), torch.zeros(2, 8), a.double(), b, route, (0, 6))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs 5 GB of device memory")
def test_addresses_beyond_two_to_the_31_elements() -> None:
    far = 1 << 31
    pool = torch.empty(far + 4096, dtype=torch.float16, device="cuda")
    a = pool.as_strided((2, 16, 64), (far, 64, 1))
    a.normal_()
    b = torch.randn(2, 32, 16, dtype=torch.float16, device="cuda")
    x = torch.randn(3, 64, dtype=torch.float16, device="cuda")
    groups = [(np.arange(3, dtype=np.int32), ((1, 1.0),))]
    for dense in (True, False):
        route = make_routing(groups, 3, [16, 16], [1.0, 1.0], "cuda", dense=dense, block=16)
        out = atmm(torch.zeros(3, 32, dtype=torch.float16, device="cuda"), x, a, b, route, (0, 32))
        exact = (x.double() @ a[1].double().T) @ b[1].double().T
        assert (out.double() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("shared", [48 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("size", [2, 4])
def test_a_tile_is_cut_down_to_the_devices_shared_memory(shared: Any, size: int) -> None:
    for tile in (Tile(64, 64, 256, 16, 4, 3), Tile(32, 64, 128, 5, 4, 8), Tile(16, 16, 64, 1, 4, 2)):
        for block_m in (16, 64):
            found = launch.fitting(tile, block_m, size, shared)
            assert (block_m + found.block_n) * found.block_k * size * found.stages <= shared
            assert 2 <= found.stages <= tile.stages and found.block_k <= tile.block_k
            assert (found.block_n, found.split_k, found.warps) == (tile.block_n, tile.split_k, tile.warps)
    assert launch.fitting(tile, 16, size, 227 << 10) == tile


def test_tiling_key_is_128_bits_and_reversible() -> None:
    key = tiling.pack("expand", 37888, 3584, 64, 33, 8, parts=2, pairs=2, dtype=torch.bfloat16)
    assert key < 1 << 128 and sum(tiling.FIELDS.values()) == 128
    fields = unpack(key)
    assert (fields["n"], fields["k"], fields["rank"], fields["rows"], fields["slots"]) == (37888, 3584, 64, 6, 3)


def test_nearest_entry_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    def key(rows: Any, n: int = 512, op: str = "shrink") -> Any:
        return tiling.pack(op, n, 64, 16, rows, 8, dtype=torch.float16)

    small, large = Tile(16, 16, 64), Tile(64, 64, 64, 2)
    path = tmp_path / "t.json"
    TilingTable.save(path, [(key(4), small, {"us": 1.0}), (key(64), large, {})], device="d")
    table = TilingTable.load(path)
    assert table.lookup(key(4)) == small and table.lookup(key(48, n=640)) == large
    assert table.lookup(key(4, op="expand")) == default_tile(unpack(key(4, op="expand")))


def test_a_shrink_takes_the_tile_of_the_nearest_input() -> None:
    """It does not see the output's columns, which weigh as much as all else where an expert's are few."""

    def key(op: str, n: int, k: int, parts: int) -> int:
        return pack(op, n, k, 16, 8192, 8, parts=parts, dtype=torch.bfloat16)

    gate_up, qkv = Tile(64, 32, 128), Tile(64, 64, 128)
    for op, expected in (("grouped_shrink", gate_up), ("shrink", gate_up), ("grouped_expand", qkv)):
        table = TilingTable({key(op, 22016, 2048, 2): gate_up, key(op, 2560, 2048, 3): qkv})
        assert table.lookup(key(op, 1536, 2048, 2)) == expected


@pytest.mark.parametrize("rows, stages", [(8192, 5), (16384, 5), (32768, 3), (65536, 3)])
@pytest.mark.parametrize("op", ["grouped_shrink", "grouped_expand"])
def test_a_deep_pipeline_is_for_as_many_rows_as_it_was_searched_for(op: str, rows: int, stages: int) -> None:
    def key(rows: int) -> int:
        return pack(op, 2048, 768, 16, rows, 1024, dtype=torch.bfloat16)

    deep = Tile(64, 32, 128, 1, 4, 5)
    found = TilingTable({key(8192): deep}).lookup(key(rows))
    assert found == replace(deep, stages=stages if op == "grouped_shrink" else 5)
    assert TilingTable({key(8192): deep, key(rows): deep}).lookup(key(rows)) == deep, "what was searched is taken"


def test_both_lookups_of_a_linear_cost_the_host_under_five_microseconds() -> None:
    import timeit

    route = make_routing([(np.arange(2, dtype=np.int32), ((0, 1.0),))], 2, [4], [1.0], "cpu")
    table, a, b = TilingTable({}), torch.zeros(1, 4, 8), torch.zeros(1, 6, 4)

    def look_up() -> None:
        tiles_of("linear", a, b, route, table)

    look_up()
    assert min(timeit.repeat(look_up, number=200, repeat=20)) / 200 < 5e-6


def test_a_broken_table_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tiling table"):
        TilingTable.load(path)
