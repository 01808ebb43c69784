"""The scheduler's side of the prefix cache: who a request is, what it found, and who should wait for whom."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.core import AdapterId
from vlora_sgl.mem_cache.prefix_sharing import PrefixSharing, can_share
from vlora_sgl.mem_cache.radix_cache import NEVER, AdapterContent, CacheIdentity, VLoraRadixCache, image_spans
from vlora_sgl.multimodal import encoder_cache
from vlora_sgl.multimodal.early_encoding import encode_ahead

WORTH_WAITING = 32
"""Tokens of prefix for which a request waits an iteration; SGLang's own in-batch prefix caching starts there too."""

# SGLang's scheduler, of which this is one side.
Base: Any = object


class PrefixReuse(Base):
    """Mixed into the scheduler, before SGLang's class."""

    vlora_args: Any
    _computing: dict[Any, Any]
    _first = False  # whether the next request that is admitted is its batch's first
    _ahead_of: Any = None  # the last request whose images were to be encoded ahead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        joins = can_share(self.tp_worker.model_runner, self.tree_cache)
        self.sharing = PrefixSharing(self.tree_cache) if joins else None
        self.encoder_cache = encoder_cache.install(self.vlora_args.encoder_cache_mb)

    def identify(self, req: Any) -> CacheIdentity | None:
        """The cache identity of a new request (SGLang's ``Req``), or ``None`` when the prefix cache is off.

        Its images get the keys of their embeddings, which do not depend on the prefix cache.
        """
        described = self.lora_manager.described[req.lora_id] if req.lora_id is not None else None
        encoder_cache.name_embeddings(req.multimodal_inputs, described.tower if described is not None else None)
        if not isinstance(self.tree_cache, VLoraRadixCache):
            return None
        salt, adapter = req.extra_key, None
        if described is not None:
            # SGLang appended the adapter's id, which is new with every load; content takes its place.
            salt = salt.removesuffix(req.lora_id) or None
            adapter = AdapterContent(described.digest, described.description.invocation)
        images, placeless = image_spans(req.multimodal_inputs)
        return self.tree_cache.identify(req.origin_input_ids, salt, adapter, images, placeless)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if isinstance(req.extra_key, CacheIdentity):
            req.extra_key = req.extra_key.renewed()
        else:
            req.extra_key = self.identify(req) or req.extra_key
            if getattr(req.extra_key, "invocation_start", 0) == NEVER:
                req.lora_id = None  # its adapter is never invoked: a request of the base model, in every respect
        super()._add_request_to_queue(req, is_retracted)
        # Where it starts nothing, the admission looks again: by then a head may want what is cached computed anew.
        if not is_retracted and self._comes_alone(req) and self._encode_ahead(req):
            self._ahead_of = req

    def _comes_alone(self, req: Any) -> bool:
        """Whether nothing runs or is in flight, and the queue holds this request alone; SGLang may have refused it."""
        idle = self.running_batch.is_empty() and self.last_batch is None and self.chunked_req is None
        return idle and not self._engine_paused and self.waiting_queue == [req]

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """SGLang's, after noting which prefixes are being computed, and counting what the new batch reuses."""
        self._computing = self._publish()
        self._first = True
        plan = super().get_new_batch_prefill(running_batch)
        if plan.batch_to_run is not None and self.sharing is not None:
            self.sharing.fulfil(plan.batch_to_run.reqs)
        if plan.batch_to_run is not None and isinstance(self.tree_cache, VLoraRadixCache):
            encoding: set[int] = set()
            for req in plan.batch_to_run.reqs:
                self._measure(req, encoding)
        return plan

    def place_invocations(self, batch: Any) -> tuple[tuple[int, ...], list[AdapterId]]:
        """Where each row's adapter starts (empty in decoding), and all that the batch runs, the base if it does.

        A batch of one adapter with an invocation start inside is no batch of one adapter: a merged adapter must be
        taken out of the rows before the invocation start.
        """
        adapters = [req.lora_id for req in batch.reqs]
        invocation_starts: tuple[int, ...] = ()
        if batch.forward_mode.is_extend():  # decoding is behind every invocation start
            invocation_starts = tuple(getattr(req.extra_key, "invocation_start", 0) for req in batch.reqs)
            if any(
                start < invocation_start
                for start, invocation_start in zip(batch.prefix_lens, invocation_starts, strict=True)
            ):
                adapters.append(None)
        return invocation_starts, adapters

    def _in_flight(self) -> list[Any]:
        """Requests whose prefill is under way, so that their KV is not in the tree yet."""
        last = self.last_batch
        in_flight = list(last.reqs) if last is not None and last.forward_mode.is_extend() else []
        return [*in_flight, self.chunked_req] if self.chunked_req is not None else in_flight

    def _publish(self) -> dict[Any, Any]:
        """Put prefixes that are waited for in the tree while computed; return who computes those that are not, by key.

        Whoever takes such a prefix runs behind its computation on the same stream, as the next chunk of a long prompt
        does, whose first chunks SGLang puts in the tree at that time too. So the device goes from one batch to the
        next; the requests would else wait until the first one's answer is known.
        """
        in_flight = self._in_flight()
        wanted = {self._prefix_key(req) for req in self.waiting_queue} - {None} if in_flight else set()
        computing = {}
        for req in in_flight:
            key = self._prefix_key(req)
            if key not in wanted or req.finished():  # finished: its answer is known, and its prefix in the tree
                continue
            if req is self.chunked_req:
                computing[key] = req
            elif not self._holds_prefix(req):
                _sgl.maybe_cache_unfinished_req(req, self.tree_cache)
        return computing

    def _prefix_key(self, req: Any) -> Any:
        identity = req.extra_key
        if not isinstance(identity, CacheIdentity) or identity.shareable < WORTH_WAITING:
            return None
        return identity.prefix_key(req.origin_input_ids)

    def _can_schedule_lora_req(self, req: Any, running_loras: Any) -> bool:
        """SGLang's verdict, but of requests that need one long prefix, one computes it; the others join it or wait."""
        key = self._prefix_key(req)
        leader = self._computing.get(key) if key is not None else None
        waits = leader is not None and not self._holds_prefix(req) and not self._shares(req, leader)
        if waits or not super()._can_schedule_lora_req(req, running_loras):
            return False
        if key is not None:
            self._computing.setdefault(key, req)
        if self._first:
            self._first = False
            if req is not self._ahead_of:  # once: it may be refused for want of memory, and come again every iteration
                self._ahead_of = req
                self._encode_ahead(req)
        return True

    def _encode_ahead(self, req: Any) -> int:
        """Start the encoder for a request before its batch is formed; where an adapter changes it, the batch has to.

        Returns:
            How many images were started.
        """
        runner = self.tp_worker.model_runner
        described = self.lora_manager.described[req.lora_id] if req.lora_id is not None else None
        changed = described is not None and described.tower is not None
        if req.multimodal_inputs is None or runner.vision_graphs is None or changed or not self.encoder_cache.max_size:
            return 0
        if not isinstance(req.extra_key, CacheIdentity):
            return 0
        start = self.tree_cache.matched_length(req.origin_input_ids, req.extra_key)
        with self.forward_stream_ctx if self.enable_overlap else nullcontext():
            if self.enable_overlap:
                self.forward_stream.wait_stream(self.schedule_stream)
            items = req.multimodal_inputs.mm_items
            return encode_ahead(runner.model, runner.vision_graphs, self.encoder_cache, items, start)

    def _shares(self, req: Any, leader: Any) -> bool:
        """Whether a request may run in the batch that computes its prefix, by a leader admitted to it before.

        A routed adapter may not: its router asks, before the first layer, what the prefix's tokens voted.
        """
        if self.sharing is None or self.lora_manager.has_routed([req.lora_id]):
            return False
        return self.sharing.promise(leader, req.extra_key.shareable)

    def _holds_prefix(self, req: Any) -> bool:
        missing = req.extra_key.shareable - self.tree_cache.matched_length(req.origin_input_ids, req.extra_key)
        return missing < self.tree_cache.page_size

    def _measure(self, req: Any, encoding: set[int]) -> None:
        """Count what a request of the new batch reuses, once; ``encoding`` are images that the batch encodes."""
        identity = req.extra_key
        if isinstance(identity, CacheIdentity) and identity.reuse is None:
            length = len(req.prefix_indices)
            needed = encoder_cache.images_to_encode(req.multimodal_inputs, length)
            misses = {key for key in needed if not self.encoder_cache.knew(key)} - encoding
            encoding |= misses
            encoder = len(needed) - len(misses), len(misses)
            reuse = self.tree_cache.measure(identity, req.last_node, length, len(req.origin_input_ids), encoder)
            req.customized_info = {**(req.customized_info or {}), "vlora_reuse": [asdict(reuse)]}

    def reuse_state(self) -> dict[str, Any]:
        """Totals over all requests, for ``/server_info`` and ``/vlora/stats``."""
        return asdict(self.tree_cache.totals) if isinstance(self.tree_cache, VLoraRadixCache) else {}
