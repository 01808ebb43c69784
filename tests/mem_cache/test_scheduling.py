"""Which prefixes under way are put in the tree, and which of those who need one join, follow or wait."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import RequestParams
from vlora_sgl.mem_cache import scheduling
from vlora_sgl.mem_cache.identity import CacheIdentity
from vlora_sgl.mem_cache.radix_cache import Reuse
from vlora_sgl.mem_cache.scheduling import WORTH_WAITING, PrefixScheduling
from vlora_sgl.multimodal.encoder_cache import EncoderCache
from vlora_sgl.request import RequestState

IMAGE = (4, 4 + WORTH_WAITING, 7)


class Tree:
    page_size = 1

    def __init__(self) -> None:
        self.published: list[Any] = []

    def matched_length(self, token_ids: array, identity: CacheIdentity) -> int:
        return identity.shareable if identity.prefix_key(token_ids) in self.published else 0

    def cache_unfinished_req(self, req: Any) -> None:
        self.published.append(key_of(req))

    def measure(self, identity: Any, node: Any, length: int, prompt_tokens: int, encoder: tuple[int, int]) -> Reuse:
        return Reuse(prompt_tokens, encoder_hits=encoder[0], encoder_misses=encoder[1])


def request(image: tuple[int, int, int] = IMAGE, finished: bool = False) -> Any:
    return SimpleNamespace(
        vlora=RequestState(RequestParams(), identity=CacheIdentity(None, 0, 0, (image,))),
        origin_input_ids=array("q", range(image[1] + 3)),
        finished=lambda: finished,
        lora_id=None,
    )


def key_of(req: Any) -> Any:
    return req.vlora.identity.prefix_key(req.origin_input_ids)


def prefixes(routed: tuple[str, ...] = (), joint: bool | None = None) -> Any:
    """The part of a scheduler over an empty tree; ``joint``: whether leaders can promise, ``None`` if none may."""
    manager = SimpleNamespace(has_routed=lambda adapters: bool(set(routed) & set(adapters)))
    made = PrefixScheduling(Tree(), SimpleNamespace(lora_manager=manager), EncoderCache(1 << 20))
    made.sharing = None if joint is None else Joint(made.tree, joint)  # type: ignore[assignment]
    return made


class Joint:
    """Promises what it is told to, in a tree that then holds it."""

    def __init__(self, tree: Tree, promises: bool) -> None:
        self.tree, self.promises = tree, promises
        self.leaders: list[Any] = []

    def can_promise(self, leader: Any, length: int) -> bool:
        return self.promises and key_of(leader) not in self.tree.published

    def promise(self, leader: Any, length: int) -> None:
        self.leaders.append((leader, length))
        self.tree.cache_unfinished_req(leader)


def admit(made: Any, req: Any) -> bool:
    """As the scheduler does; asking changes nothing, so it is asked twice."""
    before = list(made.tree.published), dict(made._leaders)
    may = made.may_admit(req)
    assert made.may_admit(req) == may and (made.tree.published, made._leaders) == before
    if may:
        made.admitted(req)
    return bool(may)


def test_a_prefix_that_others_wait_for_is_published_once() -> None:
    first, other = request(), request(image=(4, 4 + WORTH_WAITING, 8))
    made = prefixes()
    for _ in range(2):
        made.begin([request(), request()], [first, other], None)
        assert made._leaders == {} and made.tree.published == [key_of(first)]


@pytest.mark.parametrize("waiting", [[], [request(image=(4, 4 + WORTH_WAITING, 8))]], ids=["nobody", "another-image"])
def test_a_prefix_that_nobody_waits_for_is_left_to_sglang(waiting: list[Any]) -> None:
    made = prefixes()
    made.begin(waiting, [request()], None)
    assert made._leaders == {} and made.tree.published == []


def test_a_finished_request_holds_no_kv_to_publish() -> None:
    made = prefixes()
    made.begin([request()], [request(finished=True)], None)
    assert made._leaders == {} and made.tree.published == []


def test_of_a_chunked_request_the_others_wait_for_the_rest() -> None:
    chunked, made = request(), prefixes()
    made.begin([request()], [chunked], chunked)
    assert made._leaders == {key_of(chunked): chunked} and made.tree.published == []
    assert not made.may_admit(request())


@pytest.mark.parametrize(
    ("promises", "routed", "admitted"),
    [(True, (), [True, True, True]), (False, (), [True, False, False]), (True, ("a",), [True, False, True])],
    ids=["joined", "no-promise", "routed-waits"],
)
def test_who_shares_a_prefix_joins_its_leader_or_waits(
    promises: bool, routed: tuple[str, ...], admitted: list[bool]
) -> None:
    made = prefixes(routed, promises)
    reqs = [request() for _ in admitted]
    for req, adapter in zip(reqs, (None, "a", "b"), strict=True):
        req.lora_id = adapter
    assert [admit(made, req) for req in reqs] == admitted
    assert made.sharing.leaders == ([(reqs[0], IMAGE[1])] if promises else []), "once, for all who follow"
    assert admit(made, request(image=(4, 4 + WORTH_WAITING, 8))), "another image"


def test_without_a_shared_prefix_the_others_wait() -> None:
    made = prefixes()
    assert [admit(made, request()) for _ in range(2)] == [True, False]


def test_a_head_may_want_cached_images_computed_anew() -> None:
    made, req = prefixes(), request()
    made.tree.cache_unfinished_req(req)
    assert made.cached(req) == IMAGE[1]
    req.vlora.reuse_limit = IMAGE[0]
    assert made.cached(req) == IMAGE[0], "their encoder may be started"
    req.vlora.identity = None
    assert made.cached(req) is None, "nobody knows: SGLang's own cache serves"


def test_what_a_batch_encodes_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "VLoraRadixCache", Tree)
    made, reqs = prefixes(), [request(image=(4, 4 + WORTH_WAITING, key)) for key in (7, 7, 8)]
    for req, key in zip(reqs, (7, 7, 8), strict=True):
        items = [SimpleNamespace(hash=key, offsets=[(4, 3 + WORTH_WAITING)])]
        req.multimodal_inputs = SimpleNamespace(mm_items=items)
        req.prefix_indices, req.last_node = [], None
    made.formed(reqs)
    made.formed(reqs)  # a chunk more, or retracted and back
    found = [req.vlora.answer["reuse"] for req in reqs]
    assert [(one["encoder_hits"], one["encoder_misses"]) for one in found] == [(0, 1), (1, 0), (0, 1)]
