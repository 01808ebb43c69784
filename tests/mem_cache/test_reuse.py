"""Which prefixes under way are put in the tree, and which of those who need one join, follow or wait."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.mem_cache import reuse
from vlora_sgl.mem_cache.radix_cache import CacheIdentity, Reuse
from vlora_sgl.mem_cache.reuse import WORTH_WAITING, PrefixReuse
from vlora_sgl.multimodal.encoder_cache import EncoderCache

IMAGE = (4, 4 + WORTH_WAITING, 7)


class Tree:
    page_size = 1

    def __init__(self):
        self.published = []

    def matched_length(self, token_ids, identity):
        held = any(identity.prefix_key(token_ids) == key for key in self.published)
        return identity.shareable if held else 0

    def cache_unfinished_req(self, req):
        self.published.append(req.extra_key.prefix_key(req.origin_input_ids))

    def measure(self, identity, node, length, prompt_tokens, encoder):
        return Reuse(prompt_tokens, encoder_hits=encoder[0], encoder_misses=encoder[1])


def request(image=IMAGE, finished=False):
    identity = CacheIdentity(None, 0, 0, (image,))
    return SimpleNamespace(
        extra_key=identity, origin_input_ids=array("q", range(image[1] + 3)), finished=lambda: finished
    )


def scheduler(under_way, waiting, chunked=None):
    made = PrefixReuse.__new__(PrefixReuse)
    batch = SimpleNamespace(reqs=under_way, forward_mode=SimpleNamespace(is_extend=lambda: True))
    made.__dict__.update(tree_cache=Tree(), last_batch=batch, waiting_queue=waiting, chunked_req=chunked)
    return made


def test_a_prefix_that_others_wait_for_is_published_once():
    first, other = request(), request(image=(4, 4 + WORTH_WAITING, 8))
    made = scheduler([first, other], [request(), request()])
    assert made._publish() == {}
    assert made.tree_cache.published == [first.extra_key.prefix_key(first.origin_input_ids)]
    made._publish()
    assert len(made.tree_cache.published) == 1


@pytest.mark.parametrize("waiting", [[], [request(image=(4, 4 + WORTH_WAITING, 8))]], ids=["nobody", "another-image"])
def test_a_prefix_that_nobody_waits_for_is_left_to_sglang(waiting):
    made = scheduler([request()], waiting)
    assert made._publish() == {} and made.tree_cache.published == []


def test_a_finished_request_holds_no_kv_to_publish():
    made = scheduler([request(finished=True)], [request()])
    assert made._publish() == {} and made.tree_cache.published == []


def test_of_a_chunked_request_the_others_wait_for_the_rest():
    chunked = request()
    made = scheduler([], [request()], chunked)
    assert made._publish() == {chunked.extra_key.prefix_key(chunked.origin_input_ids): chunked}
    assert made.tree_cache.published == []


class Sglang:
    """What SGLang's scheduler says of every request."""

    refuses = ()

    def _can_schedule_lora_req(self, req, running_loras):
        return True

    def _add_request_to_queue(self, req, is_retracted):
        if req not in self.refuses:
            self.waiting_queue.append(req)

    def get_new_batch_prefill(self, batch):
        return SimpleNamespace(batch_to_run=batch)


class Scheduler(PrefixReuse, Sglang):
    pass


class Sharing:
    """Promises what it is told to, in a tree that then holds it."""

    def __init__(self, tree, promises):
        self.tree, self.promises, self.leaders = tree, promises, []

    def promise(self, leader, length):
        self.leaders.append((leader, length))
        if self.promises:
            self.tree.cache_unfinished_req(leader)
        return self.promises


@pytest.mark.parametrize(
    ("promises", "routed", "admitted"),
    [(True, (), [True, True, True]), (False, (), [True, False, False]), (True, ("a",), [True, False, True])],
    ids=["joined", "no-promise", "routed-waits"],
)
def test_who_shares_a_prefix_joins_its_leader_or_waits(promises, routed, admitted):
    made = Scheduler.__new__(Scheduler)
    tree = Tree()
    manager = SimpleNamespace(has_routed=lambda adapters: bool(set(routed) & set(adapters)))
    made.__dict__.update(
        tree_cache=tree,
        sharing=Sharing(tree, promises),
        lora_manager=manager,
        _computing={},
    )
    reqs = [request() for _ in admitted]
    for req, adapter in zip(reqs, (None, "a", "b"), strict=True):
        req.lora_id = adapter
    assert [made._can_schedule_lora_req(req, set()) for req in reqs] == admitted
    assert all(asked == (reqs[0], IMAGE[1]) for asked in made.sharing.leaders)
    assert made._can_schedule_lora_req(request(image=(4, 4 + WORTH_WAITING, 8)), set()), "another image"


