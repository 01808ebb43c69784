"""CUDA graphs of the image encoder, for image sizes that keep coming.

An encoder of 32 blocks is some 600 launches; on a recent GPU they take the host longer than the work of a small image
takes the device, so the host sets the time to the first token. A camera or a web page sends images of few sizes, so
the encoder is captured for those of a few, and replayed. Everything but the pixels depends on the grid alone
(positions, windows, lengths): the key is the grid, and the recorded arguments of the blocks are the graph's constants.
Of several images that are encoded together each replays its size's graph: combinations are too many to capture.
A size has one graph more for images that adapters of the encoder apply to, which reads which they are from tables.

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
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import MultimodalDataItem, Qwen2_5_VisionTransformer
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

Slots = Sequence[tuple[int, float]]
"""What an image applies of adapters: slots and their weights; empty where nothing."""

Kind = tuple[Grid, bool]
"""Of images that share a graph: their grid, and whether adapters apply to them."""


class Adapters(Protocol):
    """Adapters of the encoder (``lora.tower_routing.TowerRouting``).

    Attributes:
        images: what each image of the present call applies; empty where none applies anything.
    """

    @property
    def images(self) -> Sequence[Slots]: ...
    def route(self) -> None: ...
    def applied_by(self, items: Sequence[MultimodalDataItem]) -> Sequence[Slots] | None: ...
    def tables(self, patches: int) -> Any: ...
    def refresh(self, tables: Any, slots: Any) -> None: ...
    def reading(self, tables: Any) -> AbstractContextManager[None]: ...


class VisionGraphs:
    """Stands in the place of an encoder's ``forward``.

    Args:
        encoder: SGLang's module, of the class ``ENCODER``.
        limit: graphs that are kept; the least recently used one leaves first.
        wanted: sizes to capture when nothing runs, the first one first.

    Attributes:
        adapters: of the encoder, if there can be any.
    """

    adapters: Adapters | None = None

    def __init__(self, encoder: Qwen2_5_VisionTransformer, limit: int, wanted: Sequence[Grid] = ()) -> None:
        self.encoder, self.limit = encoder, limit
        self._wanted: dict[Kind, None] = dict.fromkeys((grid, False) for grid in wanted[:limit])
        self.replays = 0
        self._eager = encoder.forward
        self._seen: OrderedDict[Kind, int] = OrderedDict()
        self._graphs: OrderedDict[Kind, tuple[_Graph, Any]] = OrderedDict()  # with the tables that it reads
        self._pool: Any = None
        self._adapted = True

    def __call__(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """As the encoder: embeddings of patches x [S, pixels] of images with grids ``grid_thw`` [images, 3]."""
        if grid_thw.is_cuda or not self.limit or x.shape[0] > MAX_PATCHES:
            return self._eagerly(x, grid_thw)
        grids: list[Grid] = list(map(tuple, grid_thw.tolist()))
        applied = (self.adapters.images if self.adapters is not None else ()) or [()] * len(grids)
        parts = x.split([t * h * w for t, h, w in grids])
        images = list(zip(grids, parts, applied, strict=True))
        if self.serves(grids, applied):
            return torch.cat([self._replay(*image) for image in images])
        answer = self._eagerly(x, grid_thw)
        kinds = [(grid, bool(slots)) for grid, slots in zip(grids, applied, strict=True)]
        overdue = [i for i, kind in enumerate(kinds) if kind not in self._graphs and self._overdue(kind)]
        if overdue:
            self._capture(kinds[overdue[0]], parts[overdue[0]])
        return answer

    def _eagerly(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.route()
        return self._eager(x, grid_thw)

    def capture_wanted(self) -> bool:
        """Capture one of the sizes that are wanted, if any is; to be called when nothing runs."""
        while self._wanted and self.limit:
            kind = next(iter(self._wanted))
            del self._wanted[kind]
            if kind not in self._graphs:
                self._capture(kind, self._pixels(kind[0]))
                return True
        return False

    def _pixels(self, grid: Grid) -> torch.Tensor:
        """Patches of an image of this size, no two alike; drawn from no generator, which sampling may share."""
        patches, width = math.prod(grid), self.encoder.patch_embed.proj.weight[0].numel()
        pixels = torch.linspace(-1, 1, patches * width, device=self.encoder.device)
        return pixels.view(patches, width).to(self.encoder.dtype)

    def serves(self, grids: Sequence[Sequence[int]], applied: Sequence[Slots]) -> bool:
        """Whether images of these grids, which apply this, replay their graphs when they are encoded together."""
        kinds = [(tuple(grid), bool(slots)) for grid, slots in zip(grids, applied, strict=True)]
        known = self.limit > 0 and all(kind in self._graphs for kind in kinds)
        return known and len(grids) <= MAX_TOGETHER and sum(t * h * w for t, h, w in grids) <= MAX_PATCHES

    def serves_items(self, items: Sequence[MultimodalDataItem]) -> bool:
        """Whether these images, of one grid each, would replay their graphs now."""
        applied = self.adapters.applied_by(items) if self.adapters is not None else [()] * len(items)
        grids = [grid for item in items for grid in item.model_specific_data["image_grid_thw"].tolist()]
        return applied is not None and len(grids) == len(items) and self.serves(grids, applied)

    def forget_adapted(self) -> None:
        """Drop the graphs that read adapters."""
        for held in (self._graphs, self._wanted):
            for kind in [kind for kind in held if kind[1]]:
                del held[kind]

    def _replay(self, grid: Grid, x: torch.Tensor, slots: Slots) -> torch.Tensor:
        kind = grid, bool(slots)
        self._graphs.move_to_end(kind)
        self.replays += 1
        graph, tables = self._graphs[kind]
        if slots and self.adapters is not None:
            self.adapters.refresh(tables, slots)
        return graph(x)

    def state(self) -> dict[str, int]:
        """Figures for ``/server_info``."""
        return {"graphs": len(self._graphs), "graph_replays": self.replays}

    def _overdue(self, kind: Kind) -> bool:
        """Count an image of a size without a graph, and want one of sizes that keep coming."""
        if kind[1] and not self._adapted:
            return False
        count = self._seen.pop(kind, 0) + 1
        self._seen[kind] = count
        if len(self._seen) > REMEMBERED:
            forgotten, _ = self._seen.popitem(last=False)
            self._wanted.pop(forgotten, None)
        if count >= AFTER:
            self._wanted[kind] = None
        return count >= OVERDUE

    def _capture(self, kind: Kind, x: torch.Tensor) -> None:
        """Keep a graph for images of this kind, if it is seen to give what the eager run gives.

        Args:
            x: patches of one.
        """
        (grid, adapted), tables = kind, None
        self._wanted.pop(kind, None)
        try:
            with ExitStack() as stack:
                if self.adapters is not None:
                    if adapted:
                        tables = self.adapters.tables(x.shape[0])
                        self.adapters.refresh(tables, ())
                    stack.enter_context(self.adapters.reading(tables))
                grid_thw = torch.tensor([grid])
                answer, calls = self._noted(x, grid_thw)
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                graph = _Graph(self.encoder, x, grid_thw, calls, self._pool)
            reason = None if torch.equal(graph(x), answer) else "a replay differs from the eager run"
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            reason = str(error)
        if reason is not None:
            self._give_up(reason, adapted)
            return
        self._graphs[kind] = graph, tables
        if len(self._graphs) > self.limit:
            out, _ = self._graphs.popitem(last=False)
            self._seen.pop(out, None)  # or a size too many would be captured each time it comes

    def _noted(self, x: torch.Tensor, grid_thw: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, object]]]:
        """An eager run, and what its blocks were given."""
        calls: list[dict[str, object]] = []

        def noted(block: Any, *args: object, **given: object) -> torch.Tensor:
            calls.append(given)
            return block(*args, **given)

        with ExitStack() as stack:
            for block in self.encoder.blocks:
                forward = partial(noted, block.forward)
                stack.enter_context(seams.swapped("Qwen2_5_VisionBlock.forward", block, "forward", forward))
            return self._eager(x, grid_thw), calls

    def _give_up(self, reason: str, adapted: bool) -> None:
        logger.warning("no graphs of the image encoder%s: %s", " with adapters" if adapted else "", reason)
        if adapted:
            self._adapted = False
        else:
            self.limit = 0


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
