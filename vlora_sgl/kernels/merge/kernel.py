"""One grouped launch that merges an adapter into all weights it targets, and one that restores them.

The switch of V-LoRA section 4.4.1 must fit between two decode steps. Over a 7B model that is 196 matrices, so neither
a launch per matrix nor a product ``B A`` written to memory first is affordable: here one grid covers every tile of
every matrix. A static table of addresses says where each matrix, its copy of the base weights and its adapter slots
live; weights and slot pools never move, so the table is built once, and an in-place result keeps captured CUDA graphs
valid.

Traffic is the floor: each weight is read once (from the copy of the base weights) and written once. A program keeps
one tile of ``A`` and walks down a column of the matrix, so that only ``B`` is re-read, from L2; the next tiles of
``W0`` and ``B`` are on their way while the product of the present ones runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlora_sgl.kernels.devices import shared_memory
from vlora_sgl.kernels.merge.folded import FoldTable, FoldTarget
from vlora_sgl.kernels.merge.rows import common_alignment, factors_of
from vlora_sgl.scaled import E4M3

COLUMNS = 12  # int64 words of the table per target; the kernel names them


@dataclass(frozen=True, slots=True)
class MergeTarget:
    """One weight matrix, or one slice of a stacked one, that adapters merge into. Shapes are of this rank's shard.

    Attributes:
        name: full module name and slice, for messages: ``model.layers.0.self_attn.qkv_proj[1]``.
        group: the targets that adapters touch together; a launch covers whole groups.
        weight: ``W``, ``[N, K]``, rows contiguous; written in place.
        base_weights: ``W0``, ``[N, K]`` contiguous, of the weight's type; on the weight's device or in pinned host
            memory.
        lora_a: the module's A pool, ``[slots, slices * max_rank, K]``, of the weight's type or e4m3; an adapter of
            rank r holds slice i in the rows ``[i * r, (i + 1) * r)`` of its slot.
        lora_b: the rows of the module's B pool that belong to this slice, ``[slots, N, max_rank]``.
        slice_index: i above.
        factors: the rows of the module's factors that belong to this slice, ``[slots, N]`` float32 (DoRA's
            ``m / |W0 + s B A|``, numbered by slot); ``None`` where no adapter can have any.
    """

    name: str
    group: str
    weight: torch.Tensor
    base_weights: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    slice_index: int = 0
    factors: torch.Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.weight.shape
        if n * max(k, self.lora_b.stride(1)) >= 2**31:
            raise ValueError(f"{self.name}: {n} x {k} has too many elements for 32-bit offsets")
        if self.base_weights.shape != (n, k) or self.lora_a.shape[2] != k or self.lora_b.shape[1] != n:
            raise ValueError(
                f"{self.name}: weight {(n, k)} does not go with base weights {tuple(self.base_weights.shape)}, "
                f"A pool {tuple(self.lora_a.shape)}, B pool {tuple(self.lora_b.shape)}"
            )
        pools = {self.lora_a.dtype, self.lora_b.dtype}
        if self.base_weights.dtype != self.weight.dtype or pools not in ({self.weight.dtype}, {E4M3}):
            raise ValueError(
                f"{self.name}: weight, copy of the base weights and pools must have one type, {self.weight.dtype}, or "
                f"pools e4m3"
            )
        strides = (
            self.weight.stride(),
            self.base_weights.stride(),
            self.lora_a.stride()[1:],
            (self.lora_b.stride(2),),
        )
        if strides != ((k, 1), (k, 1), (k, 1), (1,)):
            raise ValueError(f"{self.name}: rows must be contiguous, got strides {strides}")
        if self.factors is not None and (self.factors.shape[1:], self.factors.stride(1)) != ((n,), 1):
            raise ValueError(f"{self.name}: factors must be rows of {n}, got {tuple(self.factors.shape)}")

    def operands(self, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``A [rank, K]`` and ``B [N, rank]`` of the adapter in ``slot``."""
        first = self.slice_index * rank
        return self.lora_a[slot, first : first + rank], self.lora_b[slot, :, :rank]


@dataclass(frozen=True, slots=True)
class BiasTarget:
    """A bias that adapters are merged into.

    Attributes:
        bias: ``[N]``, written in place.
        base_bias: its copy, as the base model has it.
        shifts: ``[slots, N]`` float32, what each slot's adapter adds.
    """

    bias: torch.Tensor
    base_bias: torch.Tensor
    shifts: torch.Tensor


