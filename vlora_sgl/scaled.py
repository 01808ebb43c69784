"""Weights of eight bits and fewer: numbers beside scales, each of which is shared by a block of a matrix.

One form for all formats that are read on a CPU and for all that adapters are folded into: ``weight`` [N, K], e4m3 or
int8, and ``scale`` [ceil(N / n), ceil(K / k)] float32 for blocks of n rows and k columns. One row is a block where a
format has a scale per output channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
FULL = 464.0
"""The largest of e4m3, and half a step."""
"""The largest number of each type that is written; int8 stays symmetric."""


class Scaled(NamedTuple):
    """A matrix as the module says.

    Attributes:
        weight: [N, K].
        scale: of every block, float32.
        block: rows and columns of a block; the last ones may be cut.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def wide(self) -> torch.Tensor:
        """[N, K] float32: each number times its scale, rounded once."""
        return self.weight.float() * spread(self.scale, self.block, self.weight.shape)

    def rows(self, rows: slice) -> Scaled:
        """These rows, views of the whole.

        Raises:
            ValueError: they cut a block.
        """
        n = self.block[0]
        if rows.start % n or (rows.stop % n and rows.stop != len(self.weight)):
            raise ValueError(f"rows {rows.start} to {rows.stop} cut blocks of {n}")
        return Scaled(self.weight[rows], self.scale[rows.start // n : -(-rows.stop // n)], self.block)


def spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scale of every element of a matrix, or of every row, where that is all there is."""
    n, k = block
    rows = scale if n == 1 else scale.repeat_interleave(n, 0)[: shape[0]]
    return rows if k >= shape[1] else rows.repeat_interleave(k, 1)[:, : shape[1]]


def block_largest(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest size of an element in every block of [N, K]."""
    (n, k), (rows, columns) = block, values.shape
    k = min(k, columns)
    filled = torch.nn.functional.pad(values.abs(), (0, -columns % k, 0, -rows % n))
    return filled.view(filled.shape[0] // n, n, filled.shape[1] // k, k).amax((1, 3))


def quantise(values: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> Scaled:
    """[N, K] in blocks, with the scales that use the whole of the type; a block of zeros has scale 1."""
    largest = block_largest(values.float(), block)
    scale = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    return Scaled(to_type(values.float() / spread(scale, block, values.shape), dtype), scale, block)


def to_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 to the nearest number of the type, ties to even; what is larger than any becomes the largest."""
    values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (values.round() if dtype == torch.int8 else values).to(dtype)


def refit(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], largest: torch.Tensor | None = None
) -> Scaled:
    """New values of a matrix in e4m3, with its old scales times the least powers of two that make the largest fit.

    E4m3 is a floating type: what did not change keeps its bits, unless it falls below the type's range. A number of up
    to ``FULL`` fits: it becomes 448, which is as near as numbers below are to theirs.

    Args:
        values: [N, K] float32.
        scale: the old scales, of the same blocks.
        largest: what is to fit, of every block, where that is not the largest of the values.
    """
    old = torch.where(scale > 0, scale, 1.0)
    largest = block_largest(values, block) if largest is None else largest
    mantissa, exponent = torch.frexp(largest / (FULL * old))
    fit = torch.where(mantissa > 0, exponent - (mantissa == 0.5).int(), 0)
    new = torch.ldexp(old, fit)
    return Scaled(to_type(values / spread(new, block, values.shape), E4M3), new, block)
