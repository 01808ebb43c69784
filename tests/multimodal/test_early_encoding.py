"""Which images are encoded before their batch is launched, and that the batch finds their embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl.multimodal.early_encoding import encode_ahead
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.multimodal.vision_graphs import VisionGraphs

GRID, OTHER = (1, 2, 4), (1, 4, 4)


class Model:
    """Embeds four patches as their sum, and notes what it was asked for."""

    visual = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        self.asked += [item.hash for item in items]
        return torch.cat([item.feature for item in items]).view(-1, 4, 2).sum(1)


def image(key: int, first: int, grid: tuple[int, int, int] = GRID, is_image: bool = True) -> Any:
    patches = grid[0] * grid[1] * grid[2]
    return SimpleNamespace(
        hash=key,
        feature=torch.full((patches, 2), float(key)),
        offsets=[(first, first + patches // 4 - 1)],
        model_specific_data={"image_grid_thw": torch.tensor([grid])},
        is_image=lambda: is_image,
    )


@pytest.fixture
def graphs() -> VisionGraphs:
    """Graphs of one grid."""
    encoder: Any = SimpleNamespace(forward=None)
    found = VisionGraphs(encoder, 4)
    found._graphs[GRID, False] = None  # type: ignore[assignment]
    return found


def test_what_is_missing_is_encoded_and_kept_once(graphs: VisionGraphs) -> None:
    model, cache = Model(), EncoderCache(1 << 20)
    items = [image(1, 3), image(2, 10), image(2, 20), image(3, 30)]
    assert encode_ahead(model, graphs, cache, items, start=5) == 2
    assert model.asked == [2, 3], "the first lies in the cached prefix, and one hash is one image"
    for key in (2, 3):
        assert torch.equal(cache.get_single(key).embedding, torch.full((2, 2), 4.0 * key))
    assert encode_ahead(model, graphs, cache, items, start=5) == 0 and len(model.asked) == 2


def test_to_the_batch_that_asks_it_was_not_there_before(graphs: VisionGraphs) -> None:
    cache = EncoderCache(1 << 20)
    assert encode_ahead(Model(), graphs, cache, [image(1, 3)], start=0) == 1
    assert cache.has(1) and not cache.knew(1)
    cache.get_single(1)
    assert (cache.hits, cache.misses, cache.state()["encoded_ahead"]) == (0, 1, 1)
    assert cache.knew(1)
    cache.get_single(1)  # by the next batch
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize(
    "items",
    [[image(1, 3), image(2, 10, OTHER)], [image(1, 3, is_image=False)], [image(1, 3)] * 0, [image(1, 3)]],
    ids=["no-graph-of-a-size", "a-video", "no-image", "all-cached"],
)
def test_else_it_is_left_to_the_batch(graphs: VisionGraphs, items: list[Any]) -> None:
    model, cache = Model(), EncoderCache(1 << 20)
    start = 100 if len(items) == 1 and items[0].is_image() else 0
    assert encode_ahead(model, graphs, cache, items, start) == 0
    assert not model.asked and not cache.ahead


def test_an_image_that_came_with_its_embedding_is_left_to_the_batch(graphs: VisionGraphs) -> None:
    item = image(1, 3)
    item.feature = None
    assert encode_ahead(Model(), graphs, EncoderCache(1 << 20), [item], start=0) == 0


def test_an_item_of_several_images_is_left_to_the_batch(graphs: VisionGraphs) -> None:
    item = image(1, 3)
    item.offsets = [(3, 4), (8, 9)]
    assert encode_ahead(Model(), graphs, EncoderCache(1 << 20), [item], start=0) == 0
