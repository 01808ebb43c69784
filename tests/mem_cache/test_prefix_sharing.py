"""A leader and its followers in one batch: every row ends up with slots of its own content, and none is lost."""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mem_cache.test_radix_cache import ADAPTERS, PAD, SLOTS, Request, World, ids, match_request, state_of
from tests.support.stand_in import passing_for
from vlora_sgl import _sgl
from vlora_sgl.mem_cache.identity import AdapterContent, ImageSpan
from vlora_sgl.mem_cache.prefix_sharing import WRITES_FIRST, PrefixSharing, can_share

AFTER_IMAGE = (AdapterContent("c", "after_image"), AdapterContent("d", "after_image"), None)


class Batch(World):
    """Requests admitted one after the other, as SGLang does, that get their slots together."""

    def __init__(self) -> None:
        super().__init__(page_size=1)
        self.sharing = PrefixSharing(self.cache)
        self.reqs: list[Any] = []

    def take(self, request: Request, end: int | None = None, cap: int | None = None) -> Any:
        """Match and lock a request that prefills up to ``end``; ``cap`` is the most that it takes from the cache."""
        tokens = request.tokens
        identity = self.cache.identify(tokens, request.salt, request.adapter, request.images)
        limit = len(tokens) - 1 if cap is None else min(cap, len(tokens) - 1)
        found = match_request(self.cache, tokens, state_of(identity), limit)
        self.cache.inc_lock_ref(found.last_device_node)
        filled = len(tokens) if end is None else max(end, len(found.device_indices) + 1)
        request.req = SimpleNamespace(
            req_pool_idx=self.pool.free_rows.pop(),
            extra_key=identity.key,
            vlora=state_of(identity),
            origin_input_ids=tokens,
            output_ids=array("q"),
            extend_range=SimpleNamespace(end=filled),
            cache_protected_len=len(found.device_indices),
            last_node=found.last_device_node,
            prefix_indices=found.device_indices,
            priority=0,
            filled=filled,
        )
        request.req.get_fill_ids = lambda req=request.req: (req.origin_input_ids + req.output_ids)[: req.filled]
        self.running.append(request)
        self.reqs.append(request.req)
        return request.req

    def promise(self, leader: Any, length: int) -> bool:
        """As a follower's admission does; asking whether it may changes nothing."""
        may = self.sharing.can_promise(leader, length)
        assert self.sharing.can_promise(leader, length) == may
        if may:
            self.sharing.promise(leader, length)
        return may

    def run(self) -> None:
        """Slots for the whole batch, the promises, and what SGLang does behind the prefill."""
        for request in self.running:
            req, start = request.req, len(request.req.prefix_indices)
            if req not in self.reqs:
                continue
            row = self.pool.req_to_token[req.req_pool_idx]
            row[:start] = req.prefix_indices
            row[start : req.filled] = self.pool.alloc(request.truth(req.vlora.invocation_start, req.filled)[start:])
        self.sharing.fulfil(self.reqs)
        self.check()
        for req in self.reqs:
            row = self.pool.req_to_token[req.req_pool_idx]
            assert req.prefix_indices.tolist() == row[: len(req.prefix_indices)].tolist()
            self.cache.cache_unfinished_req(req)
        self.reqs = []
        self.check()

    def end(self) -> None:
        for request in list(self.running):
            self.leave(request, keep=False)
        self.cache.evict(_sgl.EvictParams(num_tokens=SLOTS))
        assert not self.pool.content and len(self.pool.free_slots) == SLOTS


def about(image: int, question: array, adapter: AdapterContent | None = None) -> Request:
    """Two tokens, an image of six and a question."""
    return Request(ids(1, 2, *[PAD] * 6) + question, (ImageSpan(2, 8, ("full hash", image)),), adapter, None)


def test_followers_take_what_the_leader_will_write() -> None:
    batch = Batch()
    leader, *followers = (about(7, ids(3, 4), adapter) for adapter in AFTER_IMAGE)
    req = batch.take(leader)
    assert batch.promise(req, 8)
    for follower in followers:
        assert len(batch.take(follower).prefix_indices) == 8
    assert batch.cache.protected_size() == 8 and batch.cache.evictable_size() == 0
    batch.run()
    assert len(batch.pool.content) == 8 + 3 * 2, "the image once, each question once"
    batch.end()


def test_a_leader_must_compute_the_whole_prefix_in_this_batch() -> None:
    batch = Batch()
    req = batch.take(about(7, ids(3, 4)), end=5)
    assert not batch.promise(req, 8)
    assert len(batch.take(about(7, ids(3, 9))).prefix_indices) == 0
    batch.run()
    batch.end()


