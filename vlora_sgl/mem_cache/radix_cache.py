"""The prefix cache: exact for images, keyed per adapter, shared across adapters up to the invocation start.

The tree itself, its locks, eviction and accounting stay SGLang's, which see nothing but longer integers
(``identity``). Numbers are handed out in sequence and never twice, so forgetting one can only lose a hit, never make a
wrong one.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import (
    CacheInitParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    Req,
    TreeCacheBuildContext,
    TreeNode,
)
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.mem_cache.identity import (
    ADAPTER_SHIFT,
    ADAPTERS,
    IMAGE_BIT,
    NEVER,
    AdapterContent,
    CacheIdentity,
    ImageSpan,
)

logger = logging.getLogger(__name__)

MOST_NODES = 256
"""Of the tree that are looked at for who watches: some 5 ms, for prompts of a thousand image tokens."""


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

    def forget(self, content: Hashable) -> None:
        """Give ``content`` a new number when it comes again: nothing that is under the old one is found any more."""
        self._known.pop(content, None)

    def __len__(self) -> int:
        return len(self._known)

    def items(self) -> Iterable[tuple[Hashable, int]]:
        """What is remembered, and its numbers."""
        return self._known.items()


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


class ElementKey(_sgl.RadixKey):
    """SGLang's key, which first asks whether it is matched as a whole, as nodes mostly are: one comparison of arrays,
    where SGLang gallops over a dozen slices.

    The nodes of our tree have such keys; what is looked up is SGLang's.
    """

    __slots__ = ()

    def __getitem__(self, index: int | slice) -> ElementKey:
        part = super().__getitem__(index)
        return ElementKey(part.token_ids, part.extra_key)

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Length of the prefix shared with ``other``, in whole pages."""
        mine, theirs = self.token_ids, other.token_ids
        length = len(mine)
        whole = self.limit is None and len(other) >= length and self.extra_key == other.extra_key
        if whole and mine == (theirs if len(theirs) == length else theirs[:length]):
            return length - length % page_size
        return super().match(other, page_size)


class VLoraRadixCache(_sgl.RadixCache):
    """SGLang's radix cache over elements that carry image and adapter.

    SGLang makes keys of token ids. Whose they are is known from the request that a look-up names, or whose KV is being
    cached; a key of nobody is one of the base model without images.

    Args:
        params: SGLang's ``CacheInitParams``.
        images, adapters: contents remembered; see ``Numbering``.
    Raises:
        ConfigError: a combination whose keys are not token ids of this process alone.
    """

    def __init__(self, params: CacheInitParams, images: int = 1 << 17, adapters: int = 1 << 12) -> None:
        if params.is_eagle:
            raise ConfigError("the vlora prefix cache does not serve EAGLE's bigram keys; start without it")
        if params.enable_kv_cache_events:
            raise ConfigError("KV cache events would publish keys without meaning elsewhere; turn them off")
        self._image_numbers = Numbering(0, IMAGE_BIT, images)
        self._adapter_numbers = Numbering(1, ADAPTERS, adapters)
        self._caching: CacheIdentity | None = None
        self.totals = ReuseTotals()
        super().__init__(params)

    def identify(
        self,
        token_ids: array[int],
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

    def distrust(self, adapter: str | None, images: Iterable[ImageSpan] = ()) -> None:
        """What was computed with an adapter (its digest), and with these images, is found by no later request."""
        self._adapter_numbers.forget(adapter)
        for image in images:
            self._image_numbers.forget(image.content)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """SGLang's ``match_prefix``, over elements. A request's ``reuse_limit`` counts when the request is given."""
        key, req = params.key, params.req
        identity = self._caching if req is None else req.vlora.identity
        if identity is not None:
            # In place: SGLang makes a key per call and reads no more than its length afterwards.
            key.token_ids, key.extra_key = identity.elements(key.token_ids), identity.root
            limit = None if req is None else req.vlora.reuse_limit
            if limit is not None:
                key.limit = limit if key.limit is None else min(key.limit, limit)
        return super().match_prefix(params)

    def insert(self, params: Any) -> InsertResult:
        """SGLang's ``insert``, over elements; a new node remembers whose request computed it."""
        key, identity = params.key, self._caching
        creator, tokens, root = 0, key.token_ids, key.extra_key
        if identity is not None:
            creator, tokens, root = identity.adapter, identity.elements(tokens), identity.root
        result = super().insert(replace(params, key=ElementKey(tokens, root, limit=key.limit)))
        node = result.last_device_node
        if node is not None and not hasattr(node, "creator"):
            node.creator = creator
        return result

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """SGLang's; the keys that it makes meanwhile are this request's."""
        with self.keys_of(req.vlora.identity):
            super().cache_unfinished_req(req, chunked)

    def cache_finished_req(self, req: Req, *args: object, **kwargs: object) -> None:
        """SGLang's; the keys that it makes meanwhile are this request's."""
        with self.keys_of(req.vlora.identity):
            super().cache_finished_req(req, *args, **kwargs)

    @contextmanager
    def keys_of(self, identity: CacheIdentity | None) -> Iterator[None]:
        """Take keys that come without a request for those of this identity."""
        self._caching = identity
        try:
            yield
        finally:
            self._caching = None

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        upper.creator = getattr(child, "creator", 0)
        return upper

    def matched_length(self, token_ids: array[int], identity: CacheIdentity) -> int:
        """How many of a request's tokens are in the cache."""
        key = _sgl.RadixKey(token_ids)
        with self.keys_of(identity):
            return len(self.match_prefix(_sgl.MatchPrefixParams(key=key)).device_indices)

    def kept_images(self) -> dict[int, JsonDict]:
        """The images in the tree by number: ``tokens`` kept of each, in how many ``copies``, and the digests of the
        ``adapters`` whose requests begin with one of them; the base model's is empty. Of large trees only a part.
        """
        digests = {number: digest for digest, number in self._adapter_numbers.items()}
        found: dict[int, JsonDict] = {}
        stack: list[tuple[TreeNode, frozenset[int]]] = [(one, frozenset()) for one in self.root_node.children.values()]
        for _ in range(MOST_NODES):
            if not stack:
                break
            node, above = stack.pop()
            images, adapter = images_in(node.key)
            for image, tokens in images.items():
                one = found.setdefault(image, {"tokens": 0, "copies": 0, "adapters": set()})
                one["tokens"] += tokens
                one["copies"] += image not in above
            within = above | images.keys()
            for image in within:
                found[image]["adapters"].add(digests.get(adapter, ""))
            stack += [(child, within) for child in node.children.values()]
        return found

    def measure(
        self,
        identity: CacheIdentity,
        node: TreeNode,
        length: int,
        prompt_tokens: int,
        encoder: tuple[int, int] = (0, 0),
    ) -> Reuse:
        """What a request reuses, counted when it is first scheduled.

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
        self.totals.add(reuse)
        return reuse


def images_in(key: RadixKey) -> tuple[dict[int, int], int]:
    """The tokens of each image in a node's key, by the image's number, and the number of the adapter it ends with."""
    elements = np.asarray(key.token_ids, dtype=np.int64)
    numbers = elements[elements & IMAGE_BIT != 0] & (IMAGE_BIT - 1)
    found = {}
    while len(numbers):  # a node has one image, or few
        same = numbers == numbers[0]
        found[int(numbers[0])] = int(same.sum())
        numbers = numbers[~same]
    whole = key.extra_key[1] if isinstance(key.extra_key, tuple) else 0
    return found, whole or int(elements[-1] >> ADAPTER_SHIFT)


def create_radix_cache(context: TreeCacheBuildContext) -> object:
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
