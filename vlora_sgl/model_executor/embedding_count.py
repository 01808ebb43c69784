"""Image embeddings into a prompt without waiting for the encoder.

SGLang compares the number of embeddings with the number of image tokens in the prompt, and fetches the latter from the
device: the host then stands still until the encoder is through, and launches the decoder only afterwards. Where the
tokens are, the host knows from the requests; where the numbers agree there is nothing to fetch. Nor does it wait for
the images' features to be in host memory again (``feature_offload``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlora_sgl.model_executor.feature_offload import offloader

Offsets = Sequence[tuple[int, int]]


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
    items: Sequence[Any],
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
        embedding, input_ids = original(encode, items, sizes, prefixes, lengths, offsets, input_ids)
    one_each = all(len(item.offsets) == 1 for item in items)
    if embedding is not None and one_each and len(embedding) == image_tokens(prefixes, lengths, offsets):
        embedding.counted = True
    return embedding, input_ids


def adjust_embedding_length(
    original: Callable[..., torch.Tensor], embedding: torch.Tensor, mask: torch.Tensor, log: Any
) -> torch.Tensor:
    """SGLang's, unless the embeddings have been counted."""
    return embedding if getattr(embedding, "counted", False) else original(embedding, mask, log)
