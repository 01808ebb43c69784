"""The image encoder's outputs, kept on the device: counted, and under keys that name all that decides an embedding.

SGLang keeps them by a hash of the pixels alone. The same patches in another grid (a grey image on its side) have other
positions in the encoder, hence other embeddings; so would the same image under an adapter of the vision tower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import MultimodalDataItem, MultimodalInputs
from vlora_sgl.core import AdapterId

_OURS = 1 << 127
"""Set in every key of ours; SGLang's hashes have 64 bits."""


class EncoderCache(_sgl.MultiModalStaticCache):
    """SGLang's least-recently-used cache of embeddings, which counts its look-ups.

    Args:
        max_size: bytes of embeddings kept; 0 keeps none.

    Attributes:
        ahead: keys of embeddings whose encoder was started before a batch asked for them: the first look-up of each
            is a miss, whichever batch it comes from.
        started: how many there were.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.hits = self.misses = self.started = 0
        self.ahead: set[int] = set()

    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> object:
        """The embedding of a request's items together, or ``None``."""
        return self._count(super().get(mm_hashes, combined_hash))

    def get_single(self, mm_hash: int) -> object:
        """The embedding of one image, or ``None``."""
        ahead = mm_hash in self.ahead
        self.ahead.discard(mm_hash)
        return self._count(super().get_single(mm_hash), ahead)

    def set_ahead(self, mm_hash: int, embedding: object) -> None:
        """Keep the embedding of an image that a batch is going to ask for."""
        self.ahead.intersection_update(self.mm_cache)  # those of aborted requests are forgotten with their embeddings
        self.started += self.set(mm_hash, embedding)
        self.ahead.add(mm_hash)

    def knew(self, mm_hash: int) -> bool:
        """Whether an image was encoded, and not for the batch being formed."""
        return self.has(mm_hash) and mm_hash not in self.ahead

    def _count(self, found: object, ahead: bool = False) -> object:
        hit = found is not None and not ahead
        self.hits += hit
        self.misses += not hit
        return found

    def state(self) -> dict[str, int]:
        """Figures for ``/server_info`` and the metrics."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "encoded_ahead": self.started,
            "images": len(self),
            "bytes": self.current_size,
            "capacity_bytes": self.max_size,
        }


def install(megabytes: int) -> EncoderCache:
    """Put an empty cache in the place of SGLang's, in this process. One that SGLang turned off stays off."""
    off = _sgl.mm_utils.embedding_cache is not None and _sgl.mm_utils.embedding_cache.max_size == 0
    cache = EncoderCache(0 if off else megabytes << 20)
    seams.own("mm_utils.embedding_cache", _sgl.mm_utils, cache)
    return cache


def forget() -> None:
    """Drop all embeddings, because the encoder's weights are about to be others."""
    if _sgl.mm_utils.embedding_cache is not None:
        _sgl.mm_utils.embedding_cache.clear()


def layout_of(item: MultimodalDataItem) -> Hashable:
    """How the patches of a multimodal item are laid out: what its hash does not cover."""
    return tuple(
        (name, tuple(np.asarray(item.model_specific_data[name]).ravel().tolist()))
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "tgt_size")
        if item.model_specific_data.get(name) is not None
    )


def name_embeddings(multimodal_inputs: MultimodalInputs | None, tower: str | None, adapter: AdapterId) -> None:
    """Give the items of a request the keys that their embeddings are kept by, in place of their hashes.

    An item of a session may come again, in a request of another adapter: it is named anew by what it shows.

    Args:
        multimodal_inputs: SGLang's ``MultimodalInputs``, or ``None``.
        tower: digest of what the request's adapter changes in the vision tower; ``None`` if nothing.
        adapter: the request's; noted on the items if it changes something there.
    """
    for item in multimodal_inputs.mm_items if multimodal_inputs is not None else ():
        if not item.hash & _OURS:
            item.vlora_content = item.hash
        content = repr((item.vlora_content, item.modality.name, layout_of(item), tower)).encode()
        item.hash = _OURS | int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "big")
        item.vlora_adapter = adapter if tower is not None else None


def images_to_encode(multimodal_inputs: MultimodalInputs | None, start: int) -> list[int]:
    """Keys of the items that have tokens at ``start`` of the prompt or later, one for each."""
    items = multimodal_inputs.mm_items if multimodal_inputs is not None else ()
    return [item.hash for item in items if any(last >= start for _, last in item.offsets or ())]
