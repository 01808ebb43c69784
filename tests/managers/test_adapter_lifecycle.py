"""The front's book-keeping, with an engine that answers at once: who is counted, what leaves, what a name means."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl import _sgl
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle, UnknownAdapterResponse


class Front:
    """The part, and as much of the tokenizer manager and the engine as it deals with."""

    def __init__(self, limit: int | None = None) -> None:
        args = SimpleNamespace(
            enable_lora=True, dp_size=1, lora_paths=None, model_path="/base", max_loaded_loras=limit
        )
        self.held: dict[str, str] = {}
        self.refuse = False
        self.adapters = AdapterLifecycle(args, lambda: "base", {}, asyncio.Lock(), self.ask_ranks)

    async def ask_ranks(self, message: Any) -> list[Any]:
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
        await self.adapters.registry.let_go(request.lora_id)


def run(scenario: Any) -> None:
    asyncio.run(scenario)


def test_an_unload_waits_for_requests_and_its_name_is_gone_at_once() -> None:
    async def scenario() -> None:
        front = Front()
        await front.load("a")
        request = await front.begin("a", None, "a")
        unloading = asyncio.create_task(front.unload("a"))
        await asyncio.sleep(0)
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
