"""Which prefixes under way are put in the tree, and which of those who need one join, follow or wait."""

from array import array
from types import SimpleNamespace

import pytest

from vlora_sgl.managers.radix_cache import CacheIdentity
from vlora_sgl.managers.reuse import WORTH_WAITING, PrefixReuse

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

    def _can_schedule_lora_req(self, req, running_loras):
        return True


class Scheduler(PrefixReuse, Sglang):
    pass


class Joint:
    """Promises what it is told to, in a tree that then holds it."""

    def __init__(self, tree, promises):
        self.tree, self.promises, self.leaders = tree, promises, []

    def promise(self, leader, length):
        self.leaders.append((leader, length))
        if self.promises:
            self.tree.cache_unfinished_req(leader)
        return self.promises


@pytest.mark.parametrize(
    ("promises", "mixes", "admitted"),
    [(True, (), [True, True, True]), (False, (), [True, False, False]), (True, ("a",), [True, False, True])],
    ids=["joined", "no-promise", "a-mix-waits"],
)
def test_who_shares_a_prefix_joins_its_leader_or_waits(promises, mixes, admitted):
    made = Scheduler.__new__(Scheduler)
    tree = Tree()
    manager = SimpleNamespace(has_mix=lambda adapters: bool(set(mixes) & set(adapters)))
    made.__dict__.update(
        tree_cache=tree,
        joint=Joint(tree, promises),
        lora_manager=manager,
        _computing={},
    )
    reqs = [request() for _ in admitted]
    for req, adapter in zip(reqs, (None, "a", "b"), strict=True):
        req.lora_id = adapter
    assert [made._can_schedule_lora_req(req, set()) for req in reqs] == admitted
    assert all(asked == (reqs[0], IMAGE[1]) for asked in made.joint.leaders)
    assert made._can_schedule_lora_req(request(image=(4, 4 + WORTH_WAITING, 8)), set()), "another image"


def test_the_encoder_is_started_for_the_first_of_a_batch_and_once(monkeypatch):
    started = []
    monkeypatch.setattr(PrefixReuse, "_encode_ahead", lambda self, req: started.append(req))
    made = Scheduler.__new__(Scheduler)
    made.__dict__.update(tree_cache=Tree(), joint=None, _computing={})
    refused, second, third = (request(image=(4, 4 + WORTH_WAITING, 8 + n)) for n in range(3))
    for admitted in ([refused, second], [refused], [third, refused]):  # the first comes again: there was no memory
        made._first = True
        assert all(made._can_schedule_lora_req(req, set()) for req in admitted)
        made._computing.clear()
    assert started == [refused, third]


def test_without_a_joint_prefill_the_others_wait():
    made = Scheduler.__new__(Scheduler)
    made.__dict__.update(tree_cache=Tree(), joint=None, _computing={})
    assert [made._can_schedule_lora_req(request(), set()) for _ in range(2)] == [True, False]
