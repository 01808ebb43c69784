"""Launching the kernels: the choice of tiles, grids and workspaces.

A call is two launches: a shrink, and what it ends with, which names the call (``FIRST``). The operator, the search and
the compilation at start all resolve ``Tiles`` and ``run`` them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from vlora_sgl.kernels.atmm import activation, dense, grouped, rotated
from vlora_sgl.kernels.atmm.row_routing import DENSE_MAX_SLOTS, Routing, Vectors
from vlora_sgl.kernels.devices import ARRIVALS, arrivals, early, is_hopper, shared_memory
from vlora_sgl.kernels.tiling import Tile, TilingTable, pack, table_for
from vlora_sgl.scaled import E4M3

MAX_PARTS = 4
BOUNDS = ("O1", "O2", "O3", "O4")
_SHARED = 160 << 10  # bytes that the pipeline of an expand may fill
FIRST = {
    "linear": "linear_shrink",
    "scaled": "scaled_shrink",
    "expand": "shrink",
    "grouped_write": "grouped_shrink",
    "grouped_expand": "grouped_shrink",
    "grouped_silu": "grouped_shrink",
}
"""What a call ends with -> the shrink before it; both as the tables call them (``tiling.OPS``)."""

DENSE = ("linear", "scaled", "expand")
"""Ends of few rows."""

Start = Callable[..., object]
"""Called as ``start(kernel, grid, *args, **options)``: launches, or only compiles."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of both launches of a call.

    Attributes:
        end: what it ends with, a key of ``FIRST``.
        shrink, expand: of its first and its second launch.
    """

    end: str
    shrink: Tile
    expand: Tile


def tiles_of(end: str, a: torch.Tensor, b: torch.Tensor, routing: Routing, table: TilingTable | None = None) -> Tiles:
    """The tiles of a call: those of ``table``, or of the device's own."""
    (_, n, r), (_, low, k) = b.shape, a.shape
    pairs = 1 if routing.tile_slots is None else routing.tile_slots.shape[1]
    slots = routing.active_most if end in DENSE else routing.slots
    dtype = torch.bfloat16 if b.dtype == E4M3 else b.dtype  # eight bits are multiplied as sixteen
    return _resolve(table or table_for(b.device.index), end, (n, k, r, routing.rows, slots), low // r, pairs, dtype)


@lru_cache(maxsize=1 << 16)
def _resolve(
    table: TilingTable, end: str, shape: tuple[int, int, int, int, int], parts: int, pairs: int, dtype: torch.dtype
) -> Tiles:
    if end == "scaled" and not table.has(end):
        tiles = _resolve(table, "linear", shape, parts, pairs, dtype)
        return replace(tiles, end=end, expand=replace(tiles.expand, block_k=2 * tiles.expand.block_k))  # as many bytes
    ops = FIRST[end], end
    return Tiles(end, *(table.lookup(pack(op, *shape, parts=parts, pairs=pairs, dtype=dtype)) for op in ops))


def launched(function: triton.JITFunction, grid: tuple[int, ...], *args: object, **options: object) -> object:
    """A ``Start``: the kernel runs."""
    return function[grid](*args, **options)


def compiled(function: triton.JITFunction, grid: tuple[int, ...], *args: object, **options: object) -> object:
    """A ``Start``: the kernel is compiled, and does not run."""
    return function.warmup(*args, grid=grid, **options)


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Routing, Sequence[int]]
"""``(y, x, a, b, routing, offsets)``, as in ``atmm``."""


