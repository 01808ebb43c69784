"""The prefix cache against a dictionary: what it shares is exactly what was computed alike."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.bench_match import KINDS, match_seconds
from vlora_sgl import _sgl
from vlora_sgl.core import RequestParams
from vlora_sgl.errors import ConfigError
from vlora_sgl.mem_cache.identity import NEVER, AdapterContent, CacheIdentity, ImageSpan, image_spans
from vlora_sgl.mem_cache.radix_cache import ElementKey, Numbering, VLoraRadixCache
from vlora_sgl.request import RequestState

SLOTS = 4096


class Pool:
    """Token slots and the request table, as SGLang's two pools, with what each slot's KV was computed from."""

    device = "cpu"

    def __init__(self) -> None:
        self.free_slots = list(range(SLOTS))
        self.content: dict[int, Any] = {}
        self.req_to_token = torch.zeros((64, 512), dtype=torch.int64)
        self.free_rows = list(range(64))

    def alloc(self, contents: list[Any]) -> torch.Tensor:
        slots = [self.free_slots.pop() for _ in contents]
        self.content.update(zip(slots, contents, strict=True))
        return torch.tensor(slots, dtype=torch.int64)

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        for slot in indices.tolist():
            del self.content[slot]  # a KeyError here is a slot freed twice
            self.free_slots.append(slot)

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        for indices, start in segments:
            self.free_segment(indices, start)

    def write(self, where: tuple[int, slice], values: torch.Tensor) -> None:
        self.req_to_token[where] = values


def make_cache(pool: Any, page_size: int = 1, cls: type = VLoraRadixCache) -> Any:
    return cls(
        _sgl.CacheInitParams(
            disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=pool, page_size=page_size
        )
    )


def ids(*tokens: int) -> array:
    return array("q", tokens)


def state_of(identity: CacheIdentity, reuse_limit: int | None = None) -> RequestState:
    return RequestState(RequestParams(), identity=identity, reuse_limit=reuse_limit)


def match(cache: Any, tokens: array, identity: CacheIdentity | str | None) -> Any:
    """As SGLang looks up after an insert, the request not named; a string is a key that nobody has identified."""
    known = isinstance(identity, CacheIdentity)
    with cache.keys_of(identity if known else None):
        key = _sgl.RadixKey(tokens, identity.key if isinstance(identity, CacheIdentity) else identity)
        return cache.match_prefix(_sgl.MatchPrefixParams(key=key))


def match_request(cache: Any, tokens: array, state: RequestState, limit: int | None = None) -> Any:
    """As SGLang looks up for a request that it wants to schedule."""
    key = _sgl.RadixKey(tokens, state.identity.key, limit=limit)
    return cache.match_prefix(_sgl.MatchPrefixParams(key=key, req=SimpleNamespace(vlora=state)))


def insert(cache: Any, tokens: array, identity: CacheIdentity | None) -> Any:
    with cache.keys_of(identity):
        return cache.insert(_sgl.InsertParams(key=_sgl.RadixKey(tokens), value=torch.arange(len(tokens))))


PAD = 1_000_000 + 77  # what SGLang writes over the tokens of every image below: all hashes agree in their 30 bits


@dataclass
class Piece:
    """Prompt material: one text token, or an image of some length."""

    token: int = 0
    image: int | None = None
    length: int = 1


@dataclass
class Request:
    tokens: array
    images: tuple[ImageSpan, ...]
    adapter: AdapterContent | None
    salt: str | None
    req: Any = None
    contents: list[Any] = field(default_factory=list)

    def truth(self, invocation_start: int, upto: int) -> list[Any]:
        """What each position's KV is a function of: everything before it, and who computed each of those."""
        image_at = {t: span.content for span in self.images for t in range(span.start, span.end)}
        chain, out = (self.salt,), []
        for t in range(upto):
            who = self.adapter.digest if self.adapter is not None and t >= invocation_start else None
            chain = (hash(chain), who, image_at.get(t, self.tokens[t]))
            out.append(chain)
        return out


