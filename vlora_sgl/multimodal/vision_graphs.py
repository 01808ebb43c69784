"""CUDA graphs of the image encoder, for image sizes that keep coming.

An encoder of 32 blocks is some 600 launches; on a recent GPU they take the host longer than the work of a small image
takes the device, so the host sets the time to the first token. A camera or a web page sends images of few sizes, so
the encoder is captured for those of a few, and replayed. Everything but the pixels depends on the images' size alone
(``vision_structures``): the key is the size, and what an eager run notes of it are the graph's constants.

A graph is of one image, or of several of one size: pages, tiles, frames. What a call has no graph of its own for, the
graphs of its parts may serve, one after the other. That saves the host its launches, and costs the device, which few
patches do not fill: eight images of 1,024 patches took 27.5 ms one by one, and 24.1 in one eager run (Qwen2.5-VL-7B's
encoder, H200, 2026-11-30). So it is done only where the device would wait for the host (``TOGETHER``).
A kind of images has graphs of its own where adapters of the encoder apply, which read which they are from tables: one
where an image applies one at most, and one for two, as in a mixture, whose kernels multiply twice.

A graph computes what an eager run of the same images together computes, bit for bit; that is checked when it is
captured. In 16 bits an image's last bits depend on what it is encoded with, as without graphs: matrix products of
other sizes are summed in another order.

A capture stops the scheduler: torch gives back what memory it keeps, pinned memory too, kernels are compiled and
loaded, the encoder runs three times. So it waits until nothing runs: of common sizes right after the start, of
others once they have come a few times. Only of a server that is never idle does a request wait for one.

SGLang has such graphs too (``SGLANG_VIT_ENABLE_CUDA_GRAPH``), keyed by the number of patches: two grids of as many
patches would share one, with the wrong windows, and every size is captured when it first comes.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby, pairwise, takewhile
from typing import Any, Protocol

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import MultimodalDataItem
from vlora_sgl.multimodal.encoders import Rows
from vlora_sgl.multimodal.vision_demand import Demand, Kind
from vlora_sgl.multimodal.vision_families import Patches, Tiles, known_structure
from vlora_sgl.multimodal.vision_structures import Grid, Parts, Structure, parts_of
from vlora_sgl.seams import Place, Places
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

MAX_PATCHES = 8192
"""Of 2,048 image tokens. Larger inputs keep the device busy longer than their launches keep the host."""

TOGETHER = 3072
"""Patches of a call up to which graphs of its parts are replayed one after the other.

