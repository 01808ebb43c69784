"""When an encoder's graph is captured, used and dropped; that it computes the same is checked on a GPU, end to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.multimodal import vision_graphs
from vlora_sgl.multimodal.vision_graphs import AFTER, COMMON, MAX_PATCHES, MAX_TOGETHER, OVERDUE, VisionGraphs
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE

WRONG = 98
"""Width of images whose captured graph computes something else."""


class Encoder:
    """An encoder that doubles its input and counts its eager runs."""

    dtype = torch.float32
    patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=torch.zeros(3, 1, 1, 1, 2)))

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.blocks, self.eager = torch.device(device), (), 0

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        self.eager += 1
        return 2 * x


# As far as _sgl.is_a can tell.
Encoder.__module__, _, Encoder.__qualname__ = _sgl.NAMES["Qwen2_5_VisionTransformer"].partition(":")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Grids captured, by a stand-in for CUDA's graphs."""
    grids: list[torch.Tensor] = []

    class Graph:
        def __init__(self, encoder: object, x: torch.Tensor, grid: torch.Tensor, *_: object) -> None:
            grids.append(grid)
            self.wrong = bool((grid == WRONG).any())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * x if self.wrong else 2 * x

    monkeypatch.setattr(vision_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return grids


def ask(graphs: VisionGraphs, *grid: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.rand(math.prod(grid), 2)
        assert torch.equal(graphs(x, torch.tensor([grid])), 2 * x)


def test_a_size_that_keeps_coming_is_captured_when_nothing_runs(
    captured: list[torch.Tensor],
) -> None:
    encoder = Encoder()
    graphs = VisionGraphs(encoder, 4)
    ask(graphs, 1, 2, 2, times=AFTER - 1)
    assert not graphs.capture_wanted(), "too few to want a graph"
    ask(graphs, 1, 2, 2, times=2)
    assert not captured, "requests wait for no capture"
    assert graphs.capture_wanted() and not graphs.capture_wanted()
    assert len(captured) == 1 and encoder.eager == AFTER + 2  # one of them beside the capture
    ask(graphs, 1, 2, 2, times=4)
    assert graphs.state() == {"graphs": 1, "graph_replays": 4}
    ask(graphs, 1, 1, 4, times=2)  # as many patches, another grid
    assert encoder.eager == AFTER + 4


def test_a_server_that_is_never_idle_captures_in_the_end(captured: list[torch.Tensor]) -> None:
    graphs = VisionGraphs(Encoder(), 4)
    ask(graphs, 1, 2, 2, times=OVERDUE - 1)
    assert not captured
    ask(graphs, 1, 2, 2)
    assert len(captured) == 1
    assert not graphs.capture_wanted(), "it is not captured twice"


@pytest.mark.parametrize("limit", [1, 16])
def test_common_sizes_are_captured_one_at_a_time_before_any_image_comes(
    captured: list[torch.Tensor], limit: int
) -> None:
    graphs = VisionGraphs(Encoder(), limit, COMMON)
    for number in range(1, min(limit, len(COMMON)) + 1):
        assert graphs.capture_wanted() and len(captured) == number
    assert not graphs.capture_wanted() and graphs.state()["graphs"] == min(limit, len(COMMON))
    ask(graphs, *COMMON[0])
    assert graphs.state()["graph_replays"] == 1


def test_common_sizes_are_whole_images() -> None:
    """Patches are merged two by two, and all of them together fit no limit but that of a graph."""
    assert all(t == 1 and h % 2 == w % 2 == 0 and h * w <= MAX_PATCHES for t, h, w in COMMON)
    assert len(set(COMMON)) == len(COMMON)


def test_no_size_is_wanted_that_is_long_forgotten(
    captured: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_graphs, "REMEMBERED", 3)
    graphs = VisionGraphs(Encoder(), 16)
    for height in range(2, 12, 2):
        ask(graphs, 1, height, 2, times=AFTER)
    while graphs.capture_wanted():
        pass
    assert [grid[0, 1].item() for grid in captured] == [6, 8, 10]


def test_several_images_replay_the_graphs_of_their_sizes(captured: list[torch.Tensor]) -> None:
    encoder = Encoder()
    graphs = VisionGraphs(encoder, 4)
    small, large = (1, 2, 2), (1, 2, 4)

    def together(*grids: tuple[int, int, int]) -> None:
        x = torch.rand(sum(t * h * w for t, h, w in grids), 2)
        assert torch.equal(graphs(x, torch.tensor(grids)), 2 * x)

    together(small, small, large, small, small)
    assert graphs.capture_wanted() and not graphs.capture_wanted()
    assert [grid.tolist() for grid in captured] == [[list(small)]]
    eager = encoder.eager
    together(small, small)
    together(small, small, small)
    assert encoder.eager == eager and graphs.state() == {"graphs": 1, "graph_replays": 5}
    together(small, large)  # one size is not known yet
    assert encoder.eager == eager + 1
    together(*[small] * MAX_TOGETHER)
    assert encoder.eager == eager + 1
    together(*[small] * (MAX_TOGETHER + 1))
    assert encoder.eager == eager + 2


def test_the_least_recently_used_size_leaves(captured: list[torch.Tensor]) -> None:
    encoder = Encoder()
    graphs = VisionGraphs(encoder, 2)
    for height in (2, 4, 2, 6):
        ask(graphs, 1, height, 2, times=AFTER)
        graphs.capture_wanted()
    assert graphs.state()["graphs"] == 2 and len(captured) == 3
    eager = encoder.eager
    ask(graphs, 1, 2, 2)
    assert encoder.eager == eager, "the size used in between must have stayed"
    ask(graphs, 1, 4, 2, times=AFTER - 1)
    assert not graphs.capture_wanted() and len(captured) == 3, "the size that left is counted anew"


def test_a_graph_that_computes_something_else_is_never_used(captured: list[torch.Tensor]) -> None:
    graphs = VisionGraphs(Encoder(), 2)
    ask(graphs, 1, 2, WRONG, times=OVERDUE + 4)
    assert graphs.state() == {"graphs": 0, "graph_replays": 0} and graphs.limit == 0
    assert not graphs.serves([], [])


class Adapters:
    """Adapters that multiply: an image's is the number of its slot. Graphs read it from tables, as layers do."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.images, self.tables_made = encoder, [], 0
        self.routed: list[Any] = []
        self.read: dict[str, int] | None = None
        encoder.forward = self.eager  # type: ignore[method-assign]

    def eager(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        self.encoder.eager += 1
        own = [slots[0][0] if slots else 1 for slots in self.routed] or [1] * len(grid_thw)
        if self.read is not None:
            own = [self.read["is"]]
        parts = x.split(grid_thw.prod(1).tolist())
        return torch.cat([2 * factor * part for factor, part in zip(own, parts, strict=True)])

    def route(self) -> None:
        self.routed = self.images

    def applied_by(self, items: list[Any]) -> list[Any] | None:
        return None if any(item.vlora_adapter == 0 for item in items) else [((i.vlora_adapter, 1.0),) for i in items]

    def tables(self, patches: int) -> dict[str, int]:
        self.tables_made += 1
        return {"patches": patches, "is": 1}

    def refresh(self, tables: dict[str, int], slots: Any) -> None:
        tables["is"] = slots[0][0] if slots else 1

    @contextmanager
    def reading(self, tables: dict[str, int] | None) -> Iterator[None]:
        before, self.read = self.read, tables or {"is": 1}
        yield
        self.read = before


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> tuple[VisionGraphs, Adapters]:
    encoder = Encoder()
    adapters = Adapters(encoder)

    class Graph:
        """Replays with what is in the tables that it was captured with."""

        def __init__(self, encoder: object, x: torch.Tensor, grid: torch.Tensor, *_: object) -> None:
            self.tables, self.wrong = adapters.read, bool((grid == WRONG).any())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            assert self.tables is not None
            return 2 * self.tables["is"] * x + self.wrong

    monkeypatch.setattr(vision_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graphs = VisionGraphs(encoder, 8)  # type: ignore[arg-type]
    graphs.adapters = adapters  # type: ignore[assignment]
    return graphs, adapters


def encode(graphs: VisionGraphs, adapters: Adapters, *slots: int | None, grid: tuple[int, ...] = (1, 2, 2)) -> None:
    adapters.images = [() if slot is None else ((slot, 1.0),) for slot in slots] if any(slots) else []
    x = torch.rand(len(slots) * math.prod(grid), 2)
    factors = torch.tensor([1.0 if slot is None else slot for slot in slots]).repeat_interleave(math.prod(grid))
    assert torch.equal(graphs(x, torch.tensor([grid] * len(slots))), 2 * factors[:, None] * x)
    adapters.images = adapters.routed = []


def test_images_with_adapters_have_graphs_of_their_own(adapted: tuple[VisionGraphs, Adapters]) -> None:
    graphs, adapters = adapted
    for _ in range(AFTER):
        encode(graphs, adapters, None)
    assert graphs.capture_wanted() and graphs.state()["graphs"] == 1 and not adapters.tables_made
    for slot in range(1, AFTER + 1):
        encode(graphs, adapters, slot)
    assert graphs.capture_wanted() and not graphs.capture_wanted()
    assert graphs.state()["graphs"] == 2 and adapters.tables_made == 1
    eager = adapters.encoder.eager
    encode(graphs, adapters, 3, None, 5, 3, None)
    encode(graphs, adapters, 7)
    encode(graphs, adapters, None)
    assert adapters.encoder.eager == eager, "all of them replay, whichever adapter is theirs"
    graphs.forget_adapted()
    encode(graphs, adapters, None)
    assert adapters.encoder.eager == eager and graphs.state()["graphs"] == 1
    encode(graphs, adapters, 3)
    assert adapters.encoder.eager > eager


def test_a_wrong_graph_with_adapters_leaves_the_others(adapted: tuple[VisionGraphs, Adapters]) -> None:
    graphs, adapters = adapted
    for _ in range(OVERDUE + 4):
        encode(graphs, adapters, 3, grid=(1, 2, WRONG))
        encode(graphs, adapters, None)
    assert not graphs.capture_wanted()
    assert graphs.state()["graphs"] == 1 and graphs.limit == 8


def test_what_is_encoded_ahead_knows_its_adapter(adapted: tuple[VisionGraphs, Adapters]) -> None:
    graphs, adapters = adapted
    for _ in range(AFTER):
        encode(graphs, adapters, 3)
    graphs.capture_wanted()
    data = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    items = [SimpleNamespace(model_specific_data=data, vlora_adapter=slot) for slot in (3, 4, 0)]
    assert graphs.serves_items(items[:2])  # type: ignore[arg-type]
    assert not graphs.serves_items(items), "one is in no slot"  # type: ignore[arg-type]


def test_large_inputs_stay_eager(captured: list[torch.Tensor]) -> None:
    graphs = VisionGraphs(Encoder(), 2)
    for _ in range(OVERDUE + 2):
        graphs(torch.zeros(MAX_PATCHES + 1, 1), torch.tensor([[1, 2, 2]]))
    assert not captured


def runner(encoder: Any, **settings: Any) -> Any:
    args = SimpleNamespace(**{"tp_size": 1, "disable_cuda_graph": False, **settings})
    return SimpleNamespace(model=SimpleNamespace(visual=encoder), server_args=args, vision_graphs=None)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: runner(None), "its image encoder is no Qwen2_5_VisionTransformer"),
        (lambda: runner(type("Qwen2_5_VisionTransformer", (), {})()), "its image encoder is no Qwen2_5"),
        (lambda: runner(Encoder()), "its image encoder is not on a GPU"),
        (lambda: runner(Encoder("cuda"), tp_size=2), "tensor-parallel ranks"),
        (lambda: runner(Encoder("cuda"), disable_cuda_graph=True), "--disable-cuda-graph"),
    ],
)
def test_only_known_encoders_on_a_gpu_get_graphs(made: Callable[[], Any], why: str) -> None:
    assert str(vision_graphs.graphs(made())).startswith(why)


def test_graphs_take_the_encoders_place_unless_there_are_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = runner(Encoder("cuda"))
    assert vision_graphs.graphs(known) == [(known.model.visual, "forward", known.vision_graphs)]
    assert isinstance(known.vision_graphs, VisionGraphs)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"vision_graphs": 0}')
    assert vision_graphs.graphs(runner(Encoder("cuda"))) == "--vlora-vision-graphs 0"


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, shift: int) -> torch.Tensor:
        return x + shift


def test_what_the_blocks_are_given_is_noted_and_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_graphs, "_Graph", lambda *args: given.append(args[3]) or (lambda x: x + 3))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    encoder = Encoder()
    encoder.blocks = (Block(), Block())
    encoder.forward = lambda x, grid: encoder.blocks[1](encoder.blocks[0](x, shift=1), shift=2)
    graphs = VisionGraphs(encoder, 1)
    for _ in range(OVERDUE):
        graphs(torch.zeros(4, 2), torch.tensor([[1, 2, 2]]))
    assert given == [[{"shift": 1}, {"shift": 2}]] and graphs.state()["graphs"] == 1
    assert not any("forward" in vars(block) for block in encoder.blocks)