ADAPTERS = [
    None,
    AdapterContent("a"),
    AdapterContent("b"),
    AdapterContent("c", "after_image"),
    AdapterContent("d", "after_image"),
    AdapterContent("e", (1, 2)),
]
PIECES = st.one_of(
    st.builds(Piece, token=st.integers(0, 2)),
    st.builds(Piece, image=st.integers(0, 2), length=st.integers(1, 4)),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "start", "round", "grow", "finish", "abort", "evict"]),
        st.lists(PIECES, min_size=1, max_size=8),
        st.sampled_from(ADAPTERS),
        st.sampled_from([None, None, "a", "1", "b"]),  # salts that look like what we use inside
        st.integers(1, 6),
    ),
    max_size=40,
)


class World:
    """Requests that come, grow and leave, over one cache; every step is compared with the dictionary ``known``."""

    def __init__(self, page_size: int) -> None:
        self.pool = Pool()
        self.page = page_size
        self.cache = make_cache(self.pool, page_size)
        self.running: list[Request] = []
        self.finished: list[Request] = []

    def longest_known(self, truth: list[Any]) -> int:
        """Longest prefix whose every position is in the tree, by content."""
        known = {self.pool.content[slot] for slot in self.tree_slots()}
        length = next((t for t, content in enumerate(truth) if content not in known), len(truth))
        return length // self.page * self.page

    def tree_slots(self) -> list[int]:
        values = [node.value for node in self.nodes() if node is not self.cache.root_node]
        return torch.cat(values).tolist() if values else []

    def nodes(self) -> list[Any]:
        found, stack = [], [self.cache.root_node]
        while stack:
            found.append(stack.pop())
            stack.extend(found[-1].children.values())
        return found

    def start(self, pieces: list[Piece], adapter: AdapterContent | None, salt: str | None, new: int) -> None:
        tokens, images = array("q"), []
        for piece in pieces:
            if piece.image is not None:
                images.append(ImageSpan(len(tokens), len(tokens) + piece.length, ("full hash", piece.image)))
            tokens.extend([piece.token if piece.image is None else PAD] * piece.length)
        self.admit(Request(tokens, tuple(images), adapter, salt), new)

    def admit(self, request: Request, chunk: int) -> None:
        identity = self.cache.identify(request.tokens, request.salt, request.adapter, request.images)
        truth = request.truth(identity.invocation_start, len(request.tokens))
        limit = len(truth) - 1
        expected = self.longest_known(truth[:limit])
        found = match_request(self.cache, request.tokens, state_of(identity), limit)
        assert len(found.device_indices) == expected
        assert [self.pool.content[slot] for slot in found.device_indices.tolist()] == truth[:expected]
        self.cache.inc_lock_ref(found.last_device_node)
        row = self.pool.free_rows.pop()
        filled = min(len(truth), expected + max(chunk, self.page))  # the first chunk of a chunked prefill
        request.req = SimpleNamespace(
            req_pool_idx=row,
            extra_key=identity.key,
            vlora=state_of(identity),
            origin_input_ids=request.tokens,
            output_ids=array("q"),
            cache_protected_len=expected,
            last_node=found.last_device_node,
            prefix_indices=found.device_indices,
            priority=0,
            filled=filled,
        )
        request.req.get_fill_ids = lambda req=request.req: (req.origin_input_ids + req.output_ids)[: req.filled]
        self.pool.req_to_token[row, :expected] = found.device_indices
        self.pool.req_to_token[row, expected:filled] = self.pool.alloc(truth[expected:filled])
        self.running.append(request)
        self.cache.cache_unfinished_req(request.req, chunked=filled < len(truth))

    def grow(self, request: Request, count: int) -> None:
        req = request.req
        if req.filled == len(req.origin_input_ids) + len(req.output_ids):
            req.output_ids.extend([count % 3] * count)
        total = req.origin_input_ids + req.output_ids
        end = min(len(total), req.filled + count)
        request.tokens = total
        truth = request.truth(req.vlora.invocation_start, end)
        self.pool.req_to_token[req.req_pool_idx, req.filled : end] = self.pool.alloc(truth[req.filled :])
        req.filled = end
        self.cache.cache_unfinished_req(req)

    def leave(self, request: Request, keep: bool) -> None:
        self.running.remove(request)
        self.cache.cache_finished_req(request.req, is_insert=keep, kv_len_to_handle=request.req.filled)
        self.pool.free_rows.append(request.req.req_pool_idx)
        request.tokens = request.tokens[: request.req.filled]
        self.finished.append(request)

    def check(self) -> None:
        for request in self.running:
            row = self.pool.req_to_token[request.req.req_pool_idx, : request.req.filled].tolist()
            truth = request.truth(request.req.vlora.invocation_start, request.req.filled)
            assert [self.pool.content[slot] for slot in row] == truth
        tree = self.tree_slots()
        assert len(tree) == len(set(tree)) == self.cache.evictable_size() + self.cache.protected_size()
        held = set(tree)
        for request in self.running:
            held.update(self.pool.req_to_token[request.req.req_pool_idx, : request.req.filled].tolist())
        assert held == set(self.pool.content)
        if not self.running:
            assert self.cache.protected_size() == 0


