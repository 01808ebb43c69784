"""The image encoder started before a prefill batch is formed, or while it is.

Between the admission of a batch's first request and the batch's launch the host matches, plans and prepares for some
milliseconds, more the more requests there are, and an idle device waits for it. The first request's images need none
of that: they are encoded at once, and the batch finds their embeddings in the cache. Of requests that come together to
a scheduler with nothing to do, the first is not even admitted before all have been read: its images are encoded when
it enters the queue. With anything running that would only delay what runs. Only what replays graphs is started, which
takes the host a fraction of a millisecond. A request's images are encoded by themselves then, not beside those of the
batch's other requests: in 16 bits the last bits may be others, as whenever other images come in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import Req
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.multimodal.feature_offload import offloader
from vlora_sgl.multimodal.vision_graphs import VisionGraphs


def encode_ahead(model: Any, graphs: VisionGraphs, cache: EncoderCache, items: Sequence[Any], start: int) -> int:
    """Encode a request's images whose embeddings will be asked for, if all of them replay graphs.

    Args:
        model: SGLang's, or ours, whose encoder ``graphs`` stands in the place of.
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
    if not graphs.serves_items(images):
        return 0
    with offloader.around_embedding(images):
        for item in images:
            item.feature = item.feature.to(graphs.structure.device, non_blocking=True)
        embeddings = model.get_image_feature(images)
        embeddings = embeddings.reshape(-1, embeddings.shape[-1])  # some give a dimension to tiles
    lengths = [last - first + 1 for ((first, last),) in (item.offsets for item in images)]
    for key, embedding in zip(missing, embeddings.split(lengths), strict=True):
        cache.set_ahead(key, _sgl.EmbeddingResult(embedding=embedding))
    return len(images)


class EarlyEncoding:
    """One per scheduler: starts the encoder for the first request of a batch.

    Args:
        runner: SGLang's model runner, with our ``vision_graphs``.
        cache: keeps the embeddings until the batch asks for them.
        on_forward_stream: what is launched inside runs behind the batches launched so far.
        cached: tokens that a request would take from the prefix cache, or ``None`` if that is not known.
    """

    def __init__(
        self,
        runner: Any,
        cache: EncoderCache,
        on_forward_stream: Callable[[], AbstractContextManager[None]],
        cached: Callable[[Req], int | None],
    ) -> None:
        self._runner, self._cache, self._on_forward_stream, self._cached = runner, cache, on_forward_stream, cached
        self._first = False  # whether the next request that is admitted is its batch's first
        self._started: Req | None = None  # the last request that was looked at

    def came_alone(self, req: Req) -> None:
        """A request came to an idle scheduler. Where this starts nothing, its admission looks again."""
        if self.encode(req):
            self._started = req

    def idle(self) -> None:
        """Nothing runs: capture a size that is wanted, unless the weights may have been moved out of the device."""
        graphs = self._runner.vision_graphs
        if graphs is not None and not self._runner.server_args.enable_memory_saver:
            with self._on_forward_stream():
                graphs.capture_wanted()

    def begin(self) -> None:
        """A batch is about to be formed."""
        self._first = True

    def admitted(self, req: Req) -> None:
        """Start the first of a batch; once, as it may be refused for want of memory, and come every iteration."""
        if self._first and req is not self._started:
            self._started = req
            self.encode(req)
        self._first = False

    def encode(self, req: Req) -> int:
        """Start the encoder for a request's images; where that needs an adapter that is in no slot, the batch has to.

        Returns:
            How many images were started.
        """
        graphs = self._runner.vision_graphs
        if req.multimodal_inputs is None or graphs is None or not self._cache.max_size:
            return 0
        start = self._cached(req)
        if start is None:
            return 0
        try:
            with self._on_forward_stream():
                return encode_ahead(self._runner.model, graphs, self._cache, req.multimodal_inputs.mm_items, start)
        except torch.AcceleratorError:
            raise
        except Exception:
            return 0  # the batch encodes it again, and says what is wrong (encoder_guard)
