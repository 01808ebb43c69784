"""Kernels of the operator compiled for a Hopper card, which the compiler does without one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlora_sgl.kernels.atmm import launch

WORDS, FLOATS = ("active", "counters"), ("partials", "x_scale", "w_scale", "gates")
LINEAR: dict[str, Any] = {
    **{
        "K": 256,
        **dict.fromkeys(launch.BOUNDS, 512),
        "C": 1,
        "R": 64,
        "RP": 64,
        "ACTIVE": 8,
        "ACTIVE_P": 8,
        "GROUP": 1,
    },
    **{"HAS_BIAS": False, "SPLIT": 1, "STAGES": 3, "BM": 32, "BN": 64, "BK": 128, "PDL": True, "V_SLOT": 0},
    **{"vectors": None, "marks": None},
}
"""Constants of ``dense_linear_kernel``."""


def ptx(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], stages: int = 4, unknown: Collection[str] = ("m",)
) -> str:
    """The code of a kernel whose sizes and addresses 16 divides.

    Args:
        constants: by the kernel's names, those of arguments that are left out, too.
        types: of pointers that are neither words nor floats, where it is not bfloat16.
        unknown: numbers of which nothing is known.
    """
    types = dict.fromkeys(WORDS, "*i32") | dict.fromkeys(FLOATS, "*fp32") | types
    signature, aligned = {}, {}
    for at, name in enumerate(kernel.arg_names):
        number = name in ("m", "b_slot", "b_row") or name.startswith("stride")
        signature[name] = "constexpr" if name in constants else "i32" if number else types.get(name, "*bf16")
        if name not in constants and name not in unknown:
            aligned[(at,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "num_stages": stages, "launch_pdl": True}
    source = ASTSource(kernel, signature, values, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
