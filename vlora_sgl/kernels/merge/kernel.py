"""One grouped launch that folds an adapter into all weights it targets, and one that restores them.

The switch of V-LoRA section 4.4.1 must fit between two decode steps. Over a 7B model that is 196 matrices, so neither
a launch per matrix nor a product ``B A`` written to memory first is affordable: here one grid covers every tile of
every matrix. A static table of addresses says where each matrix, its pristine copy and its adapter slots live; weights
and slot pools never move, so the table is built once, and an in-place result keeps captured CUDA graphs valid.

Traffic is the floor: each weight is read once (from the pristine copy) and written once. ``A`` and ``B`` tiles are
re-read from L2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COLUMNS = 10  # int64 words of the table per target; the kernel names them


@dataclass(frozen=True, slots=True)
class FoldTarget:
    """One weight matrix, or one slice of a stacked one, that adapters fold into. Shapes are of this rank's shard.

    Attributes:
        name: full module name and slice, for messages: ``model.layers.0.self_attn.qkv_proj[1]``.
        group: the targets that adapters touch together; a launch covers whole groups.
        weight: ``W``, ``[N, K]``, rows contiguous; written in place.
        pristine: ``W0``, ``[N, K]`` contiguous, of the weight's type; on the weight's device or in pinned host memory.
        lora_a: the module's A pool, ``[slots, slices * max_rank, K]``; an adapter of rank r holds slice i in the rows
            ``[i * r, (i + 1) * r)`` of its slot.
        lora_b: the rows of the module's B pool that belong to this slice, ``[slots, N, max_rank]``.
        slice_index: i above.
    """

    name: str
    group: str
    weight: torch.Tensor
    pristine: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    slice_index: int = 0

    def __post_init__(self) -> None:
        n, k = self.weight.shape
        if self.pristine.shape != (n, k) or self.lora_a.shape[2] != k or self.lora_b.shape[1] != n:
            raise ValueError(
                f"{self.name}: weight {(n, k)} does not go with pristine {tuple(self.pristine.shape)}, "
                f"A pool {tuple(self.lora_a.shape)}, B pool {tuple(self.lora_b.shape)}"
            )
        if {self.pristine.dtype, self.lora_a.dtype, self.lora_b.dtype} != {self.weight.dtype}:
            raise ValueError(f"{self.name}: weight, pristine copy and pools must have one type, {self.weight.dtype}")
        strides = (self.weight.stride(), self.pristine.stride(), self.lora_a.stride()[1:], (self.lora_b.stride(2),))
        if strides != ((k, 1), (k, 1), (k, 1), (1,)):
            raise ValueError(f"{self.name}: rows must be contiguous, got strides {strides}")

    def operands(self, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``A [rank, K]`` and ``B [N, rank]`` of the adapter in ``slot``."""
        first = self.slice_index * rank
        return self.lora_a[slot, first : first + rank], self.lora_b[slot, :, :rank]


