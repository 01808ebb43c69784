"""When an encoder's graph is captured, used and dropped; that it computes the same is checked on a GPU, end to end."""

from __future__ import annotations

import math

import pytest
import torch

from vlora_sgl.multimodal import vision_graphs
from vlora_sgl.multimodal.vision_graphs import AFTER, MAX_PATCHES, MAX_TOGETHER, VisionGraphs, install

WRONG = 98
"""Width of images whose captured graph computes something else."""


class Qwen2_5_VisionTransformer:
    """An encoder that doubles its input and counts its eager runs."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.blocks, self.eager = torch.device(device), (), 0

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        self.eager += 1
        return 2 * x


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


def test_a_size_is_captured_after_a_few_images_and_then_replayed(captured: list[torch.Tensor]) -> None:
    encoder = Qwen2_5_VisionTransformer()
    graphs = VisionGraphs(encoder, 4)
    ask(graphs, 1, 2, 2, times=AFTER)
    assert not captured
    ask(graphs, 1, 2, 2, times=5)
    assert len(captured) == 1 and encoder.eager == AFTER + 2  # one of them beside the capture
    assert graphs.state() == {"graphs": 1, "graph_replays": 4}
    ask(graphs, 1, 1, 4, times=2)  # as many patches, another grid
    assert encoder.eager == AFTER + 4


def test_several_images_replay_the_graphs_of_their_sizes(captured: list[torch.Tensor]) -> None:
    encoder = Qwen2_5_VisionTransformer()
    graphs = VisionGraphs(encoder, 4)
    small, large = (1, 2, 2), (1, 2, 4)

    def together(*grids: tuple[int, int, int]) -> None:
        x = torch.rand(sum(t * h * w for t, h, w in grids), 2)
        assert torch.equal(graphs(x, torch.tensor(grids)), 2 * x)

    together(small, small, large, small, small)  # the fourth of the small ones is captured
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
    encoder = Qwen2_5_VisionTransformer()
    graphs = VisionGraphs(encoder, 2)
    for height in (2, 4, 2, 6):
        ask(graphs, 1, height, 2, times=AFTER + 2)
    assert graphs.state()["graphs"] == 2 and len(captured) == 3
    eager = encoder.eager
    ask(graphs, 1, 2, 2)
    assert encoder.eager == eager, "the size used in between must have stayed"
    ask(graphs, 1, 4, 2, times=AFTER)
    assert len(captured) == 3, "the size that left is counted anew"


def test_a_graph_that_computes_something_else_is_never_used(captured: list[torch.Tensor]) -> None:
    graphs = VisionGraphs(Qwen2_5_VisionTransformer(), 2)
    ask(graphs, 1, 2, WRONG, times=AFTER + 4)
    assert graphs.state() == {"graphs": 0, "graph_replays": 0} and graphs.limit == 0
    assert not graphs.serves([])


def test_large_inputs_stay_eager(captured: list[torch.Tensor]) -> None:
    graphs = VisionGraphs(Qwen2_5_VisionTransformer(), 2)
    for _ in range(AFTER + 2):
        graphs(torch.zeros(MAX_PATCHES + 1, 1), torch.tensor([[1, 2, 2]]))
    assert not captured


def test_only_known_encoders_on_a_gpu_get_graphs() -> None:
    class Model:
        visual = Qwen2_5_VisionTransformer()

    assert install(Model(), 4) is None
    Model.visual = Qwen2_5_VisionTransformer("cuda")
    assert install(Model(), 0) is None
    assert isinstance(install(Model(), 4), VisionGraphs)
    assert install(object(), 4) is None
