"""What the search tries, and the table it wrote; its timings need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vlora_sgl.kernels import tiling, tiling_search
from vlora_sgl.kernels.atmm import make_routing, tiles_of
from vlora_sgl.kernels.atmm.launch import Tiles
from vlora_sgl.kernels.tiling import TABLES, TilingTable, default_tile, unpack
from vlora_sgl.kernels.tiling_search import (
    MODELS,
    SHARED_BYTES,
    Job,
    Projection,
    bytes_and_flops,
    candidates,
    jobs_of,
    routings,
    winners,
    with_winners,
)

JOBS = list(jobs_of(MODELS["qwen2.5-vl-7b"], [16, 64], [1, 32, 8192], [8], torch.bfloat16))
OF_EXPERTS = [
    job
    for job in jobs_of(MODELS["qwen3-30b-a3b"], [16], [32, 8192], [8], torch.bfloat16)
    if job.projection.experts > 1
]


@pytest.mark.parametrize("job", [*JOBS, *OF_EXPERTS], ids=lambda job: job.label)
def test_candidates_begin_with_the_built_in_tile_and_fit_the_chip(job: Any) -> None:
    tiles = candidates(job)
    assert tiles[0] == default_tile(unpack(job.key)) and len(set(tiles)) == len(tiles) > 1
    moved, flops = bytes_and_flops(job)
    assert moved > 0 and flops > 0
    for tile in tiles[1:]:
        for size in (tile.block_m, tile.block_n, tile.block_k or 1, tile.warps):
            assert size & (size - 1) == 0
        size = 1 if job.op == "scaled" else job.dtype.itemsize
        assert tile.stages * (tile.block_m + tile.block_n) * tile.block_k * size <= SHARED_BYTES


def test_a_model_has_one_key_for_each_job_and_partners_come_first() -> None:
    keys = [job.key for job in JOBS]
    assert len(set(keys)) == len(keys)
    first = [(job.op, job.projection.name) for job in JOBS if job.rows == 32 and job.rank == 64]
    assert first.index(("linear_shrink", "qkv_proj")) < first.index(("linear", "qkv_proj"))
    assert first.index(("scaled_shrink", "qkv_proj")) < first.index(("scaled", "qkv_proj"))


def test_experts_are_searched_as_their_kernels_see_them() -> None:
    """A token's choices are rows, an expert of a slot is a slot; and what follows gate_up depends on how many."""
    seen = [(job.projection.name, job.op, job.rows, job.slots) for job in OF_EXPERTS]
    assert seen == [
        (f"experts.{name}", op, rows, 1024)
        for rows, end in ((256, "grouped_expand"), (65536, "grouped_silu"))
        for name, ends in (("gate_up_proj", end), ("down_proj", "grouped_expand"))
        for op in ("grouped_shrink", ends)
    ]
    shrink = next(job for job in OF_EXPERTS if job.rows == 65536)
    assert bytes_and_flops(shrink)[0] == 2 * (8192 * 2048 + 1024 * 32 * 2048 + 65536 * 32)


@pytest.mark.parametrize("share", [1, 2])
def test_torch_applies_what_a_jobs_rows_are_to_have(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's choices with its slot, of experts that differ."""
    given: list[Any] = []
    monkeypatch.setattr(tiling_search, "device_experts", lambda *operands: given.append(operands) or (0, 1))
    projection = Projection("experts", (0, 8), 16, experts=4, choices=2, share=share)
    routed, reference = routings(Job("grouped_shrink", projection, 16, 20, 12, 1, torch.bfloat16), torch.device("cpu"))
    ((routing, ids, weights, experts),) = given
    assert (routed, experts, weights.unique().tolist()) == (int(share == 1), 4, [1.0])
    assert all(len(set(chosen)) == 2 for chosen in ids.tolist())
    assert routing.tuples is not None and routing.rows == 10 and len(routing.tuples.words) == 4
    assert (reference.rows, reference.slots, reference.share) == (20, 12, share)
    for rows, ((slot, weight),) in reference.groups:
        for row in rows.tolist():
            assert divmod(slot, 4) == (routing.tuples.rows[row // 2] - 1, ids[row // 2, row % 2]) and weight == 1.0


def test_a_weight_in_eight_bits_moves_half_the_bytes() -> None:
    of = {
        job.op: bytes_and_flops(job) for job in JOBS if (job.rows, job.rank, job.projection.name) == (32, 16, "o_proj")
    }
    assert 0.5 < of["scaled"][0] / of["linear"][0] < 0.6 and of["scaled"][1] == of["linear"][1]


@pytest.mark.parametrize("searched", [False, True])
def test_a_weight_in_eight_bits_has_tiles_of_its_own_or_as_many_bytes_of_the_others(searched: bool) -> None:
    def key(op: str) -> int:
        return tiling.pack(op, 3584, 3584, 16, 32, 8, dtype=torch.bfloat16)

    plain, own = tiling.Tile(32, 64, 128, 2, 4, 4), tiling.Tile(32, 128, 512, 1, 8, 3)
    shrink, other = tiling.Tile(32, 32, 64, 8, 4, 6), tiling.Tile(32, 16, 64, 4, 4, 6)
    entries = {key("linear"): plain, key("linear_shrink"): shrink}
    table = TilingTable(entries | ({key("scaled"): own, key("scaled_shrink"): other} if searched else {}))
    a, b = torch.empty(8, 16, 3584, dtype=torch.bfloat16), torch.empty(8, 3584, 16, dtype=torch.bfloat16)
    routing = make_routing([(np.arange(32), ((0, 1.0),))], 32, [16] * 8, [1.0] * 8, "cpu", dense=True)
    found = tiles_of("scaled", a, b, routing, table)
    assert found == (Tiles("scaled", other, own) if searched else Tiles("scaled", shrink, replace(plain, block_k=256)))


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
