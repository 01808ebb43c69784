"""The front's book-keeping, with an engine that answers at once: who is counted, what leaves, what a name means."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl import _sgl
from vlora_sgl.combined import parts
from vlora_sgl.errors import RequestError
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle, UnknownAdapterResponse
from vlora_sgl.managers.waits import WaitResponse
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE


class Front:
    """The part, and as much of the tokenizer manager and the engine as it deals with."""

    def __init__(self, limit: int | None = None) -> None:
        args = SimpleNamespace(
            enable_lora=True, dp_size=1, lora_paths=None, model_path="/base", max_loaded_loras=limit
        )
        self.held: dict[str, str] = {}
        self.refuse = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.adapters = AdapterLifecycle(args, lambda: "base", {}, asyncio.Lock(), self.ask_ranks)

    async def ask_ranks(self, message: Any) -> list[Any]:
        await self.answers.wait()
        if self.refuse and isinstance(message, _sgl.LoadLoRAAdapterReqInput):
            return [_sgl.LoadLoRAAdapterReqOutput(success=False, error_message="refused")]
        if isinstance(message, _sgl.LoadLoRAAdapterReqInput):
            self.held[message.lora_id] = message.lora_path
        else:
            del self.held[message.lora_id]
        return [_sgl.LoadLoRAAdapterReqOutput(success=True, error_message="report")]

    async def load(self, name: str, pinned: bool = False) -> Any:
        return await self.adapters.load(
            _sgl.LoadLoRAAdapterReqInput(lora_name=name, lora_path=f"/{name}", pinned=pinned)
        )

    async def unload(self, name: str) -> Any:
        return await self.adapters.unload(_sgl.UnloadLoRAAdapterReqInput(lora_name=name))

    async def begin(self, *names: str | None) -> Any:
        request = SimpleNamespace(lora_path=list(names), lora_id=None)
        await self.adapters.bring_in(request.lora_path)
        request.lora_id = await self.adapters.registry.acquire(request.lora_path)
        return request

    async def end(self, request: Any) -> None:
        self.adapters.registry.let_go(request.lora_id)


def run(scenario: Any) -> None:
    asyncio.run(scenario)


def test_an_unload_waits_for_requests_and_its_name_is_gone_at_once() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        request = await front.begin("a", None, "a")
        unloading = asyncio.create_task(front.unload("a"))
        await asyncio.sleep(0.01)
        with pytest.raises(UnknownAdapterResponse):
            await front.begin("a")
        assert (await front.load("a")).success  # another load of that name does not wait
        await asyncio.sleep(0.01)
        assert not unloading.done() and len(front.held) == 2
        await front.end(request)
        assert (await unloading).success and len(front.held) == 1
        assert not (await front.unload("never")).success

    run(scenario())


def test_a_replacement_is_for_requests_to_come() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        before = await front.begin("a")
        assert (await front.adapters.reload("a", "/other")).report == "report"
        after = await front.begin("a")
        assert after.lora_id != before.lora_id
        assert [front.held[i] for r in (before, after) for i in r.lora_id] == ["/a", "/other"]
        await front.end(before)
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/other"]
        front.refuse = True
        assert not (await front.adapters.reload("a", "/bad")).success
        assert (await front.begin("a")).lora_id == after.lora_id

    run(scenario())


def test_the_least_recent_idle_adapter_goes_to_disk_and_comes_back() -> None:
    async def scenario() -> None:
        front = Front(limit=2)
        await front.load("a")
        await front.load("b")
        busy = await front.begin("a")
        await front.load("c")
        assert sorted(front.held.values()) == ["/a", "/c"], "b had no users"
        await asyncio.gather(*(front.begin("b") for _ in range(3)))
        assert sorted(front.held.values()) == ["/a", "/b"], "it came back, once"
        await front.end(busy)
        assert (await front.unload("c")).success, "what is on disk only can be unloaded too"
        with pytest.raises(UnknownAdapterResponse):
            await front.begin("c")

    run(scenario())


def test_a_member_of_a_routed_adapter_stays_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        front = Front(limit=2)
        (tmp_path / "vlora_routed.json").write_text('{"router": "vocabulary", "members": ["a"]}')
        await front.load("a")
        await front.adapters.load(_sgl.LoadLoRAAdapterReqInput(lora_name="routed", lora_path=str(tmp_path)))
        for refused in (await front.unload("a"), await front.adapters.reload("a")):
            assert not refused.success and "is a member of routed" in refused.error_message
        assert not (await front.adapters.pin("routed", True)).success
        await front.load("b")
        assert sorted(front.held.values()) == ["/a", "/b"], "the routed adapter left memory, its member did not"
        await front.unload("routed")
        assert (await front.unload("a")).success

    run(scenario())


def test_a_pin_survives_a_replacement() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a", pinned=True)
        await front.adapters.reload("a", "/other")
        await asyncio.sleep(0.01)
        assert front.adapters.registry.get("a").pinned and list(front.held.values()) == ["/other"]
        await front.adapters.pin("a", False)
        assert not front.adapters.registry.get("a").pinned

    run(scenario())


@pytest.mark.parametrize("name", ["", "base", "default"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    run_result: list[Any] = []

    async def scenario() -> None:
        run_result.append(await Front().load(name))

    run(scenario())
    assert not run_result[0].success and run_result[0].error_message


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for a second."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({"wait_seconds": 1}))


@pytest.mark.usefixtures("short_waits")
def test_an_unload_says_how_many_requests_it_waits_for_and_goes_on() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        requests = [await front.begin("a", "a"), await front.begin("a")]
        with pytest.raises(WaitResponse, match="adapter 'a' has lost its name, and 3 requests") as told:
            await front.unload("a")
        assert told.value.status_code == 504
        assert (await front.load("b")).success  # nobody else waits
        for request in requests:
            await front.end(request)
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/b"]

    run(scenario())


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("change", ["load", "unload", "reload", "pin", "revive"])
def test_an_engine_that_does_not_answer_keeps_nobody(change: str) -> None:
    async def scenario() -> None:
        front = Front(limit=1)
        await front.load("old")
        await front.load("a")  # and "old" is on disk only
        changes = {
            "load": lambda: front.load("b"),
            "unload": lambda: front.unload("a"),
            "reload": lambda: front.adapters.reload("a"),
            "pin": lambda: front.adapters.pin("a", True),
            "revive": lambda: front.begin("old"),
        }
        front.answers.clear()
        with pytest.raises(WaitResponse, match="after 1 s"):
            await changes[change]()
        if change != "unload":  # which holds nobody up
            with pytest.raises(WaitResponse, match="still under way; this was not begun"):
                await front.load("c")
        front.answers.set()  # what was begun is done, and what was not is not
        await asyncio.sleep(0.01)
        assert (await front.load("c")).success
        assert ("b" in front.adapters.known, "a" in front.adapters.known) == (change == "load", change != "unload")
        assert sorted(front.held.values()) == (["/a", "/c"] if change == "pin" else ["/c"])

    run(scenario())


def test_an_adapter_that_must_leave_does_not_hold_up_the_one_that_comes() -> None:
    async def scenario() -> None:
        front = Front(limit=1)
        await front.load("a")
        request = await front.begin("a")
        assert (await front.load("b")).success
        assert sorted(front.held.values()) == ["/a", "/b"]
        other = await front.begin("b")  # the one that comes is there for those who name it
        await front.end(request)
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/b"]
        request = await front.begin("a")  # and back, while b is in use
        await front.end(other)
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/a"]
        await front.end(request)

    run(scenario())


def test_a_request_is_counted_once_whatever_sglang_releases() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        registry = front.adapters.registry
        first, second = await front.begin("a", None), await front.begin("a")
        for _ in range(3):  # rows that finish, and SGLang's way out of a row that was aborted
            await registry.release(second.lora_id)
        assert registry.users(second.lora_id[0]) == 2
        with pytest.raises(UnknownAdapterResponse):
            await registry.acquire(["a", "nobody"])  # the first of them is not counted either
        cancelled = asyncio.create_task(front.begin("a"))
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        for request in (first, second, second):
            await front.end(request)
        assert registry.users(second.lora_id[0]) == 0

    run(scenario())


FIRE = '{"a": 0.7, "b": 0.3}'


def test_adapters_in_a_combination_are_each_used_and_equal_sums_have_one_id() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        await front.load("b")
        a, b = (front.adapters.registry.get(name).lora_id for name in "ab")
        request = await front.begin(FIRE, '{"b": 0.3, "a": 0.7}', '{"a": 1, "b": 0}', '{"a": 0}', None)
        first, second, alone, base, nobody = request.lora_id
        assert first == second and dict(parts(first)) == {a: 0.7, b: 0.3}
        assert (alone, base, nobody) == (a, None, None)
        assert [front.adapters.registry.users(uid) for uid in (a, b)] == [3, 2]
        unloading = asyncio.create_task(front.unload("b"))
        await asyncio.sleep(0.01)
        assert not unloading.done()
        with pytest.raises(UnknownAdapterResponse, match="no adapter named 'b'"):
            await front.begin(FIRE)
        await front.end(request)
        assert (await unloading).success
        assert [front.adapters.registry.users(uid) for uid in (a, b)] == [0, 0]

    run(scenario())


def test_all_of_a_combination_come_back_from_disk_together() -> None:
    async def scenario() -> None:
        front = Front(limit=2)
        for name in "abc":
            await front.load(name)
        request = await front.begin('{"c": 0.5, "a": 0.5}')  # c is in memory, a is not, and b is more recent than c
        assert sorted(front.held.values()) == ["/a", "/c"]
        await front.end(request)
        with pytest.raises(RequestError, match="3 cannot be combined; --max-loaded-loras is 2"):
            await front.begin('{"a": 1, "b": 1, "c": 1}')

    run(scenario())