def test_the_encoder_is_started_for_the_first_of_a_batch_and_once(monkeypatch):
    started = []
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", lambda self, req: started.append(req))
    made = Scheduler.__new__(Scheduler)
    made.__dict__.update(tree_cache=Tree(), sharing=None, _computing={})
    refused, second, third = (request(image=(4, 4 + WORTH_WAITING, 8 + n)) for n in range(3))
    for admitted in ([refused, second], [refused], [third, refused]):  # the first comes again: there was no memory
        made._first = True
        assert all(made._can_schedule_lora_req(req, set()) for req in admitted)
        made._computing.clear()
    assert started == [refused, third]


def idle_scheduler(**busy):
    made = Scheduler.__new__(Scheduler)
    made.__dict__.update(
        tree_cache=Tree(),
        sharing=None,
        _computing={},
        running_batch=SimpleNamespace(is_empty=lambda: True),
        last_batch=None,
        chunked_req=None,
        waiting_queue=[],
        _engine_paused=False,
        encoder_cache=EncoderCache(1 << 20),
    )
    made.__dict__.update(busy)
    return made


def keep_ahead(made, req):
    """Stands for the start of the encoder, which here has one image a request."""
    key = req.multimodal_inputs.mm_items[0].hash
    if made.encoder_cache.has(key):
        return 0
    made.encoder_cache.set_ahead(key, _sgl.EmbeddingResult(embedding=torch.zeros(4)))
    return 1


def pictured(key):
    req = request(image=(4, 4 + WORTH_WAITING, key))
    items = [SimpleNamespace(hash=key, offsets=[(4, 3 + WORTH_WAITING)])]
    req.__dict__.update(
        multimodal_inputs=SimpleNamespace(mm_items=items), prefix_indices=[], last_node=None, customized_info=None
    )
    return req


def test_at_an_idle_scheduler_the_encoder_is_started_on_arrival_of_the_first_and_once(monkeypatch):
    started = []
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", lambda self, req: started.append(req) or 1)
    first, second, third = (pictured(n) for n in range(3))
    made = idle_scheduler()
    for req in (first, second, third):
        made._add_request_to_queue(req)
    assert started == [first] and made.waiting_queue == [first, second, third]
    for admitted in ([first, second], [third, first]):
        made._first = True
        assert all(made._can_schedule_lora_req(req, set()) for req in admitted)
        made._computing.clear()
    assert started == [first, third], "on its admission the first has been started already"


def test_what_started_nothing_on_arrival_may_on_admission(monkeypatch):
    asked = []
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", lambda self, req: asked.append(req))
    made, req = idle_scheduler(), pictured(0)
    made._add_request_to_queue(req)
    made._first = True
    assert made._can_schedule_lora_req(req, set()) and asked == [req, req]


@pytest.mark.parametrize(
    "busy",
    [
        {"running_batch": SimpleNamespace(is_empty=lambda: False)},
        {"last_batch": SimpleNamespace(reqs=[])},
        {"chunked_req": request()},
        {"waiting_queue": [request()]},
        {"_engine_paused": True},
        {"is_retracted": True},
        {"refuses": [pictured(7)]},
    ],
    ids=["running", "in-flight", "a-chunk", "one-waits", "paused", "retracted", "refused"],
)
def test_else_the_encoder_waits_for_the_admission(monkeypatch, busy):
    started = []
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", lambda self, req: started.append(req))
    made = idle_scheduler(**busy)
    made._add_request_to_queue(*busy.get("refuses", [pictured(7)]), is_retracted=busy.get("is_retracted", False))
    assert not started


def test_what_was_encoded_on_arrival_is_a_miss_of_the_batch_that_asks_for_it(monkeypatch):
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", keep_ahead)
    monkeypatch.setattr(reuse, "VLoraRadixCache", Tree)
    made, req, other, later = idle_scheduler(), pictured(7), pictured(8), pictured(7)
    cache = made.encoder_cache
    made._add_request_to_queue(req)

    def found(batch):
        made.get_new_batch_prefill(SimpleNamespace(reqs=batch))
        for one in batch:  # the forward asks when the batch runs
            image = one.multimodal_inputs.mm_items[0].hash
            if cache.get_single(image) is None:
                cache.set(image, _sgl.EmbeddingResult(embedding=torch.zeros(4)))
        reused = [one.customized_info["vlora_reuse"][0] for one in batch]
        return [(one["encoder_hits"], one["encoder_misses"]) for one in reused], cache.hits, cache.misses

    made.get_new_batch_prefill(None)  # none is formed at first
    assert found([other]) == ([(0, 1)], 0, 1), "nor was the first admitted to the next"
    assert found([req]) == ([(0, 1)], 0, 2)
    assert found([later]) == ([(1, 0)], 1, 2) and cache.state()["encoded_ahead"] == 1


def test_without_a_shared_prefix_the_others_wait():
    made = Scheduler.__new__(Scheduler)
    made.__dict__.update(tree_cache=Tree(), sharing=None, _computing={})
    assert [made._can_schedule_lora_req(request(), set()) for _ in range(2)] == [True, False]