@dataclass(frozen=True, slots=True)
class MergeTile:
    """How the work is cut. One program walks down ``steps`` tiles of ``[rows, columns]`` below each other.

    Attributes:
        rows, columns: one tile, powers of two, at least 16.
        steps: tiles of one program; its tile of ``A`` stays in shared memory meanwhile.
        warps: warps of one program.
        stages: tiles of ``W0`` and ``B`` on their way at a time, one of them in use.
    """

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int


# By bytes of an element. For two bytes the best of seven of bench_switch --search, rank 64, all linears of a 7B model,
# on a card that copies 4.3 TB/s (torch 2.11, Triton 3.6, 2026-11-28): 6.42 ms, 94.7 % of a copy; with three tiles in
# flight 6.57, with two 6.99, narrower ones 6.81. Exact float32 products are not made by tensor cores, and unrolled
# large ones compile for minutes.
TILES = {
    2: MergeTile(rows=64, columns=128, steps=8, warps=4, stages=4),
    4: MergeTile(rows=32, columns=32, steps=8, warps=4, stages=1),
}


@triton.jit(
    do_not_specialize=["slot", "vector_slot"]
)  # or slot 1 would be a kernel of its own, compiled at its first switch
def _merge_kernel(
    like: tl.tensor,  # any pointer of the weights' element type; never read
    pool_like: tl.tensor,  # and one of the pools'
    factors_like: tl.tensor,  # a float32 pointer, never read, where rows have factors; else None
    table: tl.tensor,  # [targets, COLUMNS] int64
    tiles: tl.tensor,  # [programs, 2] int32: target, place within it (columns fastest)
    columns: tl.constexpr,
    slot: tl.tensor,
    vector_slot: tl.tensor,  # which factors, where there are any
    rank: tl.tensor,
    scaling: tl.tensor,
    RESTORE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide every address, row stride and slot stride of the table
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = table + tl.load(tiles + 2 * program).to(tl.int64) * columns
    place = tl.load(tiles + 2 * program + 1)
    bytes_align: tl.constexpr = ALIGN * (like.dtype.element_ty.primitive_bitwidth // 8)

    w = tl.multiple_of(tl.load(row + 0).to(like.dtype), bytes_align)
    w0 = tl.multiple_of(tl.load(row + 1).to(like.dtype), bytes_align)
    n = tl.load(row + 4).to(tl.int32)
    k = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)  # 32-bit offsets spare a third of the registers

    tiles_k = (k + BLOCK_K - 1) // BLOCK_K
    top = (place // tiles_k) * (BLOCK_N * STEPS)
    cols = (place % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = top + tl.arange(0, BLOCK_N)
    if RESTORE:
        inside = (rows[:, None] < n) & (cols[None, :] < k)
        offsets = rows[:, None] * k + cols[None, :]
        tl.store(w + offsets, tl.load(w0 + offsets, mask=inside, eviction_policy="evict_first"), mask=inside)
    else:
        a, b, b_row = factors_of(row, pool_like, slot, rank, k, ALIGN)
        # Rows of the slot past the adapter's rank hold what an earlier, wider adapter left: mask both sides.
        r = tl.arange(0, BLOCK_R)
        a_tile = tl.load(a + r[:, None] * k + cols[None, :], mask=(r[:, None] < rank) & (cols[None, :] < k), other=0.0)
        a_tile = a_tile.to(like.dtype.element_ty)
        # The compiler turns this loop's loads into asynchronous copies, STAGES deep: W streams while the product runs.
        for _ in tl.range(0, STEPS, num_stages=STAGES):
            inside = (rows[:, None] < n) & (cols[None, :] < k)
            offsets = rows[:, None] * k + cols[None, :]
            b_tile = tl.load(
                b + rows[:, None] * b_row + r[None, :], mask=(rows[:, None] < n) & (r[None, :] < rank), other=0.0
            )
            # It passes through once: keep it from pushing A and B out of L2.
            base = tl.load(w0 + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
            acc = tl.dot(b_tile.to(like.dtype.element_ty), a_tile, input_precision=PRECISION)
            for block in tl.static_range(1, RANK_BLOCKS):
                s = block * BLOCK_R + r
                a_more = tl.load(
                    a + s[:, None] * k + cols[None, :], mask=(s[:, None] < rank) & (cols[None, :] < k), other=0.0
                )
                b_more = tl.load(
                    b + rows[:, None] * b_row + s[None, :], mask=(rows[:, None] < n) & (s[None, :] < rank), other=0.0
                )
                a_more, b_more = a_more.to(like.dtype.element_ty), b_more.to(like.dtype.element_ty)
                acc = tl.dot(b_more, a_more, acc, input_precision=PRECISION)
            merged = base.to(tl.float32) + scaling * acc
            if factors_like is not None:
                factors = tl.load(row + 10).to(factors_like.dtype) + vector_slot * tl.load(row + 11)
                merged *= tl.load(factors + rows, mask=rows < n, other=0.0)[:, None]
            tl.store(w + offsets, merged.to(like.dtype.element_ty), mask=inside)
            rows += BLOCK_N


class MergeTable:
    """The static table of all merge targets of one model shard, and the two operations over it.

    Args:
        targets: every mergeable matrix; order is free, targets of one group are best adjacent.
        tile: how the work is cut; the one of ``TILES`` when left out.
        biases: what merges of adapters with vectors shift.
        folded: the FP8 targets, of an engine of the targets' type; the targets may then be none.

    Raises:
        ValueError: no targets, or targets on several devices or of several types.
    """

    def __init__(
        self,
        targets: Sequence[MergeTarget],
        tile: MergeTile | None = None,
        biases: Sequence[BiasTarget] = (),
        folded: FoldTable | None = None,
    ) -> None:
        kinds = {(t.weight.device, t.weight.dtype) for t in targets}
        kinds |= set() if folded is None else {(folded.device, folded.dtype)}
        if len(kinds) != 1 or len({t.lora_a.dtype for t in targets}) > 1:
            raise ValueError("a merge table needs at least one target, all on one device and of one type")
        self.targets, self.biases, self.folded = tuple(targets), tuple(biases), folded
        self._shifted = False
        self.groups = frozenset(t.group for t in self.everything)
        ((self.device, self.dtype),) = kinds
        self.tile = tile or TILES[self.dtype.itemsize]
        self._rows = [self._row(t) for t in targets]
        pool = targets[0].lora_a.itemsize if targets else self.dtype.itemsize
        self._align = common_alignment(self._rows, self.dtype.itemsize, pool)
        self._table = torch.tensor(self._rows, dtype=torch.int64, device=self.device)
        self._tiles: dict[tuple[frozenset[str], int], torch.Tensor] = {}

    @staticmethod
    def _row(t: MergeTarget) -> list[int]:
        n, k = t.weight.shape
        addresses = [x.data_ptr() for x in (t.weight, t.base_weights, t.lora_a, t.lora_b)]
        factors = (0, 0) if t.factors is None else (t.factors.data_ptr(), t.factors.stride(0))
        return [*addresses, n, k, t.lora_a.stride(0), t.lora_b.stride(0), t.lora_b.stride(1), t.slice_index, *factors]

    def nbytes(self, groups: Iterable[str]) -> int:
        """Bytes one operation over these groups moves at least: read the base weights, write the weights."""
        wanted = set(groups)
        own = sum(2 * t.weight.numel() * t.weight.element_size() for t in self.targets if t.group in wanted)
        return own + (0 if self.folded is None else self.folded.nbytes(wanted))

    @property
    def everything(self) -> Sequence[MergeTarget | FoldTarget]:
        """All targets."""
        return *self.targets, *self._folds(None)

    def _folds(self, groups: frozenset[str] | None) -> Sequence[FoldTarget]:
        """The FP8 targets of these groups, by default all."""
        if self.folded is None:
            return ()
        return self.folded.targets if groups is None else self.folded.members(groups)

    def merge(
        self, groups: Iterable[str], *, slot: int, rank: int, scaling: float, vectors: int | None = None
    ) -> None:
        """``W = round(W0 + scaling * B[slot] A[slot])`` for every target of ``groups``, on the current stream.

        The sum is taken in float32 in a fixed order, so the same operands give the same bits every time.

        Args:
            vectors: the number of the slot, for an adapter with vectors: each row is multiplied by its factor before
                it is rounded, and every bias is shifted.
        """
        wanted = frozenset(groups)
        self._shift(vectors)
        if self.folded is not None:
            self.folded.merge(wanted, slot=slot, rank=rank, scaling=scaling)
        if self.device.type == "cuda" or _interpreted():
            self._launch(wanted, slot=slot, rank=rank, scaling=scaling, vectors=vectors, restore=False)
            return
        for t in self._members(wanted):
            a, b = t.operands(slot, rank)
            wide = torch.promote_types(t.weight.dtype, torch.float32)
            merged = t.base_weights.to(wide) + scaling * (b.to(wide) @ a.to(wide))
            if vectors is not None and t.factors is not None:
                merged *= t.factors[vectors][:, None].to(wide)
            t.weight.copy_(merged)

    def _shift(self, slot: int | None) -> None:
        """Every bias as the base model's, with what the adapter in ``slot`` adds, if any does."""
        if slot is not None:
            for target in self.biases:
                target.bias.copy_(target.base_bias + target.shifts[slot])
        elif self._shifted:
            torch._foreach_copy_([t.bias for t in self.biases], [t.base_bias for t in self.biases])
        self._shifted = slot is not None and bool(self.biases)

    def restore(self, groups: Iterable[str]) -> None:
        """``W = W0``, bit for bit, for every target of ``groups``, on the current stream; and every bias."""
        wanted = frozenset(groups)
        self._shift(None)
        if self.folded is not None:
            self.folded.restore(wanted)
        if self.device.type == "cuda" or _interpreted():
            self._launch(wanted, slot=0, rank=0, scaling=0.0, vectors=None, restore=True)
            return
        for t in self._members(wanted):
            t.weight.copy_(t.base_weights)

    def warm_up(self, max_rank: int) -> None:
        """Compile what merges of ranks up to ``max_rank`` run, so that no switch waits; weights keep their bits.

        Ranks that are no multiple of 16 are compiled at their first switch.
        """
        smallest = [min(self.groups, key=lambda group: self.nbytes([group]))]
        rank = 16
        while rank < 2 * max_rank and self.device.type == "cuda":
            for vectors in (None, 0) if any(t.factors is not None for t in self.targets) else (None,):
                self.merge(smallest, slot=0, rank=min(rank, max_rank), scaling=0.0, vectors=vectors)
            rank *= 2
        self.restore(smallest)

    def refresh_base(self) -> None:
        """Take the present weights as the base model's, after the base model was updated, on the current stream."""
        for t in self.targets:
            t.base_weights.copy_(t.weight)
        if self.folded is not None:
            self.folded.refresh_base()
        for bias in self.biases:
            bias.base_bias.copy_(bias.bias)

    def _members(self, groups: frozenset[str]) -> list[MergeTarget]:
        unknown = groups - self.groups
        if unknown:
            raise ValueError(f"no merge targets in groups {sorted(unknown)}; there are {sorted(self.groups)}")
        return [t for t in self.targets if t.group in groups]

    def _launch(
        self,
        groups: frozenset[str],
        *,
        slot: int,
        rank: int,
        scaling: float,
        vectors: int | None,
        restore: bool,
    ) -> None:
        tile = self.tile
        steps = 1 if restore else tile.steps
        tiles = self._tiles_of(groups, steps)
        if tiles.shape[0] == 0:
            return
        block_r = min(128 if self.dtype.itemsize == 2 else 32, max(16, triton.next_power_of_2(rank)))
        rank_blocks = triton.cdiv(rank, block_r)
        _merge_kernel[(tiles.shape[0],)](
            self.targets[0].weight,
            self.targets[0].lora_a,
            None if vectors is None else self.targets[0].factors,
            self._table,
            tiles,
            COLUMNS,
            slot,
            vectors or 0,
            rank,
            scaling,
            RESTORE=restore,
            ALIGN=self._align,
            # IEEE for float32 weights: the default, tf32, keeps 10 bits of each factor.
            PRECISION="ieee" if self.dtype == torch.float32 else "tf32",
            BLOCK_N=tile.rows,
            BLOCK_K=tile.columns,
            BLOCK_R=block_r,
            RANK_BLOCKS=rank_blocks,
            STEPS=steps,
            STAGES=self._stages(block_r) if rank_blocks == 1 else 1,
            num_warps=tile.warps,
        )

    def _stages(self, block_r: int) -> int:
        """The tile's stages, or as many as this card's shared memory holds beside a tile of A."""
        if self.device.type != "cuda":
            return self.tile.stages
        room = shared_memory(torch.device("cuda")) // self.dtype.itemsize
        fit = (room - block_r * self.tile.columns) // (self.tile.rows * (self.tile.columns + block_r))
        return max(1, min(self.tile.stages, fit))

    def _tiles_of(self, groups: frozenset[str], steps: int) -> torch.Tensor:
        """The ``[programs, 2]`` list of programs for these groups, built at first use (7 MB for a whole 7B model)."""
        if (groups, steps) not in self._tiles:
            members = set(map(id, self._members(groups)))
            parts = []
            for index, t in enumerate(self.targets):
                if id(t) in members:
                    n, k = t.weight.shape
                    count = triton.cdiv(n, self.tile.rows * steps) * triton.cdiv(k, self.tile.columns)
                    local = torch.arange(count, dtype=torch.int32)
                    parts.append(torch.stack([torch.full_like(local, index), local], dim=1))
            tiles = torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.int32)
            self._tiles[groups, steps] = tiles.to(self.device)
        return self._tiles[groups, steps]


def _interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter (``TRITON_INTERPRET=1`` when this module was imported)."""
    return not isinstance(_merge_kernel, triton.JITFunction)