@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_cache_agrees_with_a_dictionary(page_size: int, steps: list[Any]) -> None:
    world = World(page_size)
    for action, pieces, adapter, salt, number in steps:
        pick = number % len(world.running) if world.running else None
        if action == "start" and len(world.running) < 8:
            world.start(pieces, adapter, salt, number)
        elif action == "round" and world.finished:
            last = world.finished[number % len(world.finished)]
            world.admit(Request(last.tokens + ids(number % 3, 1), last.images, last.adapter, last.salt), 64)
        elif action == "grow" and pick is not None:
            world.grow(world.running[pick], number)
        elif action in ("finish", "abort") and pick is not None:
            world.leave(world.running[pick], keep=action == "finish")
        elif action == "evict":
            world.cache.evict(_sgl.EvictParams(num_tokens=number * 4))
        world.check()
    for request in list(world.running):
        world.leave(request, keep=False)
    world.cache.evict(_sgl.EvictParams(num_tokens=SLOTS))
    assert not world.pool.content and len(world.pool.free_slots) == SLOTS


def test_images_of_equal_30_bits_never_share() -> None:
    cache = make_cache(Pool())
    tokens = ids(1, 2, *[PAD] * 6, 3)
    stock = make_cache(Pool(), cls=_sgl.RadixCache)
    stock.insert(_sgl.InsertParams(key=_sgl.RadixKey(tokens), value=torch.arange(9)))
    assert len(stock.match_prefix(_sgl.MatchPrefixParams(key=_sgl.RadixKey(tokens))).device_indices) == 9  # the fault

    def seen(content: int) -> CacheIdentity:
        return cache.identify(tokens, None, None, (ImageSpan(2, 8, content),))

    insert(cache, tokens, seen(5))
    assert len(match(cache, tokens, seen(5 + 2**30)).device_indices) == 2
    assert len(match(cache, tokens, seen(5)).device_indices) == 9


@pytest.mark.parametrize("salt", ["1", "(None, 1)", "1@0||-", "a", ""])
def test_no_salt_collides_with_an_adapter(salt: str) -> None:
    cache = make_cache(Pool())
    tokens = ids(5, 6, 7)
    insert(cache, tokens, cache.identify(tokens, None, AdapterContent("a")))
    adapter = cache.identify(tokens, salt, AdapterContent("a"))
    for other in (cache.identify(tokens, salt, None), salt, adapter, adapter.key):
        assert len(match(cache, tokens, other).device_indices) == 0
    assert len(match(cache, tokens, cache.identify(tokens, None, AdapterContent("a"))).device_indices) == 3


def test_identity_is_content() -> None:
    cache = make_cache(Pool())
    tokens = ids(5, 6, 7)
    insert(cache, tokens, cache.identify(tokens, None, AdapterContent("old files")))
    assert len(match(cache, tokens, cache.identify(tokens, None, AdapterContent("new files"))).device_indices) == 0
    assert len(match(cache, tokens, cache.identify(tokens, None, AdapterContent("old files"))).device_indices) == 3


