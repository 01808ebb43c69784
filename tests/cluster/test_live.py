"""A cluster's page, and the events of its replicas in one stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.cluster.test_replica_router import play, until
from tests.support.replicas import FakeCluster
from vlora_sgl import page
from vlora_sgl.cluster.links import Keys


@pytest.mark.parametrize("keys", [Keys(), Keys("key", "admin")])
def test_the_page_is_sent_without_a_key(keys: Keys) -> None:
    async def story(made: FakeCluster) -> None:
        for path, (_, kind) in page.FILES.items():
            async with made.client.get(made.url + path) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
                assert await answer.read() == page.content(path)
                assert page.HEADERS.items() <= answer.headers.items()
        async with made.client.get(f"{made.url}/vlora/live") as answer:
            assert answer.status == (401 if keys.api else 200)

    play(story, keys=keys)


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_every_replica_s_events_come_with_its_number_between_the_cluster_s_state() -> None:
    async def story(made: FakeCluster) -> None:
        assert [fake.watchers for fake in made.fakes] == [0, 0]
        steps: dict[int, list[int]] = {0: [], 1: []}
        states = 0
        async with made.client.get(f"{made.url}/vlora/live") as answer:
            async for event in events(answer):
                if "cluster" in event:
                    assert {one["number"] for one in event["cluster"]["replicas"]} == {0, 1}
                    states += 1
                else:
                    steps[event["replica"]].append(event["steps"][0][0])
                if states > 1 and all(len(found) > 5 for found in steps.values()):
                    break
        assert all(found == list(range(len(found))) for found in steps.values()), "none is lost, none comes twice"
        await until(lambda: all(fake.watchers == 0 for fake in made.fakes))

    play(story)


def test_a_replica_that_ends_and_one_that_comes_back_do_not_end_the_stream() -> None:
    async def story(made: FakeCluster) -> None:
        await made.fakes[0].kill()
        made.router.replicas[0].end()
        async with made.client.get(f"{made.url}/vlora/live") as answer:
            watched = events(answer)
            assert (await anext(watched))["cluster"]["replicas"][0]["serving"] is False
            assert (await anext(watched))["replica"] == 1
            await made.fakes[0].start(int(made.router.replicas[0].url.rpartition(":")[2]))
            await made.router.ready(made.router.replicas[0])
            async with asyncio.timeout(10):
                while (await anext(watched)).get("replica") != 0:
                    pass

    play(story)


def test_a_cluster_that_stops_ends_the_stream() -> None:
    async def story(made: FakeCluster) -> None:
        async with made.client.get(f"{made.url}/vlora/live") as answer:
            await answer.content.readline()
            made.router.stop()
            async with asyncio.timeout(5):
                await answer.read()

    play(story)
