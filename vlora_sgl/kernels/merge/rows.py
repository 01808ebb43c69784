# A kernel parameter is a pointer, a scalar or a constant; Triton reads the annotations, mypy cannot.
# mypy: disallow-untyped-defs=False
"""What the rows of both tables begin with: addresses and strides, what divides them, and a slot's factors there."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl


def common_alignment(rows: Sequence[Sequence[int]], size: int, pool: int) -> int:
    """The largest power of two of a weight's elements, at most 16 bytes, dividing all addresses and strides.

    Args:
        rows: of a table: addresses of weight, copy, A and B, rows, columns, strides of slots of A and B, of B's rows.
        size, pool: bytes of an element of a weight and of a pool.
    """
    align = 16 // size
    while align > 1 and any(
        any(address % (align * size) for address in row[:2])
        or any(address % (align * pool) for address in row[2:4])
        or any(stride % align for stride in row[5:9])
        for row in rows
    ):
        align //= 2
    return align


@triton.jit
def factors_of(row, pool_like, slot, rank, k, ALIGN: tl.constexpr):
    """(A, B, stride of B's rows) of a slot for the target of a table's row, whose slice of A begins behind others."""
    pool_align: tl.constexpr = ALIGN * (pool_like.dtype.element_ty.primitive_bitwidth // 8)
    a_slot = tl.multiple_of(tl.load(row + 6), ALIGN)
    b_slot = tl.multiple_of(tl.load(row + 7), ALIGN)
    b_row = tl.multiple_of(tl.load(row + 8).to(tl.int32), ALIGN)
    first = tl.load(row + 9) * rank
    a = tl.multiple_of(tl.load(row + 2).to(pool_like.dtype), pool_align) + slot * a_slot + first * k
    b = tl.multiple_of(tl.load(row + 3).to(pool_like.dtype), pool_align) + slot * b_slot
    return a, b, b_row
