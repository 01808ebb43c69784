"""An image that the encoder cannot compute ends its own request, and no cache keeps what stood for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.multimodal import encoder_cache
from vlora_sgl.multimodal.embedding_count import chunked_prefill_embedding
from vlora_sgl.multimodal.encoder_guard import fault_of

WIDTH, TOKENS = 4, 3


class Model:
    """Encodes an item as its value; raises for those of negative values, as ``kind`` says."""

    deepstack_visual_indexes = (1,)

    def __init__(self, one_each: bool, kind: type[Exception] = ValueError) -> None:
        self.one_each, self.kind = one_each, kind

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Embedding(2, WIDTH // 2)

    def get_image_feature(self, items: list[Any]) -> Any:
        if any(item.feature.min() < 0 for item in items):
            raise self.kind("a strange image")
        found = [item.feature[:, None].expand(TOKENS, WIDTH) for item in items]
        return found if self.one_each else torch.cat(found)


class Joined(Model):
    """As LLaVA, InternVL and Mistral 3, which leave their words' embeddings to the language model."""

    def __init__(self, one_each: bool) -> None:
        super().__init__(one_each)
        self.language_model = Model(one_each)

    def __getattribute__(self, name: str) -> Any:
        if name == "get_input_embeddings":
            raise AttributeError(name)
        return super().__getattribute__(name)


def run(values: list[list[float]], model: Model) -> tuple[torch.Tensor, list[list[Any]], Any]:
    """Requests with an image a value through SGLang's embedding of a prefill."""
    cache = encoder_cache.install(1)
    requests, offsets = [], []
    for images in values:
        spans = [(i * TOKENS, (i + 1) * TOKENS - 1) for i in range(len(images))]
        items = [
            SimpleNamespace(hash=int(value * 100), feature=torch.full((TOKENS,), value), offsets=[span])
            for value, span in zip(images, spans, strict=True)
        ]
        requests.append(items)
        offsets.append(spans)
    items = list(itertools.chain(*requests))
    sizes = [0, *itertools.accumulate(map(len, requests))]
    lengths = [len(spans) * TOKENS for spans in offsets]
    found, _ = chunked_prefill_embedding(
        _sgl.chunked_prefill_embedding, model.get_image_feature, items, sizes, [0] * len(requests), lengths,
        offsets, torch.zeros(sum(lengths), dtype=torch.int64),
    )  # fmt: skip
    assert found is not None
    return found, requests, cache


@pytest.mark.parametrize("kind", [Model, Joined])
@pytest.mark.parametrize("one_each", [False, True])
def test_the_others_of_a_batch_are_encoded(one_each: bool, kind: type[Model]) -> None:
    values = [[1.0], [-1.0], [2.0, -1.0, 3.0], [4.0]]
    found, requests, cache = run(values, kind(one_each))
    wanted = [max(value, 0.0) for images in values for value in images]
    assert torch.equal(found, torch.tensor(wanted).repeat_interleave(TOKENS)[:, None].expand(-1, WIDTH))
    faults = [fault_of(SimpleNamespace(mm_items=items)) for items in requests]
    assert [fault is not None for fault in faults] == [False, True, True, False]
    assert "a strange image" in str(faults[1]) and fault_of(None) is None
    assert cache.has(100) and cache.has(300) and not cache.has(-100)


def test_an_image_alone_that_cannot_be_encoded_has_the_models_width() -> None:
    found, requests, cache = run([[-1.0]], Model(False))
    assert found.shape == (TOKENS, WIDTH) and not found.any() and not len(cache)
    assert fault_of(SimpleNamespace(mm_items=requests[0])) is not None


def test_what_the_device_reports_is_not_an_images_fault() -> None:
    with pytest.raises(torch.AcceleratorError):
        run([[1.0], [-1.0]], Model(False, torch.AcceleratorError))
