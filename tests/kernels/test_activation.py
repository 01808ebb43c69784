"""The activation that adds gate's and up's adapters, against float64: under Triton's interpreter, and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_atmm import FixedTable, behind_each_other, check, torch_own
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import atmm, atmm_silu_and_mul, atmm_silu_reference, launch, make_routing
from vlora_sgl.kernels.tiling import Tile

# name: (K, I, R, rank of each slot)
SHAPES = {
    "whole-tiles": (64, 64, 16, [16, 8, 16]),
    "odd-width-ragged-ranks": (80, 33, 12, [12, 3]),
    "many-tiles-of-24": (48, 150, 24, [24, 0, 16, 5]),
    "one-of-its-columns": (64, 1, 32, [8, 32, 24]),
}
# name: rows, groups as (rows, pairs), slot -1 being the last; what no group names is base-only
ROUTINGS = {
    "one-row": (1, [([0], [(-1, 1.0)])]),
    "every-row": (65, [(range(65), [(0, 1.0)])]),
    "two-slots-a-row": (130, [(range(0, 130, 2), [(0, 1.0), (-1, -1.0)]), (range(1, 31, 2), [(-1, -1.0)])]),
    "four-gates-a-row": (9, [([t], [(0, 1 - t), (-1, 0.5), (0, t), (-1, 0.25)]) for t in range(4)]),
    "empty-segment": (70, [([], [(0, 1.0)]), (range(66, 70), [(-1, 2.0)])]),
    "base-only": (66, []),
}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]  # see test_atmm


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What nobody has written holds NaN: outputs, and h of rows without a slot."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def tiles(split: int) -> FixedTable:
    return FixedTable(
        grouped_shrink=Tile(16, 32, 32, split, 4, 2), grouped_silu=Tile(16, 16 * split, 0, 1, 4, split, run=split)
    )


def make_case(shape: str, routing: str, dtype: torch.dtype, block: int = 16) -> Any:
    """y, x, a, b with NaN past every slot's rank and y's last column; groups, ranks, scalings, offsets, routing."""
    k, width, r, ranks = SHAPES[shape]
    rows, named = ROUTINGS[routing]
    last, scalings = len(ranks) - 1, [0.5 + s for s in range(len(ranks))]
    groups = [
        (np.array(list(t), dtype=np.int32), tuple((last if s < 0 else s, w) for s, w in pairs)) for t, pairs in named
    ]
    rest = sorted(set(range(rows)) - {t for numbers, _ in groups for t in numbers.tolist()})
    groups.append((np.array(rest, dtype=np.int32), ()))
    torch.manual_seed(0)
    a = torch.full((len(ranks), 2 * r, k), float("nan"))
    b = torch.full((len(ranks), 2 * width, r), float("nan"))
    for s, rank in enumerate(ranks):
        a[s, : 2 * rank] = torch.randn(2 * rank, k) * k**-0.5
        b[s, :, :rank] = torch.randn(2 * width, rank)
    y = torch.full((rows, 2 * width + 8), float("nan"))
    y[:, : 2 * width] = 3 * torch.randn(rows, 2 * width)
    y, x, a, b = (t.to(DEVICE, dtype) for t in (y, torch.randn(rows, k), a, b))
    table = make_routing(groups, rows, ranks, scalings, DEVICE, dense=False, block=block)
    return y[:, : 2 * width], x, a, b, groups, ranks, scalings, (0, width, 2 * width), table


def silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def run_case(shape: str, routing: str, dtype: torch.dtype, split: int, block: int = 16, sized: bool = False) -> None:
    y, x, a, b, groups, ranks, scalings, offsets, route = make_case(shape, routing, dtype, block)
    exact = atmm_silu_reference(y.cpu(), x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets).to(DEVICE)
    own = silu_and_mul(torch_own(y, x, a, b, groups, ranks, scalings, offsets))
    if route.has_adapters:
        assert (exact - silu_and_mul(y.double())).abs().max() > 0.1, "the adapters must change the output"
    if sized:
        a, b, places = behind_each_other(a, b, ranks, 2)
        route = make_routing(groups, len(x), ranks, scalings, DEVICE, places=places, dense=False, block=block)
    before = y.clone()
    check(atmm_silu_and_mul(y, x, a, b, route, offsets, tiles(split)), exact, own)
    assert torch.equal(y, before)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [1, 3], ids=["small-tiles", "runs-of-tiles"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, routing: str, split: int, dtype: Any) -> None:
    if not CUDA and (list(SHAPES).index(shape) + list(ROUTINGS).index(routing) + split // 2) % 2 != (
        dtype is torch.float16
    ):
        pytest.skip("every shape, routing and tile with one dtype under the interpreter, for time")
    if not CUDA and (list(SHAPES).index(shape) // 2 + list(ROUTINGS).index(routing) // 2) % 2 != (split == 1):
        pytest.skip("every shape and routing with one tile, for time")
    run_case(shape, routing, dtype, split if split == 1 else 4)


@kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_on_large_tiles(shape: str) -> None:
    run_case(shape, "two-slots-a-row", torch.float32, 4, block=64)


@kernels
@pytest.mark.parametrize("shape", ["odd-width-ragged-ranks", "many-tiles-of-24"])
def test_kernel_on_slots_of_unequal_sizes(shape: str) -> None:
    run_case(shape, "two-slots-a-row", torch.float32, 1, sized=True)


@kernels
def test_kernel_leaves_rows_past_the_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's tables name the rows of its largest batch, and its n_tiles ends before the tables do."""
    y, x, a, b, groups, ranks, scalings, offsets, _ = make_case("many-tiles-of-24", "every-row", torch.float32)
    spare = np.arange(65, 150, dtype=np.int32)
    wide = make_routing([*groups, (spare, ())], 150, ranks, scalings, DEVICE, dense=False, block=16)
    wide.rows, unused = 65, torch.full((2, 16), 1 << 20, dtype=torch.int32, device=DEVICE)
    wide.tile_rows = torch.cat([wide.tile_rows, unused])
    wide.tile_slots = torch.cat([wide.tile_slots, unused[:, :1]])
    wide.tile_gates = torch.cat([wide.tile_gates, torch.ones(2, 1, 16, device=DEVICE)])
    outer, make = torch.full((150, offsets[1]), float("nan"), device=DEVICE), torch.Tensor.new_empty
    ours = ((65, offsets[1]),)
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size, **how: outer[:65] if size == ours else make(self, *size, **how)
    )
    tiles = launch.Tiles("grouped_silu", Tile(16, 32, 32, 1, 4, 2), Tile(16, 32, 0, 1, 4, 2, run=2))
    act = launch.run(tiles, (y, x, a, b, wide, offsets))
    exact = atmm_silu_reference(y.cpu(), x.cpu(), a.cpu(), b.cpu(), groups, ranks, scalings, offsets).to(DEVICE)
    assert act.data_ptr() == outer.data_ptr() and torch.isnan(outer[65:]).all()
    assert torch.allclose(act.double(), exact, atol=1e-3)


