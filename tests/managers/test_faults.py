"""One request goes wrong inside the engine: it ends with status 500, counted, told once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mem_cache.test_radix_cache import Pool
from vlora_sgl import _sgl
from vlora_sgl.core import RequestParams
from vlora_sgl.managers.ended_requests import LingeringStates
from vlora_sgl.managers.faults import Faults
from vlora_sgl.managers.scheduler import VLoraScheduler
from vlora_sgl.managers.tokenizer_manager import VLoraTokenizerManager
from vlora_sgl.mem_cache.identity import NEVER, AdapterContent, ImageSpan
from vlora_sgl.mem_cache.radix_cache import VLoraRadixCache
from vlora_sgl.model_executor.model_runner import name_bad_rows
from vlora_sgl.request import RequestState


def tree() -> VLoraRadixCache:
    pool: Any = Pool()
    return VLoraRadixCache(_sgl.CacheInitParams(False, pool, pool, 1))


def row(adapter: str | None = "id", *, finished: bool = False, chunks: int = 0, inputs: Any = None) -> Any:
    described = None if adapter is None else SimpleNamespace(digest="content")
    return SimpleNamespace(
        rid="r", lora_id=adapter, multimodal_inputs=inputs, to_finish=None, is_retracted=False,
        inflight_middle_chunks=chunks, skip_radix_cache_insert=False, finished=lambda: finished,
        vlora=RequestState(RequestParams(), described),
    )  # fmt: skip


def result(logits: torch.Tensor) -> Any:
    output: Any = SimpleNamespace(next_token_logits=logits)
    name_bad_rows(output)
    return SimpleNamespace(logits_output=output, copy_done=None)


NAMES: Any = {"id": SimpleNamespace(lora_name="digits")}


def test_rows_that_are_not_finite_end_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.zeros(5, 9)
    logits[1:] = torch.nan
    rows = [row(), row(), row(None), row(finished=True), row(chunks=1)]
    faults = Faults(tree())
    with caplog.at_level(logging.ERROR):
        faults.finished(rows, result(logits), NAMES)
        faults.finished([row()], result(torch.full((1, 9), torch.inf)), NAMES)
    assert [r.to_finish is not None for r in rows] == [False, True, True, False, False]
    assert [r.skip_radix_cache_insert for r in rows] == [False, True, True, False, False]
    assert rows[1].to_finish.to_json()["status_code"] == 500
    assert rows[1].to_finish.message == "adapter 'digits' computed values that are not finite"
    assert rows[2].to_finish.message == "the base model computed values that are not finite"
    assert faults.counts["nonfinite"] == 3 and len(caplog.records) == 2, "once for each adapter"
    faults.forget("id")
    with caplog.at_level(logging.ERROR):
        faults.finished([row()], result(torch.full((1, 9), torch.inf)), NAMES)
    assert len(caplog.records) == 3


def test_logits_in_order_and_none_at_all_end_nothing() -> None:
    rows, faults = [row()], Faults(tree())
    faults.finished(rows, result(torch.zeros(1, 9)), NAMES)
    faults.finished(rows, SimpleNamespace(logits_output=None, copy_done=None), NAMES)  # type: ignore[arg-type]
    assert rows[0].to_finish is None and not any(faults.counts.values())


@pytest.mark.parametrize("kind", ["nonfinite", "encoder"])
def test_what_it_computed_is_not_found_again(kind: str) -> None:
    """Of an adapter that computes nonsense, everything; of an image that could not be encoded, what saw it."""
    cache, ids = tree(), torch.arange(9).numpy()
    image = ImageSpan(0, 4, ("pixels",))

    def number() -> tuple[int, int]:
        content = AdapterContent("content", None)
        identity = cache.identify(memoryview(ids), None, content, (image,))  # type: ignore[arg-type]
        assert identity.invocation_start != NEVER
        return identity.adapter, identity.images[0][2]

    first = number()
    assert number() == first
    if kind == "nonfinite":
        cache.distrust("content")
    else:
        cache.distrust(None, [image])
    again = number()
    assert (again[0] != first[0], again[1] != first[1]) == ((True, False) if kind == "nonfinite" else (False, True))


def test_an_image_that_could_not_be_encoded_ends_its_request() -> None:
    item = SimpleNamespace(
        vlora_fault=ValueError("no such size"), offsets=None, hash=1, modality=SimpleNamespace(name="IMAGE")
    )
    item.model_specific_data = {}
    rows, faults = [row(inputs=SimpleNamespace(mm_items=[item])), row()], Faults(tree())
    faults.finished(rows, result(torch.zeros(2, 9)), NAMES)
    assert rows[0].to_finish.message == "an image could not be encoded: ValueError: no such size"
    assert rows[1].to_finish is None and faults.counts["encoder"] == 1


@pytest.mark.parametrize("handler", ["handle_generate_request", "handle_embedding_request"])
def test_a_request_that_cannot_be_taken_in_is_told_so(monkeypatch: pytest.MonkeyPatch, handler: str) -> None:
    """Whatever raises: before it is queued, and after."""
    sent: list[Any] = []
    scheduler: Any = VLoraScheduler.__new__(VLoraScheduler)
    scheduler.faults = Faults(tree())
    scheduler.waiting_queue = [SimpleNamespace(rid="before")]
    scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda out, req: sent.append(out))
    )

    def raising(queued: bool) -> Callable[..., None]:
        def handle(self: Any, recv_req: Any) -> None:
            if queued:
                self.waiting_queue.append(SimpleNamespace(rid=recv_req.rid))
            raise KeyError("what nobody thought of")

        return handle

    for queued in (False, True):
        monkeypatch.setattr(VLoraScheduler.__mro__[1], handler, raising(queued))
        getattr(scheduler, handler)(SimpleNamespace(rid="new"))
    assert [one.rid for one in scheduler.waiting_queue] == ["before"]
    assert [out.rid for out in sent] == ["new", "new"] and scheduler.faults.counts["request"] == 2
    assert all(
        out.finished_reason["status_code"] == 500 and "KeyError" in out.finished_reason["message"] for out in sent
    )


def test_a_step_whose_answers_cannot_be_put_together_ends_them_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    manager: Any = VLoraTokenizerManager.__new__(VLoraTokenizerManager)

    async def raising(self: Any, recv_obj: Any) -> None:
        done = self.rid_to_state.pop("done")
        done.out_list.append("its answer")
        done.event.set()
        self.rid_to_state.pop("forgotten")  # as SGLang does before it counts and hands on the last answer
        raise TypeError("what nobody thought of")

    def state() -> Any:
        return SimpleNamespace(out_list=[], event=asyncio.Event())

    states = {rid: state() for rid in ("done", "forgotten", "runs")}
    manager.rid_to_state = LingeringStates()
    manager.rid_to_state.update(states)
    monkeypatch.setattr(VLoraTokenizerManager.__mro__[1], "_handle_batch_output", raising)
    known: list[bool] = []

    def end(req: Any) -> None:
        ended.append(req)
        known.append(manager.rid_to_state.get(req.rid) is states[req.rid])

    monkeypatch.setattr(manager, "_handle_abort_req", end, raising=False)
    asyncio.run(manager._handle_batch_output(SimpleNamespace(rids=[*states])))
    assert [req.rid for req in ended] == [*states] and known == [False, True, True]
    assert all(req.finished_reason["status_code"] == 500 for req in ended)


def test_what_cannot_be_counted_ends_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager: Any = VLoraTokenizerManager.__new__(VLoraTokenizerManager)

    def raising(*_: Any) -> None:
        raise ValueError("Incorrect label names")

    monkeypatch.setattr(VLoraTokenizerManager.__mro__[1], "collect_metrics", raising)
    for _ in range(3):
        manager.collect_metrics(SimpleNamespace(finished=True), SimpleNamespace(rids=["a"]), 0)
    assert caplog.text.count("ValueError while request a was counted") == 1
