"""The prefix cache: exact for images, keyed per adapter, shared across adapters up to the invocation start.

SGLang's radix tree compares token ids. Two things that decide a token's KV are not in them: the image behind an image
token (30 bits of its hash are), and the adapter that ran. We write both into the key's elements, 63 bits each::

    bit  63        62 .. 36               35                34 .. 0
         0   |  adapter number   |  1: image token  |  image number or token id

- An *image number* stands for the whole content key of the image (full hash, grid, modality), looked up in full.
- An *adapter number* stands for the digest of the adapter's content; 0 is the base model. Elements before a request's
  *invocation start* carry 0: an adapter that activates after the image (design section 9; activated LoRA) computes
  there what the base model computes, so all such adapters and the base share those entries, in one tree.

The tree itself, its locks, eviction and accounting stay SGLang's, which see nothing but longer integers. Numbers are
handed out in sequence and never twice, so forgetting one can only lose a hit, never make a wrong one.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.multimodal.encoder_cache import layout_of

logger = logging.getLogger(__name__)

_IMAGE_BIT = 1 << 35
_ADAPTER_SHIFT = 36
_ADAPTERS = 1 << 27
NEVER = 1 << 40
"""The invocation start of a request that its adapter's invocation sequence does not occur in."""


class Numbering:
    """Small distinct integers for contents of any length, the least recently used forgotten, none given twice.

    Args:
        first: the first number given.
        end: one past the last number there is.
        capacity: contents remembered; one forgotten gets a new number when it comes back, and so misses once.
    """

    def __init__(self, first: int, end: int, capacity: int) -> None:
        self._next, self._end = first, end
        self._capacity = capacity
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def __call__(self, content: Hashable) -> int:
        """The number of ``content``.

        Raises:
            OverflowError: none is left (2^35 new images take a year at 1,000 a second); restart the server.
        """
        number = self._known.get(content)
        if number is not None:
            self._known.move_to_end(content)
            return number
        if self._next >= self._end:
            raise OverflowError(f"the prefix cache gave out all numbers below {self._end}; restart the server")
        number, self._next = self._next, self._next + 1
        self._known[content] = number
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return number

    def __len__(self) -> int:
        return len(self._known)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens ``[start, end)`` of a prompt that show one image, and the key of its whole content."""

    start: int
    end: int
    content: Hashable


@dataclass(slots=True)
class Reuse:
    """What one request found in the cache. All counts are tokens.

    Attributes:
        prompt_tokens, prompt_image_tokens: the request's prompt, and the image tokens in it.
        cached_tokens: taken from the cache, the sum of the next two.
        cached_text_tokens, cached_image_tokens: by what they are.
        shared_tokens: of the cached ones, computed by a request of another adapter (or the base model).
        encoder_hits, encoder_misses: images with tokens to compute, by whether the encoder's output was kept.
    """

    prompt_tokens: int = 0
    prompt_image_tokens: int = 0
    cached_tokens: int = 0
    cached_text_tokens: int = 0
    cached_image_tokens: int = 0
    shared_tokens: int = 0
    encoder_hits: int = 0
    encoder_misses: int = 0


@dataclass(slots=True)
class ReuseTotals(Reuse):
    """The same counts summed over requests."""

    requests: int = 0

    def add(self, reuse: Reuse) -> None:
        """Count one more request."""
        self.requests += 1
        for name, value in asdict(reuse).items():
            setattr(self, name, getattr(self, name) + value)


class CacheIdentity(str):
    """Who computes the KV of a request's tokens. It takes the place of SGLang's ``extra_key``.

    As a string it names the same thing, injectively, so that SGLang's other users of ``extra_key`` (the tree over
    waiting requests) keep adapters apart by themselves.

    Attributes:
        salt: what the caller gave as ``extra_key`` or ``cache_salt``, or ``None``; it splits the tree at the root.
        adapter: number of the adapter's content, 0 for the base model.
        invocation_start: first position computed with the adapter.
        images: where images stand and their numbers, as ``(start, end, number)``, ascending.
        root: what the tree's root branches by. A pair can never equal a caller's string.
        reuse_limit: matches for this request stop here, so that later tokens are computed; ``None`` is no limit.
        reuse: what the request found, once it was scheduled.
    """

    __slots__ = (
        "_elements",
        "_prefix_key",
        "adapter",
        "images",
        "invocation_start",
        "reuse",
        "reuse_limit",
        "root",
        "salt",
    )

    salt: str | None
    adapter: int
    invocation_start: int
    images: tuple[tuple[int, int, int], ...]
    root: Hashable
    reuse_limit: int | None
    reuse: Reuse | None
    _elements: array
    _prefix_key: Hashable

    def __new__(
        cls,
        salt: str | None,
        adapter: int,
        invocation_start: int,
        images: tuple[tuple[int, int, int], ...],
    ) -> CacheIdentity:
        numbers = ",".join(f"{start}-{end}:{number}" for start, end, number in images)
        self = super().__new__(cls, f"{adapter}@{invocation_start}|{numbers}|{'-' if salt is None else '+' + salt}")
        self.salt, self.adapter, self.invocation_start, self.images = salt, adapter, invocation_start, images
        self.root = (salt, adapter) if adapter and invocation_start == 0 else salt
        self.reuse_limit = None
        self.reuse = None
        self._elements = array("q")
        self._prefix_key = None
        return self

    def renewed(self) -> CacheIdentity:
        """The same identity with no elements kept: a retracted request comes back with other output tokens."""
        fresh = CacheIdentity(self.salt, self.adapter, self.invocation_start, self.images)
        fresh.reuse_limit, fresh.reuse = self.reuse_limit, self.reuse
        return fresh

    @property
    def shareable(self) -> int:
        """Length of the prefix that others are likely to bring too: up to the last image or the invocation start."""
        invocation_start = self.invocation_start if self.invocation_start != NEVER else 0
        return max(invocation_start, self.images[-1][1] if self.images else 0)

    def prefix_key(self, token_ids: array) -> Hashable:
        """Equal for requests whose KV is the same on the shareable prefix.

        Found once, as a prompt only grows, and short: a scheduler asks for those of its whole queue.
        """
        if self._prefix_key is None:
            prefix = self.elements(token_ids)[: self.shareable].tobytes()
            self._prefix_key = self.root, hashlib.blake2b(prefix, digest_size=16).digest()
        return self._prefix_key

    def elements(self, token_ids: array) -> array:
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
                    new[max(start - done, 0) : end - done] = _IMAGE_BIT | number
            if invoked:
                new[max(self.invocation_start - done, 0) :] |= invoked << _ADAPTER_SHIFT
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

    def invocation_start(self, token_ids: array, images: Iterable[ImageSpan]) -> int:
        """First position that runs with the adapter. ``NEVER``: not even the answer does, as in PEFT."""
        if self.invocation is None:
            return 0
        if self.invocation == "after_image":
            return max((image.end for image in images), default=0)
        assert isinstance(self.invocation, tuple)
        position = _last_occurrence(token_ids, self.invocation)
        return NEVER if position is None else position


def _last_occurrence(token_ids: array, sequence: Iterable[int]) -> int | None:
    needle, haystack = array("q", sequence).tobytes(), token_ids.tobytes()
    at = haystack.rfind(needle)
    while at >= 0 and at % 8:
        at = haystack.rfind(needle, 0, at + len(needle) - 1)
    return at // 8 if at >= 0 else None


def image_spans(multimodal_inputs: Any) -> tuple[tuple[ImageSpan, ...], tuple[Hashable, ...]]:
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


class ElementKey(_sgl.RadixKey):
    """SGLang's key, which first asks whether it is matched as a whole, as nodes mostly are: one comparison of arrays,
    where SGLang gallops over a dozen slices.

    The nodes of our tree have such keys; what is looked up is SGLang's.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> ElementKey:
        part = super().__getitem__(index)
        return ElementKey(part.token_ids, part.extra_key)

    def match(self, other: Any, page_size: int = 1) -> int:
        """Length of the prefix shared with ``other``, in whole pages."""
        mine, theirs = self.token_ids, other.token_ids
        length = len(mine)
        whole = self.limit is None and len(other) >= length and self.extra_key == other.extra_key
        if whole and mine == (theirs if len(theirs) == length else theirs[:length]):
            return length - length % page_size
        return super().match(other, page_size)


