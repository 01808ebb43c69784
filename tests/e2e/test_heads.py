"""Heads served: equal to transformers + PEFT + head, alone and among generating requests, and what goes wrong."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch

from tests.conftest import Server
from tests.support.head_reference import (
    ROUNDING,
    Reference,
    assert_close,
    data_url,
    make_image,
    question,
)
from tests.support.ties import assert_same_tokens
from tests.support.tiny_random import make_adapter
from vlora_sgl.errors import HeadError, UnknownAdapterError
from vlora_sgl.heads import ClassifyHead, CountHead, DetectHead, save_heads
from vlora_sgl.heads.asking import Task
from vlora_sgl.heads.asking import ask as ask_engine

pytestmark = pytest.mark.e2e
HIDDEN = 128
MANY = "VLORA_TEST_HEAD_REQUESTS"  # head requests of the leak test, for a longer run
PROMPT = question("How many objects are there?")


def make_headed(directory: Path, model: Path, seed: int, labels: list[str], **options: Any) -> Path:
    make_adapter(directory, model, seed)
    torch.manual_seed(seed)
    heads = [ClassifyHead("kind", HIDDEN, labels), CountHead("dots", HIDDEN, 4)]
    heads.append(DetectHead("find", HIDDEN, ["cat", "dog"], threshold=0.01))
    save_heads(directory, heads, **options)
    return directory


@pytest.fixture(scope="module")
def headed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two more adapters on the server, with heads of the same names."""
    root = tmp_path_factory.mktemp("headed")
    paths = {
        "H1": make_headed(root / "H1", server.model.path, 11, ["cat", "dog", "owl"]),
        "H2": make_headed(root / "H2", server.model.path, 12, ["yes", "no"]),
    }
    for name, path in paths.items():
        body = {"lora_name": name, "lora_path": str(path)}
        reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
    return paths


def ask(server: Server, adapter: str | None, head: str, image: Any = None, prompt: str = PROMPT) -> Any:
    request: dict[str, Any] = {"text": prompt, "sampling_params": {"custom_params": {"vlora_head": head}}}
    if adapter is not None:
        request["lora_path"] = adapter
    if image is not None:
        request["image_data"] = [data_url(image)]
    return server.generate(**request)["meta_info"]["vlora"]["head"]


@pytest.mark.parametrize("head", ["kind", "dots", "find"])
def test_answers_equal_transformers_and_peft(server: Server, headed: dict[str, Path], head: str) -> None:
    reference, image = Reference(server.model.path), make_image(3)
    expected = {name: reference.answer(path, head, PROMPT, image) for name, path in headed.items()}
    assert expected["H1"] != expected["H2"]
    for name in headed:
        server.flush()
        cold = ask(server, name, head, image)
        warm = ask(server, name, head, image)  # the prompt is cached: the last token, or the remembered answer
        assert_close(cold, expected[name])
        assert_close(warm, expected[name])


def test_mixed_with_generating_requests(server: Server, headed: dict[str, Path]) -> None:
    images = [make_image(seed) for seed in range(3)]

    def generated(name: str | None, image: Any) -> Any:
        return server.generate(text=PROMPT, image_data=[data_url(image)], lora_path=name)

    jobs: list[tuple[Any, ...]] = [
        (ask, server, name, head, image)
        for image in images
        for name, head in (("H1", "kind"), ("H2", "kind"), ("H1", "dots"), ("H2", "find"))
    ]
    jobs += [(generated, name, image) for image in images for name in (None, "A", "H1")]
    server.flush()
    alone = [job[0](*job[1:]) for job in jobs]
    server.flush()
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: job[0](*job[1:]), jobs))
    heads = 4 * len(images)
    assert_close(together[:heads], alone[:heads], tolerance=1e-4 * ROUNDING**2)
    for one, other in zip(together[heads:], alone[heads:], strict=True):
        assert_same_tokens(one, other)


