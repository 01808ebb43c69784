"""The prefix cache's part of the scheduler: who a request is, what it found, and who should wait for whom."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ModelRunner, Req
from vlora_sgl.core import JsonDict
from vlora_sgl.mem_cache.identity import NEVER, AdapterContent, CacheIdentity, image_spans
from vlora_sgl.mem_cache.prefix_sharing import PrefixSharing, can_share
from vlora_sgl.mem_cache.radix_cache import VLoraRadixCache
from vlora_sgl.multimodal import encoder_cache

WORTH_WAITING = 32
"""Tokens of prefix for which a request waits an iteration; SGLang's own in-batch prefix caching starts there too."""


class PrefixScheduling:
    """One per scheduler.

    Of requests that need one long prefix, one computes it (the leader); the others join its batch, where that can be,
    or wait until the prefix is in the tree.

    Args:
        tree: the prefix cache. Where it is SGLang's own, requests have no identity, and nobody waits.
        runner: SGLang's model runner.
        embeddings: the image encoder's cache.
    """

    def __init__(self, tree: Any, runner: ModelRunner, embeddings: encoder_cache.EncoderCache) -> None:
        self.tree, self.embeddings = tree, embeddings
        self.lora_manager = getattr(runner, "lora_manager", None)
        self.sharing = PrefixSharing(tree) if can_share(runner, tree) else None
        self._leaders: dict[Hashable, Req] = {}  # who computes a prefix that is not in the tree yet, by prefix key

    def arrived(self, req: Req) -> None:
        """Settle who computes a new request's KV. Its images get the keys of their embeddings."""
        state, adapter = req.vlora, req.vlora.adapter
        encoder_cache.name_embeddings(req.multimodal_inputs, None if adapter is None else adapter.tower, req.lora_id)
        if not isinstance(self.tree, VLoraRadixCache):
            return
        salt, content = req.extra_key, None
        if adapter is not None:
            assert salt is not None and req.lora_id is not None
            # SGLang appended the adapter's id, which is new with every load; content takes its place.
            salt = salt.removesuffix(req.lora_id) or None
            content = AdapterContent(adapter.digest, adapter.description.invocation)
        images, placeless = image_spans(req.multimodal_inputs)
        state.identity = self.tree.identify(req.origin_input_ids, salt, content, images, placeless)
        req.extra_key = state.identity.key
        if state.invocation_start == NEVER:
            req.lora_id = None  # its adapter is never invoked: a request of the base model, in every respect

    def returned(self, req: Req) -> None:
        """A retracted request comes back to the queue, and will have other output tokens."""
        if req.vlora.identity is not None:
            req.vlora.identity.forget()

    def begin(self, waiting: Sequence[Req], in_flight: Sequence[Req], chunked: Req | None) -> None:
        """Before a batch is formed: put prefixes that are waited for in the tree while they are computed.

        Whoever takes such a prefix runs behind its computation on the same stream, as the next chunk of a long prompt
        does, whose first chunks SGLang puts in the tree at that time too. So the device goes from one batch to the
        next; the requests would else wait until the first one's answer is known.

        Args:
            waiting: the queue.
            in_flight: requests whose prefill is under way, so that their KV is not in the tree yet.
            chunked: the one among them with chunks to come: it is a leader still.
        """
        self._leaders = {}
        wanted = {self._prefix_key(req) for req in waiting} - {None} if in_flight else set()
        for req in in_flight:
            key = self._prefix_key(req)
            if key not in wanted or req.finished():  # finished: its answer is known, and its prefix in the tree
                continue
            if req is chunked:
                self._leaders[key] = req
            elif not self._holds_prefix(req):
                _sgl.maybe_cache_unfinished_req(req, self.tree)

    def may_admit(self, req: Req) -> bool:
        """Whether a request need not wait for its prefix: nobody computes it, or it is there, or it can be joined."""
        leader = self._leader_of(req)
        return leader is None or self._holds_prefix(req) or self._joins(req, leader)

    def admitted(self, req: Req) -> None:
        """A request goes into the batch: it leads those of its prefix, or is promised what its leader computes."""
        leader, key = self._leader_of(req), self._prefix_key(req)
        if leader is not None and self._joins(req, leader):
            assert self.sharing is not None
            self.sharing.promise(leader, req.vlora.identity.shareable)
        elif leader is None and key is not None:
            self._leaders[key] = req

    def formed(self, reqs: Sequence[Req]) -> None:
        """The batch has its slots: keep what was promised, and count what every request reuses, once."""
        if self.sharing is not None:
            self.sharing.fulfil(reqs)
        encoding: set[int] = set()  # images that the batch encodes
        for req in reqs:
            state = req.vlora
            if state.identity is not None and "reuse" not in state.answer:
                length = len(req.prefix_indices)
                needed = encoder_cache.images_to_encode(req.multimodal_inputs, length)
                misses = {key for key in needed if not self.embeddings.knew(key)} - encoding
                encoding |= misses
                encoder = len(needed) - len(misses), len(misses)
                reuse = self.tree.measure(state.identity, req.last_node, length, len(req.origin_input_ids), encoder)
                state.answer["reuse"] = asdict(reuse)
                if state.params.trace and state.identity.images:
                    state.answer["images"] = [number for *_, number in state.identity.images]

    def cached(self, req: Req) -> int | None:
        """How many tokens a request would take from the cache; ``None`` where SGLang's own cache serves."""
        state = req.vlora
        if state.identity is None:
            return None
        length = self.tree.matched_length(req.origin_input_ids, state.identity)
        return int(length if state.reuse_limit is None else min(length, state.reuse_limit))

    def state(self) -> dict[str, int]:
        """Totals over all requests, for ``/server_info`` and the metrics."""
        return asdict(self.tree.totals) if isinstance(self.tree, VLoraRadixCache) else {}

    def kept_images(self) -> dict[int, JsonDict]:
        """See ``VLoraRadixCache.kept_images``; nothing where SGLang's own cache serves."""
        return self.tree.kept_images() if isinstance(self.tree, VLoraRadixCache) else {}

    def _prefix_key(self, req: Req) -> Hashable:
        identity: CacheIdentity | None = req.vlora.identity
        if identity is None or identity.shareable < WORTH_WAITING:
            return None
        return identity.prefix_key(req.origin_input_ids)

    def _leader_of(self, req: Req) -> Req | None:
        key = self._prefix_key(req)
        return self._leaders.get(key) if key is not None else None

    def _joins(self, req: Req, leader: Req) -> bool:
        """Whether a request may run in the batch that computes its prefix, by a leader admitted to it before.

        A routed adapter may not: its router asks, before the first layer, what the prefix's tokens voted.
        """
        if self.sharing is None or self.lora_manager is None or self.lora_manager.has_routed([req.lora_id]):
            return False
        return self.sharing.can_promise(leader, req.vlora.identity.shareable)

    def _holds_prefix(self, req: Req) -> bool:
        identity = req.vlora.identity
        missing = identity.shareable - self.tree.matched_length(req.origin_input_ids, identity)
        return bool(missing < self.tree.page_size)
