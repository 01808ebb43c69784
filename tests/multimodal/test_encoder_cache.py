"""Embeddings of images: found again only for the same patches in the same grid under the same tower."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.multimodal import encoder_cache
from vlora_sgl.multimodal.encoder_cache import EncoderCache, images_to_encode, name_embeddings


def item(content: int = 7, grid: tuple[int, int] = (4, 6), modality: str = "IMAGE", offsets: Any = ((3, 8),)) -> Any:
    return SimpleNamespace(
        hash=content,
        modality=SimpleNamespace(name=modality),
        offsets=offsets,
        model_specific_data={"image_grid_thw": torch.tensor([[1, *grid]])},
    )


def key(one: Any, tower: str | None = None) -> int:
    name_embeddings(SimpleNamespace(mm_items=[one]), tower, "id")
    assert one.vlora_adapter == (None if tower is None else "id")
    return int(one.hash)


def test_a_key_names_all_that_decides_an_embedding() -> None:
    same, again = key(item()), key(item())
    assert same == again
    others = [key(item(8)), key(item(grid=(6, 4))), key(item(modality="VIDEO")), key(item(), "t1"), key(item(), "t2")]
    assert len({same, *others}) == 6


def test_an_item_that_comes_again_is_named_by_what_it_shows() -> None:
    """A session's items are the same objects in its next request, which may be one of another adapter."""
    one = item()
    first = key(one)
    assert key(one) == first and key(one, "a tower") == key(item(), "a tower") != first
    assert key(one) == first
    name_embeddings(None, None, None)


def test_look_ups_are_counted_and_the_oldest_leave() -> None:
    cache = EncoderCache(100)
    for number in range(3):
        assert cache.get_single(number) is None
        cache.set(number, embedding(40))
    assert cache.get_single(0) is None and cache.get_single(2) is not None
    assert cache.get([1, 2]) is None
    kept = {"images": 2, "bytes": 80, "capacity_bytes": 100}
    assert cache.state() == {"hits": 1, "misses": 5, "encoded_ahead": 0, **kept}


def test_what_was_encoded_ahead_is_a_miss_to_the_first_that_asks() -> None:
    cache = EncoderCache(100)
    cache.set_ahead(1, embedding(40))
    assert cache.has(1) and not cache.knew(1)
    assert cache.get_single(1) is not None and (cache.hits, cache.misses) == (0, 1)
    assert cache.knew(1) and cache.get_single(1) is not None and (cache.hits, cache.misses) == (1, 1)


def test_what_left_before_anybody_asked_is_forgotten() -> None:
    cache = EncoderCache(100)
    for number in range(4):
        cache.set_ahead(number, embedding(40))
    assert cache.ahead <= {1, 2, 3} and cache.get_single(0) is None and not cache.knew(0)
    cache.set(0, embedding(40))
    assert cache.knew(0), "encoded by the batch that asked"


def embedding(size: int) -> Any:
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    return EmbeddingResult(embedding=torch.zeros(size, dtype=torch.uint8))


def test_install_and_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sgl.mm_utils, "embedding_cache", None)
    encoder_cache.forget()  # before there is one
    cache = encoder_cache.install(2)
    assert _sgl.mm_utils.embedding_cache is cache and cache.max_size == 2 << 20
    cache.set(1, embedding(8))
    encoder_cache.forget()
    assert len(cache) == 0 and cache.current_size == 0
    monkeypatch.setattr(_sgl.mm_utils, "embedding_cache", EncoderCache(0))  # as SGLang turns it off
    assert encoder_cache.install(2).max_size == 0


def test_only_images_beyond_the_match_are_encoded() -> None:
    inputs = SimpleNamespace(mm_items=[item(1, offsets=[(2, 5)]), item(2, offsets=[(8, 11)]), item(3, offsets=None)])
    assert [images_to_encode(inputs, start) for start in (0, 5, 6, 12)] == [[1, 2], [1, 2], [2], []]
    assert images_to_encode(None, 0) == []
