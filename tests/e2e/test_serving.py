"""The main job, end to end: one server, images and adapters mixed, answers equal to transformers + PEFT."""

from __future__ import annotations

import base64
import http.client
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from tests.conftest import Server
from tests.support.reference import Reference
from tests.support.ties import assert_same_tokens
from vlora_sgl import plugin
from vlora_sgl.platforms.cpu import is_plain_cpu
from vlora_sgl.seams import How

pytestmark = pytest.mark.e2e

QUESTION = "How many objects are there?"
MIXED = [None, "A", "B", "A"]


def prompt(*turns: str, image: bool = False) -> str:
    """The chat template's text for turns that begin with the user; the image goes into the first."""
    parts = []
    for position, turn in enumerate(turns):
        seen = "<|vision_start|><|image_pad|><|vision_end|>" if image and position == 0 else ""
        parts.append(f"<|im_start|>{('user', 'assistant')[position % 2]}\n{seen}{turn}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def picture(seed: int) -> Image.Image:
    """A 112x112 image of soft random blobs."""
    noise = np.random.default_rng(seed).integers(0, 255, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((112, 112), Image.Resampling.BICUBIC)


def encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.model.path, server.model.adapters)


@pytest.mark.parametrize("seen", [False, True], ids=["text", "image"])
def test_mixed_batch_equals_single_runs_and_peft(server: Server, reference: Reference, seen: bool) -> None:
    text, image = prompt(QUESTION, image=seen), picture(1)
    data = {"image_data": encoded(image)} if seen else {}
    expected = {name: reference.generate(text, name, image if seen else None) for name in (None, "A", "B")}
    assert len({tuple(ids) for ids in expected.values()}) == 3, "the adapters must change the answer"

    server.flush()
    for name, ids in expected.items():
        assert_same_tokens(server.generate(text=text, lora_path=name, **data), ids)

    server.flush()
    batch = {key: [value] * len(MIXED) for key, value in data.items()}
    rows = server.generate(text=[text] * len(MIXED), lora_path=MIXED, **batch)
    for row, name in zip(rows, MIXED, strict=True):
        assert_same_tokens(row, expected[name])
    assert [row["meta_info"]["vlora"]["adapter"] for row in rows] == MIXED


@pytest.mark.gpu
@pytest.mark.skipif(is_plain_cpu(), reason="the encoder's CUDA graphs")
def test_images_of_one_size_replay_the_encoders_graph(server: Server, reference: Reference) -> None:
    """Two sizes of as many patches in turn: each has a graph of its own, and every answer is transformers'."""

    before = graph_state(server)
    for seed in range(20, 28):
        for size in ((112, 112), (56, 224)):
            image = picture(seed).resize(size)
            text = prompt(QUESTION, image=True)
            answer = server.generate(text=text, lora_path=None, image_data=encoded(image))
            assert_same_tokens(answer, reference.generate(text, None, image))
    after = graph_state(server)
    assert after["encoder"]["graph_replays"] - before["encoder"].get("graph_replays", 0) >= 8
    assert after["encoder"]["encoded_ahead"] - before["encoder"]["encoded_ahead"] >= 8
    assert after["encoder"]["misses"] - before["encoder"]["misses"] == 16, "what is encoded ahead was not there before"
    if after["prefill_graphs"] is not None:
        assert after["prefill_graphs"] - before["prefill_graphs"] == 16


@pytest.mark.gpu
@pytest.mark.skipif(is_plain_cpu(), reason="the prefill's CUDA graphs")
def test_prefills_of_all_lengths_replay_graphs(server: Server, reference: Reference) -> None:
    """Alone and several at once, with prefixes in the cache and without; each answer is transformers'."""
    texts = [prompt(QUESTION * n) for n in (1, 1, 2, 5)]
    names = ["A", None, "B", "A"]
    expected = [reference.generate(text, name) for text, name in zip(texts, names, strict=True)]
    before = graph_state(server)["prefill_graphs"]
    for _ in range(2):
        server.flush()
        for text, name, answer in zip(texts, names, expected, strict=True):
            assert_same_tokens(server.generate(text=text, lora_path=name), answer)
        server.flush()
        for _ in range(2):
            rows = server.generate(text=texts, lora_path=names)
            for row, answer in zip(rows, expected, strict=True):
                assert_same_tokens(row, answer)
    assert graph_state(server)["prefill_graphs"] - before >= 12


def graph_state(server: Server) -> dict[str, Any]:
    """What the server says of its CUDA graphs, among other things."""
    return requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["vlora"]


def test_second_round_about_an_image_finds_it_cached(server: Server, reference: Reference) -> None:
    server.flush()
    first, image = prompt(QUESTION, image=True), picture(2)
    total, image_tokens = reference.prompt_tokens(first, image)
    assert 0 < image_tokens < total
    answer = server.generate(text=first, image_data=encoded(image), lora_path="A")
    assert answer["meta_info"]["cached_tokens"] == 0

    second = prompt(QUESTION, answer["text"], "Is there a cat?", image=True)
    again = server.generate(text=second, image_data=encoded(image), lora_path="A")
    assert again["meta_info"]["cached_tokens"] >= total - 1
    assert_same_tokens(again, reference.generate(second, "A", image))

    other = server.generate(text=second, image_data=encoded(image), lora_path="B")
    assert other["meta_info"]["cached_tokens"] == 0
    assert_same_tokens(other, reference.generate(second, "B", image))


def test_openai_client_picks_the_adapter_by_every_name(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    base = next(model.id for model in client.models.list() if model.id not in server.adapters)

    def ask(model: str, **extra: Any) -> Any:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=12,
            extra_body={"ignore_eos": True, **extra},
        )

    answers = {model: ask(model).choices[0].message.content for model in (base, "A", "B")}
    assert len(set(answers.values())) == 3
    assert ask(f"{base}:A").choices[0].message.content == answers["A"]
    assert ask(base, lora_path="B").choices[0].message.content == answers["B"]
    assert ask("A").model == "A"


def test_sglang_client_runs_unchanged(server: Server) -> None:
    import sglang

    @sglang.function
    def program(s: Any) -> None:
        s += sglang.user(QUESTION)
        s += sglang.assistant(sglang.gen("answer", max_tokens=8, ignore_eos=True))

    state = program.run(backend=sglang.RuntimeEndpoint(server.url), temperature=0)
    assert state["answer"]


def unknown_by_path(server: Server) -> requests.Response:
    return post(server, "generate", text=QUESTION, lora_path="C")


def unknown_after_colon(server: Server) -> requests.Response:
    return post(server, "v1/chat/completions", model=f"{server.model.path}:C", messages=messages(QUESTION))


def unknown_model(server: Server) -> requests.Response:
    return post(server, "v1/completions", model="C", prompt=QUESTION)


def post(server: Server, route: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/{route}", json=body, timeout=60)


def messages(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": part} for part in content]


@pytest.mark.parametrize("ask", [unknown_by_path, unknown_after_colon, unknown_model])
def test_unknown_adapter_is_a_404_that_lists_the_loaded(
    server: Server, ask: Callable[[Server], requests.Response]
) -> None:
    response = ask(server)
    assert response.status_code == 404
    assert "no adapter named 'C'; loaded: A, B" in response.text


def test_broken_image_is_refused(server: Server) -> None:
    broken = base64.b64encode(b"not an image").decode()
    response = post(server, "generate", text=prompt(QUESTION, image=True), image_data=broken)
    assert 400 <= response.status_code < 500
    assert "image" in response.text
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}
    response = post(server, "v1/chat/completions", model="default", messages=messages([url]))
    assert 400 <= response.status_code < 500
    assert "image" in response.text
    assert server.generate(text=QUESTION)["output_ids"]


def test_prompt_over_the_context_is_refused(server: Server) -> None:
    response = post(server, "generate", text="cat " * 4000)
    assert response.status_code == 400
    assert "context length (2048 tokens)" in response.text
    assert server.generate(text=QUESTION)["output_ids"]


def test_adapter_directory_without_config_is_refused(server: Server, tmp_path: Path) -> None:
    shutil.copy(server.model.adapters["A"] / "adapter_model.safetensors", tmp_path)
    response = post(server, "load_lora_adapter", lora_name="D", lora_path=str(tmp_path))
    assert response.status_code == 400
    assert "adapter_config.json" in response.text
    assert server.generate(text=QUESTION, lora_path="A")["output_ids"]


def test_server_says_what_runs(server: Server) -> None:
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    ours = info["internal_states"][0]["vlora"]
    assert ours["scheduler"] == "VLoraScheduler"
    assert ours["mode"] == "auto"
    chosen = ours["chosen"]["settings"]
    assert {"user", "measured", "SGLang", "plain CPU"} >= {one["by"] for one in chosen.values()}
    assert chosen["attention_backend"]["value"] == info["attention_backend"]
    if not is_plain_cpu():
        assert f"attention {info['attention_backend']} ({chosen['attention_backend']['by']})" in server.log.read_text()


def test_the_server_says_of_every_replacement_where_it_is_or_why_not(server: Server) -> None:
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    found = info["internal_states"][0]["vlora"]["seams"]
    assert found.keys() == {row.target for row in plugin.TABLE}
    nowhere = {target for target, state in found.items() if state["state"] == "not in this process"}
    elsewhere = {"multimodal_processor.pkgutil", "detokenizer_manager.DecodeStatus"}
    if not is_plain_cpu():
        elsewhere |= {"sys.modules", "torch.tensor", "torch.Tensor.pin_memory"}  # a plain CPU's
    assert nowhere <= {"sys.meta_path", *elsewhere}, "a client's, and those of other processes"
    assert all(state.get("places") or state.get("why") for target, state in found.items() if target not in nowhere)
    always = {row.target for row in plugin.TABLE if row.how in (How.CLASS, How.WRAP)}
    parts = {"Scheduler.policy", "TokenizerManager.rid_to_state", "http_server.app.router.routes"}
    model = {"LogitsProcessor.forward", "Qwen2DecoderLayer.forward"}
    assert {found[target]["state"] for target in always | parts | model} == {"in place"}
    if is_plain_cpu():
        assert found["Qwen2Attention.forward"] == {"state": "not for this model", "why": "the GPU is no Hopper"}


@pytest.mark.skipif(not is_plain_cpu(), reason="on a GPU SGLang's capture and kernels speak for themselves")
def test_an_idle_connection_outlives_those_of_usual_clients(server: Server) -> None:
    """uvicorn's five seconds are shorter than aiohttp's fifteen: such a client lost a request now and then."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
        opened = connection.sock
        time.sleep(6)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        assert opened is not None and connection.sock is opened
    finally:
        connection.close()


def test_a_start_prints_what_a_user_needs(server: Server) -> None:
    text = server.log.read_text()
    assert f"vlora_sgl: serving {server.model.path} on {server.url} (adapters: A, B)" in text
    before, _, _ = text.partition("vlora_sgl: serving")
    for noise in ("Traceback", "Warning", "Ignore import error", "torchcodec"):
        assert noise not in before, before
