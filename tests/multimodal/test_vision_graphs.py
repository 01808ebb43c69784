"""When an encoder's graph is captured, used and dropped; that it computes the same is checked on a GPU, end to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stand_in import passing_for
from vlora_sgl.multimodal import vision_demand, vision_graphs
from vlora_sgl.multimodal.vision_demand import AFTER, OVERDUE
from vlora_sgl.multimodal.vision_families import Clip, Intern, Qwen2
from vlora_sgl.multimodal.vision_graphs import LEAST, MAX_PATCHES, TOGETHER, VisionGraphs
from vlora_sgl.multimodal.vision_structures import Parts
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE

WRONG, WRONG_TOGETHER = 98, 5
"""Width, and number, of images whose captured graph computes something else."""


class Encoder(passing_for("Qwen2VisionTransformer")):  # type: ignore[misc]
    """An encoder that doubles its input and counts its eager runs."""

    dtype, spatial_merge_size = torch.float32, 2
    patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=torch.zeros(3, 1, 1, 1, 2)))

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.blocks, self.eager = torch.device(device), (), 0

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        self.eager += 1
        return 2 * x


Encoder.__module__, Encoder.__qualname__ = Encoder.__mro__[1].__module__, Encoder.__mro__[1].__qualname__


def graphs_of(encoder: Any, limit: int, *wanted: tuple[int, ...]) -> VisionGraphs:
    return VisionGraphs(Qwen2(encoder), limit, wanted)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """How many images of which size have been captured, by a stand-in for CUDA's graphs."""
    kinds: list[tuple[int, ...]] = []
    noted = vision_graphs.parts_of

    def parts_of(structure: Any, method: Any, x: torch.Tensor, grid: tuple[int, ...], count: int) -> Any:
        kinds.append((count, *grid))
        return noted(structure, method, x, grid, count)

    class Graph:
        def __init__(self, parts: Parts, x: torch.Tensor, pool: object) -> None:
            count, *grid = kinds[-1]
            self.wrong, self.shape = WRONG in grid or count == WRONG_TOGETHER, x.shape

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape == self.shape
            return 3 * x if self.wrong else 2 * x

    monkeypatch.setattr(vision_graphs, "parts_of", parts_of)
    monkeypatch.setattr(vision_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return kinds


def ask(graphs: VisionGraphs, *grid: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.rand(math.prod(grid), 2)
        assert torch.equal(graphs(x, torch.tensor([grid])), 2 * x)


def test_a_size_that_keeps_coming_is_captured_when_nothing_runs(
    captured: list[tuple[int, ...]],
) -> None:
    encoder = Encoder()
    graphs = graphs_of(encoder, 4)
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


def test_a_server_that_is_never_idle_captures_in_the_end(captured: list[tuple[int, ...]]) -> None:
    graphs = graphs_of(Encoder(), 4)
    ask(graphs, 1, 2, 2, times=OVERDUE - 1)
    assert not captured
    ask(graphs, 1, 2, 2)
    assert len(captured) == 1
    assert not graphs.capture_wanted(), "it is not captured twice"


@pytest.mark.parametrize("limit", [1, 16])
def test_common_sizes_are_captured_one_at_a_time_before_any_image_comes(
    captured: list[tuple[int, ...]], limit: int
) -> None:
    common = [(1, 16, 16), (1, 24, 24), (1, 32, 32)]
    graphs = graphs_of(Encoder(), limit, *common)
    for number in range(1, min(limit, len(common)) + 1):
        assert graphs.capture_wanted() and len(captured) == number
    assert not graphs.capture_wanted() and graphs.state()["graphs"] == min(limit, len(common))
    ask(graphs, *common[0])
    assert graphs.state()["graph_replays"] == 1


def test_no_size_is_wanted_that_is_long_forgotten(
    captured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_demand, "REMEMBERED", 3)
    graphs = graphs_of(Encoder(), 16)
    for height in range(2, 12, 2):
        ask(graphs, 1, height, 2, times=AFTER)
    while graphs.capture_wanted():
        pass
    assert captured == [(1, 1, height, 2) for height in (6, 8, 10)]


def together(graphs: VisionGraphs, *grids: tuple[int, ...], times: int = 1) -> None:
    for _ in range(times):
        x = torch.rand(sum(map(math.prod, grids)), 2)
        assert torch.equal(graphs(x, torch.tensor(grids)), 2 * x)


def test_few_images_replay_the_graphs_of_their_sizes(captured: list[tuple[int, ...]]) -> None:
    encoder = Encoder()
    graphs = graphs_of(encoder, 4)
    small, large = (1, 2, 2), (1, 2, 4)
    together(graphs, small, large, small, large, small)
    assert graphs.capture_wanted() and not graphs.capture_wanted()
    assert captured == [(1, *small)]
    eager = encoder.eager
    together(graphs, small, small)
    together(graphs, small, small, small)
    assert encoder.eager == eager and graphs.state() == {"graphs": 1, "graph_replays": 5}
    together(graphs, small, large)  # one size is not known yet
    assert encoder.eager == eager + 1


def test_one_after_the_other_only_where_launches_take_the_time(captured: list[tuple[int, ...]]) -> None:
    """A graph of few patches takes as long as one of ``LEAST``."""
    encoder = Encoder()
    small, large = (1, 2, 2), (1, 32, 32)
    graphs = graphs_of(encoder, 4, small, large)
    assert graphs.capture_wanted() and graphs.capture_wanted()
    eager, most = encoder.eager, TOGETHER // 1024
    together(graphs, *[large] * most)
    together(graphs, *[small] * (TOGETHER // LEAST))
    together(graphs, *[large] * (most - 1), small, small)
    assert encoder.eager == eager
    for images in ([large] * (most + 1), [small] * (TOGETHER // LEAST + 1), [large, large, small, small, small]):
        assert not graphs.serves(images, [()] * len(images))
        together(graphs, *images)
        eager += 1
        assert encoder.eager == eager


def test_images_of_one_size_that_keep_coming_together_are_captured_together(
    captured: list[tuple[int, ...]],
) -> None:
    encoder = Encoder()
    graphs, frame, page = graphs_of(encoder, 4), (1, 16, 16), (1, 2, 2)
    together(graphs, *[frame] * 8, times=AFTER)
    assert graphs.capture_wanted() and not graphs.capture_wanted(), "eight frames one by one help nobody"
    assert captured == [(8, *frame)]
    eager = encoder.eager
    together(graphs, *[frame] * 8, times=2)
    assert encoder.eager == eager and graphs.state() == {"graphs": 1, "graph_replays": 2}
    assert graphs.serves([frame] * 8, [()] * 8) and not graphs.serves([frame] * 7, [()] * 7)
    together(graphs, *[frame] * 16)  # twice, but the device is busy then
    assert encoder.eager == eager + 1
    together(graphs, *[page] * 3)  # as many patches as 12 of another size: runs eagerly
    assert encoder.eager == eager + 2


def test_a_call_takes_the_graphs_of_most_images(captured: list[tuple[int, ...]]) -> None:
    encoder = Encoder()
    graphs, small = graphs_of(encoder, 8, (1, 2, 2)), (1, 2, 2)
    assert graphs.capture_wanted()
    together(graphs, *[small] * 3, times=AFTER)  # served one by one meanwhile
    assert graphs.capture_wanted() and captured == [(1, *small), (3, *small)]
    before, eager = graphs.replays, encoder.eager
    together(graphs, *[small] * 3)
    assert graphs.replays == before + 1
    together(graphs, *[small] * 7)
    assert graphs.replays == before + 1 + 3, "3 + 3 + 1"
    together(graphs, *[small] * 2, (1, 2, 4), times=2)
    assert encoder.eager == eager + 2


def test_what_is_served_by_parts_waits_for_no_capture(captured: list[tuple[int, ...]]) -> None:
    graphs = graphs_of(Encoder(), 8, (1, 2, 2))
    assert graphs.capture_wanted()
    together(graphs, *[(1, 2, 2)] * 3, times=OVERDUE + 4)
    assert len(captured) == 1, "it is not captured while a request waits"
    assert graphs.capture_wanted() and len(captured) == 2


def test_an_overdue_kind_is_captured_of_its_own_images(captured: list[tuple[int, ...]]) -> None:
    graphs = graphs_of(Encoder(), 4)
    together(graphs, (1, 4, 4), *[(1, 32, 32)] * 4, times=OVERDUE)
    assert captured == [(4, 1, 32, 32)]


def test_a_wrong_graph_of_several_leaves_those_of_one(captured: list[tuple[int, ...]]) -> None:
    encoder = Encoder()
    graphs, small = graphs_of(encoder, 4), (1, 2, 2)
    together(graphs, *[small] * WRONG_TOGETHER, times=AFTER)
    while graphs.capture_wanted():
        pass
    assert captured == [(1, *small), (WRONG_TOGETHER, *small)] and graphs.state()["graphs"] == 1
    together(graphs, *[small] * 3, times=OVERDUE + 1)
    assert not graphs.capture_wanted() and graphs.state()["graphs"] == 1 and graphs.limit == 4


def test_the_least_recently_used_size_leaves(captured: list[tuple[int, ...]]) -> None:
    encoder = Encoder()
    graphs = graphs_of(encoder, 2)
    for height in (2, 4, 2, 6):
        ask(graphs, 1, height, 2, times=AFTER)
        graphs.capture_wanted()
    assert graphs.state()["graphs"] == 2 and len(captured) == 3
    eager = encoder.eager
    ask(graphs, 1, 2, 2)
    assert encoder.eager == eager, "the size used in between must have stayed"
    ask(graphs, 1, 4, 2, times=OVERDUE + AFTER - 1)
    assert not graphs.capture_wanted() and len(captured) == 3, "the size that left has to come often"
    ask(graphs, 1, 4, 2)
    assert graphs.capture_wanted() and len(captured) == 4


def test_graphs_of_several_images_leave_room_for_those_of_one(captured: list[tuple[int, ...]]) -> None:
    encoder = Encoder()
    small, other = (1, 2, 2), (1, 2, 4)
    graphs = graphs_of(encoder, 4, small, other)
    while graphs.capture_wanted():
        pass
    for count in (2, 3, 4):
        together(graphs, *[small] * count, times=AFTER)
        assert graphs.capture_wanted()
    assert graphs.state()["graphs"] == 4
    eager, before = encoder.eager, graphs.replays
    ask(graphs, *other)
    ask(graphs, *small)
    together(graphs, *[small] * 4)
    together(graphs, *[small] * 2)  # the one that left
    assert encoder.eager == eager and graphs.replays == before + 5


def test_a_graph_that_computes_something_else_is_never_used(captured: list[tuple[int, ...]]) -> None:
    graphs = graphs_of(Encoder(), 2)
    ask(graphs, 1, 2, WRONG, times=OVERDUE + 4)
    assert graphs.state() == {"graphs": 0, "graph_replays": 0} and graphs.limit == 0
    assert not graphs.serves([], [])


UNFIT = 77
"""A slot that a graph's tables have no room for."""


class Adapters:
    """Adapters that multiply: an image's is the number of its slot. Graphs read it from tables, as layers do."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.images, self.tables_made = encoder, [], 0
        self.routed: list[Any] = []
        self.read: dict[str, Any] | None = None
        self.widths: list[int] = []
        encoder.forward = self.eager  # type: ignore[method-assign]

    def eager(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        self.encoder.eager += 1
        own = [slots[0][0] if slots else 1 for slots in self.routed] or [1] * len(grid_thw)
        if self.read is not None:
            own = self.read["is"]
        parts = x.split(grid_thw.prod(1).tolist())
        return torch.cat([2 * factor * part for factor, part in zip(own, parts, strict=self.read is None)])

    def route(self) -> None:
        self.routed = self.images

    def applied_by(self, items: list[Any]) -> list[Any] | None:
        return None if any(item.vlora_adapter == 0 for item in items) else [((i.vlora_adapter, 1.0),) for i in items]

    def fit(self, applied: Any) -> bool:
        return all(slots != ((UNFIT, 1.0),) for slots in applied)

    def tables(self, rows: tuple[int, int], pairs: int) -> dict[str, Any]:
        assert rows[0] == 4 * rows[1]
        self.tables_made += 1
        self.widths.append(pairs)
        return {"rows": rows, "is": [1]}

    def refresh(self, tables: dict[str, Any], applied: Any) -> None:
        assert tables["rows"][0] % len(applied) == 0
        tables["is"] = [slots[0][0] if slots else 1 for slots in applied]

    @contextmanager
    def reading(self, tables: dict[str, Any] | None) -> Iterator[None]:
        before, self.read = self.read, tables or {"is": [1] * 9}
        yield
        self.read = before


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> tuple[VisionGraphs, Adapters]:
    encoder = Encoder()
    adapters = Adapters(encoder)

    class Graph:
        """Replays with what is in the tables that it was captured with."""

        def __init__(self, parts: Parts, x: torch.Tensor, pool: object) -> None:
            self.tables, self.wrong = adapters.read, len(x) == 2 * WRONG

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            assert self.tables is not None
            own = self.tables["is"]
            own = own if "rows" in self.tables else own[:1]
            return torch.cat([2 * one * part for one, part in zip(own, x.chunk(len(own)), strict=True)]) + self.wrong

    monkeypatch.setattr(vision_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graphs = graphs_of(encoder, 8)
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


def test_images_of_one_call_have_one_graph_whichever_adapters_are_theirs(
    adapted: tuple[VisionGraphs, Adapters],
) -> None:
    graphs, adapters = adapted
    for _ in range(AFTER):
        encode(graphs, adapters, 3, None, 5)
    while graphs.capture_wanted():
        pass
    before, eager = graphs.replays, adapters.encoder.eager
    encode(graphs, adapters, 2, 7, None)
    encode(graphs, adapters, None, None, 4)
    assert graphs.replays == before + 2 and adapters.encoder.eager == eager
    encode(graphs, adapters, 2, UNFIT, None)
    assert adapters.encoder.eager == eager + 1
    encode(graphs, adapters, None, None, None)
    assert graphs.replays == before + 5, "no adapter: three graphs that read none"
    graphs.forget_adapted()
    encode(graphs, adapters, 2, 7, None)
    assert adapters.encoder.eager == eager + 2


def test_images_that_apply_two_have_graphs_of_their_own(adapted: tuple[VisionGraphs, Adapters]) -> None:
    graphs, adapters = adapted
    x, grid = torch.rand(4, 2), torch.tensor([[1, 2, 2]])
    for _ in range(AFTER):
        encode(graphs, adapters, 3)
        adapters.images = [((3, 1.0), (4, -1.0))]
        graphs(x, grid)
        adapters.images = []
    while graphs.capture_wanted():
        pass
    assert adapters.widths == [1, 2] and graphs.state()["graphs"] == 2
    eager = adapters.encoder.eager
    for slots in ([((3, 1.0),)], [((5, 1.0), (4, -1.0))]):
        adapters.images = slots
        graphs(x, grid)
    assert adapters.encoder.eager == eager
    adapters.images = [((3, 1.0),), ((5, 1.0), (4, -1.0))]
    graphs(torch.cat([x, x]), grid.repeat(2, 1))
    assert adapters.encoder.eager == eager, "each image by its own"


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
    encode(graphs, adapters, UNFIT)  # eagerly
    data = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    items = [SimpleNamespace(model_specific_data=data, vlora_adapter=slot) for slot in (3, 4, 0)]
    assert graphs.serves_items(items[:2])  # type: ignore[arg-type]
    assert not graphs.serves_items(items), "one is in no slot"  # type: ignore[arg-type]


def test_large_inputs_stay_eager(captured: list[tuple[int, ...]]) -> None:
    graphs = graphs_of(Encoder(), 2)
    for _ in range(OVERDUE + 2):
        graphs(torch.zeros(MAX_PATCHES + 2, 2), torch.tensor([[1, 2, MAX_PATCHES // 2 + 1]]))
    assert not captured


def runner(encoder: Any, **settings: Any) -> Any:
    args = SimpleNamespace(**{"tp_size": 1, "disable_cuda_graph": False, **settings})
    return SimpleNamespace(model=SimpleNamespace(visual=encoder), server_args=args, vision_graphs=None)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: runner(None), "its image encoder is none of Qwen2VisionTransformer, Qwen2_5_VisionTransformer"),
        (lambda: runner(type("Qwen2_5_VisionTransformer", (), {})()), "its image encoder is none of"),
        (lambda: runner(Encoder()), "its image encoder is not on a GPU"),
        (lambda: runner(Encoder("cuda"), tp_size=2), "tensor-parallel ranks"),
        (lambda: runner(Encoder("cuda"), disable_cuda_graph=True), "--disable-cuda-graph"),
    ],
)
def test_only_known_encoders_on_a_gpu_get_graphs(made: Callable[[], Any], why: str) -> None:
    assert str(vision_graphs.of_patches(made())).startswith(why)


def test_sglangs_own_graphs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", "1")
    assert "SGLANG_VIT_ENABLE_CUDA_GRAPH" in str(vision_graphs.of_patches(runner(Encoder("cuda"))))


def test_graphs_take_the_encoders_place_unless_there_are_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = runner(Encoder("cuda"))
    assert vision_graphs.of_patches(known) == [(known.model.visual, "forward", known.vision_graphs)]
    assert isinstance(known.vision_graphs, VisionGraphs)
    assert vision_graphs.of_tiles(known) == "its images are cut into patches"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"vision_graphs": 0}')
    assert vision_graphs.of_patches(runner(Encoder("cuda"))) == "--vlora-vision-graphs 0"


def tiled(name: str) -> Any:
    """A model of tiles, as far as anybody looks before an image comes."""
    inner = SimpleNamespace(
        embeddings=SimpleNamespace(image_size=16, patch_size=4), encoder=SimpleNamespace(layers=())
    )
    if name == "internvl":
        tower = passing_for("InternVisionModel", SimpleNamespace)(device="cuda", dtype=torch.float16, **vars(inner))
        kind = passing_for("InternVLChatModel", SimpleNamespace)
        return kind(vision_model=tower, downsample_ratio=0.5, extract_feature=None)
    tower = SimpleNamespace(device="cuda", dtype=torch.float16, vision_model=inner)
    ours = type("Llava", (SimpleNamespace,), {"extract_feature": lambda self, x: x})
    return ours(vision_tower=tower, rows_of_size=lambda height, width: (17, 16))


@pytest.mark.parametrize("name, kind, rows", [("internvl", Intern, (17, 4)), ("llava", Clip, (17, 16))])
def test_models_of_tiles_are_captured_by_their_number(name: str, kind: type, rows: tuple[int, int]) -> None:
    model = tiled(name)
    found = runner(None)
    found.model = model
    assert vision_graphs.of_patches(found) == "its images are not cut into patches"
    assert vision_graphs.of_tiles(found) == [(model, "extract_feature", found.vision_graphs)]
    structure = found.vision_graphs.structure
    assert isinstance(structure, kind) and structure.common() == [(3, 16, 16)] and structure.rows((3, 16, 16)) == rows
    for feature, tiles in ((torch.zeros(5, 3, 16, 16), 5), (torch.zeros(4, 8), 0), (None, 0)):
        assert structure.grids_of(SimpleNamespace(feature=feature)) == [(3, 16, 16)] * tiles


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, shift: int) -> torch.Tensor:
        return x + shift


def test_what_the_blocks_are_given_is_noted_and_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_graphs, "_Graph", lambda parts, *_: given.append(parts.given) or (lambda x: x + 3))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    encoder = Encoder()
    encoder.blocks = tuple(Block() for _ in range(2))
    for block in encoder.blocks:
        block.attn = None
    encoder.forward = lambda x, grid: encoder.blocks[1](encoder.blocks[0](x, shift=1), shift=2)
    graphs = graphs_of(encoder, 1)
    for _ in range(OVERDUE):
        graphs(torch.zeros(4, 2), torch.tensor([[1, 2, 2]]))
    assert given == [[{"shift": 1}, {"shift": 2}]] and graphs.state()["graphs"] == 1
    assert not any("forward" in vars(block) for block in encoder.blocks)


def test_an_encoder_that_is_another_than_it_was_gets_no_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a capture raises, the call is answered, and one line says so."""

    def no_graph(*_: object) -> Any:
        raise ValueError("blocks have moved")

    monkeypatch.setattr(vision_graphs, "_Graph", no_graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graphs = graphs_of(Encoder(), 4)
    ask(graphs, 1, 2, 2, times=OVERDUE + 4)
    assert [record.getMessage() for record in caplog.records] == ["no graphs of the image encoder: blocks have moved"]
    assert graphs.limit == 0 and not graphs.capture_wanted()
