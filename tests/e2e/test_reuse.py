"""The prefix cache served: nothing shared that must not be, everything that may, and counted."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from tests.conftest import Server
from tests.support.head_reference import Reference, data_url, make_image, question
from tests.support.tiny_random import make_adapter
from vlora_sgl.heads import save_heads

pytestmark = pytest.mark.e2e
IMAGE_TOKENS = 12  # 112 x 84 pixels, 28 x 28 a token


def ask(
    server: Server,
    prompt: str,
    name: str | None = None,
    images: tuple[int, ...] = (1,),
    size: Any = (112, 84),
    **more: Any,
) -> Any:
    pictures = [data_url(make_image(seed, size)) for seed in images]
    return server.generate(text=prompt, image_data=pictures, lora_path=name, **more)


def reuse(answer: Any) -> Any:
    return answer["meta_info"]["vlora"]["reuse"]


def test_adapters_do_not_share_and_answers_equal_cold_runs(server: Server) -> None:
    prompt, order = question("Describe the image in one word."), (None, "A", "B", "A", None, "B")
    cold = {}
    for name in (None, "A", "B"):
        server.flush()
        cold[name] = ask(server, prompt, name)["output_ids"]
    assert len({tuple(ids) for ids in cold.values()}) == 3
    server.flush()
    seen = set()
    for name in order:
        answer = ask(server, prompt, name)
        assert answer["output_ids"] == cold[name]
        assert (reuse(answer)["cached_tokens"] > 0) == (name in seen)
        assert reuse(answer)["shared_tokens"] == 0
        seen.add(name)


def test_round_two_computes_no_image_token_again(server: Server) -> None:
    server.flush()
    first = question("Is there a cat?")
    answer = ask(server, first, "A")
    assert reuse(answer)["prompt_image_tokens"] == IMAGE_TOKENS and reuse(answer)["cached_image_tokens"] == 0
    second = first + answer["text"] + "<|im_end|>\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"
    found = reuse(ask(server, second, "A"))
    assert found["cached_image_tokens"] == found["prompt_image_tokens"] == IMAGE_TOKENS
    assert found["cached_tokens"] == found["cached_image_tokens"] + found["cached_text_tokens"]


def test_another_image_is_another_prefix(server: Server) -> None:
    server.flush()
    prompt = question("Is there a cat?")
    ask(server, prompt, images=(1,))
    assert reuse(ask(server, prompt, images=(2,)))["cached_image_tokens"] == 0
    assert reuse(ask(server, prompt, images=(1,)))["cached_image_tokens"] == IMAGE_TOKENS


def test_a_callers_word_for_an_image_is_not_taken(server: Server) -> None:
    server.flush()
    prompt = question("Is there a cat?")
    ask(server, prompt, images=(1,), mm_hashes=["abc"])
    assert reuse(ask(server, prompt, images=(2,), mm_hashes=["abc"]))["cached_image_tokens"] == 0


def test_an_image_is_encoded_once_for_all_adapters(server: Server) -> None:
    server.flush()
    prompt = question("Is there a cat?")
    found = [reuse(ask(server, prompt, name, images=(91,))) for name in (None, "A", "B", "A")]
    encoder = [(one["encoder_misses"], one["encoder_hits"]) for one in found]
    assert encoder == [(1, 0), (0, 1), (0, 1), (0, 0)], "the last one's image was in the prefix cache"
    before = stats(server)["encoder"]
    both = reuse(ask(server, question("Is there a cat?", images=2), images=(92, 91)))
    after = stats(server)["encoder"]
    assert (both["encoder_misses"], both["encoder_hits"]) == (1, 1)
    assert (after["misses"] - before["misses"], after["hits"] - before["hits"]) == (1, 1)
    assert 0 < after["bytes"] <= after["capacity_bytes"] and after["images"] > before["images"]


def test_equal_patches_in_another_grid_are_another_image(server: Server) -> None:
    """A grey image has the same patches lying and standing, and SGLang's hash is of the patches."""
    server.flush()
    prompt = question("Describe the image in one word.")
    for size in ((196, 56), (56, 196)):
        grey = data_url(Image.new("RGB", size, (99, 99, 99)))
        found = reuse(server.generate(text=prompt, image_data=[grey]))
        assert (found["encoder_misses"], found["encoder_hits"], found["cached_image_tokens"]) == (1, 0, 0)


def test_random_interleavings_equal_cold_runs(server: Server, tmp_path: Path) -> None:
    """Adapters, images, rounds and clients that go away, eight at a time."""
    save_heads(make_adapter(tmp_path / "I", server.model.path, 61), [], invocation="after_image")
    load(server, "I", tmp_path / "I")
    first = question("Describe the image in one word.")
    prompts = [first, first + "yes<|im_end|>\n<|im_start|>user\nIs there a cat?<|im_end|>\n<|im_start|>assistant\n"]
    cases = list(itertools.product(prompts, (None, "A", "B", "I"), (1, 2)))
    cold = {}
    for prompt, name, image in cases:
        server.flush()
        cold[prompt, name, image] = ask(server, prompt, name, images=(image,))["output_ids"]
    assert len({tuple(ids) for ids in cold.values()}) > len(cases) // 2
    server.flush()
    choose = random.Random(0)

    def one(case: Any) -> Any:
        prompt, name, image = case
        if choose.random() < 0.2:
            with contextlib.suppress(requests.Timeout):
                body = {"text": prompt, "image_data": [data_url(make_image(image))], "lora_path": name}
                requests.post(f"{server.url}/generate", json=body, timeout=choose.choice((0.05, 0.2)))
        return ask(server, prompt, name, images=(image,), timeout=300)["output_ids"]

    order = [choose.choice(cases) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, order))
    assert answers == [cold[case] for case in order]
    unload(server, "I")


