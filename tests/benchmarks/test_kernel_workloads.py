"""The kernel benchmark's workloads and figures, without a GPU."""

import pytest
import torch

from benchmarks.kernels.peers import OPTIONAL, PEERS, vllm_weights
from benchmarks.kernels.workloads import PROJECTIONS, Inputs, Workload, grid, rows_by_adapter


@pytest.mark.parametrize("popularity", ["distinct", "uniform", "zipf", "skewed", "identical"])
@pytest.mark.parametrize(("rows", "adapters"), [(1, 1), (7, 3), (8192, 64), (64, 64)])
def test_every_row_has_an_adapter_and_every_adapter_a_row(popularity: str, rows: int, adapters: int) -> None:
    lengths = rows_by_adapter(popularity, rows, adapters)
    assert sum(lengths) == rows and min(lengths) >= 1
    assert len(lengths) == (1 if popularity == "identical" else adapters)
    assert lengths == sorted(lengths, reverse=True)


def test_an_unknown_popularity_is_refused() -> None:
    with pytest.raises(ValueError, match="popularity must be"):
        rows_by_adapter("even", 4, 2)


def test_the_grid_covers_both_phases_of_every_projection() -> None:
    loads = grid(quick=True)
    assert {(load.projection, load.phase) for load in loads} == {
        (name, phase) for name in PROJECTIONS for phase in ("decode", "prefill")
    }
    assert any(len(load.ranks) > 1 for load in loads) and len(loads) < len(grid(quick=False))


@pytest.mark.parametrize("projection", ["qkv_proj", "o_proj"])
@pytest.mark.parametrize("ranks", [(8,), (8, 4, 2)])
def test_weights_as_vllm_keeps_them_compute_the_same(projection: str, ranks: tuple[int, ...]) -> None:
    """By the formula of its kernels: rows times A of their slot, times B, into the columns of each projection."""
    inputs = Inputs(Workload(projection, 7, 3, "zipf", ranks), copies=1, dtype=torch.float64)
    slots = torch.repeat_interleave(torch.arange(len(inputs.lengths)), torch.tensor(inputs.lengths))
    a, b = vllm_weights(inputs, 0)
    assert all(t.is_contiguous() for t in (*a, *b))
    parts = []
    for down, up in zip(a, b, strict=True):
        low = torch.einsum("tk,trk->tr", inputs.x[0], down[slots, 0])
        parts.append(torch.einsum("tr,tnr->tn", low, up[slots, 0]))
    exact, _ = inputs.exact(torch.arange(7))
    assert not torch.equal(exact, inputs.y[0])
    torch.testing.assert_close(inputs.y[0] + torch.cat(parts, 1), exact)


def test_peers_that_need_more_are_asked_for() -> None:
    assert set(OPTIONAL) < set(PEERS) and "atmm" not in OPTIONAL
