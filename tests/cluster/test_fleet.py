"""Several fronts and their directory, over real HTTP: what one does the others know, and what ends loses nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.support.fleets import Fleet, fleet
from tests.support.replicas import ADMIN
from vlora_sgl.cluster import directory, directory_link, front, member, status

Story = Callable[[Fleet], Awaitable[None]]
KNOWN = {f"a{n}": f"/a{n}" for n in range(8)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet's clock runs five times as fast."""
    for module in (directory, directory_link, front, member):
        for name in (
            "BEAT_S",
            "SYNC_S",
            "SILENT_S",
            "SUSPECT_S",
            "SETTLE_S",
            "SETTLE_AGAIN_S",
            "SETTLE_MORE_S",
            "AGAIN_S",
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name) / 5)


def play(story: Story, **options: Any) -> None:
    """Run a story on a fleet, with an end to waiting."""

    async def run() -> None:
        async with asyncio.timeout(30), fleet(**options) as made:
            await story(made)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def loads(made: Fleet) -> list[int]:
    return [fake.orders.count("/load_lora_adapter") for fake in made.fakes.values()]


def test_fronts_agree_on_homes_and_load_an_adapter_once() -> None:
    async def story(made: Fleet) -> None:
        for _ in range(3):
            answers = await asyncio.gather(*(made.ask(front, name) for name in KNOWN for front in (0, 1, 0, 1)))
            assert {status for status, _ in answers} == {200}
            asked = [name for name in KNOWN for _ in range(4)]
            assert all(name in has["has"] for (_, has), name in zip(answers, asked, strict=True))
        assert loads(made) == [4, 4]
        homes = (await made.get("/cluster"))["homes"]
        assert homes.keys() == KNOWN.keys() and all(len(home) == 1 for home in homes.values())

    play(story, known=KNOWN)


def test_what_one_front_is_told_all_fronts_know_at_once() -> None:
    async def story(made: Fleet) -> None:
        order = {"lora_name": "n", "lora_path": "/n"}
        assert (await made.post(0, "/load_lora_adapter", order, ADMIN))[0] == 200
        assert [(await made.ask(front, "n"))[0] for front in (1, 0)] == [200, 200]
        assert (await made.post(1, "/load_lora_adapter", order))[0] == 401
        refused = await made.post(1, "/load_lora_adapter", {"lora_name": "o", "lora_path": "broken"}, ADMIN)
        assert refused[0] == 400 and "no o from broken" in refused[1]["error_message"]
        assert (await made.ask(1, "o"))[0] == 404
        assert (await made.post(1, "/unload_lora_adapter", {"lora_name": "n"}, ADMIN))[0] == 200
        assert (await made.ask(1, "n"))[0] == 404
        await until(lambda: "n" not in made.fronts[0].catalogue)
        assert (await made.ask(0, "n"))[0] == 404

    play(story)


def test_a_front_counts_what_others_have_under_way() -> None:
    async def story(made: Fleet) -> None:
        for fake in made.fakes.values():
            fake.hold.clear()
        asks = [asyncio.create_task(made.ask(0)) for _ in range(6)]
        await until(lambda: sum(replica.elsewhere for replica in made.fronts[1].replicas) == 6)
        assert [replica.elsewhere for replica in made.fronts[0].replicas] == [0, 0]
        assert {replica.limit for replica in made.fronts[1].replicas} == {32}
        state = await made.get("/cluster", front=1)
        assert sum(replica["running"] for replica in state["replicas"]) == 6
        assert state["fronts"] == ["front-0", "front-1"]
        for fake in made.fakes.values():
            fake.hold.set()
        await asyncio.gather(*asks)
        await until(lambda: sum(replica.served for replica in made.directory.replicas) == 6)

    play(story)


