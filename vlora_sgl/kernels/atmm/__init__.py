"""ATMM, the adaptive-tiling matrix multiplication: one operator for every way of applying adapters (V-LoRA, 4.3).

``atmm`` adds the adapters' part to rows a base layer has computed; ``atmm_linear`` computes base and adapters
together, which saves launches for few rows (decode) and a pass over the output for many (prefill).
``atmm_silu_and_mul`` adds it to gate and up inside the activation that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora_sgl.kernels.atmm import launch
from vlora_sgl.kernels.atmm.launch import ScaledInput, tiles_of
from vlora_sgl.kernels.atmm.reference import atmm_reference, atmm_silu_reference, atmm_torch
from vlora_sgl.kernels.atmm.rotated import Rotation
from vlora_sgl.kernels.atmm.row_routing import DENSE_MAX_ROWS, Group, Pairs, Routing, Vectors, make_routing
from vlora_sgl.kernels.rotary import rotate_and_store
from vlora_sgl.kernels.tiling import TilingTable

__all__ = [
    "DENSE_MAX_ROWS",
    "Group",
    "Pairs",
    "Rotation",
    "Routing",
    "ScaledInput",
    "Vectors",
    "atmm",
    "atmm_linear",
    "atmm_reference",
    "atmm_rotated",
    "atmm_scaled",
    "atmm_silu_and_mul",
    "atmm_silu_reference",
    "atmm_torch",
    "make_routing",
    "on_kernels",
    "tiles_of",
]

WRITE_FIRST_SHARE = 0.75
"""Share of rows with adapters from which ``atmm_linear`` writes their part before the base GEMM.

Beside the products, writing first moves y twice (2 M N elements, though the GEMM hides its half); accumulating
afterwards moves the touched rows twice (2 f M N). A prototype on an H100 took 1.120 and 1.144 of the base at f = 1.
"""


def atmm(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    table: TilingTable | None = None,
    vectors: Vectors | None = None,
) -> torch.Tensor:
    """``y[t, o[c]:o[c+1]] += sum_j g[t, j] * (x[t] A_jc^T) B_jc^T``, in place.

    Args:
        y: [M, >= N] output rows of the base layer. Changed in place.
        x: [M, K] input rows, of y's dtype (float16, bfloat16 or float32).
        a: [S, C * R, K] A of every pool slot; a slot of rank r keeps its C parts in the first C * r rows. Both factors
            are of x's dtype, or both e4m3 (``lora.eight_bits``).
        b: [S, N, R] B of every pool slot; a slot of rank r keeps it in the first r columns. Slots of unequal sizes are
            views that overlap (``lora.pool``); ``routing.places`` then says where in S a slot begins.
        routing: which slots apply to which rows, and the slots' ranks and scalings.
        offsets: C + 1 bounds of the stacked projections' columns, from 0 to N.
        table: tiles to use instead of the device's own table.
        vectors: of the slots that have them, and the bias that y contains; read where rows of the routing are marked.
            ``None``: no adapter has any for this linear.

    Returns:
        y.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    launch.check(y, x, a, b, routing, offsets, vectors)
    vectors = _wanted(vectors, routing)
    if not routing.rows:
        return y
    if not on_kernels(x.device):
        return atmm_torch(y, x, a, b, routing, offsets, vectors)
    end = "expand" if routing.gates is not None else "grouped_expand"
    operands = y, x, a, b, routing, offsets
    launch.run(tiles_of(end, a, b, routing, table), operands, vectors=vectors)
    return _add_more(operands, table)


def _add_more(operands: launch.Operands, table: TilingTable | None) -> torch.Tensor:
    """``atmm`` of what rows apply besides (``Routing.more``), one after the other: y."""
    y, x, a, b, routing, offsets = operands
    for more in routing.more:
        atmm(y, x, a, b, more, offsets, table)
    return y


def atmm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    table: TilingTable | None = None,
    vectors: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x W^T + bias`` plus ``atmm``: [M, N], freshly allocated.

    Few rows take the shrink and, beside it, the base GEMM that ends with the expand. Many rows take the expand first,
    written not accumulated, and let the library's GEMM accumulate onto it (beta = 1): one pass less over the rows with
    adapters, but one more over those without. So where those are many (a mixture with many hot rows), the GEMM comes
    first; and where rows have vectors, because those change the GEMM's result.

    Args:
        weight: [N, K] base weight; bias: [N] or None. The others as in ``atmm``; N must equal ``offsets[-1]``.
        vectors: of the slots, as ``Vectors`` has them.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    if weight.shape != (offsets[-1], x.shape[1]):
        raise ValueError(f"weight must be [{offsets[-1]}, {x.shape[1]}], got {tuple(weight.shape)}")
    given = None if vectors is None else Vectors(vectors, bias)
    changed = _wanted(given, routing) is not None
    if not on_kernels(x.device) or not routing.rows or (changed and routing.gates is None):
        return atmm(launch.library_linear(x, weight, bias), x, a, b, routing, offsets, table, given)
    y = x.new_empty((routing.rows, offsets[-1]))
    launch.check(y, x, a, b, routing, offsets, given)
    operands = y, x, a, b, routing, offsets
    if routing.gates is not None:
        tiles, wanted = tiles_of("linear", a, b, routing, table), _wanted(given, routing)
        return launch.run(tiles, operands, weight=weight, bias=bias, vectors=wanted)
    if routing.touched is not None and routing.touched < WRITE_FIRST_SHARE * routing.rows:
        return atmm(launch.library_linear(x, weight, bias), x, a, b, routing, offsets, table)
    launch.run(tiles_of("grouped_write", a, b, routing, table), operands, bias=bias)
    y.addmm_(x, weight.T)
    return _add_more(operands, table)