@pytest.mark.parametrize("head", ["kind", "find"])
def test_several_images_equal_transformers_and_peft(server: Server, headed: dict[str, Path], head: str) -> None:
    """The frames of a clip for its action; boxes of two images of different sizes."""
    images = [make_image(1), make_image(2, (224, 140)), make_image(3)]
    prompt = question("How many objects are there?", images=3)
    found = server.generate(text=prompt, image_data=[data_url(i) for i in images], lora_path="H1", head=head)
    answer = found["meta_info"]["vlora"]["head"]
    assert_close(answer, Reference(server.model.path).answer(headed["H1"], head, prompt, *images))
    if head == "find":
        assert answer["image_sizes"] == [[112, 84], [224, 140], [112, 84]]


def test_the_order_of_frames_counts(server: Server, headed: dict[str, Path]) -> None:
    frames = [data_url(make_image(seed)) for seed in range(3)]
    prompt = question("How many objects are there?", images=3)
    one, other = (
        server.generate(text=prompt, image_data=order, lora_path="H1", head="kind")["meta_info"]["vlora"]["head"]
        for order in (frames, frames[::-1])
    )
    assert one["probabilities"] != other["probabilities"]


@pytest.mark.parametrize(
    ("adapter", "head", "with_image", "message"),
    [
        ("H1", "kinds", True, "kind (classify), dots (count), find (detect)"),
        ("A", "kind", True, "heads it has: none"),
        (None, "kind", True, "base model has no heads"),
        ("H1", "find", False, "has none"),
    ],
)
def test_impossible_requests_get_400(
    server: Server, headed: dict[str, Path], adapter: Any, head: str, with_image: bool, message: str
) -> None:
    body = {"text": PROMPT if with_image else "Is there a cat?", "lora_path": adapter}
    body["sampling_params"] = {"custom_params": {"vlora_head": head}}
    if with_image:
        body["image_data"] = [data_url(make_image(0))]
    reply = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert reply.status_code == 400 and message in reply.text
    assert ask(server, "H1", "kind", make_image(0))["kind"] == "classify"  # and the server goes on


def test_a_wrong_head_file_fails_the_load_by_name(server: Server, headed: dict[str, Path], tmp_path: Path) -> None:
    path = make_headed(tmp_path / "bad", server.model.path, 13, ["a", "b"])
    torch.manual_seed(0)
    (path / "vlora_adapter.json").write_text('{"format": 1, "heads": [{"name": "x", "kind": "classify"}]}')
    body = {"lora_name": "bad", "lora_path": str(path)}
    reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)
    assert reply.status_code == 400 and "head 'x' needs ['labels']" in reply.text


def test_head_requests_mixed_with_streams_leak_nothing(server: Server, headed: dict[str, Path]) -> None:
    before, count = stats(server)["heads"], int(os.environ.get(MANY, "90"))

    def one(number: int) -> None:
        name, head = (("H1", "kind"), ("H2", "dots"), ("H1", "find"))[number % 3]
        if number % 5 == 0:
            stream(server, ("A", None, "H2")[number % 3], make_image(number % 7), hang_up=number % 10 == 0)
        ask(server, name, head, make_image(number % 13))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(count)))
    server.flush()  # refused while anything runs
    load = requests.get(f"{server.url}/get_load", timeout=30).json()[0]
    assert (load["num_reqs"], load["num_tokens"]) == (0, 0)
    # SGLang ends the server when, idle, a token or request slot is missing: it must still answer.
    time.sleep(1)
    assert ask(server, "H1", "kind", make_image(0))["kind"] == "classify"
    assert server.process.poll() is None
    assert stats(server)["heads"]["requests"] == before["requests"] + count + 1


