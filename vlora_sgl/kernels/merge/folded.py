"""Merging into FP8 weights: ``W = quantise(W0 + s B A)`` with scales made anew, and ``W = W0``, numbers and scales.

The copy is the quantised original, so restoring is exact and takes a quarter of what a float32 would. A fold reads it,
adds the update in float32, in units of the old scale, and writes FP8. The new scales are the old ones times powers of
two (``scaled.refit``), so that a weight which an adapter does not change keeps its bits; what changes is rounded once,
to three bits behind the leading one. A block of 128 x 128 is a tile, whose largest element is known before it is
written. A row is not: its scale is made for a bound of its elements, the type's largest number and the product of the
lengths of B's row and A's longest column (Cauchy-Schwarz). That may be a power of two more than needed, which costs
numbers of a floating type nothing, and saves a pass over the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vlora_sgl.kernels.devices import is_hopper
from vlora_sgl.kernels.merge.rows import common_alignment, factors_of
from vlora_sgl.scaled import E4M3, FULL, LARGEST, Scaled, refit

BLOCK = 128, 128
"""Rows and columns of a block, which are those of its tile."""
LENGTHS = 256
"""Columns of A whose lengths a program finds."""
WORDS = 12


class Tile(NamedTuple):
    """What a program works on at a time, in which shape."""

    rows: int
    columns: int
    warps: int
    stages: int


OF_ROWS, OF_BLOCKS = Tile(64, 128, 8, 3), Tile(*BLOCK, 8, 1)
"""Rows share what is read of A, twice the bytes of W at rank 64; 128 rows leave a multiprocessor fewer programs, which
on an H200 costs as much."""


@dataclass(frozen=True, slots=True)
class FoldTarget:
    """One FP8 matrix, or one slice of a stacked one, of this rank's shard.

    Attributes:
        name, group, slice_index: as of ``MergeTarget``.
        weight: W, written in place: numbers and scales.
        base: W0, their copy; on the weight's device or in pinned host memory.
        lora_a, lora_b: as of ``MergeTarget``, of the pool's type.
    """

    name: str
    group: str
    weight: Scaled
    base: Scaled
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    slice_index: int = 0

    def __post_init__(self) -> None:
        n, k = self.weight.weight.shape
        for one in (self.weight, self.base):
            if one.weight.dtype != E4M3 or one.weight.shape != (n, k) or not one.weight.is_contiguous():
                raise ValueError(f"{self.name}: expected {E4M3} [{n}, {k}], contiguous, got {one.weight.dtype}")
            if one.scale.shape != self.weight.scale.shape or not one.scale.is_contiguous():
                raise ValueError(f"{self.name}: scales {tuple(one.scale.shape)}, not contiguous or of two shapes")
        if self.weight.block not in ((1, k), BLOCK):
            raise ValueError(f"{self.name}: scales of a row or of 128 x 128 elements, got {self.weight.block}")
        if self.lora_a.shape[2] != k or self.lora_b.shape[1] != n:
            raise ValueError(f"{self.name}: {(n, k)} does not go with pools {self.lora_a.shape}, {self.lora_b.shape}")
        if n * max(k, self.lora_b.stride(1)) >= 2**31:
            raise ValueError(f"{self.name}: {n} x {k} has too many elements for 32-bit offsets")

    def fold(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> Scaled:
        """W0 with an adapter of ``a`` [r, K] and ``b`` [N, r] folded in, with torch."""
        base = self.base._replace(scale=self.base.scale.to(a.device))
        return refit(self.updated(a, b, scaling), base.scale, base.block, reach(base, a.float(), b.float(), scaling))

    def updated(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """``W0 + s B A`` in float32, before it is quantised."""
        return torch.addmm(self.base_weights.to(a.device), b.float(), a.float(), alpha=scaling)

    @property
    def base_weights(self) -> torch.Tensor:
        """What W0 means, float32."""
        return self.base.wide()


def loss(target: FoldTarget, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """What a fold loses: ``|W - (W0 + s B A)| / |W0 + s B A|``, Frobenius; a float64 on the device.

    It is the relative error, in quadratic mean, of the layer's output for inputs without a direction of their own.
    """
    exact = target.updated(a, b, scaling)
    error = target.fold(a, b, scaling).wide() - exact
    sizes = (torch.linalg.vector_norm(matrix, dtype=torch.float64) for matrix in (error, exact))
    lost, whole = sizes
    return torch.where(whole > 0, lost / whole, 0.0)


def fold_reference(base: Scaled, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> Scaled:
    """The sum in float64, rounded to float32, then quantised as ``scaled.refit`` says."""
    a, b = lora_a.double(), lora_b.double()
    exact = base.weight.double() * _whole(base) + scaling * (b @ a)
    largest = reach(base, a, b, scaling)
    return refit(exact.float(), base.scale, base.block, None if largest is None else largest.float())


def reach(base: Scaled, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """What no element of a row exceeds once ``s B A`` is added, [N, 1]; ``None`` where scales are of blocks."""
    if base.block[0] > 1:
        return None
    longest = torch.linalg.vector_norm(a, dim=0).max()
    return LARGEST[E4M3] * base.scale + abs(scaling) * longest * torch.linalg.vector_norm(b, dim=1, keepdim=True)


def _whole(matrix: Scaled) -> torch.Tensor:
    return Scaled(torch.ones_like(matrix.weight, dtype=torch.float32), matrix.scale, matrix.block).wide().double()


@triton.jit
def _to_e4m3(values, NATIVE: tl.constexpr):
    """Float32 as float8e4nv: the nearest number, ties to even; what is larger than any becomes the largest."""
    if NATIVE:
        return values.to(tl.float8e4nv)  # cvt.rn.satfinite
    # Half a step is added and taken away, by the adder's rule.
    size = tl.abs(values)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # no finer than 2^-9
    step = (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    rounded = tl.minimum((size + step) - step, 448.0)
    return tl.where(values < 0, -rounded, rounded).to(tl.float8e4nv)


@triton.jit
def _columns_of_b(b, rows, block, n, b_row, rank, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr):
    """B's columns of a block of ranks: [BLOCK_N, BLOCK_R], as they are multiplied."""
    s = block * BLOCK_R + tl.arange(0, BLOCK_R)
    # Past the adapter's rank a slot holds what an earlier one left.
    tile = tl.load(b + rows[:, None] * b_row + s[None, :], mask=(rows[:, None] < n) & (s[None, :] < rank), other=0.0)
    return _wide(tile, PRECISION)


