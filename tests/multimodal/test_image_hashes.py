"""Hashes of images made on the way in are those that the scheduler would make."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from vlora_sgl.managers.tokenizer_manager import hash_images


def item(**fields: object) -> MultimodalDataItem:
    return MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 4)], **fields)


def test_they_are_the_schedulers_and_what_is_known_stays() -> None:
    patches = [torch.randn(16, 1176), torch.randn(16, 1176)]
    mine, theirs = ([item(feature=p) for p in patches] for _ in range(2))
    for one in theirs:
        one.set_pad_value()
    known = item(feature=patches[0], hash=7, pad_value=8)
    embedded = item(precomputed_embeddings=torch.ones(4, 8))
    asyncio.run(hash_images(SimpleNamespace(mm_items=[*mine, known, embedded])))
    assert [(one.hash, one.pad_value) for one in mine] == [(one.hash, one.pad_value) for one in theirs]
    assert mine[0].hash != mine[1].hash and (known.hash, known.pad_value) == (7, 8)
    assert embedded.hash is None
    asyncio.run(hash_images(None))
