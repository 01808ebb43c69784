"""What the search tries, and the table it wrote; its timings need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlora_sgl.kernels import tiling
from vlora_sgl.kernels.tiling import TABLES, TilingTable, default_tile, unpack
from vlora_sgl.kernels.tiling_search import (
    MODELS,
    SHARED_BYTES,
    bytes_and_flops,
    candidates,
    jobs_of,
    winners,
    with_winners,
)

JOBS = list(jobs_of(MODELS["qwen2.5-vl-7b"], [16, 64], [1, 32, 8192], [8], torch.bfloat16))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_candidates_begin_with_the_built_in_tile_and_fit_the_chip(job: Any) -> None:
    tiles = candidates(job)
    assert tiles[0] == default_tile(unpack(job.key)) and len(set(tiles)) == len(tiles) > 1
    moved, flops = bytes_and_flops(job)
    assert moved > 0 and flops > 0
    for tile in tiles[1:]:
        for size in (tile.block_m, tile.block_n, tile.block_k or 1, tile.warps):
            assert size & (size - 1) == 0
        assert tile.stages * (tile.block_m + tile.block_n) * tile.block_k * job.dtype.itemsize <= SHARED_BYTES


def test_a_model_has_one_key_for_each_job_and_partners_come_first() -> None:
    keys = [job.key for job in JOBS]
    assert len(set(keys)) == len(keys)
    first = [(job.op, job.projection.name) for job in JOBS if job.rows == 32 and job.rank == 64]
    assert first.index(("linear_shrink", "qkv_proj")) < first.index(("linear", "qkv_proj"))


def test_the_shipped_table_has_the_decode_tiles_of_a_7b_shape() -> None:
    path = TABLES / f"{tiling.table_name('NVIDIA H200', '3.6.0')}.json"
    table = TilingTable.load(path)
    wanted = {job.key for job in JOBS if job.rows == 32 and job.op in ("linear_shrink", "linear")}
    assert wanted <= table.exact.keys()


def test_what_won_on_other_shapes_is_tried_first() -> None:
    def job(model: Any, op: str = "linear_shrink", rank: int = 64) -> Any:
        jobs = jobs_of(MODELS[model], [rank], [32], [8], torch.bfloat16)
        return next(j for j in jobs if j.op == op and j.projection.name == "o_proj")

    won, other = tiling.Tile(32, 16, 64, 2, 4, 5), tiling.Tile(32, 16, 64, 2, 4, 6)
    deep = tiling.Tile(32, 16, 256, 64, 4, 2)  # more parts than this projection's width has
    seven, wide = job("qwen2.5-vl-7b"), job("llava-1.5-13b")
    table = {seven.key: (won, {}), job("qwen2.5-vl-7b", rank=16).key: (other, {}), wide.key: (deep, {})}
    mine = job("qwen2.5-vl-3b")
    found = with_winners(mine, winners(table))
    assert found[:2] == [candidates(mine)[0], won]
    assert found[2:] == candidates(mine)[1:]
