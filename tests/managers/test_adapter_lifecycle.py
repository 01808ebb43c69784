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
from vlora_sgl.errors import AdapterError, RequestError
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle
from vlora_sgl.managers.adapter_registry import UnknownAdapterResponse
from vlora_sgl.managers.waits import WaitResponse
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE, UPLOADS_VARIABLE


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


# Versions


class Numbered(Front):
    """A front whose engine reports a digest of what a path stands for."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.content: dict[str, str] = {}
        self.names: dict[str, tuple[str, bool]] = {}

    async def ask_ranks(self, message: Any) -> list[Any]:
        (result,) = await super().ask_ranks(message)
        if isinstance(message, _sgl.LoadLoRAAdapterReqInput) and result.success:
            self.names[message.lora_id] = message.lora_name, message.pinned
            digest = self.content.get(message.lora_path, message.lora_path.encode().hex())
            result.error_message = f"matched all; digest {digest}"
        return [result]

    async def load(self, name: str, pinned: bool = False, path: str | None = None) -> Any:
        return await self.adapters.load(
            _sgl.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path or f"/{name}", pinned=pinned)
        )

    async def answers_with(self, name: str, conversation: str | None = None) -> tuple[str, int]:
        """The path and the number of the version that a request gets."""
        request = await self.begin(self.adapters.meant(name, conversation))
        (uid,) = request.lora_id
        ((_, number),) = self.adapters.registry.versions(uid)
        await self.end(request)
        return self.held[uid], number

    def called(self) -> dict[str, str]:
        """What the engine calls what it holds."""
        return {path: self.names[uid][0] for uid, path in self.held.items()}


def test_a_plain_name_is_the_current_version_and_others_have_their_number() -> None:
    async def scenario() -> None:
        front = Numbered()
        assert (await front.load("a")).version == 1
        assert (await front.load("a@4")).version == 4
        for name, version in (("a", ("/a", 1)), ("a@1", ("/a", 1)), ("a@4", ("/a@4", 4))):
            assert await front.answers_with(name) == version
        for name in ("a@2", "a@5", "b@1"):
            with pytest.raises(UnknownAdapterResponse):
                await front.answers_with(name)
        for name in ("a", "a@1", "a@3", "a@4"):
            refused = await front.load(name)
            assert not refused.success and (
                "loaded already" in refused.error_message or "above 4" in refused.error_message
            )
        assert (await front.adapters.reload("a", "/new")).version == 5, "numbers are never used twice"
        assert await front.answers_with("a") == ("/new", 5) == await front.answers_with("a@5")
        with pytest.raises(UnknownAdapterResponse):
            await front.answers_with("a@1")
        assert (await front.load("b@7")).version == 7, "the first one that comes is current"
        assert await front.answers_with("b") == ("/b@7", 7)

    run(scenario())


def test_promotion_and_roll_back_move_the_name_and_the_pin() -> None:
    async def scenario() -> None:
        front = Numbered()
        await front.load("a", pinned=True)
        await front.load("a@2")
        before = await front.begin("a")
        assert (await front.adapters.promote("a@2")).version == 2
        assert await front.answers_with("a") == ("/a@2", 2) and await front.answers_with("a@1") == ("/a", 1)
        assert front.called() == {"/a": "a@1", "/a@2": "a"}
        assert {name: bool(ref.pinned) for name, ref in front.adapters.known.items()} == {"a": True, "a@1": False}
        assert front.held[before.lora_id[0]] == "/a", "who runs keeps what it began with"
        rows = {row["name"]: (row["adapter"], row["version"], row["share"]) for row in front.adapters.listed({})}
        assert rows == {"a": ("a", 2, 1.0), "a@1": ("a", 1, 0.0)}
        assert (await front.adapters.roll_back("a")).version == 1
        assert await front.answers_with("a") == ("/a", 1) and await front.answers_with("a@2") == ("/a@2", 2)
        assert (await front.adapters.promote("a@2", drop=True)).success
        assert not (await front.adapters.roll_back("a")).success, "what was current before is gone"
        await front.end(before)
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/a@2"]
        refused = await front.adapters.promote("a")
        assert not refused.success and "which version" in refused.error_message
        with pytest.raises(UnknownAdapterResponse):
            await front.adapters.promote("a@9")

    run(scenario())


def test_conversations_are_shared_out_and_stay_with_their_version() -> None:
    async def scenario() -> None:
        front = Numbered()
        await front.load("a")
        await front.load("a@2")
        await front.load("a@3")
        everybody = [f"conversation {number}" for number in range(2000)]

        async def served() -> dict[str, int]:
            return {one: (await front.answers_with("a", one))[1] for one in everybody}

        assert set((await served()).values()) == {1}
        await front.adapters.promote("a@2", 0.1)
        first = await served()
        assert first == await served()
        assert 150 < sum(number == 2 for number in first.values()) < 250
        await front.adapters.promote("a@2", 0.3)
        second = await served()
        assert all(second[one] == 2 for one, number in first.items() if number == 2), "a share that grows moves nobody"
        await front.adapters.promote("a@3", 0.5)
        third = await served()
        assert 300 < sum(number == 1 for number in third.values()) < 500
        assert [row["share"] for row in front.adapters.listed({})] == pytest.approx([0.2, 0.3, 0.5])
        with pytest.raises(RequestError, match="1 at most together"):
            await front.adapters.promote("a@2", 0.6)
        assert third == await served()
        assert {(await front.answers_with("a"))[1] for _ in range(200)} == {1, 2, 3}, "without a conversation, any"
        await front.unload("a@3")
        assert set((await served()).values()) == {1, 2}
        assert (await front.adapters.roll_back("a")).success
        assert set((await served()).values()) == {1}

    run(scenario())


def test_of_several_as_one_each_is_the_version_of_the_conversation() -> None:
    async def scenario() -> None:
        front = Numbered()
        for name in ("a", "a@2", "b"):
            await front.load(name)
        meant = front.adapters.meant
        assert meant('{"a": 0.5, "b": 0.25}', "x") == '{"a": 0.5, "b": 0.25}'
        assert meant('{"a": 0.5, "a@1": 0.25}', "x") == '{"a": 0.75}', "the same adapter by two names"
        await front.adapters.promote("a@2")
        request = await front.begin(meant('{"a": 0.5, "a@1": 0.25, "b": 1}', "x"))
        assert {front.held[uid] for uid, _ in parts(request.lora_id[0])} == {"/a", "/a@2", "/b"}
        await front.end(request)

    run(scenario())


def test_an_unloaded_name_takes_all_its_versions_and_a_current_one_stays_while_there_are_others() -> None:
    async def scenario() -> None:
        front = Numbered()
        await front.load("a")
        await front.load("a@2")
        refused = await front.unload("a@1")
        assert not refused.success and "is the current version" in refused.error_message
        assert (await front.unload("a@2")).success and (await front.unload("a@1")).success
        assert front.held == {} and front.adapters.known == {} == front.adapters.versions
        await front.load("a")
        await front.load("a@2")
        request = await front.begin("a@2")
        unloading = asyncio.create_task(front.unload("a"))
        await asyncio.sleep(0.01)
        assert list(front.held.values()) == ["/a@2"] and not unloading.done()
        await front.end(request)
        assert (await unloading).success and front.held == {} and front.adapters.registry.served == {}

    run(scenario())


def test_files_that_changed_while_an_adapter_was_on_disk_are_another_version() -> None:
    async def scenario() -> None:
        front = Numbered(limit=1)
        await front.load("a")
        await front.load("a@2")  # and the first is on disk only
        assert await front.answers_with("a") == ("/a", 1)
        front.content |= {"/a": "cafe", "/a@2": "c0de"}
        with pytest.raises(AdapterError, match="the files of this version have changed"):
            await front.answers_with("a@2")
        await front.load("b")
        assert await front.answers_with("a") == ("/a", 3)

    run(scenario())


def test_files_that_came_in_a_request_go_with_their_last_version(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(UPLOADS_VARIABLE, str(tmp_path / "uploads"))

    async def scenario() -> None:
        front = Numbered(limit=1)
        paths = [front.adapters.uploads.begin() for _ in range(4)]
        there = lambda: [Path(path).exists() for path in paths]  # noqa: E731
        await front.load("a", path=paths[0])
        request = await front.begin("a")
        await front.adapters.reload("a", paths[1])
        assert there() == [True] * 4
        await front.end(request)
        await asyncio.sleep(0.01)
        assert there() == [False, True, True, True]
        await front.load("b", path=paths[2])
        assert there()[1] and await front.answers_with("a") == (paths[1], 2), "it is on disk only, and comes back"
        front.refuse = True
        assert not (await front.adapters.reload("a", paths[3])).success
        assert there() == [False, True, True, False]
        await front.unload("a")
        await front.unload("b")
        assert there() == [False] * 4

    run(scenario())
