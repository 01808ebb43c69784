"""Adapters from a trainer's memory, and versions of them: over HTTP, on the server that all tests share."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server
from tests.e2e.test_board import counted
from tests.e2e.test_metrics import soon
from tests.soak import phases, pushes
from tests.soak.phases import GREEDY, adapters, answer, load, post, reload, unload
from tests.soak.pushes import push
from tests.support.tiny_random import make_adapter

pytestmark = pytest.mark.e2e

TEXT = phases.question(3, words=20)


@pytest.fixture(scope="module")
def contents(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("versions")
    return [make_adapter(root / str(seed), server.model.path, 40 + seed, rank=4 + 4 * seed) for seed in range(4)]


@pytest.fixture
def fire(server: Server, contents: list[Path]) -> Iterator[str]:
    """An adapter with two versions, the first of which is current."""
    load(server, "fire", contents[0]).raise_for_status()
    load(server, "fire@2", contents[1]).raise_for_status()
    yield "fire"
    if "fire" in adapters(server):
        unload(server, "fire").raise_for_status()


def served(server: Server, name: Any, **more: Any) -> Any:
    """What an answer says of who gave it."""
    return server.generate(text=TEXT, lora_path=name, sampling_params=GREEDY, **more)["meta_info"]["vlora"]


def files_of_uploads(server: Server) -> int:
    """Directories of adapters that came in requests, of this server."""
    mine = f"vlora-uploads-*-{server.process.pid}"
    return sum(len([*root.iterdir()]) for base in ("/dev/shm", "/tmp") for root in Path(base).glob(mine))


def test_an_adapter_that_comes_in_a_body_is_the_one_in_a_directory(server: Server, contents: list[Path]) -> None:
    load(server, "there", contents[0]).raise_for_status()
    expected = answer(server, TEXT, "there")
    assert expected != answer(server, TEXT, None)
    reply = push(server, "load_lora_adapter", "sent", contents[0])
    assert reply.status_code == 200 and "matched all" in reply.json()["report"] and reply.json()["version"] == 1
    try:
        assert answer(server, TEXT, "sent") == expected
        digests = {row["digest"] for name, row in adapters(server).items() if name in ("there", "sent")}
        assert len(digests) == 1
        reply = push(server, "reload_lora_adapter", "sent", contents[1])
        assert reply.status_code == 200 and reply.json()["version"] == 2
        assert answer(server, TEXT, "sent") not in (expected, answer(server, TEXT, None))
        assert files_of_uploads(server) == 1
    finally:
        for name in ("there", "sent"):
            unload(server, name).raise_for_status()
    assert files_of_uploads(server) == 0


def sent(
    server: Server, data: dict[str, str], files: dict[str, Any], route: str = "load_lora_adapter"
) -> requests.Response:
    return requests.post(f"{server.url}/{route}", data=data, files=files, timeout=60)


def test_a_body_that_is_no_adapter_is_refused_by_name_and_leaves_nothing(server: Server, contents: list[Path]) -> None:
    good, name = pushes.body(contents[0], 0), {"lora_name": "bad"}
    weights, config = phases.WEIGHTS, "adapter_config.json"
    pickle = b"\x80\x04\x95" + b"x" * 100
    cases: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
        (name, {weights: good[weights]}, 400, "needs a part 'adapter_config.json'"),
        (name, {config: good[config]}, 400, "needs a part 'adapter_model.safetensors'"),
        (name, {**good, "adapter_model.bin": ("x", pickle)}, 400, "an adapter's parts are"),
        (name, {**good, "../../escape.json": ("x", b"{}")}, 400, "an adapter's parts are"),
        (name, {**good, weights: (weights, pickle)}, 400, "not a complete safetensors file"),
        (name, {**good, weights: (weights, good[weights][1][:-100])}, 400, "not a complete safetensors file"),
        (name, {**good, config: (config, b"[1, 2")}, 400, "not readable as JSON"),
        ({**name, "lora_path": "/etc"}, good, 400, "an adapter's parts are"),
        ({}, good, 400, "lora_name"),
        ({"lora_name": "A"}, good, 400, "is loaded already"),
        ({"lora_name": "a:b"}, good, 400, "without ':'"),
        ({**name, "pinned": "perhaps"}, good, 400, "pinned"),
    ]
    for data, files, status, message in cases:
        reply = sent(server, data, files)
        assert reply.status_code == status and message in reply.text, (message, reply.status_code, reply.text)
    reply = sent(server, {"lora_name": "nobody"}, good, "reload_lora_adapter")
    assert reply.status_code == 404
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for route, text, status in (("load_lora_adapter", b"--y\r\n", 400), ("generate", b"--x\r\n", 415)):
        assert requests.post(f"{server.url}/{route}", text, headers=form, timeout=60).status_code == status
    assert "bad" not in adapters(server) and files_of_uploads(server) == 0
    assert answer(server, TEXT, "A")


def test_a_version_is_named_and_said_in_every_answer(server: Server, fire: str, contents: list[Path]) -> None:
    first, second = (answer(server, TEXT, name) for name in ("fire@1", "fire@2"))
    assert first != second and answer(server, TEXT, "fire") == first
    for name, version in (("fire", 1), ("fire@1", 1), ("fire@2", 2)):
        said = served(server, name)
        assert (said["adapter"], said["version"]) == ("fire", version)
        for model in (name, f"{server.model.path}:{name}"):
            chat = post(server, "v1/completions", model=model, prompt=TEXT, max_tokens=8, temperature=0)
            assert chat.status_code == 200, chat.text
    both = {"fire@2": 0.5, "fire": 0.5}
    reply = post(server, "generate", text=TEXT, adapters=both, sampling_params=GREEDY).json()
    assert reply["meta_info"]["vlora"]["adapters"] == both
    assert reply["meta_info"]["vlora"]["versions"] == ["fire@1", "fire@2"]
    rows = server.generate(text=[TEXT] * 3, lora_path=["fire@2", None, "fire"], sampling_params=GREEDY)
    assert [row["output_ids"] for row in (rows[0], rows[2])] == [second, first]
    assert [row["meta_info"]["vlora"].get("version") for row in rows] == [2, None, 1]
    several = server.generate(text=TEXT, lora_path="fire@2", sampling_params={**GREEDY, "n": 2})
    assert {row["meta_info"]["vlora"]["version"] for row in several} == {2}
    unknown = post(server, "generate", text=TEXT, lora_path="fire@3")
    assert unknown.status_code == 404 and "fire@2" in unknown.text


def test_a_canary_has_its_share_and_conversations_stay(server: Server, fire: str) -> None:
    def shares(**keys: Any) -> Counter[int]:
        replies = server.generate(text=[TEXT] * 48, lora_path="fire", sampling_params={"max_new_tokens": 1}, **keys)
        return Counter(row["meta_info"]["vlora"]["version"] for row in replies)

    ids = [f"conversation {number}" for number in range(48)]
    assert shares(rid=ids) == {1: 48}
    assert post(server, "promote_lora_adapter", lora_name="fire@2", share=0.5).status_code == 200
    assert {row["name"]: row["share"] for row in adapters(server).values() if row["adapter"] == "fire"} == {
        "fire": 0.5,
        "fire@2": 0.5,
    }
    found = shares(rid=ids)
    assert 10 < found[2] < 38 and shares(rid=ids) == found
    for key in ("conversation_id", "routing_key"):
        for number in range(4):
            assert len(shares(**{key: f"c{number}"})) == 1, "all of a conversation"
    before = counted(server)
    numbers = shares(rid=ids)
    after = counted(server)
    for version in (1, 2):
        key = "vlora:request_success_total", "fire", "length", str(version)
        assert after[key] - before.get(key, 0) == numbers[version], "counted by version"
        assert after["vlora:adapter_share", "fire", str(version)] == 0.5
    reply = post(server, "promote_lora_adapter", lora_name="fire@2", share=1.5)
    assert reply.status_code == 400 and "share" in reply.text
    assert post(server, "roll_back_lora_adapter", lora_name="fire").json()["version"] == 1
    assert shares(rid=ids) == {1: 48}


def test_promote_and_roll_back_change_what_a_name_means_while_it_streams(server: Server, fire: str) -> None:
    long = {"max_new_tokens": 60}
    wanted = [[*phases.stream(server, TEXT, name, **long)][-1]["output_ids"] for name in ("fire@1", "fire@2")]
    chunks = phases.stream(server, TEXT, "fire", **long)
    next(chunks)
    reply = post(server, "promote_lora_adapter", lora_name="fire@2")
    assert reply.status_code == 200 and reply.json()["version"] == 2
    after = [*phases.stream(server, TEXT, "fire", **long)][-1]
    rest = [*chunks][-1]
    assert rest["output_ids"] == wanted[0] and rest["meta_info"]["vlora"]["version"] == 1
    assert after["output_ids"] == wanted[1] and after["meta_info"]["vlora"]["version"] == 2
    assert post(server, "roll_back_lora_adapter", lora_name="fire").json()["version"] == 1
    assert [*phases.stream(server, TEXT, "fire", **long)][-1]["output_ids"] == wanted[0]
    assert unload(server, "fire@1").status_code == 400, "it is current"
    assert unload(server, "fire@2").status_code == 200
    assert post(server, "promote_lora_adapter", lora_name="fire@2").status_code == 404
    assert post(server, "roll_back_lora_adapter", lora_name="fire").status_code == 400


def test_a_watched_folder_s_adapters_come_change_and_go(
    server: Server, contents: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "watched" / "seen"
    assert post(server, "generate", text=TEXT, lora_path="seen").status_code == 404
    load(server, "here", contents[0]).raise_for_status()
    first = answer(server, TEXT, "here")
    reload(server, "here", contents[1]).raise_for_status()
    second = answer(server, TEXT, "here")
    unload(server, "here").raise_for_status()
    shutil.copytree(contents[0], folder)
    models = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert "seen" in {card["id"] for card in models} and "seen" not in adapters(server)
    assert answer(server, TEXT, "seen") == first
    chat = post(server, "v1/chat/completions", model="seen", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert chat.status_code == 200
    for file in contents[1].iterdir():
        shutil.copy(file, folder)
    assert soon(lambda: adapters(server)["seen"]["version"] == 2)
    assert answer(server, TEXT, "seen") == second
    shutil.rmtree(folder)
    assert soon(lambda: "seen" not in adapters(server))
    unknown = post(server, "generate", text=TEXT, lora_path="seen", stream=True)
    assert unknown.status_code == 404 and "no adapter named 'seen'" in unknown.text


@pytest.mark.parametrize("versions", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_every_answer_is_of_one_version_while_a_trainer_pushes(
    server: Server, contents: list[Path], versions: int
) -> None:
    found = pushes.run(server, contents, versions)
    assert found.wrong == [] and found.versions == versions
    assert len(found.answers) > 3, "pushes and answers took turns"
    assert files_of_uploads(server) == 0 and phases.users_left(server) == {}
    early, late = found.memory[len(found.memory) // 2], found.memory[-1]
    assert late - early < 24, found.memory  # 500 copies of the weights alone would be 250 MB
