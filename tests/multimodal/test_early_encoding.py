"""Which images are encoded before their batch is launched, and that the batch finds their embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl.multimodal.early_encoding import encode_ahead
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.multimodal.vision_families import Clip, Qwen2
from vlora_sgl.multimodal.vision_graphs import VisionGraphs

GRID, OTHER = (1, 2, 4), (1, 4, 4)


class Model:
    """Embeds four patches as their sum, and notes what it was asked for."""

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
    encoder = SimpleNamespace(
        forward=None, blocks=(), patch_embed=None, spatial_merge_size=2, device="cpu", dtype=torch.float32
    )
    found = VisionGraphs(Qwen2(encoder), 4)
    found._graphs[GRID, 1, False] = None  # type: ignore[assignment]
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


class Tiled:
    """Embeds a tile as two tokens of its mean."""

    vision_tower = SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        vision_model=SimpleNamespace(embeddings=SimpleNamespace(image_size=4), encoder=SimpleNamespace(layers=())),
    )

    def rows_of_size(self, height: int, width: int) -> tuple[int, int]:
        return 3, 2

    def extract_feature(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.mean((1, 2, 3))[:, None, None].expand(-1, 2, 5)

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        return self.extract_feature(torch.cat([item.feature for item in items]))


@pytest.mark.parametrize("kinds", [[1], [3]], ids=["tile-by-tile", "three-together"])
def test_images_of_several_tiles_are_encoded_where_their_tiles_have_graphs(kinds: list[int]) -> None:
    model, cache = Tiled(), EncoderCache(1 << 20)
    graphs = VisionGraphs(Clip(model), 4)
    for count in kinds:
        graphs._graphs[(3, 4, 4), count, False] = None  # type: ignore[assignment]
    items = [
        SimpleNamespace(
            hash=key,
            feature=torch.full((tiles, 3, 4, 4), float(key)),
            offsets=[(10 * key, 10 * key + 2 * tiles - 1)],
            is_image=lambda: True,
        )
        for key, tiles in ((1, 1), (2, 2))
    ]
    assert encode_ahead(model, graphs, cache, items, start=0) == 2
    for key, tiles in ((1, 1), (2, 2)):
        assert torch.equal(cache.get_single(key).embedding, torch.full((2 * tiles, 5), float(key)))
    items[0].hash, items[0].feature = 9, torch.zeros(2, 5)  # the caller brought the embedding
    assert encode_ahead(model, graphs, cache, items, start=0) == 0
