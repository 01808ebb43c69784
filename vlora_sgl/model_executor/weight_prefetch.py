"""Fetching a linear's weight into the L2 cache while the model does something that needs little bandwidth.

A decode step reads all weights once, and no linear begins before the attention, norm or activation in front of it is
through: for that time the memory idles. A kernel of a few threads on a stream beside asks for what the next linear
will read first; the linear then finds it in the cache. Nothing is computed, so no result depends on it.

It is part of captured decode graphs only. Not measured yet: off unless ``--vlora-prefetch-mb`` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl.kernels.prefetch import prefetch_to_l2

MAX_ROWS = 256
"""Batches with more rows compute longer than they read."""

ORDER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The linears of a decoder layer as a forward runs them."""


class WeightPrefetch:
    """What a linear fetches when it has been launched.

    Args:
        weight: of the linear that comes next, or ``None`` behind the last.
        limit: bytes of it, from its beginning.
        stream: the stream beside; one for all linears.
    """

    def __init__(self, weight: torch.Tensor | None, limit: int, stream: Any) -> None:
        self.weight, self.limit, self.stream = weight, limit, stream

    def launch(self, rows: int) -> None:
        """``fetch``, while a graph of few rows is captured."""
        if rows <= MAX_ROWS and _sgl.capture_mode.get_is_capture_mode():
            self.fetch()

    def fetch(self) -> None:
        """Ask for the weight beside the current stream; behind the last linear, join the streams."""
        current = torch.cuda.current_stream()
        if self.weight is None:
            current.wait_stream(self.stream)
            return
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            prefetch_to_l2(self.weight, self.limit)


def install(layers: Sequence[dict[str, Any]], limit: int, stream: Any) -> int:
    """Let every linear of the decoder fetch the next one's weight.

    Args:
        layers: per decoder layer, the wrapped linears by name.
        limit: bytes of each weight.
        stream: as in ``WeightPrefetch``.

    Returns:
        How many do; 0 where the layers are not those of ``ORDER``, with plain matrices as weights.
    """
    chain: list[Any] = []
    for layer in layers:
        named = {re.split(r"[./]", name)[-1]: module for name, module in layer.items()}
        if not set(ORDER) <= set(named) or not all(named[name].fusible for name in ORDER):
            return 0
        chain += [named[name] for name in ORDER]
    for module, following in zip(chain, [*chain[1:], None], strict=True):
        weight = None if following is None else following.base_layer.weight.data
        module.ahead = WeightPrefetch(weight, limit, stream)
    return len(chain)
