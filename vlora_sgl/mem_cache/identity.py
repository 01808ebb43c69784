"""Who computes a token's KV: the images in a prompt, the adapter and where it starts, as elements of a tree's keys.

SGLang's radix tree compares token ids. Two things that decide a token's KV are not in them: the image behind an image
token (30 bits of its hash are), and the adapter that ran. We write both into the key's elements, 63 bits each::

    bit  63        62 .. 36               35                34 .. 0
         0   |  adapter number   |  1: image token  |  image number or token id

- An *image number* stands for the whole content key of the image (full hash, grid, modality), looked up in full.
- An *adapter number* stands for the digest of the adapter's content; 0 is the base model. Elements before a request's
  *invocation start* carry 0: an adapter that activates after the image (design section 9; activated LoRA) computes
  there what the base model computes, so all such adapters and the base share those entries, in one tree.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from vlora_sgl._sgl_types import MultimodalInputs
from vlora_sgl.multimodal.encoder_cache import layout_of

IMAGE_BIT = 1 << 35
ADAPTER_SHIFT = 36
ADAPTERS = 1 << 27
NEVER = 1 << 40
"""The invocation start of a request that its adapter's invocation sequence does not occur in."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens ``[start, end)`` of a prompt that show one image, and the key of its whole content."""

    start: int
    end: int
    content: Hashable


class CacheIdentity:
    """Who computes the KV of one request's tokens, and the key elements that say so.

    Args:
        salt: what the caller gave as ``extra_key`` or ``cache_salt``, or ``None``; it splits the tree at the root.
        adapter: number of the adapter's content, 0 for the base model.
        invocation_start: first position computed with the adapter.
        images: where images stand and their numbers, as ``(start, end, number)``, ascending.

    Attributes:
        key: the same as a string, injectively. It takes the place of SGLang's ``extra_key``, so that SGLang's own
            trees (that over waiting requests) keep adapters and images apart too.
        root: what our tree's root branches by; never equal to a caller's string.
    """

    def __init__(
        self, salt: str | None, adapter: int, invocation_start: int, images: tuple[tuple[int, int, int], ...]
    ) -> None:
        self.adapter, self.invocation_start, self.images = adapter, invocation_start, images
        numbers = ",".join(f"{start}-{end}:{number}" for start, end, number in images)
        self.key = f"{adapter}@{invocation_start}|{numbers}|{'-' if salt is None else '+' + salt}"
        whole = adapter if invocation_start == 0 else 0
        self.root: Hashable = None if salt is None and not whole else (salt, whole)
        self._elements = array("q")
        self._prefix_key: Hashable = None

    def forget(self) -> None:
        """Keep no elements: a retracted request comes back with other output tokens."""
        self._elements = array("q")

    @property
    def shareable(self) -> int:
        """Length of the prefix that others are likely to bring too: up to the last image or the invocation start."""
        invocation_start = self.invocation_start if self.invocation_start != NEVER else 0
        return max(invocation_start, self.images[-1][1] if self.images else 0)

    def prefix_key(self, token_ids: array[int]) -> Hashable:
        """Equal for requests whose KV is the same on the shareable prefix.

        Found once, as a prompt only grows, and short: a scheduler asks for those of its whole queue.
        """
        if self._prefix_key is None:
            prefix = self.elements(token_ids)[: self.shareable].tobytes()
            self._prefix_key = self.root, hashlib.blake2b(prefix, digest_size=16).digest()
        return self._prefix_key

    def elements(self, token_ids: array[int]) -> array[int]:
        """Key elements of the request's tokens (int64). Kept, because a queued request's tokens only ever grow.

        A request of one adapter from its first token on, or of the base model, without images, needs no rewriting:
        the root keeps it apart, at no cost per token.
        """
        invoked = self.adapter if self.invocation_start else 0
        if not invoked and not self.images:
            return token_ids
        done = len(self._elements)
        if done > len(token_ids):
            return self._elements[: len(token_ids)]
        if done < len(token_ids):
            # Always another array: nodes of the tree may hold the one that was.
            grown = self._elements + token_ids[done:] if done else array("q", token_ids)
            new = np.frombuffer(grown, dtype=np.int64)[done:]
            for start, end, number in self.images:
                if end > done:
                    new[max(start - done, 0) : end - done] = IMAGE_BIT | number
            if invoked:
                new[max(self.invocation_start - done, 0) :] |= invoked << ADAPTER_SHIFT
            self._elements = grown
        return self._elements


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What of an adapter decides KV: its digest, and where it starts.

    Attributes:
        digest: of weights, scalings and invocation start.
        invocation: ``None`` from the first token on; ``"after_image"`` after the prompt's last image; a token
            sequence: from the start of its last occurrence.
    """

    digest: str
    invocation: str | tuple[int, ...] | None = None

    def invocation_start(self, token_ids: array[int], images: Iterable[ImageSpan]) -> int:
        """First position that runs with the adapter. ``NEVER``: not even the answer does, as in PEFT."""
        if self.invocation is None:
            return 0
        if self.invocation == "after_image":
            return max((image.end for image in images), default=0)
        assert isinstance(self.invocation, tuple)
        position = _last_occurrence(token_ids, self.invocation)
        return NEVER if position is None else position


def _last_occurrence(token_ids: array[int], sequence: Iterable[int]) -> int | None:
    needle, haystack = array("q", sequence).tobytes(), token_ids.tobytes()
    at = haystack.rfind(needle)
    while at >= 0 and at % 8:
        at = haystack.rfind(needle, 0, at + len(needle) - 1)
    return at // 8 if at >= 0 else None


def image_spans(multimodal_inputs: MultimodalInputs | None) -> tuple[tuple[ImageSpan, ...], tuple[Hashable, ...]]:
    """Where the images (or videos) of a request stand, and the contents that stand nowhere in particular.

    The content key is the item's full hash together with the shape of its grid: equal pixels laid out differently give
    other positions, hence other KV.

    Args:
        multimodal_inputs: SGLang's ``MultimodalInputs`` of a request, or ``None``.
    Returns:
        the spans, ascending; and the content keys of items without offsets, which must split the tree at its root.
    """
    spans: list[ImageSpan] = []
    placeless: list[Hashable] = []
    for item in multimodal_inputs.mm_items if multimodal_inputs is not None else ():
        shape = layout_of(item)
        if not item.offsets:
            placeless.append((item.hash, item.modality.name, shape))
        for part, (first, last) in enumerate(item.offsets or ()):
            spans.append(ImageSpan(first, last + 1, (item.hash, item.modality.name, shape, part)))
    return tuple(sorted(spans, key=lambda span: span.start)), tuple(placeless)