def test_a_killed_replica_leaves_its_number_to_the_next_and_no_request_is_lost() -> None:
    async def story(made: Fleet) -> None:
        for name in KNOWN:
            assert (await made.ask(0, name))[0] == 200
        await until(lambda: len(made.fronts[0].routing.homes) == 8)
        await asyncio.sleep(0.2)
        before = (await made.get("/cluster"))["homes"]
        first, second = made.fakes
        made.fakes[first].hold.clear()
        asks = [asyncio.create_task(made.ask(n % 2, name)) for n, name in enumerate(KNOWN)]
        await until(lambda: len(made.fakes[first].bodies) > len(KNOWN) // 2)
        await made.kill_replica(first)
        assert {status for status, _ in await asyncio.gather(*asks)} == {200}
        await until(lambda: all(len(front.serving) == 1 for front in made.fronts))
        new = await made.start_replica()
        assert new._number == 0
        await until(lambda: all(len(front.serving) == 2 for front in made.fronts))
        for name, homes in before.items():
            assert (await made.ask(1, name))[0] == 200
            assert name in made.fakes[(new, second)[homes[0]]].adapters

    play(story, known=KNOWN)


def test_a_replica_that_comes_before_the_last_one_is_given_up_has_its_number_too() -> None:
    async def story(made: Fleet) -> None:
        first, second = made.fakes
        await made.kill_replica(first)
        await asyncio.sleep(1.5 * directory.SUSPECT_S)
        assert len(made.directory.replicas) == 2, "it is silent, and not yet forgotten"
        new = await made.start_replica()
        await until(lambda: all(len(front.serving) == 2 for front in made.fronts) and new._number is not None)
        assert (new._number, second._number) == (0, 1)

    play(story, known=KNOWN)


def test_a_request_that_ends_replicas_takes_at_most_two() -> None:
    async def story(made: Fleet) -> None:
        members = [*made.fakes]
        for fake in made.fakes.values():
            fake.hold.clear()
        ask = asyncio.create_task(made.ask(0))
        for _ in range(2):
            await until(lambda: any(made.fakes[one].bodies for one in members if one in made.fakes))
            (holder,) = (one for one in members if one in made.fakes and made.fakes[one].bodies)
            await made.kill_replica(holder)
        status, body = await ask
        assert (status, body["error"]["type"]) == (502, "ReplicaLostError")
        assert len(made.fakes) == 1
        await until(lambda: made.directory._totals == {"sent_again": 1, "lost": 1})

    play(story, replicas=3)


def test_a_stream_of_a_killed_replica_ends_with_an_error() -> None:
    async def story(made: Fleet) -> None:
        for fake in made.fakes.values():
            fake.stop_after = 1
        body = {"text": "x", "stream": True}
        async with made.client.post(f"{made.fronts_at[0].url}/generate", json=body) as answer:
            assert await answer.content.readany()
            for member in [*made.fakes]:
                await made.kill_replica(member)
            *_, error, done, _ = (await answer.read()).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "ReplicaLostError"
        assert done == b"data: [DONE]"

    play(story)


async def everything(made: Fleet) -> None:
    """An adapter from a body, a version, a pin, an adapter that is gone, homes and counts."""
    form = aiohttp.FormData()
    form.add_field("lora_name", "sent")
    form.add_field("adapter.safetensors", b"weights", filename="adapter.safetensors")
    url, headers = made.fronts_at[0].url, {"Authorization": f"Bearer {ADMIN}"}
    async with made.client.post(f"{url}/load_lora_adapter", data=form, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    for path, order in (
        ("load", {"lora_name": "b", "lora_path": "/b"}),
        ("load", {"lora_name": "b@2", "lora_path": "/b2"}),
        ("promote", {"lora_name": "b@2"}),
        ("pin", {"lora_name": "b"}),
        ("load", {"lora_name": "gone", "lora_path": "/gone"}),
        ("unload", {"lora_name": "gone"}),
    ):
        assert (await made.post(1, f"/{path}_lora_adapter", order, ADMIN))[0] == 200
    for name in KNOWN:
        await made.ask(1, name)


def test_a_new_directory_knows_what_the_last_one_knew() -> None:
    async def story(made: Fleet) -> None:
        await everything(made)
        await asyncio.sleep(0.3)
        before = made.directory.known()
        assert before["catalogue"]["pinned"] == ["b"] and before["catalogue"]["files"] and before["homes"]
        await made.kill_directory()
        assert [(await made.ask(front, name))[0] for front in (0, 1) for name in ("a0", "b", None)] == [200] * 6
        await made.start_directory()
        await until(lambda: len(made.directory.serving) == 2)
        await until(lambda: all(one._version[0] == made.directory.identity for one in made.fronts))
        after = made.directory.known()
        assert [after[part] for part in ("homes", "catalogue")] == [before[part] for part in ("homes", "catalogue")]
        assert after["replicas"] == [{**one, "starts": 1} for one in before["replicas"]]
        assert made.directory.catalogue.files["sent"] == {"adapter.safetensors": b"weights"}
        assert (await made.ask(0, "gone"))[0] == 404
        third = await made.start_replica()
        await made.directory.catalogue.bring(["sent"], made.directory.replicas[2])
        assert "weights" in made.fakes[third].adapters["sent"]

    play(story, known=KNOWN)


def test_a_front_that_is_killed_takes_only_its_own_connections() -> None:
    async def story(made: Fleet) -> None:
        for fake in made.fakes.values():
            fake.hold.clear()
        asks = [asyncio.create_task(made.ask(front)) for front in (0, 1, 1, 1)]
        await until(lambda: sum(len(fake.bodies) for fake in made.fakes.values()) == 4)
        await made.fronts_at[0].kill()
        for fake in made.fakes.values():
            fake.hold.set()
        lost, *answers = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(lost, aiohttp.ClientError) and {status for status, _ in answers} == {200}
        await until(lambda: len(made.directory._fronts) == 1)
        await until(lambda: {replica.limit for replica in made.fronts[1].replicas} == {64})
        assert sum(replica.running for replica in made.directory.replicas) == 0

    play(story)


def test_what_was_loaded_while_a_replica_was_away_is_there_when_it_returns() -> None:
    async def story(made: Fleet) -> None:
        order = {"lora_name": "a", "lora_path": "/a"}
        assert (await made.post(0, "/load_lora_adapter", order, ADMIN))[0] == 200
        (holder,) = (one for one, fake in made.fakes.items() if fake.adapters)
        fake = made.fakes[holder]
        await holder.leave()
        await until(lambda: len(made.directory.serving) == 1)
        assert (await made.post(0, "/reload_lora_adapter", {**order, "lora_path": "/b"}, ADMIN))[0] == 200
        await holder.ready(holder)
        assert fake.adapters == {"a": "/b"}

    play(story)


def test_metrics_of_all_replicas_are_in_one_place() -> None:
    async def story(made: Fleet) -> None:
        await made.ask(0, "a0")
        lines = (await made.get("/metrics")).splitlines()
        assert {'sglang:asked{replica="0"} 1', 'sglang:asked{replica="1"} 0'} <= {*lines} | {
            line.replace('"0"', '"x"').replace('"1"', '"0"').replace('"x"', '"1"') for line in lines
        }
        assert any(line.startswith("sglang:held{replica=") and line.endswith(',adapter="a0"} 1') for line in lines)
        assert len([line for line in lines if line.startswith("# ")]) == len(
            {line for line in lines if line[0] == "#"}
        )
        assert any(line.startswith("vlora_cluster:serving") for line in lines)

    play(story, known=KNOWN)


def test_joined_metrics_keep_what_is_said_of_them() -> None:
    text = '# HELP a A.\n# TYPE a histogram\na_bucket{le="1"} 2\na_sum 3.5\nb 1 1700000000\n'
    assert status.joined([(0, text), (4, text)]).splitlines() == [
        "# HELP a A.", "# TYPE a histogram", 'a_bucket{replica="0",le="1"} 2', 'a_sum{replica="0"} 3.5',
        'b{replica="0"} 1 1700000000', 'a_bucket{replica="4",le="1"} 2', 'a_sum{replica="4"} 3.5',
        'b{replica="4"} 1 1700000000',
    ]  # fmt: skip