An image of 1,024 patches takes 3.44 ms by its graph and, in an eager run of eight, 3.01 ms (H200, 2026-11-30). Of
3,072 patches the device loses 1.3 ms of 10; the host launches three graphs instead of 600 kernels, and forms the batch
meanwhile. Beyond, the loss grows with every patch, and an eager run keeps the device as busy as the host.
"""

LEAST = 512
"""Patches that a graph counts for at least: 600 kernels behind each other take their time however few they are of."""

Slots = Sequence[tuple[int, float]]
"""What an image applies of adapters: slots and their weights; empty where nothing."""


class Adapters(Protocol):
    """Adapters of the encoder (``lora.tower_routing.TowerRouting``).

    Attributes:
        images: what each image of the present call applies; empty where none applies anything.
    """

    @property
    def images(self) -> Sequence[Slots]: ...
    def route(self) -> None: ...
    def applied_by(self, items: Sequence[MultimodalDataItem]) -> Sequence[Slots] | None: ...
    def fit(self, applied: Any) -> bool: ...
    def tables(self, rows: Rows, pairs: int) -> Any: ...
    def refresh(self, tables: Any, applied: Any) -> None: ...
    def reading(self, tables: Any) -> AbstractContextManager[None]: ...


class VisionGraphs:
    """Stands in the place of the method that an encoder is called by.

    Args:
        structure: the encoder's.
        limit: graphs that are kept; the least recently used one leaves first. Half of them may be of several images:
            a batch has any number of them, and graphs of one serve all.
        wanted: sizes to capture when nothing runs, the first one first.

    Attributes:
        adapters: of the encoder, if there can be any.
    """

    adapters: Adapters | None = None

    def __init__(self, structure: Structure, limit: int, wanted: Sequence[Grid] = ()) -> None:
        self.structure, self.limit = structure, limit
        self._demand = Demand((grid, 1, 0) for grid in wanted[:limit])
        self.replays = 0
        self._eager = getattr(structure.owner, structure.method)
        self._graphs: OrderedDict[Kind, tuple[_Graph, Any]] = OrderedDict()  # with the tables that it reads
        self._pool: Any = None

    def __call__(self, x: torch.Tensor, grid_thw: Any = None) -> torch.Tensor:
        """As the method: embeddings of images ``x``, as their structure has them."""
        grids = self.structure.grids(x, grid_thw) if self.limit else None
        if not grids or self._patches(grids) > MAX_PATCHES:
            return self._eagerly(x, grid_thw)
        applied = (self.adapters.images if self.adapters is not None else ()) or [()] * len(grids)
        kinds = self._graphs_of(grids, applied)
        if kinds is None:
            answer = self._eagerly(x, grid_thw)
        else:
            images = zip(kinds, *self._split(kinds, x, applied), strict=True)
            answer = torch.cat([self._replay(*own) for own in images])
        if kinds is None or len(kinds) > 1:
            self._count(x, grids, applied, was_eager=kinds is None)
        return answer

    def _eagerly(self, x: torch.Tensor, grid_thw: Any) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.route()
        answer: torch.Tensor = self._eager(x) if grid_thw is None else self._eager(x, grid_thw)
        return answer

    def _patches(self, grids: Sequence[Grid]) -> int:
        return sum(self.structure.rows(grid)[0] for grid in grids)

    # Which graphs serve a call

    def serves(self, grids: Sequence[Grid], applied: Sequence[Slots]) -> bool:
        """Whether images of these sizes, which apply this, replay graphs when they are encoded together."""
        return self._patches(grids) <= MAX_PATCHES and self._graphs_of(grids, applied) is not None

    def serves_items(self, items: Sequence[MultimodalDataItem]) -> bool:
        """Whether the images of these items would replay graphs now."""
        grids = [self.structure.grids_of(item) for item in items]
        if not all(grids):
            return False
        every = [grid for own in grids for grid in own]
        applied = self.adapters.applied_by(items) if self.adapters is not None else [()] * len(every)
        return applied is not None and self.serves(every, applied)

    def _graphs_of(self, grids: Sequence[Grid], applied: Sequence[Slots]) -> list[Kind] | None:
        """The graphs that a call's images replay, one after the other; ``None``: it runs eagerly."""
        kinds: list[Kind] = []
        at = 0
        while at < len(grids):
            found = next((kind for kind in _kinds(grids[at:], applied[at:]) if kind in self._graphs), None)
            if found is None:
                return None
            kinds.append(found)
            at += found[1]
        if not self._worthwhile(kinds) or not self.limit:
            return None
        fits = self.adapters is None or not any(applied) or self.adapters.fit(applied)
        return kinds if fits else None

    def _worthwhile(self, kinds: Sequence[Kind]) -> bool:
        """Whether graphs of these kinds, one after the other, take less time than an eager run."""
        cost = sum(max(LEAST, count * self.structure.rows(grid)[0]) for grid, count, _ in kinds)
        return len(kinds) == 1 or cost <= TOGETHER

    def _split(
        self, kinds: Sequence[Kind], x: torch.Tensor, applied: Sequence[Slots]
    ) -> tuple[list[torch.Tensor], list[Sequence[Slots]]]:
        """The images of each of these graphs, and what they apply."""
        ends = [0]
        for _, count, _ in kinds:
            ends.append(ends[-1] + count)
        rows = [self.structure.shape(grid, count)[0] for grid, count, _ in kinds]
        return list(x.split(rows)), [applied[a:b] for a, b in pairwise(ends)]

    def _replay(self, kind: Kind, x: torch.Tensor, applied: Sequence[Slots]) -> torch.Tensor:
        self._graphs.move_to_end(kind)
        self.replays += 1
        graph, tables = self._graphs[kind]
        if kind[2] and self.adapters is not None:
            self.adapters.refresh(tables, applied)
        return graph(x)

    # Which graphs are captured

    def _count(self, x: torch.Tensor, grids: Sequence[Grid], applied: Sequence[Slots], was_eager: bool) -> None:
        """Count the kinds of a call's images that have no graph, and want one of those that keep coming."""
        places = [list(same) for _, same in groupby(range(len(grids)), key=lambda place: grids[place])]
        found = [(_kind(grids, applied, own), own[0]) for own in places if len(own) > 1]
        singles = [(_kind(grids, applied, [place]), place) for place in range(len(grids))]
        if was_eager and self._worthwhile([kind for kind, _ in singles]):
            found += singles
        missing = [(kind, place) for kind, place in found if kind not in self._graphs]
        overdue = [(kind, place) for kind, place in missing if self._demand.came(kind) and was_eager]
        if overdue:
            kind, place = overdue[0]
            begin = sum(self.structure.shape(grid, 1)[0] for grid in grids[:place])
            self._capture(kind, x[begin : begin + self.structure.shape(*kind[:2])[0]])

    def capture_wanted(self) -> bool:
        """Capture one of the kinds that are wanted, if any is; to be called when nothing runs."""
        while self.limit and (kind := self._demand.pop()) is not None:
            if kind not in self._graphs:
                self._capture(kind, self._pixels(*kind[:2]))
                return True
        return False

    def _pixels(self, grid: Grid, count: int) -> torch.Tensor:
        """So many images of this size, no two pixels alike; drawn from no generator, which sampling may share."""
        shape = self.structure.shape(grid, count)
        pixels = torch.linspace(-1, 1, math.prod(shape), device=self.structure.device)
        return pixels.view(shape).to(self.structure.dtype)

    def _capture(self, kind: Kind, x: torch.Tensor) -> None:
        """Keep a graph for images of this kind, if it is seen to give what the eager run gives.

        Args:
            x: such images.
        """
        (grid, count, pairs), tables = kind, None
        self._demand.wanted.pop(kind, None)
        try:
            with ExitStack() as stack:
                if self.adapters is not None:
                    if pairs:
                        patches, tokens = self.structure.rows(grid)
                        tables = self.adapters.tables((count * patches, count * tokens), pairs)
                        self.adapters.refresh(tables, [()] * count)
                    stack.enter_context(self.adapters.reading(tables))
                answer, parts = parts_of(self.structure, self._eager, x, grid, count)
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                graph = _Graph(parts, x, self._pool)
            reason = None if torch.equal(graph(x), answer) else "a replay differs from the eager run"
        except Exception as error:  # out of memory, an operation that cannot be captured, or an encoder that changed
            reason = str(error)
        if reason is not None:
            self._give_up(reason, count > 1, pairs > 0)
            return
        self._graphs[kind] = graph, tables
        several = [held for held in self._graphs if held[1] > 1]  # the least recently used one first
        too_many = len(several) > max(1, self.limit // 2)
        if too_many or len(self._graphs) > self.limit:
            out = several[0] if too_many else next(iter(self._graphs))
            del self._graphs[out]
            self._demand.left(out)

    def _give_up(self, reason: str, several: bool, adapted: bool) -> None:
        what = " of several images" * several + " with adapters" * adapted
        logger.warning("no graphs of the image encoder%s: %s", what, reason)
        if several or adapted:
            self._demand.give_up(several, adapted)
        else:
            self.limit = 0

    def forget_adapted(self) -> None:
        """Drop the graphs that read adapters."""
        for held in (self._graphs, self._demand.wanted):
            for kind in [kind for kind in held if kind[2]]:
                del held[kind]

    def state(self) -> dict[str, int]:
        """Figures for ``/server_info``."""
        return {"graphs": len(self._graphs), "graph_replays": self.replays}


def _kind(grids: Sequence[Grid], applied: Sequence[Slots], places: Sequence[int]) -> Kind:
    """Of images of one size, at these places of a call."""
    return grids[places[0]], len(places), max(len(applied[place]) for place in places)


def _kinds(grids: Sequence[Grid], applied: Sequence[Slots]) -> Iterator[Kind]:
    """The graphs that may serve the first images of a call, those of most images first."""
    alike = len(list(takewhile(lambda grid: grid == grids[0], grids)))
    return (_kind(grids, applied, range(count)) for count in range(alike, 0, -1))


class _Graph:
    """Images in, embeddings out."""

    def __init__(self, parts: Parts, x: torch.Tensor, pool: Any) -> None:
        self._x = x.to(device=parts.structure.device, dtype=parts.structure.dtype, copy=True)
        self._parts = parts  # a graph holds addresses, not tensors
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._out = parts(self._x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._out.clone()


def of_patches(runner: Any) -> Places:
    """What stands in the place of the encoder of a model runner that is given patches."""
    return _graphs(runner, Patches, "its images are not cut into patches")


def of_tiles(runner: Any) -> Places:
    """What stands in the place of the method of a model that encodes whole images, or tiles."""
    return _graphs(runner, Tiles, "its images are cut into patches")


def _graphs(runner: Any, kind: type, otherwise: str) -> Places:
    """It becomes the runner's ``vision_graphs``."""
    structure = known_structure(runner.model)
    if isinstance(structure, str):
        return structure
    if not isinstance(structure, kind):
        return otherwise
    limit = VLoraArgs.from_environment().vision_graphs
    if limit < 1 or runner.server_args.disable_cuda_graph:
        return "--vlora-vision-graphs 0" if limit < 1 else "--disable-cuda-graph"
    if runner.server_args.tp_size > 1:
        return "tensor-parallel ranks would have to capture their reductions together"
    if _sgl.envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get():
        return "SGLang has graphs of its own (SGLANG_VIT_ENABLE_CUDA_GRAPH)"
    runner.vision_graphs = VisionGraphs(structure, limit, structure.common())
    return [Place(structure.owner, structure.method, runner.vision_graphs)]
