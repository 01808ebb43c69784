"""Image embeddings into a prompt without waiting for the encoder.

SGLang compares the number of embeddings with the number of image tokens in the prompt, and fetches the latter from the
device: the host then stands still until the encoder is through, and launches the decoder only afterwards. Where the
tokens are, the host knows from the requests; where the numbers agree there is nothing to fetch. Nor does it wait for
the images' features to be in host memory again (``feature_offload``), nor for anything about images that the prefix
cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlora_sgl._sgl_types import ForwardBatch, MultimodalDataItem
from vlora_sgl.multimodal.encoder_guard import Guarded, forget_faults
from vlora_sgl.multimodal.feature_offload import offloader

Offsets = Sequence[tuple[int, int]]

EMBEDS_ONLY = frozenset(
    {
        "InternVLChatModel",
        "LlavaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
)
"""Architectures whose decoders look at a batch's images for nothing but their embeddings: graphs may hold them."""


def leave_out_cached_images(batch: ForwardBatch) -> None:
    """Take requests' images out of a prefill (SGLang's ``ForwardBatch``) if the prefix cache holds all their tokens.

    Nothing of them is computed. SGLang would all the same send what marks their tokens to the device and wait for it,
    behind whatever the stream was given before: a batch could not be launched while another runs.
    """
    inputs, prefixes = batch.mm_inputs, batch.extend_prefix_lens_cpu
    if not inputs or prefixes is None:
        return
    left = [
        None if one is not None and _all_before(one.mm_items, prefix) else one
        for one, prefix in zip(inputs, prefixes, strict=True)
    ]
    out = [one for one, kept in zip(inputs, left, strict=True) if one is not None and one is not kept]
    if out:
        offloader.take([item for one in out for item in one.mm_items])
        batch.mm_inputs = left


def _all_before(items: Sequence[MultimodalDataItem], prefix: int) -> bool:
    return all(item.offsets and all(last < prefix for _, last in item.offsets) for item in items)


def image_tokens(prefixes: Sequence[int], lengths: Sequence[int], offsets: Sequence[Offsets]) -> int:
    """Image tokens that a batch computes: of each request the tokens [prefix, prefix + length), with its images' first
    and last positions."""
    return sum(
        max(0, min(last + 1, prefix + length) - max(first, prefix))
        for prefix, length, images in zip(prefixes, lengths, offsets, strict=False)
        for first, last in images
    )


def chunked_prefill_embedding(
    original: Callable[..., Any],
    encode: Any,
    items: Sequence[MultimodalDataItem],
    sizes: Sequence[int],
    prefixes: Sequence[int],
    lengths: Sequence[int],
    offsets: Sequence[Offsets],
    input_ids: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """SGLang's, with ``counted`` on the embeddings when there are as many as image tokens.

    When it returns, the items' features are on their way to host memory (``feature_offload``). An item of several
    images may have its placeholders changed (pruned video frames): that one is left to SGLang.
    """
    with offloader.around_embedding(items):
        embedding, input_ids = original(Guarded(encode), items, sizes, prefixes, lengths, offsets, input_ids)
    forget_faults(items, sizes)
    one_each = all(len(item.offsets or ()) == 1 for item in items)
    if embedding is not None and one_each and len(embedding) == image_tokens(prefixes, lengths, offsets):
        embedding.counted = True
    return embedding, input_ids


def adjust_embedding_length(
    original: Callable[..., torch.Tensor], embedding: torch.Tensor, mask: torch.Tensor, log: object
) -> torch.Tensor:
    """SGLang's, unless the embeddings have been counted."""
    return embedding if getattr(embedding, "counted", False) else original(embedding, mask, log)
