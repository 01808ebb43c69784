"""The image encoder started before a prefill batch is formed, or while it is.

Between the admission of a batch's first request and the batch's launch the host matches, plans and prepares for some
milliseconds, more the more requests there are, and an idle device waits for it. The first request's images need none
of that: they are encoded at once, and the batch finds their embeddings in the cache. Of requests that come together to
a scheduler with nothing to do, the first is not even admitted before all have been read: its images are encoded when
it enters the queue. With anything running that would only delay what runs. Only what replays graphs is started, which
takes the host a fraction of a millisecond; a graph computes the same bits alone as in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.multimodal.feature_offload import offloader
from vlora_sgl.multimodal.vision_graphs import VisionGraphs


def encode_ahead(model: Any, graphs: VisionGraphs, cache: EncoderCache, items: Sequence[Any], start: int) -> int:
    """Encode a request's images whose embeddings will be asked for, if all of them replay graphs.

    Args:
        model: SGLang's, whose encoder ``graphs`` stands in the place of.
        items: the request's multimodal items.
        start: position of the first prompt token that is not cached.

    Returns:
        How many were encoded.
    """
    missing = {item.hash: item for item in items if item.offsets and item.offsets[-1][1] >= start}
    missing = {key: item for key, item in missing.items() if not cache.has(key)}
    images = list(missing.values())
    # No feature: the caller brought the embedding.
    if not images or not all(i.is_image() and len(i.offsets) == 1 and i.feature is not None for i in images):
        return 0
    if not graphs.serves([grid for item in images for grid in item.image_grid_thw.tolist()]):
        return 0
    with offloader.around_embedding(images):
        for item in images:
            item.feature = item.feature.to(model.visual.device, non_blocking=True)
        embeddings = model.get_image_feature(images)
    lengths = [last - first + 1 for ((first, last),) in (item.offsets for item in images)]
    for key, embedding in zip(missing, embeddings.split(lengths), strict=True):
        cache.set_ahead(key, _sgl.EmbeddingResult(embedding=embedding))
    return len(images)