@triton.jit
def _merge_kernel(
    like: tl.tensor,  # any pointer of the weights' element type; never read
    table: tl.tensor,  # [targets, COLUMNS] int64
    tiles: tl.tensor,  # [programs, 2] int32: target, tile within it (columns fastest)
    columns: tl.constexpr,
    slot: tl.tensor,
    rank: tl.tensor,
    scaling: tl.tensor,
    RESTORE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide every address, row stride and slot stride of the table
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = table + tl.load(tiles + 2 * program).to(tl.int64) * columns
    tile = tl.load(tiles + 2 * program + 1)
    bytes_align: tl.constexpr = ALIGN * (like.dtype.element_ty.primitive_bitwidth // 8)

    w = tl.multiple_of(tl.load(row + 0).to(like.dtype), bytes_align)
    w0 = tl.multiple_of(tl.load(row + 1).to(like.dtype), bytes_align)
    n = tl.load(row + 4)
    k = tl.multiple_of(tl.load(row + 5), ALIGN)

    tiles_k = (k + BLOCK_K - 1) // BLOCK_K
    rows = (tile // tiles_k) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < n) & (cols[None, :] < k)
    offsets = rows[:, None] * k + cols[None, :]
    if not RESTORE:
        a_slot = tl.multiple_of(tl.load(row + 6), ALIGN)
        b_slot = tl.multiple_of(tl.load(row + 7), ALIGN)
        b_row = tl.multiple_of(tl.load(row + 8), ALIGN)
        first = tl.load(row + 9) * rank
        a = tl.multiple_of(tl.load(row + 2).to(like.dtype), bytes_align) + slot * a_slot + first * k
        b = tl.multiple_of(tl.load(row + 3).to(like.dtype), bytes_align) + slot * b_slot
        acc = tl.full((BLOCK_N, BLOCK_K), 0.0, dtype=tl.float32)
        for block in tl.static_range(0, RANK_BLOCKS):
            r = block * BLOCK_R + tl.arange(0, BLOCK_R)
            # Rows of the slot past the adapter's rank hold what an earlier, wider adapter left: mask both sides.
            a_tile = tl.load(
                a + r[:, None] * k + cols[None, :],
                mask=(r[:, None] < rank) & (cols[None, :] < k),
                other=0.0,
            )
            b_tile = tl.load(
                b + rows[:, None] * b_row + r[None, :],
                mask=(rows[:, None] < n) & (r[None, :] < rank),
                other=0.0,
            )
            acc += tl.dot(b_tile, a_tile, input_precision=PRECISION)
    # Loaded after the product: before it, the tile's registers make four warps spill. It passes through once, so keep
    # it from pushing A and B out of L2.
    base = tl.load(w0 + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
    if RESTORE:
        tl.store(w + offsets, base, mask=inside)
    else:
        merged = base.to(tl.float32) + scaling * acc
        tl.store(w + offsets, merged.to(like.dtype.element_ty), mask=inside)


class MergeTable:
    """The static table of all fold targets of one model shard, and the two operations over it.

    Args:
        targets: every foldable matrix; order is free, targets of one group are best adjacent.
        block_n, block_k: tile of one program.
        num_warps: warps per program.

    Raises:
        ValueError: no targets, or targets on several devices or of several types.
    """

    # The tile: fastest of four on an H100 80GB HBM3 (torch 2.11, Triton 3.6, 2026-11-28, bench_switch), all linears of
    # a 7B model at rank 64: 12.19 ms, against 12.43 (128 x 64, 4 warps), 12.55 and 13.10 (128 x 128, 4 and 8 warps).
    def __init__(
        self,
        targets: Sequence[FoldTarget],
        *,
        block_n: int = 64,
        block_k: int = 128,
        num_warps: int = 4,
    ) -> None:
        if len({(t.weight.device, t.weight.dtype) for t in targets}) != 1:
            raise ValueError("a merge table needs at least one target, all on one device and of one type")
        self.targets = tuple(targets)
        self.groups = frozenset(t.group for t in targets)
        self.device = targets[0].weight.device
        self.dtype = targets[0].weight.dtype
        self._block_n, self._block_k, self._num_warps = block_n, block_k, num_warps
        self._rows = [self._row(t) for t in targets]
        self._align = self._common_alignment()
        self._table = torch.tensor(self._rows, dtype=torch.int64, device=self.device)
        self._tiles: dict[frozenset[str], torch.Tensor] = {}

    @staticmethod
    def _row(t: FoldTarget) -> list[int]:
        n, k = t.weight.shape
        addresses = [x.data_ptr() for x in (t.weight, t.pristine, t.lora_a, t.lora_b)]
        return [*addresses, n, k, t.lora_a.stride(0), t.lora_b.stride(0), t.lora_b.stride(1), t.slice_index]

    def _common_alignment(self) -> int:
        """The largest power of two of elements, at most 16 bytes, dividing all addresses and strides."""
        size = self.dtype.itemsize
        align = 16 // size
        while align > 1 and any(
            any(address % (align * size) for address in row[:4]) or any(stride % align for stride in row[5:9])
            for row in self._rows
        ):
            align //= 2
        return align

    def nbytes(self, groups: Iterable[str]) -> int:
        """Bytes one operation over these groups moves at least: read the pristine weights, write the weights."""
        wanted = set(groups)
        return sum(2 * t.weight.numel() * t.weight.element_size() for t in self.targets if t.group in wanted)

    def fold(self, groups: Iterable[str], *, slot: int, rank: int, scaling: float) -> None:
        """``W = round(W0 + scaling * B[slot] A[slot])`` for every target of ``groups``, on the current stream.

        The sum is taken in float32 in a fixed order, so the same operands give the same bits every time.
        """
        wanted = frozenset(groups)
        if self.device.type == "cuda" or _interpreted():
            self._launch(wanted, slot=slot, rank=rank, scaling=scaling, restore=False)
            return
        for t in self._members(wanted):
            a, b = t.operands(slot, rank)
            wide = torch.promote_types(t.weight.dtype, torch.float32)
            t.weight.copy_(t.pristine.to(wide) + scaling * (b.to(wide) @ a.to(wide)))

    def restore(self, groups: Iterable[str]) -> None:
        """``W = W0``, bit for bit, for every target of ``groups``, on the current stream."""
        wanted = frozenset(groups)
        if self.device.type == "cuda" or _interpreted():
            self._launch(wanted, slot=0, rank=0, scaling=0.0, restore=True)
            return
        for t in self._members(wanted):
            t.weight.copy_(t.pristine)

    def refresh_pristine(self) -> None:
        """Take the present weights as the pristine ones, after the base model was updated, on the current stream."""
        for t in self.targets:
            t.pristine.copy_(t.weight)

    def _members(self, groups: frozenset[str]) -> list[FoldTarget]:
        unknown = groups - self.groups
        if unknown:
            raise ValueError(f"no fold targets in groups {sorted(unknown)}; there are {sorted(self.groups)}")
        return [t for t in self.targets if t.group in groups]

    def _launch(self, groups: frozenset[str], *, slot: int, rank: int, scaling: float, restore: bool) -> None:
        tiles = self._tiles_of(groups)
        if tiles.shape[0] == 0:
            return
        block_r = min(64, max(16, triton.next_power_of_2(rank)))
        _merge_kernel[(tiles.shape[0],)](
            self.targets[0].weight,
            self._table,
            tiles,
            COLUMNS,
            slot,
            rank,
            scaling,
            RESTORE=restore,
            ALIGN=self._align,
            # IEEE for float32 weights: the default, tf32, keeps 10 bits of each factor.
            PRECISION="ieee" if self.dtype == torch.float32 else "tf32",
            BLOCK_N=self._block_n,
            BLOCK_K=self._block_k,
            BLOCK_R=block_r,
            RANK_BLOCKS=triton.cdiv(rank, block_r),
            num_warps=self._num_warps,
        )

    def _tiles_of(self, groups: frozenset[str]) -> torch.Tensor:
        """The ``[programs, 2]`` list of tiles of these groups, built at first use (3 MB for a whole 7B model)."""
        if groups not in self._tiles:
            members = set(map(id, self._members(groups)))
            parts = []
            for index, t in enumerate(self.targets):
                if id(t) in members:
                    n, k = t.weight.shape
                    count = triton.cdiv(n, self._block_n) * triton.cdiv(k, self._block_k)
                    local = torch.arange(count, dtype=torch.int32)
                    parts.append(torch.stack([torch.full_like(local, index), local], dim=1))
            tiles = torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.int32)
            self._tiles[groups] = tiles.to(self.device)
        return self._tiles[groups]


def _interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter (``TRITON_INTERPRET=1`` when this module was imported)."""
    return not isinstance(_merge_kernel, triton.JITFunction)