def stats(server: Server) -> Any:
    reply = requests.get(f"{server.url}/server_info", timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()["internal_states"][0]["vlora"]


def stream(server: Server, adapter: str | None, image: Any, hang_up: bool) -> None:
    """Generate 12 tokens as a stream; or go away after the first."""
    body = {"text": PROMPT, "image_data": [data_url(image)], "lora_path": adapter, "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=120) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines).startswith(b"data:")
        if not hang_up:
            assert list(lines)[-1] == b"data: [DONE]"


class Remote:
    """What asks heads in the engine's ``classify``, ``count`` and ``detect``, whose ``generate`` asks the server."""

    def __init__(self, server: Server, adapters: dict[str, Path]) -> None:
        from transformers import AutoProcessor

        def directory_of(name: str) -> str:
            if name not in adapters:
                raise UnknownAdapterError(name, adapters)
            return str(adapters[name])

        processor = AutoProcessor.from_pretrained(server.model.path, use_fast=False)
        self.tokenizer_manager = SimpleNamespace(
            adapters=SimpleNamespace(directory_of=directory_of), processor=processor
        )
        self.generate = lambda prompt, image_data, **more: server.generate(
            text=prompt, image_data=[data_url(image) for image in image_data], **more
        )


def test_the_engines_methods(server: Server, headed: dict[str, Path]) -> None:
    engine, image = Remote(server, headed), make_image(3)
    template = engine.tokenizer_manager.processor.apply_chat_template
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there a cat?"}]}]
    prompt = template(turn, tokenize=False, add_generation_prompt=True)
    tasks: tuple[tuple[Task, str], ...] = (("classify", "kind"), ("count", "dots"), ("detect", "find"))
    for task, head in tasks:
        found = ask_engine(engine, task, image, "H1", None, "Is there a cat?")
        again = ask_engine(engine, task, [image], "H1", head, "Is there a cat?")
        for other in (ask(server, "H1", head, image, prompt), again):
            assert_close(other, found, tolerance=1e-4 * ROUNDING**2)
    with pytest.raises(HeadError, match=r"kind \(classify\), dots \(count\), find \(detect\)"):
        ask_engine(engine, "classify", image, "H1", "dots", None)
    with pytest.raises(HeadError, match="needs an image"):
        ask_engine(engine, "detect", [], "H1", None, None)
    with pytest.raises(UnknownAdapterError, match="H1, H2"):
        ask_engine(engine, "count", image, "H3", None, None)


def test_vision_routes_answer_like_generate(server: Server, headed: dict[str, Path]) -> None:
    image = make_image(3)
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    body = {"model": "H1", "input": [part, {"type": "text", "text": "How many objects are there?"}]}
    for task, head in (("classify", "kind"), ("count", "dots"), ("detect", "find")):
        reply = requests.post(f"{server.url}/v1/vision/{task}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert (answer["object"], answer["model"], answer["head"]) == (f"vision.{task}", "H1", head)
        wanted = ask(server, "H1", head, image)
        assert_close({key: answer[key] for key in wanted}, wanted, tolerance=1e-3 * ROUNDING)
    schema = requests.get(f"{server.url}/openapi.json", timeout=30).json()
    assert {"/v1/vision/classify", "/v1/vision/count", "/v1/vision/detect"} <= schema["paths"].keys()


@pytest.mark.parametrize(
    ("task", "change", "status", "message"),
    [
        ("classify", {"head": "dots"}, 400, "kind (classify), dots (count), find (detect)"),
        ("classify", {"model": "A"}, 400, "heads it has: none"),
        ("classify", {"model": "nobody"}, 404, "nobody"),
        ("detect", {"input": [{"type": "text", "text": "x"}]}, 400, "needs an image"),
        ("detect", {"input": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}, 400, "allowed"),
    ],
)
def test_vision_routes_refuse_by_name(
    server: Server, headed: dict[str, Path], task: str, change: dict[str, Any], status: int, message: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(make_image(0))}}
    body = {"model": "H1", "input": [part], **change}
    reply = requests.post(f"{server.url}/v1/vision/{task}", json=body, timeout=60)
    assert reply.status_code == status and message in reply.text


def test_head_in_generate_and_chat_completions(server: Server, headed: dict[str, Path]) -> None:
    image = make_image(3)
    wanted = ask(server, "H1", "kind", image)
    found = server.generate(text=PROMPT, image_data=[data_url(image)], lora_path="H1", head="kind")
    assert_close(found["meta_info"]["vlora"]["head"], wanted, tolerance=1e-4)
    assert found["text"] == wanted["label"] and found["meta_info"]["completion_tokens"] == 1
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}]
    parts.append({"type": "text", "text": "How many objects are there?"})
    chat = {"model": "H1", "messages": [{"role": "user", "content": parts}], "head": "kind"}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == wanted["label"]
