"""CUDA graphs of the image encoder, for image sizes that keep coming.

An encoder of 32 blocks is some 600 launches; on a recent GPU they take the host longer than the work of a small image
takes the device, so the host sets the time to the first token. A camera or a web page sends images of few sizes, so
the encoder is captured for those of a few, and replayed. Everything but the pixels depends on the grid alone
(positions, windows, lengths): the key is the grid, and the recorded arguments of the blocks are the graph's constants.
Of several images that are encoded together each replays its size's graph: combinations are too many to capture.

A capture stops the scheduler: torch gives back what memory it keeps, pinned memory too, kernels are compiled and
loaded, the encoder runs three times. So it waits until nothing runs: of ``COMMON`` sizes right after the start, of
others once they have come a few times. Only of a server that is never idle does a request wait for one.

SGLang has such graphs too (``SGLANG_VIT_ENABLE_CUDA_GRAPH``), keyed by the number of patches: two grids of as many
patches would share one, with the wrong windows, and every size is captured when it first comes.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import Qwen2_5_VisionTransformer
from vlora_sgl.seams import Place, Places
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

ENCODER = "Qwen2_5_VisionTransformer"
"""SGLang's encoder whose forward is the one of ``_Graph``."""

Grid = tuple[int, ...]

COMMON: tuple[Grid, ...] = tuple((1, h, w) for h, w in ((16, 16), (24, 24), (32, 32), (36, 36), (34, 46), (46, 34)))
"""Captured when a server that has started is first idle: images of 224 x 224, 336 x 336, 448 x 448 and 512 x 512
pixels, and of 640 x 480 in either orientation, in patches of 14."""

AFTER = 3
"""Images of a size that run eagerly before it is captured, once nothing runs."""

OVERDUE = 24
"""Images of a size after which its capture waits no longer for that."""

REMEMBERED = 512
"""Sizes that are counted at a time."""

MAX_PATCHES = 8192
"""Of 2,048 image tokens. Larger inputs keep the device busy longer than their launches keep the host."""

MAX_TOGETHER = 16
"""Images that are encoded one after the other; more together keep the device busy as long as the host."""


