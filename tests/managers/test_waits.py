"""Waits for the ranks: each has an end, and an answer that comes late is nobody else's."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.managers.waits import BoundedCommunicator, WaitResponse, limit_of
from vlora_sgl.server_args import ENVIRONMENT_VARIABLE


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({"wait_seconds": 1}))


def test_a_late_answer_is_not_the_next_ones() -> None:
    async def scenario() -> None:
        sent: list[Any] = []
        ranks = BoundedCommunicator(sent.append, 2)
        with pytest.raises(WaitResponse, match="the engine's answer to str is still under way; it goes on") as told:
            await ranks("first")
        assert told.value.status_code == 504
        second = asyncio.create_task(ranks("second"))
        await asyncio.sleep(0.01)
        assert sent == ["first"]  # in turn
        for reply in ("first", "first", "second", "second"):
            ranks.handle_recv(reply)
            await asyncio.sleep(0.01)
        assert await second == ["second", "second"]

    asyncio.run(scenario())


def test_what_has_not_been_sent_is_never_sent() -> None:
    async def scenario() -> None:
        sent: list[Any] = []
        ranks = BoundedCommunicator(sent.append, 1)
        outcomes = await asyncio.gather(*(ranks(i) for i in range(3)), return_exceptions=True)
        assert [isinstance(one, WaitResponse) for one in outcomes] == [True] * 3
        assert "this was not begun" in str(outcomes[2])
        ranks.handle_recv("late")
        await asyncio.sleep(0.01)
        assert sent == [0]

    asyncio.run(scenario())


def test_a_caller_that_leaves_leaves_no_lock() -> None:
    async def scenario() -> None:
        ranks = BoundedCommunicator(lambda message: None, 1)
        gone = asyncio.create_task(ranks("first"))
        await asyncio.sleep(0.01)
        gone.cancel()
        second = asyncio.create_task(ranks("second"))
        for _ in range(2):
            await asyncio.sleep(0.01)
            ranks.handle_recv("reply")
        assert await second == ["reply"]

    asyncio.run(scenario())


def test_weights_may_take_longer() -> None:
    messages = [type(name, (SimpleNamespace,), {})() for name in ("FlushCacheReqInput", "CheckWeightsReqInput")]
    assert [limit_of(message) for message in messages] == [1, 10]