@triton.jit
def _wide(tile, PRECISION: tl.constexpr):
    """Products of eight bits would be summed in fewer bits."""
    if tile.dtype.primitive_bitwidth == 8:
        WIDE: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.bfloat16
        tile = tile.to(WIDE)
    return tile


@triton.jit
def _sums(
    w0, a, b, held, given, factor, rows, cols, n, k, b_row, rank,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, RANK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A tile of ``W0 / scale + (s / scale) B A``, float32: of numbers, which an A or B of zeros leaves as they are.

    Past the matrix are zeros. ``held``: B's columns of the first block of ranks.
    """
    inside = (rows[:, None] < n) & (cols[None, :] < k)
    numbers = tl.load(w0 + rows[:, None] * k + cols[None, :], mask=inside & (given > 0), other=0.0)
    r = tl.arange(0, BLOCK_R)
    for block in tl.static_range(0, RANK_BLOCKS):
        s = block * BLOCK_R + r
        a_tile = tl.load(a + s[:, None] * k + cols[None, :], mask=(s[:, None] < rank) & (cols[None, :] < k), other=0.0)
        a_tile = _wide(a_tile, PRECISION)
        if block == 0:
            acc = tl.dot(held, a_tile, input_precision=PRECISION)
        else:
            more = _columns_of_b(b, rows, block, n, b_row, rank, PRECISION, BLOCK_R)
            acc = tl.dot(more, a_tile, acc, input_precision=PRECISION)
    return numbers.to(tl.float32) + factor * acc


@triton.jit
def _fit(largest, LIMIT: tl.constexpr):
    """The least power of two that brings numbers to LIMIT at most, as an exponent; 0 for zeros."""
    bits = tl.div_rn(largest, LIMIT).to(tl.int32, bitcast=True)
    fit = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.where(largest > 0, tl.minimum(tl.maximum(fit, -126), 126), 0)


@triton.jit
def _power(exponent):
    """Two to a power that float32 has."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["slot"])
def _lengths_kernel(
    pool_like: tl.tensor,  # any pointer of the pools' type, never read
    table: tl.tensor,  # [targets, WORDS] int64
    tiles: tl.tensor,  # [programs, 2] int32: target, place within it
    words: tl.constexpr,
    longest: tl.tensor,  # [targets] int32, bits of a float32 >= 0: raised to the square of A's longest column
    slot: tl.tensor,
    rank: tl.tensor,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
) -> None:
    target = tl.load(tiles + 2 * tl.program_id(0))
    row = table + target.to(tl.int64) * words
    k = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    a, _, _ = factors_of(row, pool_like, slot, rank, k, ALIGN)
    cols = tl.load(tiles + 2 * tl.program_id(0) + 1) * BLOCK_K + tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for block in tl.static_range(0, RANK_BLOCKS):
        s = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (s[:, None] < rank) & (cols[None, :] < k)
        tile = tl.load(a + s[:, None] * k + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(tile * tile, 0)
    tl.atomic_max(longest + target, tl.max(squares, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["slot"])
def _fold_kernel(
    like: tl.tensor,  # any pointer of e4m3, never read
    pool_like: tl.tensor,  # any pointer of the pools' type, never read
    table: tl.tensor,  # [targets, WORDS] int64
    tiles: tl.tensor,  # [programs, 2] int32: target, place within it
    words: tl.constexpr,
    longest: tl.tensor,  # of ``_lengths_kernel``; not read of blocks
    slot: tl.tensor,
    rank: tl.tensor,
    scaling: tl.tensor,
    ALIGN: tl.constexpr,  # numbers that divide every address, row stride and slot stride of the table
    BLOCKED: tl.constexpr,
    NATIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    target = tl.load(tiles + 2 * tl.program_id(0))
    place = tl.load(tiles + 2 * tl.program_id(0) + 1)
    row = table + target.to(tl.int64) * words
    w = tl.multiple_of(tl.load(row + 0).to(like.dtype), ALIGN)
    w0 = tl.multiple_of(tl.load(row + 1).to(like.dtype), ALIGN)
    n = tl.load(row + 4).to(tl.int32)
    k = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    a, b, b_row = factors_of(row, pool_like, slot, rank, k, ALIGN)
    scale = tl.load(row + 10).to(tl.pointer_type(tl.float32))
    scale0 = tl.load(row + 11).to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, BLOCK_K)
    if BLOCKED:
        across = tl.cdiv(k, BLOCK_K)
        rows = (place // across) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = (place % across) * BLOCK_K + lane
        given = tl.load(scale0 + place)
        old = tl.where(given > 0, given, 1.0)
        one = tl.zeros((BLOCK_N, 1), tl.float32)
        held = _columns_of_b(b, rows, 0, n, b_row, rank, PRECISION, BLOCK_R)
        sums = _sums(w0, a, b, held, one + given, tl.div_rn(one + scaling, one + old), rows, cols, n, k, b_row, rank,
                     PRECISION, BLOCK_R, RANK_BLOCKS)  # fmt: skip
        fit = _fit(tl.max(tl.max(tl.abs(sums), 1), 0), LIMIT)
        tl.store(scale + place, old * _power(fit))
        inside = (rows[:, None] < n) & (cols[None, :] < k)
        tl.store(w + rows[:, None] * k + cols[None, :], _to_e4m3(sums * _power(-fit), NATIVE), mask=inside)
    else:
        rows = place * BLOCK_N + tl.arange(0, BLOCK_N)
        live = rows < n
        given = tl.load(scale0 + rows, mask=live, other=1.0)
        old = tl.where(given > 0, given, 1.0)
        held = _columns_of_b(b, rows, 0, n, b_row, rank, PRECISION, BLOCK_R)
        length = tl.zeros((BLOCK_N,), tl.float32)
        for block in tl.static_range(0, RANK_BLOCKS):
            part = _columns_of_b(b, rows, block, n, b_row, rank, PRECISION, BLOCK_R).to(tl.float32)
            length += tl.sum(part * part, 1)
        of_a = tl.load(longest + target).to(tl.float32, bitcast=True)
        factor = tl.div_rn(tl.zeros((BLOCK_N,), tl.float32) + scaling, old)
        reach = tl.where(given > 0, 448.0, 0.0) + tl.abs(factor) * tl.sqrt(length * of_a)
        fit = _fit(reach, LIMIT)
        tl.store(scale + rows, old * _power(fit), mask=live)
        shrink = _power(-fit)[:, None]
        for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            sums = _sums(w0, a, b, held, given[:, None], factor[:, None], rows, start + lane, n, k, b_row, rank,
                         PRECISION, BLOCK_R, RANK_BLOCKS)  # fmt: skip
            inside = live[:, None] & (start + lane < k)[None, :]
            tl.store(w + rows[:, None] * k + (start + lane)[None, :], _to_e4m3(sums * shrink, NATIVE), mask=inside)


class FoldTable:
    """All FP8 targets of one model shard, and the two operations over them.

    Args:
        targets: at least one, on one device, with pools of one type.
        dtype: of the engine, by default that of the pools.

    Raises:
        ValueError: they are not.
    """

    def __init__(self, targets: Sequence[FoldTarget], dtype: torch.dtype | None = None) -> None:
        if len({(t.weight.weight.device, t.lora_a.dtype) for t in targets}) != 1:
            raise ValueError("a fold table needs at least one target, all on one device and with pools of one type")
        self.targets = tuple(targets)
        self.groups = frozenset(t.group for t in targets)
        self.device, self.dtype = targets[0].weight.weight.device, dtype or targets[0].lora_a.dtype
        rows = [self._row(t) for t in targets]
        self._align = common_alignment(rows, E4M3.itemsize, targets[0].lora_a.itemsize)
        self._table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._tiles: dict[tuple[frozenset[str], str], torch.Tensor] = {}
        self._longest = torch.zeros(len(targets), dtype=torch.int32, device=self.device)

    @staticmethod
    def _row(t: FoldTarget) -> list[int]:
        n, k = t.weight.weight.shape
        addresses = [x.data_ptr() for x in (t.weight.weight, t.base.weight, t.lora_a, t.lora_b)]
        scales = [x.data_ptr() for x in (t.weight.scale, t.base.scale)]
        strides = [t.lora_a.stride(0), t.lora_b.stride(0), t.lora_b.stride(1)]
        return [*addresses, n, k, *strides, t.slice_index, *scales]

    def nbytes(self, groups: Iterable[str]) -> int:
        """Bytes that a fold of these groups moves at least: every number read and written once."""
        wanted = set(groups)
        return sum(2 * t.weight.weight.numel() for t in self.targets if t.group in wanted)

    def merge(self, groups: frozenset[str], *, slot: int, rank: int, scaling: float) -> None:
        """Fold the adapter of a slot into every target of ``groups`` that is here, on the current stream."""
        if self.device.type == "cuda" or _interpreted():
            for blocked in (False, True):
                self._launch(groups, blocked, slot=slot, rank=rank, scaling=scaling)
            return
        for t in self.members(groups):
            first = t.slice_index * rank
            found = t.fold(t.lora_a[slot, first : first + rank], t.lora_b[slot, :, :rank], scaling)
            t.weight.weight.copy_(found.weight)
            t.weight.scale.copy_(found.scale)

    def restore(self, groups: frozenset[str]) -> None:
        """W0, bit for bit."""
        self._copy([(t.weight, t.base) for t in self.members(groups)])

    def refresh_base(self) -> None:
        """Take the present weights as the base model's."""
        self._copy([(t.base, t.weight) for t in self.targets])

    @staticmethod
    def _copy(pairs: Sequence[tuple[Scaled, Scaled]]) -> None:
        numbers = [_words(to.weight, of.weight) for to, of in pairs]
        for both in (numbers, [(to.scale, of.scale) for to, of in pairs]):
            if both:
                to, of = zip(*both, strict=True)
                torch._foreach_copy_(to, of, non_blocking=True)

    def members(self, groups: frozenset[str]) -> list[FoldTarget]:
        """The targets of these groups."""
        return [t for t in self.targets if t.group in groups]

    def _launch(self, groups: frozenset[str], blocked: bool, *, slot: int, rank: int, scaling: float) -> None:
        tiles = self._tiles_of(groups, "blocks" if blocked else "rows")
        if not len(tiles):
            return
        block_r = min(64, max(16, triton.next_power_of_2(rank)))
        ranks = {"ALIGN": self._align, "BLOCK_R": block_r, "RANK_BLOCKS": triton.cdiv(rank, block_r)}
        like, pool = self.targets[0].weight.weight, self.targets[0].lora_a
        if not blocked:
            self._longest.zero_()
            columns = self._tiles_of(groups, "columns")
            _lengths_kernel[(len(columns),)](
                pool, self._table, columns, WORDS, self._longest, slot, rank, BLOCK_K=LENGTHS, num_warps=4, **ranks
            )
        tile = OF_BLOCKS if blocked else OF_ROWS
        _fold_kernel[(len(tiles),)](
            like, pool, self._table, tiles, WORDS, self._longest, slot, rank, scaling,
            BLOCKED=blocked,
            NATIVE=self.device.type == "cuda" and is_hopper(self.device),
            LIMIT=FULL,
            PRECISION="ieee" if self.dtype == torch.float32 else "tf32",
            BLOCK_N=tile.rows,
            BLOCK_K=tile.columns,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **ranks,
        )  # fmt: skip

    def _tiles_of(self, groups: frozenset[str], kind: str) -> torch.Tensor:
        """[programs, 2]: target and place, of those whose scales are of ``blocks``, or of ``rows``, of which there are
        places among A's ``columns``, too."""
        if (groups, kind) not in self._tiles:
            parts = [torch.empty(0, 2, dtype=torch.int32)]
            longest_first = sorted(enumerate(self.targets), key=lambda one: -one[1].weight.weight.shape[1])
            for index, t in longest_first:
                n, k = t.weight.weight.shape
                if t.group in groups and (t.weight.block[0] > 1) == (kind == "blocks"):
                    counts = {
                        "blocks": t.weight.scale.numel(),
                        "rows": -(-n // OF_ROWS.rows),
                        "columns": -(-k // LENGTHS),
                    }
                    local = torch.arange(counts[kind], dtype=torch.int32)
                    parts.append(torch.stack([torch.full_like(local, index), local], dim=1))
            self._tiles[groups, kind] = torch.cat(parts).to(self.device)
        return self._tiles[groups, kind]


def _words(*numbers: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of eight bits as they are copied fastest: eight to a word, where all of them fill words."""
    whole = all(x.numel() % 8 == 0 and x.data_ptr() % 8 == 0 for x in numbers)
    return [x.view(-1).view(torch.int64 if whole else torch.uint8) for x in numbers]


def _interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return not isinstance(_fold_kernel, triton.JITFunction)
