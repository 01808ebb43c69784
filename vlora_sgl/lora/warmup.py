"""The grouped kernels of prefills that run eagerly, compiled at start: the first large prefill must not wait for them.

Captured graphs have what smaller prefills launch. What is compiled depends on the linear's shape, the tile, the rows
of a block and the slots per row, not on the number of rows. So the tiles are those of many rows, and the operands the
slots themselves with a few rows of input and output: no more memory than those, and no launch.

What routed rows need besides (lower tiles, more slots a row) is compiled when they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from vlora_sgl.kernels.atmm import DENSE_MAX_ROWS, Routing, Vectors, launch, make_routing
from vlora_sgl.kernels.atmm.launch import Tiles, tiles_of
from vlora_sgl.kernels.atmm.row_routing import TILE_ROWS, is_dense
from vlora_sgl.kernels.tiling import bucket

logger = logging.getLogger(__name__)

ROWS = 16
"""Of the operands that stand for a batch's."""


@dataclass(frozen=True)
class Linear:
    """A wrapped linear, by what its kernels are compiled for.

    Attributes:
        a, b: its slots in the pool.
        offsets: bounds of its stacked projections' columns.
        ends: the calls it may make, by what they end with. Where its base weight goes through the operator, one may
            write before the base GEMM accumulates; where an activation adds the adapters' part, it is always that
            one's.
        bias: what is added with it, if anything.
        dtype: of its inputs.
        vectors: its slots' vectors, where adapters may have any.
    """

    a: torch.Tensor
    b: torch.Tensor
    offsets: tuple[int, ...]
    ends: tuple[str, ...]
    bias: torch.Tensor | None
    dtype: torch.dtype
    vectors: torch.Tensor | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for linears whose kernels are the same."""
        a, b = self.a, self.b
        return self.offsets, a.shape, a.stride(), b.shape, b.stride(), a.dtype, self.ends, self.bias is not None

    def tiles(self, routing: Routing) -> Iterator[Tiles]:
        """The tiles of the calls that a batch may make; where rows have vectors, none writes before the base GEMM."""
        for end in self.ends:
            if routing.marks is None or end != "grouped_write":
                yield tiles_of(end, self.a, self.b, routing)


def wrapped_linears(manager: Any) -> list[Linear]:
    """One of each kind that a LoRA manager has wrapped for the operator."""
    found: dict[tuple[object, ...], Linear] = {}
    for layer in manager.lora_modules:
        for module in layer.values():
            if hasattr(module, "fusible"):
                ends = ("grouped_expand", "grouped_write") if module.fusible else ("grouped_expand",)
                if getattr(module, "deferred", None) is not None:
                    ends = ("grouped_silu",)
                slots, dtype = (module.a, module.b, module.offsets), manager.dtype
                linear = Linear(*slots, ends, module.own_bias, dtype, module.vectors)
                found.setdefault(linear.key, linear)
    return list(found.values())


def compile_prefills(manager: Any, captured: int, most: int) -> int:
    """Compile, on a GPU, what prefills beyond the captured ones launch; returns the number of kernels asked for.

    Args:
        manager: the LoRA manager, with its pool.
        captured: tokens of the largest captured prefill, 0 if none is.
        most: tokens of the largest prefill there can be.
    """
    backend, slots = manager.lora_backend, manager.max_loras_per_batch
    linears = wrapped_linears(manager) if manager.device.type == "cuda" else []
    fewest = 1 + (captured or (DENSE_MAX_ROWS if is_dense(1, slots, backend.most_dense) else 0))
    if not linears or fewest > most:
        return 0
    start = time.monotonic()
    sizes = range(bucket(fewest), bucket(most) + 1)
    compiler = _Compiler()
    for pairs, block in product((1, 2) if manager.two_slots_a_row else (1,), _blocks(fewest, slots)):
        routing = _routing(slots, pairs, block, backend.places, manager.device)
        for marks in (None, routing.n_tiles)[: 1 + backend.marks_rows]:  # some words in the place of marks
            routing = replace(routing, marks=marks)
            large = [replace(routing, rows=1 << size) for size in sizes]
            for linear in linears:
                _compile(linear, routing, {tiles for batch in large for tiles in linear.tiles(batch)}, compiler)
    logger.info(
        "compiled %d kernels for prefills of %d to %d tokens in %.1f s",
        *(len(compiler.kernels), fewest, most, time.monotonic() - start),
    )
    return len(compiler.kernels)


def _blocks(fewest: int, slots: int) -> Sequence[int]:
    """Rows per tile that batches of ``fewest`` rows and more may have (see ``make_routing``)."""
    most_groups = 2 * slots + 1  # a slot's rows, those that take a merged adapter out besides, and base rows
    return TILE_ROWS[fewest >= 32 * most_groups :]


def _routing(slots: int, pairs: int, block: int, places: Sequence[int], device: torch.device) -> Routing:
    """Rows that apply so many slots each; which ones, nothing depends on."""
    applied = tuple((slot, 1.0) for slot in range(pairs))
    group = (np.arange(ROWS, dtype=np.int32), applied)
    return make_routing([group], ROWS, [1] * slots, [1.0] * slots, device, places=places, block=block, dense=False)


def _compile(linear: Linear, routing: Routing, tiles: Iterable[Tiles], compiler: _Compiler) -> None:
    a, b, offsets = linear.a, linear.b, linear.offsets
    x, y = (a.new_empty((ROWS, width), dtype=linear.dtype) for width in (a.shape[2], offsets[-1]))
    for each in tiles:
        bias = linear.bias if each.end == "grouped_write" else None  # what accumulates finds the bias in y
        vectors = None
        if routing.marks is not None and linear.vectors is not None:
            vectors = Vectors(linear.vectors, linear.bias)
        launch.run(each, (y, x, a, b, routing, offsets), bias=bias, vectors=vectors, start=compiler)


class _Compiler:
    """Compiles and loads each kernel once (a ``launch.Start``).

    Attributes:
        kernels: what there was to compile.
    """

    def __init__(self) -> None:
        self.kernels: set[tuple[object, ...]] = set()

    def __call__(self, function: Any, grid: tuple[int, ...], *args: Any, **options: object) -> None:
        sizes = (value for value in args if isinstance(value, int))
        left_out = tuple(value is None for value in args)
        name = function.__name__, args[0].dtype, left_out, *sizes, *options.values()
        if name not in self.kernels:
            self.kernels.add(name)
            try:
                load(launch.compiled(function, grid, *args, **options))
            except OutOfResources as error:
                logger.warning("%s does not fit this device: %s", function.__name__, error)


def load(compiled: Any) -> object:
    """Have Triton load a compiled kernel, and build its launcher: else its first launch does."""
    return compiled.run