def test_activated_adapters_share_the_image_and_nothing_after() -> None:
    cache = make_cache(Pool())
    image = (ImageSpan(1, 7, "cat"),)
    question = ids(1, *[PAD] * 6, 3, 4, 5)
    identities = [
        cache.identify(question, None, adapter, image)
        for adapter in (AdapterContent("c", "after_image"), AdapterContent("d", "after_image"), None)
    ]
    insert(cache, question, identities[0])
    for identity in identities[1:]:
        found = match(cache, question, identity)
        assert len(found.device_indices) == 7
        reuse = cache.measure(identity, found.last_device_node, 7, len(question))
        assert (reuse.cached_image_tokens, reuse.cached_text_tokens, reuse.shared_tokens) == (6, 1, 7)
        insert(cache, question, identity)
    assert cache.totals.requests == 2 and cache.totals.shared_tokens == 14
    assert cache.total_size() == 7 + 3 * 3
    plain = cache.identify(question, None, AdapterContent("c2"), image)
    assert len(match(cache, question, plain).device_indices) == 0


def test_activation_sequence_is_its_last_occurrence() -> None:
    adapter = AdapterContent("e", (1, 2))
    assert adapter.invocation_start(ids(1, 2, 0, 1, 2, 9), ()) == 3
    assert adapter.invocation_start(ids(2, 1), ()) == NEVER
    # Bytes of two numbers may hold the needle across their border; only whole numbers count.
    assert AdapterContent("e", (1 << 8,)).invocation_start(ids(1 << 8, (1 << 16) + (1 << 40)), ()) == 0
    assert AdapterContent("c", "after_image").invocation_start(ids(1, 2), ()) == 0


def test_a_retracted_request_may_generate_other_tokens() -> None:
    cache = make_cache(Pool())
    tokens, image = ids(1, *[PAD] * 4, 3), (ImageSpan(1, 5, "cat"),)
    identity = cache.identify(tokens, None, AdapterContent("c", "after_image"), image)
    insert(cache, tokens + ids(8, 8), identity)
    before = identity.prefix_key(tokens)
    identity.forget()
    assert len(match(cache, tokens + ids(9, 9), identity).device_indices) == 6
    assert identity.prefix_key(tokens) == before
    assert len(match(cache, tokens + ids(8, 8), cache.identify(tokens, None, None, image)).device_indices) == 5


def test_reuse_stops_before_the_image_when_its_states_are_wanted() -> None:
    cache = make_cache(Pool())
    tokens, image = ids(1, 2, *[PAD] * 4, 3), (ImageSpan(2, 6, "cat"),)
    insert(cache, tokens, cache.identify(tokens, None, None, image))
    dense = cache.identify(tokens, None, None, image)
    assert len(match_request(cache, tokens, state_of(dense, image[0].start)).device_indices) == 2
    assert len(match(cache, tokens, dense).device_indices) == 7  # the cache's own look-up after an insert


def test_image_content_includes_its_grid() -> None:
    def item(grid: list[int], offsets: Any = ((3, 8),)) -> Any:
        return SimpleNamespace(
            hash=7,
            modality=SimpleNamespace(name="IMAGE"),
            offsets=offsets,
            model_specific_data={"image_grid_thw": torch.tensor([grid])},
        )

    (wide,), _ = image_spans(SimpleNamespace(mm_items=[item([1, 4, 6])]))
    (tall,), _ = image_spans(SimpleNamespace(mm_items=[item([1, 6, 4])]))
    assert (wide.start, wide.end) == (3, 9) and wide.content != tall.content
    spans, placeless = image_spans(SimpleNamespace(mm_items=[item([1, 4, 6], offsets=None)]))
    assert spans == () and len(placeless) == 1
    assert image_spans(None) == ((), ())


