"""The replica router, over real HTTP, with replicas that count what they get."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.replicas import ADMIN, FakeCluster, cluster
from vlora_sgl.cluster.catalogue import members_of
from vlora_sgl.cluster.links import Keys
from vlora_sgl.cluster.placement import Affinity, RoundRobin
from vlora_sgl.cluster.replica_router import Settings
from vlora_sgl.sources import Source

Story = Callable[[FakeCluster], Awaitable[None]]


def play(story: Story, **options: Any) -> None:
    """Run a story on a cluster, with an end to waiting."""

    async def run() -> None:
        async with asyncio.timeout(20), cluster(**options) as made:
            await story(made)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_body_passes_unchanged_and_an_answer_with_its_headers() -> None:
    body = {
        "text": "é",
        "lora_path": None,
        "sampling_params": {"custom_params": {"vlora_head": "h"}},
        "head": "h",
        "new": 1,
    }

    async def story(made: FakeCluster) -> None:
        async with made.client.post(f"{made.url}/generate", json=body) as answer:
            assert (answer.status, answer.headers["X-Kept"]) == (200, "yes")
            number = int(answer.headers["X-VLora-Replica"])
        assert (made.fakes[number].bodies, made.fakes[1 - number].bodies) == ([body], [])

    play(story)


def test_an_adapter_that_is_loaded_nowhere_is_loaded_once_where_it_is_asked_for() -> None:
    async def story(made: FakeCluster) -> None:
        answers = await asyncio.gather(*(made.ask("a") for _ in range(8)))
        assert {status for status, _ in answers} == {200}
        assert {tuple(body["has"]) for _, body in answers} == {("a",)}
        assert [fake.orders for fake in made.fakes].count(["/load_lora_adapter"]) == 1
        assert sorted(len(fake.bodies) for fake in made.fakes) == [0, 8]
        assert all(fake.adapters in ({}, {"a": "/a"}) for fake in made.fakes)

    play(story, known={"a": "/a"})


def test_adapters_spread_and_stay_while_round_robin_loads_them_everywhere() -> None:
    known = {f"a{n}": f"/a{n}" for n in range(8)}
    loads = {}
    for name, routing in (("affinity", None), ("round_robin", RoundRobin())):

        async def story(made: FakeCluster, name: str = name) -> None:
            for _ in range(3):
                for adapter in known:
                    assert (await made.ask(adapter))[0] == 200
            loads[name] = [replica.loads for replica in made.router.replicas]

        play(story, known=known, routing=routing, replicas=3)
    assert sum(loads["affinity"]) == 8 and max(loads["affinity"]) <= 4
    assert loads["round_robin"] == [8, 8, 8]


def test_a_hot_adapter_is_served_by_every_replica_under_load() -> None:
    async def story(made: FakeCluster) -> None:
        for fake in made.fakes:
            fake.hold.clear()
        asks = [asyncio.create_task(made.ask("hot")) for _ in range(40)]
        await until(lambda: sum(len(fake.bodies) for fake in made.fakes) == 40)
        assert min(len(fake.bodies) for fake in made.fakes) >= 15
        for fake in made.fakes:
            fake.hold.set()
        assert {status for status, _ in await asyncio.gather(*asks)} == {200}

    play(story, known={"hot": "/hot"}, routing=Affinity(slots=4, shares={"hot": 1}))


def test_a_stream_comes_as_it_is_produced() -> None:
    async def story(made: FakeCluster) -> None:
        times, lines = [], []
        async with made.client.post(f"{made.url}/generate", json={"text": "x", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                if line.strip():
                    times.append(time.perf_counter())
                    lines.append(line)
        assert lines == [b'data: {"n": 0}\n', b'data: {"n": 1}\n', b'data: {"n": 2}\n', b"data: [DONE]\n"]
        assert times[2] - times[0] > 0.06  # 0.05 s apart at the replica

    play(story)


@pytest.mark.parametrize("stream", [False, True])
def test_killing_a_replica_loses_no_request_that_has_no_answer_yet(stream: bool) -> None:
    async def story(made: FakeCluster) -> None:
        for fake in made.fakes:
            fake.hold.clear()

        async def ask() -> tuple[int, str]:
            async with made.client.post(f"{made.url}/generate", json={"text": "x", "stream": stream}) as answer:
                return answer.status, await answer.text()

        asks = [asyncio.create_task(ask()) for _ in range(30)]
        await until(lambda: [len(fake.bodies) for fake in made.fakes] == [5, 5])
        await until(lambda: sum(replica.waiting for replica in made.router.replicas) == 20)
        await made.fakes[0].kill()
        await until(lambda: 0 in made.troubles)
        made.router.replicas[0].end()
        made.fakes[1].hold.set()
        answers = await asyncio.gather(*asks)
        assert {status for status, _ in answers} == {200}
        assert all("error" not in text for _, text in answers)
        assert (made.router.lost, made.router.sent_again) == (0, 5)
        assert [len(fake.bodies) for fake in made.fakes] == [5, 30]

    play(story, limit=5)


def test_a_stream_that_breaks_off_says_so() -> None:
    async def story(made: FakeCluster) -> None:
        for fake in made.fakes:
            fake.stop_after = 1
        async with made.client.post(f"{made.url}/generate", json={"text": "x", "stream": True}) as answer:
            got = b""
            while b'"n": 1' not in got:
                got += await answer.content.readany()
            for fake in made.fakes:
                await fake.kill()
            got += await answer.content.read()
        events = [line[6:] for line in got.decode().splitlines() if line.startswith("data: ")]
        assert json.loads(events[2])["error"]["type"] == "ReplicaLostError"
        assert events[3] == "[DONE]"
        assert made.router.lost == 1

    play(story, replicas=1)


def test_a_request_that_ends_replicas_does_not_end_all_of_them() -> None:
    async def story(made: FakeCluster) -> None:
        for fake in made.fakes:
            fake.hold.clear()
        ask = asyncio.create_task(made.ask())
        for _ in range(2):
            await until(lambda: any(r.running for r in made.router.replicas))
            (number,) = [r.number for r in made.router.replicas if r.running]
            await until(lambda n=number: len(made.fakes[n].bodies) == 1)
            await made.fakes[number].kill()
            await until(lambda n=number: n in made.troubles)
        status, body = await ask
        assert (status, body["error"]["type"]) == (502, "ReplicaLostError")
        assert sorted(len(fake.bodies) for fake in made.fakes) == [0, 1, 1]

    play(story, replicas=3)


def test_requests_wait_for_a_replica_and_then_get_a_503() -> None:
    async def story(made: FakeCluster) -> None:
        made.router.replicas[0].end()
        waits = asyncio.create_task(made.ask())
        await asyncio.sleep(0.1)
        assert not waits.done()
        await made.router.ready(made.router.replicas[0])
        assert (await waits)[0] == 200
        made.router.replicas[0].end()
        async with made.client.post(f"{made.url}/generate", json={"text": "x"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert (await answer.json())["error"]["type"] == "ClusterError"
        async with made.client.get(f"{made.url}/health") as answer:
            assert answer.status == 503

    play(story, replicas=1)


def test_more_than_the_queue_holds_is_refused() -> None:
    async def story(made: FakeCluster) -> None:
        made.fakes[0].hold.clear()
        asks = [asyncio.create_task(made.ask()) for _ in range(3)]
        await until(lambda: made.router.replicas[0].waiting == 2)
        assert (await made.ask())[0] == 503
        made.fakes[0].hold.set()
        assert [status for status, _ in await asyncio.gather(*asks)] == [200, 200, 200]

    play(story, replicas=1, limit=1, settings=Settings(queue=2))


def test_a_client_that_hangs_up_frees_its_place_running_or_waiting() -> None:
    async def story(made: FakeCluster) -> None:
        (replica,) = made.router.replicas
        made.fakes[0].hold.clear()
        asks = [asyncio.create_task(made.ask()) for _ in range(4)]
        await until(lambda: (replica.running, replica.waiting) == (2, 2))
        for ask in (asks[0], asks[3]):
            ask.cancel()
        await until(lambda: (replica.running, replica.waiting) == (2, 0))
        made.fakes[0].hold.set()
        assert [(await ask)[0] for ask in asks[1:3]] == [200, 200]
        await until(lambda: replica.load == 0)

    play(story, replicas=1, limit=2)


def test_unknown_adapters_are_a_404_with_the_names_and_reach_no_replica() -> None:
    async def story(made: FakeCluster) -> None:
        for path, body in (
            ("/generate", {"lora_path": "b"}),
            ("/v1/chat/completions", {"model": "base:b", "messages": []}),
            ("/v1/vision/classify", {"model": "b", "input": []}),
        ):
            status, answer = await made.post(path, body)
            assert (status, answer["error"]["type"]) == (404, "UnknownAdapterError")
            assert "'b'; loaded: a" in answer["error"]["message"]
        assert [fake.bodies for fake in made.fakes] == [[], []]
        assert (await made.post("/v1/chat/completions", {"model": "base:a", "messages": []}))[0] == 200
        assert (await made.post("/v1/chat/completions", {"model": "base", "messages": []}))[0] == 200

    play(story, known={"a": "/a"})


def test_an_adapter_that_cannot_be_loaded_is_the_requests_error() -> None:
    async def story(made: FakeCluster) -> None:
        status, answer = await made.ask("a")
        assert (status, answer["error"]["type"]) == (400, "AdapterError")
        assert "no a from broken" in answer["error"]["message"]
        assert (await made.ask())[0] == 200

    play(story, known={"a": "broken"})


def test_lives_of_an_adapter_across_replicas() -> None:
    async def story(made: FakeCluster) -> None:
        load = {"lora_name": "a", "lora_path": "/a"}
        assert (await made.post("/load_lora_adapter", load))[0] == 401
        assert made.router.catalogue.paths == {}
        status, answer = await made.post("/load_lora_adapter", load, ADMIN)
        assert (status, answer["report"]) == (200, "all matched")
        assert [fake.adapters for fake in made.fakes].count({"a": "/a"}) == 1
        assert (await made.post("/load_lora_adapter", load, ADMIN))[0] == 400

        for replica in made.router.replicas:  # as if it had been hot
            await made.router.catalogue.bring(["a"], replica)
        assert (await made.post("/reload_lora_adapter", {"lora_name": "a", "lora_path": "broken"}, ADMIN))[0] == 400
        assert [fake.adapters for fake in made.fakes] == [{"a": "/a"}] * 2
        assert (await made.post("/reload_lora_adapter", {"lora_name": "a", "lora_path": "/b"}, ADMIN))[0] == 200
        assert [fake.adapters for fake in made.fakes] == [{"a": "/b"}] * 2

        assert (await made.post("/unload_lora_adapter", {"lora_name": "a"}))[0] == 401
        assert (await made.ask("a"))[0] == 200
        assert (await made.post("/unload_lora_adapter", {"lora_name": "a"}, ADMIN))[0] == 200
        assert [fake.adapters for fake in made.fakes] == [{}, {}]
        assert (await made.ask("a"))[0] == 404
        assert (await made.post("/unload_lora_adapter", {"lora_name": "a"}, ADMIN))[0] == 404

    play(story)


def test_a_routed_adapters_members_are_loaded_before_it(tmp_path: Path) -> None:
    spec = {"format": 1, "router": "vocabulary", "members": ["a", "b"], "modalities": {"text": "a", "image": "b"}}
    (tmp_path / "vlora_routed.json").write_text(json.dumps(spec))

    async def story(made: FakeCluster) -> None:
        status, body = await made.ask("both")
        assert (status, body["has"]) == (200, ["a", "b", "both"])
        (holder,) = (fake for fake in made.fakes if fake.adapters)
        assert list(holder.adapters) == ["a", "b", "both"]

    play(story, known={"both": str(tmp_path), "a": "/a", "b": "/b"})


@pytest.mark.parametrize("text", ["{", "[]", '{"router": "compositional", "adapters": {}}'])
def test_a_broken_routed_adapter_is_the_replicas_to_refuse(tmp_path: Path, text: str) -> None:
    (tmp_path / "vlora_routed.json").write_text(text)
    assert members_of(str(tmp_path), "routed") == ()


def test_a_replica_that_comes_back_is_told_what_has_changed() -> None:
    async def story(made: FakeCluster) -> None:
        made.fakes[0].adapters = {"gone": "/gone", "new": "/old", "own": "/own"}
        made.router.replicas[0].end()
        await made.router.ready(made.router.replicas[0])  # what it came with is the cluster's now
        assert made.router.catalogue.paths == {"gone": "/gone", "new": "/old", "own": "/own"}
        await made.post("/unload_lora_adapter", {"lora_name": "gone"}, ADMIN)
        await made.post("/reload_lora_adapter", {"lora_name": "new", "lora_path": "/new"}, ADMIN)
        made.fakes[0].adapters = {"gone": "/gone", "new": "/old", "own": "/own"}  # what its flags say
        made.fakes[0].versions = {}
        made.router.replicas[0].end()
        await made.router.ready(made.router.replicas[0])
        assert made.fakes[0].adapters == {"new": "/new", "own": "/own"} == made.router.replicas[0].loaded

    play(story)


def test_lists_orders_and_figures_are_the_clusters() -> None:
    async def story(made: FakeCluster) -> None:
        await made.ask("a")
        cards = (await made.get("/v1/models"))["data"]
        assert sorted(card["id"] for card in cards) == ["a", "b", "base"]
        assert (await made.get("/v1/models/b"))["parent"] == "base"
        async with made.client.post(f"{made.url}/flush_cache") as answer:
            assert await answer.text() == "Cache flushed."
        assert all("/flush_cache" in fake.orders for fake in made.fakes)
        state = await made.get("/cluster")
        assert (sum(r["served"] for r in state["replicas"]), len(state["homes"]["a"])) == (1, 1)
        async with made.client.get(f"{made.url}/metrics") as answer:
            assert 'vlora_cluster:serving{replica="1"} 1' in (await answer.text()).splitlines()
        async with made.client.post(f"{made.url}/update_weights_from_disk", json={}) as answer:
            assert answer.status == 404 and made.fakes[1].url in await answer.text()

    play(story, known={"a": "/a", "b": "/b"})


def test_a_wrong_key_sets_nothing_in_motion() -> None:
    async def story(made: FakeCluster) -> None:
        for path, body in (("/generate", {"lora_path": "a"}), ("/generate", {"lora_path": "b"})):
            for key in (None, "wrong", ADMIN):
                assert (await made.post(path, body, key))[0] == 401
        for path in ("/cluster", "/lora_adapters", "/v1/models"):
            async with made.client.get(made.url + path) as answer:
                assert answer.status == 401
        assert [(fake.orders, fake.bodies) for fake in made.fakes] == [([], []), ([], [])]
        async with made.client.get(f"{made.url}/health") as answer:
            assert answer.status == 200
        assert (await made.post("/generate", {"lora_path": "a"}, "key"))[0] == 200
        assert (await made.post("/unload_lora_adapter", {"lora_name": "a"}, "key"))[0] == 401
        assert (await made.post("/unload_lora_adapter", {"lora_name": "a"}, ADMIN))[0] == 200

    play(story, known={"a": "/a"}, keys=Keys("key", ADMIN))


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/load_lora_adapter", "/flush_cache"])
def test_a_body_that_is_too_large_or_no_json_reaches_no_replica(path: str) -> None:
    wrong = {b"x" * 5000: 413, b"[" * 3000: 400, b'{"lora_name": "a", "lora_name": "b"}': 400}

    async def story(made: FakeCluster) -> None:
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
        for body, status in wrong.items():
            if status == 400 and path == "/flush_cache":
                continue  # passed on unread
            async with made.client.post(made.url + path, data=body, headers=headers) as answer:
                error = json.loads(await answer.text())["error"]
                assert answer.status == error["code"] == status and "the body must" in error["message"]
        assert all(not fake.bodies and not fake.orders for fake in made.fakes)

    play(story, settings=Settings(patience=0.5, body=4096))


def test_an_adapter_is_brought_for_every_route_that_takes_a_model() -> None:
    async def story(made: FakeCluster) -> None:
        for path in ("/v1/messages", "/v1/responses", "/v1/score", "/v1/tokenize", "/invocations"):
            status, answer = await made.post(path, {"model": "nobody"})
            assert status == 404 and "'nobody'; loaded: a" in answer["error"]["message"]
            await made.client.post(made.url + path, json={"model": "base:a"})
        assert [fake.orders for fake in made.fakes].count(["/load_lora_adapter"]) == 1

    play(story, known={"a": "/a"})


def test_a_cluster_that_stops_refuses_who_comes_and_who_waits_and_answers_who_runs() -> None:
    async def story(made: FakeCluster) -> None:
        for fake in made.fakes:
            fake.hold.clear()
        running = [asyncio.create_task(made.ask(stream=False)) for _ in range(2)]
        await until(lambda: all(fake.bodies for fake in made.fakes))
        waiting = asyncio.create_task(made.ask())
        await until(lambda: any(view.waiting for view in made.router.replicas))
        made.router.stop()
        for view in made.router.replicas:
            view.end()  # as their supervisors do
        for path in ("/generate", "/v1/chat/completions", "/load_lora_adapter", "/no/such/route"):
            status, body = await made.post(path, {"text": "x"}, key=ADMIN)
            assert (status, body["error"]["type"]) == (503, "StoppingError")
        async with made.client.get(f"{made.url}/health") as answer:
            assert answer.status == 503
        assert (await waiting)[0] == 503
        for fake in made.fakes:
            fake.hold.set()
        assert [(await one)[0] for one in running] == [200, 200]

    play(story, limit=1, routing=RoundRobin())


# Versions


def sent(name: str, content: bytes) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("lora_name", name)
    form.add_field("adapter_config.json", b"{}", filename="adapter_config.json")
    form.add_field("adapter_model.safetensors", content, filename="adapter_model.safetensors")
    return form


async def send(made: FakeCluster, route: str, name: str, content: bytes) -> int:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with made.client.post(made.url + route, data=sent(name, content), headers=headers) as answer:
        return answer.status


async def everywhere(made: FakeCluster, name: str = "a") -> None:
    for replica in made.router.replicas:
        await made.router.catalogue.bring([name], replica)


def test_an_adapter_that_is_sent_reaches_every_replica_that_needs_it() -> None:
    async def story(made: FakeCluster) -> None:
        assert await send(made, "/load_lora_adapter", "a", b"first") == 200
        assert sum(bool(fake.adapters) for fake in made.fakes) == 1
        await everywhere(made)
        assert made.fakes[0].adapters == made.fakes[1].adapters and b"first" in str(made.fakes[0].adapters).encode()
        assert await send(made, "/reload_lora_adapter", "a", b"second") == 200
        for fake in made.fakes:
            assert (
                list(fake.adapters) == ["a"] and "second" in fake.adapters["a"] and "first" not in fake.adapters["a"]
            )
            assert fake.versions["a"].current == 2
        made.fakes[0].adapters, made.fakes[0].versions = {}, {}
        made.router.replicas[0].end()
        await made.router.ready(made.router.replicas[0])  # it was started again, and has nothing
        await everywhere(made)
        assert made.fakes[0].adapters == made.fakes[1].adapters and made.fakes[0].versions["a"].current == 2
        await made.post("/unload_lora_adapter", {"lora_name": "a"}, ADMIN)
        assert made.router.catalogue.files == {} == made.fakes[0].adapters

    play(story)


def test_an_adapter_that_is_sent_is_bounded_and_needs_the_key() -> None:
    async def story(made: FakeCluster) -> None:
        assert await send(made, "/load_lora_adapter", "a", b"x" * 5000) == 413
        async with made.client.post(f"{made.url}/load_lora_adapter", data=sent("a", b"x")) as answer:
            assert answer.status == 401
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "multipart/form-data; boundary=x"}
        async with made.client.post(f"{made.url}/load_lora_adapter", data=b"--y", headers=headers) as answer:
            assert answer.status == 400, await answer.text()
        assert [fake.orders for fake in made.fakes] == [[], []]

    play(story, settings=Settings(patience=0.5, adapter=4096))


def test_versions_agree_wherever_an_adapter_is_and_comes_to() -> None:
    async def story(made: FakeCluster) -> None:
        load = {"lora_name": "a", "lora_path": "/a"}
        assert (await made.post("/load_lora_adapter", load, ADMIN))[0] == 200
        for number in (2, 3):
            load = {"lora_name": f"a@{number}", "lora_path": f"/a{number}"}
            assert (await made.post("/load_lora_adapter", load, ADMIN))[0] == 200
        assert (await made.post("/load_lora_adapter", load, ADMIN))[0] == 400, "there already"
        assert (await made.post("/promote_lora_adapter", {"lora_name": "a@2"}, ADMIN))[0] == 200
        assert (await made.post("/promote_lora_adapter", {"lora_name": "a@3", "share": 0.25}, ADMIN))[0] == 200
        await everywhere(made)
        first, second = (fake.versions["a"] for fake in made.fakes)
        assert made.fakes[0].adapters == made.fakes[1].adapters == {"a": "/a2", "a@1": "/a", "a@3": "/a3"}
        assert (first.current, first.others, first.shares) == (second.current, second.others, second.shares)
        assert (first.current, first.shares) == (2, {3: 0.25})
        for name, status in (("a@1", 200), ("a@2", 200), ("a@3", 200), ("a@4", 404), ("b@1", 404)):
            assert (await made.ask(name))[0] == status
        for _ in range(2):  # the trial ends, then the promotion
            assert (await made.post("/roll_back_lora_adapter", {"lora_name": "a"}, ADMIN))[0] == 200
        assert [(fake.versions["a"].current, fake.versions["a"].shares) for fake in made.fakes] == [(1, {})] * 2
        assert (await made.post("/unload_lora_adapter", {"lora_name": "a@3"}, ADMIN))[0] == 200
        assert (await made.post("/reload_lora_adapter", {"lora_name": "a", "lora_path": "/b"}, ADMIN))[0] == 200
        assert [fake.adapters for fake in made.fakes] == [{"a": "/b", "a@2": "/a2"}] * 2
        assert [fake.versions["a"].current for fake in made.fakes] == [4, 4]
        rows = (await made.get("/lora_adapters"))["adapters"]
        assert sorted((row["name"], row["version"], row["replica"]) for row in rows) == [
            ("a", 4, 0), ("a", 4, 1), ("a@2", 2, 0), ("a@2", 2, 1),
        ]  # fmt: skip
        for order in ({"lora_name": "a"}, {"lora_name": "a@2", "share": 2}, {"lora_name": "a@2", "share": "x"}):
            assert (await made.post("/promote_lora_adapter", order, ADMIN))[0] == 400
        assert (await made.post("/promote_lora_adapter", {"lora_name": "a@9"}, ADMIN))[0] == 404

    play(story)


def test_a_version_that_one_replica_refuses_is_on_none() -> None:
    async def story(made: FakeCluster) -> None:
        await made.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, ADMIN)
        await everywhere(made)
        made.fakes[1].broken = "/b"
        for route, name in (("/reload_lora_adapter", "a"), ("/load_lora_adapter", "a@2")):
            assert (await made.post(route, {"lora_name": name, "lora_path": "/b"}, ADMIN))[0] == 400
            assert [fake.adapters for fake in made.fakes] == [{"a": "/a"}] * 2
        made.fakes[1].broken = ""
        assert (await made.post("/reload_lora_adapter", {"lora_name": "a@9", "lora_path": "/b"}, ADMIN))[0] == 200
        assert [fake.versions["a"].current for fake in made.fakes] == [9, 9]

    play(story)


def test_what_replicas_may_have_from_a_source_is_theirs_to_find() -> None:
    async def story(made: FakeCluster) -> None:
        status, body = await made.ask("fire")
        assert (status, body["has"]) == (200, []), "nothing was loaded there for it"
        assert (await made.ask("../fire"))[0] == 404
        made.fakes[0].adapters = {"fire": "/cache/fire"}  # as it would do by itself
        assert (await made.post("/reload_lora_adapter", {"lora_name": "fire", "lora_path": "/new"}, ADMIN))[0] == 200
        assert [fake.adapters for fake in made.fakes] == [{"fire": "/new"}, {}]

    play(story, sources=[Source("s3://bucket/adapters")])