class ScaledInput(NamedTuple):
    """An input for a weight in e4m3.

    Attributes:
        numbers: [M, K] e4m3.
        scale: [M] float32, of each row of them.
        weight_scale: [N] float32, of each row of the weight.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    weight_scale: torch.Tensor


def run(
    tiles: Tiles,
    operands: Operands,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    vectors: Vectors | None = None,
    scaled: ScaledInput | None = None,
    out: torch.Tensor | None = None,
    start: Start = launched,
) -> torch.Tensor:
    """Both launches of a call.

    Args:
        weight: of the base GEMM of ``linear``.
        bias: what ``linear`` and ``grouped_write`` add.
        scaled: with a ``weight`` in e4m3, the same of x.
        vectors: of the slots, where rows have marks; not for ``grouped_write``, which leaves x W^T to another.
        out: where ``grouped_silu`` puts the activation, [M, I].
        start: launches each kernel.

    Returns:
        y, to which ``expand`` and ``grouped_expand`` have added the adapters' part; ``linear`` and ``scaled`` have
        written base and adapters to it, ``grouped_write`` the adapters' part of every row. ``grouped_silu`` leaves y
        [M, >= 2 I] and returns the activation, [M, I], freshly allocated unless ``out`` is given.
    """
    if tiles.end in DENSE:
        return _dense(tiles, operands, weight, bias, vectors, scaled, start)
    if tiles.end == "grouped_silu":
        return _grouped_silu(tiles, operands, vectors, out, start)
    return _grouped(tiles, operands, bias, vectors, start)


def _of_vectors(vectors: Vectors | None, routing: Routing) -> tuple[torch.Tensor | None, ...]:
    """What kernels with vectors are given more: the bias that y holds, the vectors, the rows' marks."""
    return (None, None, None) if vectors is None else (vectors.bias, vectors.slots, routing.marks)


def _vector_slot(vectors: Vectors | None) -> int:
    return 0 if vectors is None else vectors.slots.stride(0)


def _bounds(offsets: Sequence[int]) -> tuple[int, int, int, int]:
    """The column bounds after 0, padded to MAX_PARTS by repeating the last."""
    ends = [*offsets[1:], *[offsets[-1]] * (MAX_PARTS + 1 - len(offsets))]
    return ends[0], ends[1], ends[2], ends[3]