def test_placeless_images_split_at_the_root() -> None:
    cache = make_cache(Pool())
    tokens = ids(1, 2, 3)
    insert(cache, tokens, cache.identify(tokens, None, None, placeless=("cat",)))
    assert len(match(cache, tokens, cache.identify(tokens, None, None, placeless=("dog",))).device_indices) == 0
    assert len(match(cache, tokens, cache.identify(tokens, None, None, placeless=("cat",))).device_indices) == 3


def test_numbers_are_never_given_twice() -> None:
    number = Numbering(0, 5, capacity=2)
    assert [number(c) for c in "aba"] == [0, 1, 0]
    assert number("c") == 2 and number("b") == 3 and len(number) == 2  # b was forgotten: a miss, not a mix-up
    number("d")
    with pytest.raises(OverflowError, match="restart"):
        number("e")


def test_refuses_keys_that_are_not_its_own() -> None:
    pool = Pool()
    params = _sgl.CacheInitParams(False, pool, pool, 1, is_eagle=True)
    with pytest.raises(ConfigError, match="EAGLE"):
        VLoraRadixCache(params)
    with pytest.raises(ConfigError, match="events"):
        VLoraRadixCache(_sgl.CacheInitParams(False, pool, pool, 1, enable_kv_cache_events=True))


@given(
    shared=st.integers(0, 300),
    tails=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    page_size=st.sampled_from([1, 4, 16]),
    limit=st.none() | st.integers(0, 340),
)
def test_keys_match_as_sglangs_do(shared: int, tails: tuple[int, int], page_size: int, limit: int | None) -> None:
    tokens = list(range(shared))
    mine, other = ids(*tokens, *[-1] * tails[0]), _sgl.RadixKey(ids(*tokens, *[-2] * tails[1]), limit=limit)
    expected = _sgl.RadixKey(mine).match(other, page_size)
    assert ElementKey(mine, None).match(other, page_size) == expected
    assert ElementKey(mine, None)[: shared // 2].match(other, page_size) <= expected


def test_long_keys_never_cross_namespaces() -> None:
    with pytest.raises(ValueError, match="extra_key"):
        ElementKey(ids(*range(200)), "a").match(_sgl.RadixKey(ids(*range(200)), "b"))


def test_nodes_have_the_fast_key_whole_split_and_grown() -> None:
    cache, tokens = make_cache(Pool()), ids(*range(300))
    insert(cache, tokens[:200], None)
    insert(cache, ids(*range(100), *range(500, 600)), None)
    insert(cache, tokens, None)
    nodes, kinds = [cache.root_node], set()
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        kinds |= {type(child.key) for child in node.children.values()}
    assert kinds == {ElementKey} and len(match(cache, tokens, None).device_indices) == 300


def test_the_benchmark_times_every_look_up() -> None:
    found = match_seconds(repeats=2, prefixes=5, length=64)
    assert found.keys() == KINDS.keys()
    assert all(len(times) == 10 and min(times) > 0 for side in found.values() for times in side.values())


def test_kept_images_say_whose_requests_begin_with_them() -> None:
    pool = Pool()
    cache = make_cache(pool)
    span = ImageSpan(1, 5, ("cat", "IMAGE", (2, 2), 0))
    late, whole = AdapterContent("late", "after_image"), AdapterContent("whole")
    for adapter, last in ((None, 90), (late, 91), (whole, 92)):
        tokens = ids(10, PAD, PAD, PAD, PAD, 11, last)
        insert(cache, tokens, cache.identify(tokens, None, adapter, (span,)))
    tokens = ids(10, PAD, PAD, 11)
    insert(cache, tokens, cache.identify(tokens, None, None, (ImageSpan(1, 3, ("dog", "IMAGE", (1, 2), 0)),)))
    tokens = ids(7, 8, 9)
    insert(cache, tokens, cache.identify(tokens, None, whole))
    late_shares = {"tokens": 8, "copies": 2, "adapters": {"", "late", "whole"}}
    assert cache.kept_images() == {0: late_shares, 1: {"tokens": 2, "copies": 1, "adapters": {""}}}
