"""The tile of SGLang's Triton attention for prefills, on Hopper.

SGLang launches it with 128 queries a program and no pipeline, so a program waits for each block of keys; a short
prompt behind a long prefix is one such program a head, most of it empty. With 64 queries and three stages it takes
0.46 of the time for seven prompts of 29 tokens behind 1,028 each, and 0.8 to 0.9 for prompts of 256 and 1,057 tokens
without a prefix (H200, head width 128, 2026-11-29). A query meets its keys in the same blocks in the same order, so
the results are the same to the last bit.

Where SGLang has flash attention of its own, that is the default and nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.model_executor.fast_paths import unmeasured
from vlora_sgl.seams import Place, Places

WIDEST = 128
"""Head width up to which SGLang takes ``THEIRS``: wider heads have smaller tiles already."""
THEIRS = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_DPE": 0}
OURS = {"BLOCK_M": 64, "num_warps": 4, "num_stages": 3}


class Retiled:
    """Stands in the place of the attention kernel.

    Args:
        kernel: SGLang's, a Triton function.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        """The launcher for SGLang's grid (requests, heads, blocks of queries), as Triton's own functions have it."""
        requests, heads, blocks = grid

        def launch(*args: object, **options: Any) -> object:
            if options["BLOCK_DMODEL"] <= WIDEST and THEIRS.items() <= options.items():
                # A block too many returns at once.
                return self.kernel[requests, heads, 2 * blocks](*args, **{**options, **OURS})
            return self.kernel[grid](*args, **options)

        return launch


def tiles(_: object) -> Places:
    """What has every attention of this process take the tile."""
    name = _sgl.NAMES["extend_attention_kernel"].partition(":")[2]
    return unmeasured() or [Place(_sgl.extend_attention, name, Retiled(_sgl.extend_attention_kernel))]
