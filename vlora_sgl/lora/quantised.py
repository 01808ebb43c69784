"""Which quantised linears are served with adapters, and which of them adapters can be folded into."""

from __future__ import annotations

from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl.platforms.quantised import DequantisingLinearMethod
from vlora_sgl.scaled import E4M3, Scaled

SERVED = (
    "UnquantizedLinearMethod",
    "Fp8LinearMethod",
    "W8A8Fp8LinearMethod",
    "W8A8Int8LinearMethod",
    "CompressedTensorsLinearMethod",
    "AWQLinearMethod",
    "GPTQLinearMethod",
    "GPTQMarlinLinearMethod",
)
SCHEMES = ("CompressedTensorsW8A8Fp8", "CompressedTensorsW8A16Fp8", "CompressedTensorsW8A8Int8")
"""Of compressed-tensors."""
FOLDED = ("Fp8LinearMethod", "W8A8Fp8LinearMethod", "CompressedTensorsLinearMethod")


def why_not_served(layer: Any) -> str | None:
    """Why adapters of a linear of SGLang's are not served, or ``None`` if they are."""
    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, DequantisingLinearMethod):
        return None
    name, scheme = type(method).__name__, type(getattr(layer, "scheme", None)).__name__
    if not _sgl.is_a(method, *SERVED):
        return f"linears of {name} are not served with adapters"
    if name == "CompressedTensorsLinearMethod" and scheme not in SCHEMES:
        return f"compressed-tensors of {scheme} are not served with adapters"
    if getattr(method, "use_mxfp8", False):
        return "mxfp8 is not served with adapters"
    return None


def foldable(layer: Any) -> Scaled | str:
    """A quantised linear's weight as adapters are folded into it, in place: views; or why they are not.

    Folding needs a number beside a scale for each: FP8 with a scale for each row or each block of rows and columns.
    """
    method = layer.quant_method
    if isinstance(method, DequantisingLinearMethod):
        return _checked(Scaled(layer.weight.data, layer.weight_scale.data, layer.scale_block))
    if not _sgl.is_a(method, *FOLDED) or getattr(method, "use_marlin", False):
        return f"quantised with {type(method).__name__}"
    holder = getattr(layer, "scheme", None) or method
    weight, scale = layer.weight.data, getattr(layer, "weight_scale_inv", None)
    scale = (layer.weight_scale if scale is None else scale).data
    block = getattr(holder, "weight_block_size", None)
    if block is None:  # SGLang hands its kernels the transposed view, of the scales too where it quantises as it loads
        weight, block = weight.T, (1, weight.shape[0])
        scale = scale.view(-1, 1) if scale.is_contiguous() and scale.numel() == len(weight) else scale
    return _checked(Scaled(weight, scale, (int(block[0]), int(block[1]))))


def fused(layer: Any) -> Scaled | None:
    """A quantised linear's weight, if few rows multiply by it where their adapters join (``atmm_scaled``).

    SGLang's kernel for a scale an output and a scale a row then has the same operands.
    """
    method: Any = getattr(layer, "quant_method", None)
    if not _sgl.is_a(method, "Fp8LinearMethod") or getattr(layer, "input_scale", None) is not None:
        return None
    if not getattr(method, "cutlass_fp8_supported", False) or method.block_quant:
        return None
    found = foldable(layer)
    whole = isinstance(found, Scaled) and found.block[0] == 1 and not any(size % 16 for size in found.weight.shape)
    return found if whole else None  # type: ignore[return-value]


def _checked(found: Scaled) -> Scaled | str:
    (rows, columns), (n, k) = found.weight.shape, found.block
    if found.weight.dtype != E4M3:
        return f"its weight is {found.weight.dtype}; adapters are folded into {E4M3}"
    if n > 1 and (n, k) != (128, 128):
        return f"its scales are of blocks of {n} x {k}, adapters are folded into rows and blocks of 128 x 128"
    wanted = (-(-rows // n), -(-columns // k))
    if found.scale.shape != wanted or found.scale.dtype != torch.float32:
        return f"its scales are {found.scale.dtype} {tuple(found.scale.shape)}, expected float32 {wanted}"
    if not found.weight.is_contiguous() or not found.scale.is_contiguous():
        return "its weight is not stored row by row"
    return found