@kernels
def test_kernel_saturates_where_silu_does() -> None:
    y, x, a, b, _, ranks, scalings, offsets, _ = make_case("whole-tiles", "base-only", torch.float32)
    y[:, :64] = torch.tensor([-1e30, -200.0, -0.0, 200.0], device=DEVICE).repeat(16)
    route = make_routing([(np.arange(66, dtype=np.int32), ())], 66, ranks, scalings, DEVICE, dense=False)
    assert torch.allclose(atmm_silu_and_mul(y, x, a, b, route, offsets, tiles(1)), silu_and_mul(y))


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) > 20


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_graph_replay_equals_eager_bit_for_bit(shape: str) -> None:
    y, x, a, b, _, _, _, offsets, route = make_case(shape, "two-slots-a-row", torch.bfloat16, block=64)
    eager = atmm_silu_and_mul(y, x, a, b, route, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atmm_silu_and_mul(y, x, a, b, route, offsets)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="the shape of a 7B layer")
@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("pairs", [1, 2])
def test_a_7b_layer_with_the_tables_own_tiles(rank: int, pairs: int) -> None:
    """As far from float64 as torch's matmuls and activation, with pipelines as deep as they are served."""
    rows, k, width, slots = 700, 3584, 18944, 3
    options = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    a, b = torch.randn(slots, 2 * rank, k, **options) * k**-0.5, torch.randn(slots, 2 * width, rank, **options)
    x, y = torch.randn(rows, k, **options), torch.randn(rows, 2 * width, **options)
    thirds = np.array_split(np.arange(rows, dtype=np.int32), 3)
    groups = [(t, ((s, 1.0), ((s + 1) % 3, -0.5))[:pairs]) for s, t in enumerate(thirds[:2])] + [(thirds[2], ())]
    route = make_routing(groups, rows, [rank] * slots, [0.5] * slots, "cuda")
    exact, own = (y.double(), y.clone())
    for out, *operands in ((exact, x.double(), a.double(), b.double()), (own, x, a, b)):
        out.copy_(torch_own(out, *operands, groups, [rank] * slots, [0.5] * slots, (0, width, 2 * width)))
    out = atmm_silu_and_mul(y, x, a, b, route, (0, width, 2 * width))
    check(out, silu_and_mul(exact), silu_and_mul(own))
    assert torch.equal(out, atmm_silu_and_mul(y, x, a, b, route, (0, width, 2 * width)))
    base = silu_and_mul(y[thirds[2]])
    assert torch.allclose(out[thirds[2]].float(), base.float(), rtol=0.02, atol=0.02)


def test_what_it_cannot_serve_is_refused() -> None:
    rows = [(np.arange(70, dtype=np.int32), ((0, 1.0),))]
    route = make_routing(rows, 70, [4], [1.0], "cpu")
    y, x, a = torch.zeros(70, 6), torch.zeros(70, 8), torch.zeros(1, 8, 8)
    with pytest.raises(ValueError, match="equal width"):
        atmm_silu_and_mul(y, x, a, torch.zeros(1, 6, 4), route, (0, 2, 6))
    few = make_routing([(np.arange(2, dtype=np.int32), ())], 2, [4], [1.0], "cpu")
    with pytest.raises(ValueError, match="row tiles"):
        atmm_silu_and_mul(y[:2], x[:2], a, torch.zeros(1, 6, 4), few, (0, 3, 6))
    if not INTERPRETED:
        with pytest.raises(ValueError, match="device with kernels"):
            atmm_silu_and_mul(y, x, a, torch.zeros(1, 6, 4), route, (0, 3, 6))
    with pytest.raises(ValueError, match="x must be"):
        atmm(y, x[:1], a, torch.zeros(1, 6, 4), route, (0, 3, 6))