def _column_tiles(offsets: Sequence[int], block: int) -> int:
    return sum(-(-(end - start) // block) for start, end in pairwise(offsets))


def rank_pad(rank: int) -> int:
    """The rank as the kernels tile it: a power of two that ``tl.dot`` takes."""
    return max(16, triton.next_power_of_2(rank))


@lru_cache(maxsize=1 << 12)
def fitting(tile: Tile, block_m: int, size: int, shared: int) -> Tile:
    """A tile of a shrink or a GEMM whose pipeline fits a device: fewer stages, then shorter steps.

    Args:
        block_m: rows of a program.
        size: bytes of an element.
        shared: bytes of shared memory that a program may have.
    """
    stage = (block_m + tile.block_n) * tile.block_k * size
    stages = min(tile.stages, shared // stage)
    if stages < 2 <= tile.stages and tile.block_k > 32:
        return fitting(replace(tile, block_k=tile.block_k // 2), block_m, size, shared)
    return replace(tile, stages=max(1, stages))


def _stages(tile: Tile, block_m: int, rp: int, pairs: int, x: torch.Tensor) -> int:
    """The pipeline depth of an expand, or what of it fits."""
    step = (tile.block_n + block_m) * rp * pairs * x.itemsize
    return max(1, min(tile.stages, min(_SHARED, shared_memory(x.device)) // step))


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    vectors: Vectors | None = None,
) -> None:
    """Refuse tensors that do not fit each other.

    Raises:
        ValueError: says what was expected and what came.
    """
    check_inputs(x, a, b, routing, offsets)
    n = b.shape[1]
    if y.shape[0] != routing.rows or y.shape[1] < n:
        raise ValueError(f"y must be [{routing.rows}, >= {n}], got {tuple(y.shape)}")
    _check_layout("y", y, x.dtype)
    if vectors is not None:
        slots = vectors.slots
        if slots.shape != (routing.slots, 2, n) or slots.stride()[1:] != (n, 1) or slots.dtype != torch.float32:
            raise ValueError(
                f"vectors must be float32 [{routing.slots}, 2, {n}], each slot's contiguous, got {slots.dtype} "
                f"{tuple(slots.shape)} with strides {slots.stride()}"
            )


def check_inputs(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, routing: Routing, offsets: Sequence[int]) -> None:
    """``check``, where nothing is written to y."""
    parts, (places, n, r) = len(offsets) - 1, b.shape
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"1 to {MAX_PARTS} stacked projections are supported, got {parts}")
    rows = routing.rows // routing.share
    if x.shape != (rows, a.shape[2]):
        raise ValueError(f"x must be [{rows}, {a.shape[2]}] (rows of the routing, K of a), got {tuple(x.shape)}")
    if a.shape[:2] != (places, parts * r) or max(routing.places, default=0) >= places:
        wanted = max(routing.places, default=0) + 1
        raise ValueError(f"a must be [>= {wanted}, {parts} * {r}, K], got {tuple(a.shape)}, b {tuple(b.shape)}")
    if offsets[0] != 0 or offsets[-1] != n or list(offsets) != sorted(offsets):
        raise ValueError(f"offsets must rise from 0 to {n}, got {tuple(offsets)}")
    factors = E4M3 if a.dtype == E4M3 else x.dtype
    for name, tensor, dtype in (("x", x, x.dtype), ("a", a, factors), ("b", b, factors)):
        _check_layout(name, tensor, dtype)


def _check_layout(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous along its last dimension, got strides {tensor.stride()}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must have dtype {dtype}, as what it goes with, got {tensor.dtype}")


def _dense_shrink(
    x: torch.Tensor, a: torch.Tensor, rank: int, parts: int, routing: Routing, tile: Tile, start: Start
) -> torch.Tensor:
    """h [M, ACTIVE * C * RP] of every active slot."""
    assert routing.gates is not None and routing.active is not None
    slots, active, rp, pdl = routing.slots, routing.active_most, rank_pad(rank), is_hopper(x.device)
    m, block_m = routing.rows, _dense_rows(routing)
    shrink = fitting(tile, block_m, x.itemsize, shared_memory(x.device))
    low_tiles = active * -(-parts * rp // shrink.block_n)
    h = torch.empty((m, active * parts * rp), dtype=x.dtype, device=x.device)
    start(
        dense.dense_shrink_kernel, (low_tiles * shrink.split_k,),
        x, a, h, routing.gates, routing.active, _partials(x, low_tiles, shrink, block_m), arrivals(x.device, "shrink"),
        m, x.stride(0), a.stride(0),
        K=x.shape[1], C=parts, RP=rp, SLOTS=slots, ACTIVE=active, SPLIT=shrink.split_k, BM=block_m, BN=shrink.block_n,
        BK=shrink.block_k, PDL=pdl, num_warps=shrink.warps, num_stages=shrink.stages, **early(pdl),
    )  # fmt: skip
    return h


def _dense_rows(routing: Routing) -> int:
    """Rows of a dense program: all of them."""
    return triton.next_power_of_2(max(routing.rows, 16))


def _dense_options(tile: Tile, x: torch.Tensor, rank: int, routing: Routing) -> dict[str, int | bool]:
    """Constants that what follows a dense shrink is compiled with, whatever it is."""
    rp, block_m, pdl, active = rank_pad(rank), _dense_rows(routing), is_hopper(x.device), routing.active_most
    group = max(1, 64 // rp) if active > DENSE_MAX_SLOTS else 1
    return {
        "R": rank, "RP": rp, "ACTIVE": active, "ACTIVE_P": triton.next_power_of_2(active), "GROUP": group,
        "STAGES": _stages(tile, block_m, group * rp, 1, x), "BM": block_m, "BN": tile.block_n, "PDL": pdl,
        "num_warps": tile.warps, **early(pdl),
    }  # fmt: skip


def _dense(
    tiles: Tiles,
    operands: Operands,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    vectors: Vectors | None,
    scaled: ScaledInput | None,
    start: Start,
) -> torch.Tensor:
    y, x, a, b, routing, offsets = operands
    r, parts, m, expand = b.shape[2], len(offsets) - 1, routing.rows, tiles.expand
    h, common = _dense_shrink(x, a, r, parts, routing, tiles.shrink, start), _dense_options(expand, x, r, routing)
    common |= {"V_SLOT": _vector_slot(vectors), **dict(zip(BOUNDS, _bounds(offsets), strict=True))}
    columns = _column_tiles(offsets, expand.block_n)
    held_bias, slots_of_vectors, marks = _of_vectors(vectors, routing)
    if weight is None:
        start(
            dense.dense_expand_kernel, (columns,),
            y, b, h, routing.active, held_bias, slots_of_vectors, marks, m, y.stride(0), b.stride(0), b.stride(1),
            C=parts, num_stages=1, **common,
        )  # fmt: skip
        return y
    block_m = _dense_rows(routing)
    left, x_scale, w_scale = scaled or (x, None, None)
    expand = fitting(expand, block_m, left.itemsize, shared_memory(x.device))
    start(
        dense.dense_linear_kernel, (columns * expand.split_k,),
        left, weight, x if bias is None else bias, y, b, h, routing.active, _partials(x, columns, expand, block_m),
        arrivals(x.device, "linear"), slots_of_vectors, marks, x_scale, w_scale, m, left.stride(0), y.stride(0),
        weight.stride(0), b.stride(0), b.stride(1),
        K=x.shape[1], C=parts, HAS_BIAS=bias is not None, SPLIT=expand.split_k, BK=expand.block_k,
        num_stages=expand.stages, **common,
    )  # fmt: skip
    return y


def can_rotate(tiles: Tiles, rotation: rotated.Rotation) -> bool:
    """Whether ``run_rotated`` has tiles of whole pairs of columns: those of a head are cut into powers of two."""
    width = rotation.k_cache.shape[2]
    return tiles.end == "linear" and width % tiles.expand.block_n == 0 and width & (width - 1) == 0


def run_rotated(
    tiles: Tiles,
    operands: Operands,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: rotated.Rotation,
    start: Start = launched,
) -> torch.Tensor:
    """Both launches of ``linear`` on stacked q, k and v, whose second rotates and stores (``rotated``).

    Args:
        operands: their first, y, is q: [M, HEADS * D], contiguous.
    """
    q, x, a, b, routing, _ = operands
    (_, kv_heads, width), r, m = rotation.k_cache.shape, b.shape[2], routing.rows
    h, common = _dense_shrink(x, a, r, 3, routing, tiles.shrink, start), _dense_options(tiles.expand, x, r, routing)
    block_m = _dense_rows(routing)
    expand = fitting(tiles.expand, block_m, x.itemsize, shared_memory(x.device))
    columns = weight.shape[0] // expand.block_n
    start(
        rotated.dense_rotated_kernel, (columns * expand.split_k,),
        x, weight, x if bias is None else bias, q, b, h, routing.active, _partials(x, columns, expand, block_m),
        arrivals(x.device, "linear"), *rotation.operands[:5], m, x.stride(0), weight.stride(0), b.stride(0),
        b.stride(1), rotation.positions.stride(0), rotation.k_cache.stride(0), rotation.v_cache.stride(0),
        K=x.shape[1], HEADS=q.shape[1] // width, KV_HEADS=kv_heads, HALF=width // 2, FIRST=rotation.sections[0],
        SECOND=rotation.sections[1], HAS_BIAS=bias is not None, SPLIT=expand.split_k, BK=expand.block_k,
        num_stages=expand.stages, **common,
    )  # fmt: skip
    return q


def _partials(x: torch.Tensor, tiles: int, tile: Tile, block_m: int) -> torch.Tensor:
    """Room for what the splits of so many tiles leave for the last of them; any tensor where there are none."""
    if tile.split_k == 1:
        return x
    return torch.empty(tiles * tile.split_k * block_m * tile.block_n, dtype=torch.float32, device=x.device)


def _grouped_shrink(
    x: torch.Tensor, a: torch.Tensor, rank: int, parts: int, routing: Routing, tile: Tile, start: Start
) -> torch.Tensor:
    """h [P, M, C * RP] of every row tile's slots; rows without a slot are left as they come."""
    assert routing.tile_rows is not None and routing.tile_slots is not None
    (tiles, block_m), pairs = routing.tile_rows.shape, routing.tile_slots.shape[1]
    rp, pdl = rank_pad(rank), is_hopper(x.device)
    tile = fitting(tile, block_m, x.itemsize, shared_memory(x.device))
    h_tiles = -(-pairs * parts * rp // tile.block_n)
    h = torch.empty((pairs, routing.rows, parts * rp), dtype=x.dtype, device=x.device)
    if tiles * h_tiles > ARRIVALS:
        tile = replace(tile, split_k=1)  # this many tiles fill the chip without splitting
    start(
        grouped.grouped_shrink_kernel, (h_tiles * tile.split_k, tiles),
        x, a, h, routing.tile_rows, routing.tile_slots, routing.tile_gates, routing.n_tiles,
        _partials(x, tiles * h_tiles, tile, block_m), arrivals(x.device, "shrink"),
        routing.rows, x.stride(0), a.stride(0), h.stride(0),
        K=x.shape[1], C=parts, RP=rp, PAIRS=pairs, SHARE=routing.share, SPLIT=tile.split_k, BM=block_m,
        FOLDS=routing.folds, BN=tile.block_n, BK=tile.block_k, PDL=pdl, num_warps=tile.warps, num_stages=tile.stages,
        **early(pdl),
    )  # fmt: skip
    return h


def _grouped(
    tiles: Tiles, operands: Operands, bias: torch.Tensor | None, vectors: Vectors | None, start: Start
) -> torch.Tensor:
    y, x, a, b, routing, offsets = operands
    assert routing.tile_rows is not None and routing.tile_slots is not None and routing.n_tiles is not None
    parts, r = len(offsets) - 1, b.shape[2]
    rp, (o1, o2, o3, o4) = rank_pad(r), _bounds(offsets)
    (count, block_m), pairs = routing.tile_rows.shape, routing.tile_slots.shape[1]
    expand, h = tiles.expand, _grouped_shrink(x, a, r, parts, routing, tiles.shrink, start)
    n_tiles, pdl = _column_tiles(offsets, expand.block_n), is_hopper(x.device)
    held_bias, slots_of_vectors, marks = _of_vectors(vectors, routing)
    start(
        grouped.grouped_expand_kernel, (-(-n_tiles // expand.run), count),
        y, held_bias if vectors is not None else x if bias is None else bias, b, h, routing.tile_rows,
        routing.tile_slots, routing.n_tiles, slots_of_vectors, marks, routing.rows, y.stride(0), b.stride(0),
        b.stride(1), h.stride(0),
        O1=o1, O2=o2, O3=o3, O4=o4, C=parts, R=r, RP=rp, PAIRS=pairs, PAIRS_P=triton.next_power_of_2(pairs),
        N_TILES=n_tiles, RUN=expand.run, STAGES=_stages(expand, block_m, rp, pairs, x),
        ACCUMULATE=tiles.end == "grouped_expand", HAS_BIAS=bias is not None, BM=block_m, FOLDS=routing.folds,
        BN=expand.block_n, PDL=pdl, V_SLOT=_vector_slot(vectors), num_warps=expand.warps, num_stages=1, **early(pdl),
    )  # fmt: skip
    return y


def _grouped_silu(
    tiles: Tiles, operands: Operands, vectors: Vectors | None, out: torch.Tensor | None, start: Start
) -> torch.Tensor:
    y, x, a, b, routing, _ = operands
    assert routing.tile_rows is not None and routing.tile_slots is not None and routing.n_tiles is not None
    (_, n, r), (count, block_m), pairs = b.shape, routing.tile_rows.shape, routing.tile_slots.shape[1]
    rp, width, pdl = rank_pad(r), n // 2, is_hopper(x.device)
    tile, h = tiles.expand, _grouped_shrink(x, a, r, 2, routing, tiles.shrink, start)
    act = y.new_empty((routing.rows, width)) if out is None else out
    held = 2 * block_m * rp * pairs * x.itemsize  # both halves of h
    stage = 2 * tile.block_n * (rp * pairs + block_m) * x.itemsize  # of B and of y
    stages = max(1, min(tile.stages, (min(_SHARED, shared_memory(x.device)) - held) // stage))
    stages = stages if vectors is None else 1  # else their tiles, [BM, BN] of float32, would be kept for every stage
    start(
        activation.grouped_silu_kernel, (-(-width // (tile.block_n * tile.run)), count),
        act, y, b, h, routing.tile_rows, routing.tile_slots, routing.n_tiles, *_of_vectors(vectors, routing),
        routing.rows, act.stride(0), y.stride(0), b.stride(0), b.stride(1), h.stride(0),
        I=width, R=r, RP=rp, PAIRS=pairs, PAIRS_P=triton.next_power_of_2(pairs), RUN=tile.run, STAGES=stages,
        BM=block_m, FOLDS=routing.folds, BN=tile.block_n, PDL=pdl, V_SLOT=_vector_slot(vectors),
        FAST=act.is_cuda, num_warps=tile.warps, num_stages=1, **early(pdl),
    )  # fmt: skip
    return act


def library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The base linear by the library torch calls."""
    return F.linear(x, weight, bias)