def test_the_last_chunk_of_a_leader_is_shared() -> None:
    batch = Batch()
    leader = about(7, ids(3, 4))
    req = batch.take(leader, end=5)
    batch.run()
    req.filled = req.extend_range.end = len(leader.tokens)
    batch.reqs = [req]
    assert batch.promise(req, 8)
    assert len(batch.take(about(7, ids(9))).prefix_indices) == 8
    batch.run()
    assert len(batch.pool.content) == 8 + 2 + 1
    batch.end()


def test_what_a_leader_computes_for_itself_alone_is_not_promised() -> None:
    """It wants the logprobs of its prompt, say, of which the tree holds the beginning."""
    batch = Batch()
    batch.take(Request(ids(1, 2), (), None, None))
    batch.run()
    req = batch.take(about(7, ids(3, 4)), cap=0)
    assert not batch.promise(req, 8)
    batch.run()
    batch.end()


def test_a_promise_is_split_by_those_who_need_less_of_it() -> None:
    """A prompt that ends within the prefix, one that starts like it, and a leader of a prefix that goes on."""
    batch = Batch()
    assert batch.promise(batch.take(about(7, ids(3, 4))), 8)
    assert len(batch.take(about(7, ids()), cap=7).prefix_indices) == 7
    assert len(batch.take(Request(ids(1, 2, 3), (), None, None)).prefix_indices) == 2
    first, second = ImageSpan(2, 8, ("full hash", 7)), ImageSpan(9, 12, ("full hash", 5))
    longer = [
        Request(ids(1, 2, *[PAD] * 6, 3, *[PAD] * 3, 4, last), (first, second), adapter, None)
        for last, adapter in ((5, None), (6, AFTER_IMAGE[0]))
    ]
    req = batch.take(longer[0])
    assert len(req.prefix_indices) == 8 and batch.promise(req, 12)
    assert len(batch.take(longer[1]).prefix_indices) == 12
    batch.run()
    batch.end()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 2),  # the image
                st.lists(st.integers(3, 4), max_size=4),  # the question
                st.sampled_from(ADAPTERS),
                st.one_of(st.none(), st.integers(1, 12)),  # where its chunk ends
                st.one_of(st.none(), st.integers(0, 8)),  # the most it takes from the cache
                st.sampled_from(["leave", "abort", "stay", "evict"]),
            ),
            min_size=1,
            max_size=6,
        ),
        max_size=4,
    )
)
def test_any_batches_keep_content_and_slots_right(batches: list[Any]) -> None:
    batch = Batch()
    for rows in batches:
        leaders: dict[Any, Any] = {}
        for image, question, adapter, end, cap, _ in rows:
            request = about(image, ids(*question), adapter)
            end = end if end is None else min(end, len(request.tokens))
            req = batch.take(request, end, cap)
            key = req.vlora.identity.prefix_key(request.tokens)
            if key not in leaders:
                leaders[key] = req
            if key in leaders and leaders[key].extend_range.end >= 8:
                batch.promise(leaders[key], req.vlora.identity.shareable)
        batch.run()
        for *_, after in rows:
            if after == "evict":
                batch.cache.evict(_sgl.EvictParams(num_tokens=9))
            elif after != "stay" and batch.running:
                batch.leave(batch.running[0], keep=after == "leave")
            batch.check()
    batch.end()


@pytest.mark.parametrize(
    ("change", "joins"),
    [
        ({}, True),
        ({"backend": passing_for("FlashAttentionBackend")()}, True),
        ({"backend": type("FlashInferAttnBackend", (), {})()}, False),
        ({"backend": type("TritonAttnBackend", (), {})()}, False),  # of another module
        ({"page_size": 16}, False),
        ({"mla": True}, False),
        ({"attn_cp_size": 2}, False),
    ],
)
def test_where_a_prefill_may_read_what_it_writes(change: dict[str, Any], joins: bool) -> None:
    found = {"backend": passing_for("TritonAttnBackend")(), "page_size": 1, "mla": False, "attn_cp_size": 1, **change}
    runner = SimpleNamespace(
        attn_backend=found["backend"],
        use_mla_backend=found["mla"],
        server_args=SimpleNamespace(attn_cp_size=found["attn_cp_size"]),
    )
    world = World(found["page_size"])
    world.pool.page_size = found["page_size"]
    assert can_share(runner, world.cache) == joins


def test_sglangs_triton_backend_writes_before_it_reads() -> None:
    assert "TritonAttnBackend" in WRITES_FIRST
    source = inspect.getsource(_sgl.TritonAttnBackend.forward_extend)
    written, unified, read = (
        source.index(call) for call in ("._set_kv_buffer(", "._forward_extend_unified(", ".extend_attention_fwd(")
    )
    assert written < min(unified, read)