class VLoraRadixCache(_sgl.RadixCache):
    """SGLang's radix cache over elements that carry image and adapter.

    Keys come with a ``CacheIdentity`` as ``extra_key`` (from ``identify``); a key with a plain string or ``None`` is a
    request of the base model without images.

    Args:
        params: SGLang's ``CacheInitParams``.
        images, adapters: contents remembered; see ``Numbering``.
    Raises:
        ConfigError: a combination whose keys are not token ids of this process alone.
    """

    def __init__(self, params: Any, images: int = 1 << 17, adapters: int = 1 << 12) -> None:
        if params.is_eagle:
            raise ConfigError("the vlora prefix cache does not serve EAGLE's bigram keys; start without it")
        if params.enable_kv_cache_events:
            raise ConfigError("KV cache events would publish keys without meaning elsewhere; turn them off")
        self._image_numbers = Numbering(0, _IMAGE_BIT, images)
        self._adapter_numbers = Numbering(1, _ADAPTERS, adapters)
        self.totals = ReuseTotals()
        super().__init__(params)

    def identify(
        self,
        token_ids: array,
        salt: str | None,
        adapter: AdapterContent | None,
        images: tuple[ImageSpan, ...] = (),
        placeless: tuple[Hashable, ...] = (),
    ) -> CacheIdentity:
        """The identity of a request, to be kept for its life.

        Args:
            token_ids: its prompt.
            salt: the caller's own namespace.
            adapter: its adapter, ``None`` for the base model.
            images, placeless: from ``image_spans``.
        """
        if placeless:
            salt = f"{salt or ''}|{self._image_numbers(placeless)}"
        number, invocation_start = 0, 0
        if adapter is not None:
            invocation_start = adapter.invocation_start(token_ids, images)
            number = 0 if invocation_start == NEVER else self._adapter_numbers(adapter.digest)
        numbers = tuple((image.start, image.end, self._image_numbers(image.content)) for image in images)
        identity = CacheIdentity(salt, number, invocation_start, numbers)
        identity.elements(token_ids)  # once per request, so that its first match costs no more than the next
        return identity

    def match_prefix(self, params: Any) -> Any:
        """SGLang's ``match_prefix``, over elements. A request's ``reuse_limit`` counts when the request is given."""
        key = params.key
        identity = key.extra_key
        if isinstance(identity, CacheIdentity):
            # In place: SGLang makes a key per call and reads no more than its length afterwards. A key once rewritten
            # carries no identity any more, and so is not rewritten again.
            key.token_ids, key.extra_key = identity.elements(key.token_ids), identity.root
            limit = identity.reuse_limit
            if limit is not None and params.req is not None:
                key.limit = limit if key.limit is None else min(key.limit, limit)
        return super().match_prefix(params)

    def insert(self, params: Any) -> Any:
        """SGLang's ``insert``, over elements; a new node remembers whose request computed it."""
        key, identity = params.key, params.key.extra_key
        creator, tokens, root = 0, key.token_ids, identity
        if isinstance(identity, CacheIdentity):
            creator, tokens, root = identity.adapter, identity.elements(tokens), identity.root
        result = super().insert(replace(params, key=ElementKey(tokens, root, limit=key.limit)))
        node = result.last_device_node
        if node is not None and not hasattr(node, "creator"):
            node.creator = creator
        return result

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        upper.creator = getattr(child, "creator", 0)
        return upper

    def matched_length(self, token_ids: array, identity: CacheIdentity) -> int:
        """How many of a request's tokens are in the cache."""
        key = _sgl.RadixKey(token_ids, identity)
        return len(self.match_prefix(_sgl.MatchPrefixParams(key=key)).device_indices)

    def measure(
        self, identity: CacheIdentity, node: Any, length: int, prompt_tokens: int, encoder: tuple[int, int] = (0, 0)
    ) -> Reuse:
        """What a request reuses, counted once per request, when it is first scheduled.

        Args:
            identity: the request's.
            node: the last node of its match.
            length: tokens matched.
            prompt_tokens: length of its prompt.
            encoder: its images beyond the match, by whether their embedding is kept: hits and misses.
        """
        images = sum(end - start for start, end, _ in identity.images)
        cached_images = sum(max(0, min(end, length) - start) for start, end, _ in identity.images)
        shared = 0
        while node is not self.root_node:
            if getattr(node, "creator", 0) != identity.adapter:
                shared += len(node.key)
            node = node.parent
        reuse = Reuse(prompt_tokens, images, length, length - cached_images, cached_images, shared, *encoder)
        if identity.reuse is None:
            identity.reuse = reuse
            self.totals.add(reuse)
        return identity.reuse


def create_radix_cache(context: Any) -> Any:
    """Factory of the backend ``vlora``, for SGLang's registry of radix caches.

    Where the model or a flag needs a tree of another kind, SGLang's own is built and a warning says so.
    """
    for wanted, what in (
        (context.is_hybrid_swa, "sliding-window layers"),
        (context.is_hybrid_ssm, "state-space layers"),
        (context.enable_hierarchical_cache, "--enable-hierarchical-cache"),
    ):
        if wanted:
            logger.warning("%s: SGLang's own prefix cache serves them, without sharing across adapters", what)
            return _sgl.default_radix_cache_factory(context)
    if context.disable_radix_cache:
        return _sgl.default_radix_cache_factory(context)
    return VLoraRadixCache(context.params)
