"""The scheduler's steps over stand-ins for SGLang's scheduler and for our parts: who is asked, in which order."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mem_cache.test_scheduling import IMAGE, key_of, prefixes, request
from vlora_sgl import _sgl
from vlora_sgl.errors import HeadError
from vlora_sgl.managers.deadlines import Deadlines
from vlora_sgl.managers.scheduler import VLoraScheduler
from vlora_sgl.mem_cache.scheduling import WORTH_WAITING
from vlora_sgl.multimodal.early_encoding import EarlyEncoding


class Early(EarlyEncoding):
    """Starts the encoder of every request that is looked at, or of none; the images are kept where it does."""

    def __init__(self, cache: Any, starts: bool) -> None:
        super().__init__(None, cache, lambda: None, lambda req: 0)  # type: ignore[arg-type, return-value]
        self.cache, self.starts = cache, starts
        self.asked: list[Any] = []

    def encode(self, req: Any) -> int:
        self.asked.append(req)
        key = req.vlora.identity.images[0][2]
        if not self.starts or self.cache.has(key):
            return 0
        self.cache.set_ahead(key, _sgl.EmbeddingResult(embedding=torch.zeros(4)))
        return 1


class Prefixes:
    """Of the prefix cache's part, what a new request needs."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def arrived(self, req: Any) -> None:
        self.steps.append("prefixes")

    def returned(self, req: Any) -> None:
        self.steps.append("returned")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An idle scheduler that takes every request; ``refuses`` are those that SGLang does not queue."""

    def queue(self: Any, req: Any, is_retracted: bool = False) -> None:
        if req not in self.refuses:
            self.waiting_queue.append(req)

    stock = VLoraScheduler.__mro__[1]
    monkeypatch.setattr(stock, "_add_request_to_queue", queue)
    monkeypatch.setattr(stock, "_can_schedule_lora_req", lambda self, req, running: True)
    monkeypatch.setattr(stock, "get_new_batch_prefill", lambda self, batch: SimpleNamespace(batch_to_run=batch))
    made: Any = VLoraScheduler.__new__(VLoraScheduler)
    made.prefixes = prefixes()
    made.early_encoding = Early(made.prefixes.embeddings, starts=True)
    made.heads = SimpleNamespace(under_way=[])
    made.planning, made.deadlines = None, Deadlines()
    made.running_batch = SimpleNamespace(is_empty=lambda: True)
    made.last_batch = made.chunked_req = None
    made.waiting_queue, made.refuses, made._engine_paused = [], [], False
    monkeypatch.setattr(made.prefixes, "returned", lambda req: None)
    return made


def test_the_collector_leaves_out_what_the_start_made(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, dropped = [object()], weakref.WeakSet[Any]()
    frozen: list[int] = []

    class Ring:
        def __init__(self) -> None:
            self.me = self

    dropped.add(Ring())
    monkeypatch.setattr(VLoraScheduler.__mro__[1], "run_event_loop", lambda self: frozen.append(gc.get_freeze_count()))
    before = gc.get_freeze_count()
    try:
        idle.run_event_loop()
        assert frozen[0] > before + 10_000 and not dropped, "rings of the start are not kept for good"
        assert not any(kept is one for one in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("saver", [False, True])
@pytest.mark.parametrize("fully", [False, True])
def test_what_encoders_capture_waits_until_nothing_runs(
    idle: Any, monkeypatch: pytest.MonkeyPatch, fully: bool, saver: bool
) -> None:
    steps: list[str] = []
    graphs = SimpleNamespace(capture_wanted=lambda: steps.append("captured"))
    runner = SimpleNamespace(vision_graphs=graphs, server_args=SimpleNamespace(enable_memory_saver=saver))
    idle.early_encoding = EarlyEncoding(runner, None, nullcontext, lambda req: 0)  # type: ignore[arg-type]
    stock = VLoraScheduler.__mro__[1]
    monkeypatch.setattr(stock, "is_fully_idle", lambda self: fully)
    monkeypatch.setattr(stock, "on_idle", lambda self: steps.append("sleeps"))
    monkeypatch.setattr(VLoraScheduler, "_unload_drained", lambda self: None)
    idle.on_idle()
    assert steps == ["captured"] * (fully and not saver) + ["sleeps"]
    runner.vision_graphs = None
    idle.on_idle()
    assert steps[-1] == "sleeps"


def pictured(number: int) -> Any:
    req = request(image=(4, 4 + WORTH_WAITING, number))
    items = [SimpleNamespace(hash=number, offsets=[(4, 3 + WORTH_WAITING)])]
    req.multimodal_inputs, req.prefix_indices, req.last_node = SimpleNamespace(mm_items=items), [], None
    return req


def test_the_encoder_is_started_for_the_first_of_a_batch_and_once(idle: Any) -> None:
    refused, second, third = (pictured(n) for n in range(3))
    for admitted in ([refused, second], [refused], [third, refused]):  # the first comes again: there was no memory
        idle.get_new_batch_prefill(None)
        assert all(idle._can_schedule_lora_req(req, set()) for req in admitted)
    assert idle.early_encoding.asked == [refused, third]


def test_at_an_idle_scheduler_it_is_started_on_arrival_of_the_first_and_once(idle: Any) -> None:
    first, second, third = (pictured(n) for n in range(3))
    for req in (first, second, third):
        idle._add_request_to_queue(req)
    assert idle.early_encoding.asked == [first] and idle.waiting_queue == [first, second, third]
    for admitted in ([first, second], [third, first]):
        idle.get_new_batch_prefill(None)
        assert all(idle._can_schedule_lora_req(req, set()) for req in admitted)
    assert idle.early_encoding.asked == [first, third], "on its admission the first has been started already"


def test_what_started_nothing_on_arrival_may_on_admission(idle: Any) -> None:
    req, idle.early_encoding.starts = pictured(0), False
    idle._add_request_to_queue(req)
    idle.get_new_batch_prefill(None)
    assert idle._can_schedule_lora_req(req, set()) and idle.early_encoding.asked == [req, req]


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
def test_else_the_encoder_waits_for_the_admission(idle: Any, busy: dict[str, Any]) -> None:
    idle.__dict__.update(busy)
    idle._add_request_to_queue(*busy.get("refuses", [pictured(7)]), is_retracted=busy.get("is_retracted", False))
    assert not idle.early_encoding.asked


def test_what_was_encoded_on_arrival_is_a_miss_of_the_batch_that_asks_for_it(idle: Any) -> None:
    req, other, later = pictured(7), pictured(8), pictured(7)
    cache = idle.prefixes.embeddings
    idle._add_request_to_queue(req)

    def found(batch: list[Any]) -> Any:
        idle.get_new_batch_prefill(SimpleNamespace(reqs=batch))
        for one in batch:  # the forward asks when the batch runs
            image = one.multimodal_inputs.mm_items[0].hash
            if cache.get_single(image) is None:
                cache.set(image, _sgl.EmbeddingResult(embedding=torch.zeros(4)))
        reused = [one.vlora.answer["reuse"] for one in batch]
        return [(one["encoder_hits"], one["encoder_misses"]) for one in reused], cache.hits, cache.misses

    idle.get_new_batch_prefill(None)  # none is formed at first
    assert found([other]) == ([(0, 1)], 0, 1), "nor was the first admitted to the next"
    assert found([req]) == ([(0, 1)], 0, 2)
    assert found([later]) == ([(1, 0)], 1, 2) and cache.state()["encoded_ahead"] == 1


def test_asking_twice_whether_a_request_may_be_admitted_changes_nothing(idle: Any) -> None:
    """A leader and its follower: between the answer and the admission, neither tree, encoder nor plan has moved."""
    leader, follower = request(), request()
    idle.prefixes = prefixes(joint=True)
    idle.get_new_batch_prefill(None)
    idle.planning = SimpleNamespace(may_admit=lambda req: True)
    assert idle._can_schedule_lora_req(leader, set())
    started = list(idle.early_encoding.asked)
    assert idle.may_admit(follower) and idle.may_admit(follower)
    assert (idle.prefixes.tree.published, idle.prefixes.sharing.leaders) == ([], [])
    assert idle.early_encoding.asked == started and list(idle.prefixes._leaders.values()) == [leader]
    assert idle._can_schedule_lora_req(follower, set())
    assert idle.prefixes.sharing.leaders == [(leader, IMAGE[1])] and idle.prefixes.tree.published == [key_of(leader)]


@pytest.mark.parametrize(
    ("custom_params", "refused", "message"),
    [
        ({"vlora_trace": True}, None, None),
        ({"vlora_class": "soon"}, None, "realtime, interactive, batch"),
        ({"vlora_head": "h"}, HeadError("no head named 'h'"), "no head named 'h'"),
    ],
)
def test_a_request_is_read_once_and_what_it_wrongly_asks_is_said(
    idle: Any, custom_params: Any, refused: Any, message: str | None
) -> None:
    steps: list[str] = []

    def heads(req: Any) -> None:
        steps.append("heads")
        if refused is not None:
            raise refused

    idle.heads = SimpleNamespace(arrived=heads, recall=lambda req: steps.append("recall"))
    idle.prefixes, idle.early_encoding = Prefixes(steps), SimpleNamespace(came_alone=lambda req: steps.append("alone"))
    said: list[str] = []
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom_params),
        lora_id=None,
        to_finish=None,
        set_finish_with_abort=said.append,
    )
    idle._add_request_to_queue(req)
    asked = ["heads"] if message is None or refused is not None else []
    assert steps == [*asked, "prefixes", "recall", "alone"]
    assert (said == []) if message is None else (message in said[0])
    state = req.vlora
    idle._add_request_to_queue(req, is_retracted=True)
    assert req.vlora is state and steps[-1] == "returned"


def test_the_scheduler_is_one_subclass() -> None:
    assert len(VLoraScheduler.__bases__) == 1 and VLoraScheduler.__bases__[0].__module__.startswith("sglang.")
