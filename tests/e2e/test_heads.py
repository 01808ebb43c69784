"""Heads served: equal to transformers + PEFT + head, alone and among generating requests, and what goes wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.conftest import Server
from tests.e2e.reference import Reference, assert_close, data_url, make_image, question
from tests.tiny_random import make_adapter
from vlora_sgl.heads import ClassifyHead, CountHead, DetectHead, save_heads

pytestmark = pytest.mark.e2e
HIDDEN = 128
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
    return server.generate(**request)["meta_info"]["vlora_head"]


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
    images = [make_image(seed) for seed in range(6)]

    def generated(name: str | None, image: Any) -> Any:
        return server.generate(text=PROMPT, image_data=[data_url(image)], lora_path=name)["output_ids"]

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
    assert_close(together, alone, tolerance=1e-4)


def test_a_long_prompt_in_chunks_and_two_images(server: Server, headed: dict[str, Path]) -> None:
    found = server.generate(
        text=question("Is there a cat?", images=2),
        image_data=[data_url(make_image(1)), data_url(make_image(2, (224, 140)))],
        lora_path="H1",
        sampling_params={"custom_params": {"vlora_head": "find"}},
    )["meta_info"]["vlora_head"]
    assert found["image_sizes"] == [[112, 84], [224, 140]]


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


def test_many_head_requests_leave_nothing_behind(server: Server, headed: dict[str, Path]) -> None:
    def one(number: int) -> None:
        name, head = (("H1", "kind"), ("H2", "dots"), ("H1", "find"))[number % 3]
        if number % 10 == 0:
            server.generate(text=PROMPT, image_data=[data_url(make_image(number % 7))], lora_path="A")
        ask(server, name, head, make_image(number % 13))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))
    server.flush()  # refused while anything runs; SGLang's own idle check kills the server if a slot is missing
    assert server.process.poll() is None
    state = requests.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]
    assert state["vlora"]["heads"]["requests"] >= 200


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
        assert_close({key: answer[key] for key in wanted}, wanted, tolerance=1e-3)
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
    assert_close(found["meta_info"]["vlora_head"], wanted, tolerance=1e-4)
    assert found["text"] == wanted["label"] and found["meta_info"]["completion_tokens"] == 1
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}]
    parts.append({"type": "text", "text": "How many objects are there?"})
    chat = {"model": "H1", "messages": [{"role": "user", "content": parts}], "head": "kind"}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == wanted["label"]