class VisionGraphs:
    """Stands in the place of an encoder's ``forward``.

    Args:
        encoder: SGLang's module, of the class ``ENCODER``.
        limit: graphs that are kept; the least recently used one leaves first.
        wanted: sizes to capture when nothing runs, the first one first.
    """

    def __init__(self, encoder: Qwen2_5_VisionTransformer, limit: int, wanted: Sequence[Grid] = ()) -> None:
        self.encoder, self.limit = encoder, limit
        self._wanted = dict.fromkeys(wanted[:limit])
        self.replays = 0
        self._eager = encoder.forward
        self._seen: OrderedDict[Grid, int] = OrderedDict()
        self._graphs: OrderedDict[Grid, _Graph] = OrderedDict()
        self._pool: Any = None

    def __call__(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """As the encoder: embeddings of patches x [S, pixels] of images with grids ``grid_thw`` [images, 3]."""
        if grid_thw.is_cuda or not self.limit or x.shape[0] > MAX_PATCHES:
            return self._eager(x, grid_thw)
        grids: list[Grid] = list(map(tuple, grid_thw.tolist()))
        parts = x.split([t * h * w for t, h, w in grids])
        if self.serves(grids):
            return torch.cat([self._replay(grid, part) for grid, part in zip(grids, parts, strict=True)])
        answer = self._eager(x, grid_thw)
        overdue = [i for i, grid in enumerate(grids) if grid not in self._graphs and self._overdue(grid)]
        if overdue:
            self._capture(grids[overdue[0]], parts[overdue[0]])
        return answer

    def capture_wanted(self) -> bool:
        """Capture one of the sizes that are wanted, if any is; to be called when nothing runs."""
        while self._wanted and self.limit:
            grid = next(iter(self._wanted))
            del self._wanted[grid]
            if grid not in self._graphs:
                self._capture(grid, self._pixels(grid))
                return True
        return False

    def _pixels(self, grid: Grid) -> torch.Tensor:
        """Patches of an image of this size, no two alike; drawn from no generator, which sampling may share."""
        patches, width = math.prod(grid), self.encoder.patch_embed.proj.weight[0].numel()
        pixels = torch.linspace(-1, 1, patches * width, device=self.encoder.device)
        return pixels.view(patches, width).to(self.encoder.dtype)

    def serves(self, grids: Sequence[Sequence[int]]) -> bool:
        """Whether images of these grids, encoded together, replay their graphs."""
        known = self.limit > 0 and all(tuple(grid) in self._graphs for grid in grids)
        return known and len(grids) <= MAX_TOGETHER and sum(t * h * w for t, h, w in grids) <= MAX_PATCHES

    def _replay(self, grid: Grid, x: torch.Tensor) -> torch.Tensor:
        self._graphs.move_to_end(grid)
        self.replays += 1
        return self._graphs[grid](x)

    def state(self) -> dict[str, int]:
        """Figures for ``/server_info``."""
        return {"graphs": len(self._graphs), "graph_replays": self.replays}

    def _overdue(self, grid: Grid) -> bool:
        """Count an image of a size without a graph, and want one of sizes that keep coming."""
        count = self._seen.pop(grid, 0) + 1
        self._seen[grid] = count
        if len(self._seen) > REMEMBERED:
            forgotten, _ = self._seen.popitem(last=False)
            self._wanted.pop(forgotten, None)
        if count >= AFTER:
            self._wanted[grid] = None
        return count >= OVERDUE

    def _capture(self, grid: Grid, x: torch.Tensor) -> None:
        """Keep a graph for images of this size, if it is seen to give what the eager run gives.

        Args:
            x: patches of one.
        """
        grid_thw, calls = torch.tensor([grid]), list[dict[str, object]]()
        self._wanted.pop(grid, None)

        def noted(block: Any, *args: object, **given: object) -> torch.Tensor:
            calls.append(given)
            return block(*args, **given)

        try:
            with ExitStack() as stack:
                for block in self.encoder.blocks:
                    forward = partial(noted, block.forward)
                    stack.enter_context(seams.swapped("Qwen2_5_VisionBlock.forward", block, "forward", forward))
                answer = self._eager(x, grid_thw)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = _Graph(self.encoder, x, grid_thw, calls, self._pool)
            same = torch.equal(graph(x), answer)
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            logger.warning("no graphs of the image encoder: %s", error)
            self.limit = 0
            return
        if not same:
            logger.warning("no graphs of the image encoder: a replay differs from the eager run")
            self.limit = 0
            return
        self._graphs[grid] = graph
        if len(self._graphs) > self.limit:
            out, _ = self._graphs.popitem(last=False)
            self._seen.pop(out, None)  # or a size too many would be captured each time it comes


class _Graph:
    """The encoder captured for one grid: patches in, embeddings out."""

    def __init__(
        self,
        encoder: Qwen2_5_VisionTransformer,
        x: torch.Tensor,
        grid_thw: torch.Tensor,
        calls: list[dict[str, object]],
        pool: Any,
    ) -> None:
        window, _ = encoder.get_window_index(grid_thw)
        window = window.to(encoder.device)
        back = torch.argsort(window)
        unit = encoder.spatial_merge_unit
        self._x = x.to(device=encoder.device, dtype=encoder.dtype, copy=True)
        self._constants = (window, back, calls)  # a graph holds addresses, not tensors
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            hidden = encoder.patch_embed(self._x)
            rows = hidden.shape[0]
            hidden = hidden.reshape(rows // unit, unit, -1)[window].reshape(rows, 1, -1)
            for block, given in zip(encoder.blocks, calls, strict=True):
                hidden = block(hidden, **given)
            self._out = encoder.merger(hidden)[back]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._out.clone()


def known_encoder(model: object) -> Qwen2_5_VisionTransformer | str:
    """A model's image encoder if it is of ``ENCODER``'s class, on CUDA; else why not, in words."""
    encoder: Any = getattr(model, "visual", None)
    if not _sgl.is_a(encoder, ENCODER):
        return f"its image encoder is no {ENCODER}"
    return encoder if encoder.device.type == "cuda" else "its image encoder is not on a GPU"


def graphs(runner: Any) -> Places:
    """What stands in the place of the image encoder of a model runner; it becomes the runner's ``vision_graphs``."""
    encoder = known_encoder(runner.model)
    if isinstance(encoder, str):
        return encoder
    limit = VLoraArgs.from_environment().vision_graphs
    if limit < 1 or runner.server_args.disable_cuda_graph:
        return "--vlora-vision-graphs 0" if limit < 1 else "--disable-cuda-graph"
    if runner.server_args.tp_size > 1:
        return "tensor-parallel ranks would have to capture their reductions together"
    runner.vision_graphs = VisionGraphs(encoder, limit, COMMON)
    return [Place(encoder, "forward", runner.vision_graphs)]