def stats(server: Server) -> Any:
    return requests.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]["vlora"]


def test_prometheus_shows_what_was_reused(server: Server) -> None:
    ask(server, question("Is there a cat?"), "A")
    shown = requests.get(f"{server.url}/metrics", timeout=30).text
    for name in ("vlora:reuse_tokens{", 'kind="cached_image"', "vlora:encoder_images{", "vlora:head_requests{"):
        assert name in shown


def load(server: Server, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    reply = requests.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)
    assert reply.status_code == 200, reply.text


def unload(server: Server, name: str) -> None:
    reply = requests.post(f"{server.url}/unload_lora_adapter", json={"lora_name": name}, timeout=60)
    assert reply.status_code == 200, reply.text


def test_identity_is_content_across_reloads(server: Server, tmp_path: Path) -> None:
    prompt = question("Describe the image in one word.")
    old = make_adapter(tmp_path / "old", server.model.path, 21)
    new = make_adapter(tmp_path / "new", server.model.path, 22)
    path = tmp_path / "served"
    shutil.copytree(old, path)
    server.flush()
    load(server, "R", path)
    first = ask(server, prompt, "R")
    unload(server, "R")
    load(server, "R", path)
    again = ask(server, prompt, "R")
    assert again["output_ids"] == first["output_ids"] and reuse(again)["cached_image_tokens"] == IMAGE_TOKENS
    unload(server, "R")
    shutil.rmtree(path)
    shutil.copytree(new, path)
    load(server, "R", path)
    other = ask(server, prompt, "R")
    assert other["output_ids"] != first["output_ids"] and reuse(other)["cached_tokens"] == 0
    server.flush()
    assert ask(server, prompt, "R")["output_ids"] == other["output_ids"]
    unload(server, "R")


def test_a_salt_cannot_reach_an_adapters_entries(server: Server) -> None:
    prompt = question("Is there a cat?")
    server.flush()
    ask(server, prompt, "A")
    assert reuse(ask(server, prompt, extra_key="A"))["cached_tokens"] == 0
    assert reuse(ask(server, prompt, "A", extra_key="x"))["cached_tokens"] == 0
    assert reuse(ask(server, prompt, "A", extra_key="x"))["cached_image_tokens"] == IMAGE_TOKENS


def test_totals_are_shown(server: Server) -> None:
    def totals() -> Any:
        return requests.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]["vlora"]["reuse"]

    before = totals()
    found = reuse(ask(server, question("Is there a cat?"), "B"))
    after = totals()
    assert after["requests"] == before["requests"] + 1
    assert after["cached_tokens"] - before["cached_tokens"] == found["cached_tokens"]


def test_activated_adapters_share_one_image_exactly(server: Server, tmp_path: Path) -> None:
    prompt = question("Describe the image in one word.")
    names = ["V1", "V2", "V3"]
    for number, name in enumerate(names):
        path = make_adapter(tmp_path / name, server.model.path, 31 + number)
        save_heads(path, [], invocation="after_image")
        load(server, name, path)
    cold = {}
    for name in (*names, None):
        server.flush()
        cold[name] = ask(server, prompt, name, size=(224, 168))
        assert reuse(cold[name])["cached_tokens"] == 0
    assert len({tuple(answer["output_ids"]) for answer in cold.values()}) == len(cold)
    server.flush()
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(cold, pool.map(lambda name: ask(server, prompt, name, size=(224, 168)), cold), strict=True))
    assert {name: a["output_ids"] for name, a in answers.items()} == {n: a["output_ids"] for n, a in cold.items()}
    cached = sorted(reuse(answer)["cached_image_tokens"] for answer in answers.values())
    assert cached == [0, 48, 48, 48], "one of them computes the image"
    assert sum(reuse(answer)["shared_tokens"] > 0 for answer in answers.values()) == 3
    for name in names:
        unload(server, name)


def test_eight_activated_adapters_prefill_their_image_once(server: Server, tmp_path: Path) -> None:
    prompt, names = question("How many objects are there?"), [f"E{number}" for number in range(8)]
    for number, name in enumerate(names):
        save_heads(make_adapter(tmp_path / name, server.model.path, 51 + number), [], invocation="after_image")
        load(server, name, tmp_path / name)
    server.flush()
    before = stats(server)["reuse"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: ask(server, prompt, name, images=(77,), size=(224, 168)), names))
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 4
    assert sorted(reuse(answer)["cached_image_tokens"] for answer in answers) == [0, *[48] * 7]
    assert sum(reuse(answer)["encoder_misses"] for answer in answers) == 1
    after = stats(server)["reuse"]
    gained = {name: after[name] - before[name] for name in after}
    assert gained["prompt_image_tokens"] - gained["cached_image_tokens"] == 48, "the image, once"
    assert gained["shared_tokens"] >= 7 * 48
    for name in names:
        unload(server, name)


def test_an_activated_adapter_equals_its_definition(server: Server, tmp_path: Path) -> None:
    """The base model's KV up to the invocation start, the adapter after it: transformers + PEFT in two passes."""
    prompt, image = question("Describe the image in one word."), make_image(1)
    path = make_adapter(tmp_path / "W", server.model.path, 41)
    save_heads(path, [], invocation="after_image")
    load(server, "W", path)
    server.flush()
    served = ask(server, prompt, "W")["output_ids"]
    load_plain = make_adapter(tmp_path / "P", server.model.path, 41)
    load(server, "P", load_plain)
    assert ask(server, prompt, "P")["output_ids"] != served, "the invocation start must matter"
    assert Reference(server.model.path).generate_activated(path, prompt, image, len(served)) == served
    unload(server, "W")
    unload(server, "P")
