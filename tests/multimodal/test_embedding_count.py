"""Embeddings are placed without asking the device how many image tokens there are, where the requests say it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.multimodal.embedding_count import (
    adjust_embedding_length,
    chunked_prefill_embedding,
    image_tokens,
    leave_out_cached_images,
)

IMAGE, PAD = 4, 1000


@pytest.mark.parametrize(
    ("prefixes", "lengths", "offsets", "wanted"),
    [
        ([0], [10], [[(2, 5)]], 4),
        ([3], [7], [[(2, 5)]], 3),  # a prefix or a chunk may end within an image
        ([0], [4], [[(2, 5)]], 2),
        ([6], [4], [[(2, 5)]], 0),
        ([0, 8], [12, 3], [[(0, 3), (6, 9)], [(0, 3), (9, 12)]], 8 + 2),
        ([5], [5], [[]], 0),
    ],
)
def test_image_tokens(prefixes: list[int], lengths: list[int], offsets: list[Any], wanted: int) -> None:
    assert image_tokens(prefixes, lengths, offsets) == wanted


def place(embeddings: int, offsets: list[tuple[int, int]], per_item: int = 1) -> tuple[Any, list[str]]:
    """A prompt of ten tokens, four of them an image's, through our two functions; and what asked the device."""
    items = [
        SimpleNamespace(offsets=offsets[i : i + per_item], feature=None) for i in range(0, len(offsets), per_item)
    ]
    ids = torch.full((10,), 7)
    for first, last in offsets:
        ids[first : last + 1] = PAD
    asked: list[str] = []

    def encode(*_: Any) -> Any:
        return torch.arange(embeddings * 2.0).reshape(embeddings, 2), ids

    def adjust(embedding: torch.Tensor, mask: torch.Tensor, log: Any) -> torch.Tensor:
        asked.append("count")
        return inspect.unwrap(_sgl.adjust_embedding_length)(embedding, mask, log)  # SGLang's, whatever is around it

    found, ids = chunked_prefill_embedding(encode, None, items, [0, len(items)], [0], [10], [offsets], ids)
    return adjust_embedding_length(adjust, found, (ids == PAD)[:, None], SimpleNamespace(warning=print)), asked


def test_matching_numbers_need_no_count() -> None:
    found, asked = place(IMAGE, [(2, 5)])
    assert len(found) == IMAGE and not asked


def test_too_few_are_counted_and_refused() -> None:
    with pytest.raises(RuntimeError, match="Insufficient multimodal embedding length"):
        place(IMAGE - 1, [(2, 5)])


def test_items_of_several_images_are_left_to_sglang() -> None:
    found, asked = place(2 * IMAGE, [(0, 3), (5, 8)], per_item=2)
    assert len(found) == 2 * IMAGE and asked


def test_images_that_the_prefix_cache_holds_are_left_out() -> None:
    def inputs(*offsets: tuple[int, int]) -> Any:
        return SimpleNamespace(mm_items=[SimpleNamespace(offsets=[one], feature=None, hash=1) for one in offsets])

    within, at_end, later, placeless, text = inputs((2, 5)), inputs((2, 5)), inputs((0, 1), (2, 9)), inputs(), None
    placeless.mm_items.append(SimpleNamespace(offsets=None, feature=None, hash=1))
    given = [within, at_end, later, placeless, text]
    batch = SimpleNamespace(mm_inputs=given, extend_prefix_lens_cpu=[5, 6, 6, 100, 3])
    leave_out_cached_images(batch)
    assert batch.mm_inputs == [within, None, later, placeless, None]
    assert given[1] is at_end  # SGLang's own list is as it was


def test_a_batch_with_images_to_compute_stays_as_it_is() -> None:
    for prefixes, images in (([0], [SimpleNamespace(mm_items=[SimpleNamespace(offsets=[(2, 5)])])]), (None, [None])):
        batch = SimpleNamespace(mm_inputs=images, extend_prefix_lens_cpu=prefixes)
        leave_out_cached_images(batch)
        assert batch.mm_inputs is images
