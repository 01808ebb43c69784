"""The kernel benchmark's workloads and figures, without a GPU."""

import pytest

from benchmarks.kernels.workloads import PROJECTIONS, grid, rows_by_adapter


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