def atmm_scaled(
    x: torch.Tensor,
    scaled: ScaledInput,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    table: TilingTable | None = None,
    vectors: torch.Tensor | None = None,
) -> torch.Tensor:
    """``atmm_linear`` of few rows on a weight in e4m3: [M, N] of x's type, freshly allocated.

    The base product is of quantised numbers, as in the engine's own kernel; adapters see x as it is.

    Args:
        scaled: x, quantised row by row, and the scales of the weight's rows.
        weight: [N, K] e4m3. The others as in ``atmm_linear``; the routing has gates.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit, or a routing of many rows.
    """
    numbers, x_scale, w_scale = scaled
    shapes = tuple(numbers.shape), x_scale.numel(), w_scale.numel(), tuple(weight.shape)
    if shapes != (tuple(x.shape), len(x), offsets[-1], (offsets[-1], x.shape[1])):
        raise ValueError(
            f"numbers, scales and weight must fit {tuple(x.shape)} and {offsets[-1]} columns, got {shapes}"
        )
    if routing.gates is None:
        raise ValueError("a weight in e4m3 is multiplied here for few rows alone")
    given = None if vectors is None else Vectors(vectors, bias)
    y = x.new_empty((routing.rows, offsets[-1]))
    launch.check(y, x, a, b, routing, offsets, given)
    tiles, wanted = tiles_of("scaled", a, b, routing, table), _wanted(given, routing)
    operands = y, x, a, b, routing, offsets
    return launch.run(tiles, operands, weight=weight, bias=bias, vectors=wanted, scaled=scaled)


def atmm_rotated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    rotation: Rotation,
    table: TilingTable | None = None,
) -> torch.Tensor:
    """``rotate_and_store`` of what ``atmm_linear`` gives for stacked q, k and v: q, with k and v in the cache.

    For few rows one launch fewer than both; the bits are theirs.

    Args:
        offsets: bounds of q, k and v.
        rotation: positions, angles and the cache. The others as in ``atmm_linear``.

    Returns:
        q, [M, HEADS * D], contiguous.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    tiles = tiles_of("linear", a, b, routing, table) if routing.gates is not None else None
    if tiles is None or not (on_kernels(x.device) and routing.rows and launch.can_rotate(tiles, rotation)):
        qkv = atmm_linear(x, weight, bias, a, b, routing, offsets, table)
        return rotate_and_store(qkv, *rotation.operands)
    q = x.new_empty((routing.rows, offsets[1]))
    launch.check_inputs(x, a, b, routing, offsets)
    return launch.run_rotated(tiles, (q, x, a, b, routing, offsets), weight, bias, rotation)


def atmm_silu_and_mul(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    table: TilingTable | None = None,
    vectors: Vectors | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``silu(gate) * up`` of the gate and up that ``atmm`` would leave in y: [M, I], freshly allocated unless given.

    For many rows (a routing with row tiles). Where ``atmm`` and an activation move y four times, this reads it once.
    The adapters' part joins gate and up in float32, and nothing is rounded before the product is.

    Args:
        y: [M, >= 2 I] gate and up of the base layer. Changed only where rows apply more than one pass adds.
        offsets: (0, I, 2 I). The others as in ``atmm``.
        out: [M, I] of y's dtype; rows that are in no tile are left as they are.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit; a routing for few rows; a device without kernels.
    """
    launch.check(y, x, a, b, routing, offsets, vectors)
    width = b.shape[1] // 2
    if tuple(offsets) != (0, width, 2 * width):
        raise ValueError(f"offsets must bound two projections of equal width, got {tuple(offsets)}")
    if routing.tile_rows is None or not on_kernels(x.device):
        raise ValueError("the fused activation needs row tiles and a device with kernels: use atmm and an activation")
    if out is not None and (out.shape, out.dtype, out.stride(1)) != ((routing.rows, width), y.dtype, 1):
        raise ValueError(
            f"out must be {y.dtype} [{routing.rows}, {width}], contiguous along its last dimension, got {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    if not routing.rows:
        return y.new_empty((0, width)) if out is None else out
    _add_more((y, x, a, b, routing, offsets), table)
    operands, tiles = (y, x, a, b, routing, offsets), tiles_of("grouped_silu", a, b, routing, table)
    return launch.run(tiles, operands, vectors=_wanted(vectors, routing), out=out)


def _wanted(vectors: Vectors | None, routing: Routing) -> Vectors | None:
    """The vectors, if any row of the batch needs them: else the kernels are those of a pool without."""
    return None if routing.marks is None else vectors


def on_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on a GPU, and with ``TRITON_INTERPRET=1`` on CPU tensors."""
    from triton import knobs

    return device.type != "cpu" or bool(knobs.runtime.interpret)
