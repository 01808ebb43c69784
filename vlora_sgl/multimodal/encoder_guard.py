"""An image that the encoder cannot compute ends its own request, not the batch that it came with.

SGLang encodes the images of a batch in one call. Where that raises, each is encoded alone; those that raise again get
an embedding of zeros, which no cache keeps, and the scheduler ends their requests when the batch is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import MultimodalDataItem, MultimodalInputs


def fault_of(inputs: MultimodalInputs | None) -> Exception | None:
    """Why an image of a request could not be encoded; ``None`` if all could."""
    faults = (getattr(item, "vlora_fault", None) for item in (inputs.mm_items if inputs is not None else ()))
    return next((fault for fault in faults if fault is not None), None)


class Guarded:
    """A model's method that encodes, which no item makes raise. What the device itself reports is raised on.

    Args:
        encode: gives the embeddings [tokens, width] of all items behind each other, or a list with one for each.
    """

    def __init__(self, encode: Any) -> None:
        self._encode = encode
        # SGLang asks whose method it is, to know whether the features have to be moved to the device first.
        self.__self__, self.__name__ = getattr(encode, "__self__", None), getattr(encode, "__name__", "")

    def __call__(self, items: Sequence[MultimodalDataItem]) -> Any:
        """As the method; where that raises, a list of what it gives for each item alone."""
        try:
            return self._encode(items)
        except torch.AcceleratorError:
            raise
        except Exception:
            return [self._alone(item) for item in items]

    def _alone(self, item: MultimodalDataItem) -> torch.Tensor:
        """[tokens, width] of one item; zeros, and a mark on it, where that raises."""
        tokens = sum(last - first + 1 for first, last in item.offsets or ())
        try:
            found = self._encode([item])
            embedding: torch.Tensor = (found[0] if isinstance(found, list) else found).reshape(tokens, -1)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            item.vlora_fault = error
            model: Any = self.__self__
            owner = model if hasattr(model, "get_input_embeddings") else model.language_model
            words = owner.get_input_embeddings().weight
            # Models with deepstack give the embeddings of several layers beside each other.
            layers = 1 + len(getattr(model, "deepstack_visual_indexes", ()))
            return words.new_zeros(tokens, words.shape[1] * layers)
        return embedding


def forget_faults(items: Sequence[MultimodalDataItem], sizes: Sequence[int]) -> None:
    """Mark every item of a batch that is one that could not be encoded, and keep no embedding of it.

    Args:
        items: of all requests.
        sizes: where each request's items begin; then the end of the last.
    """
    faults = {item.hash: fault for item in items if (fault := getattr(item, "vlora_fault", None)) is not None}
    if not faults:
        return
    for item in items:
        item.vlora_fault = faults.get(item.hash)
    cache = _sgl.mm_utils.embedding_cache
    for first, last in pairwise(sizes):
        keys = [item.hash for item in items[first:last]]
        for key in {*faults.keys() & keys, cache.combine_hashes(keys) if faults.keys() & keys else None}:
            if key is not None and cache.has(key):
                cache.free(key, None)
