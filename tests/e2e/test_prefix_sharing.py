"""Requests about one new image that wait in the queue together: one prefill, and the answers of cold runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server, TinyModel, queued_together, serve
from tests.e2e.test_reuse import ask, load, reuse, stats, unload
from tests.e2e.test_scheduling import change
from tests.support.head_reference import question
from tests.support.ties import MARGIN, assert_same_tokens
from tests.support.tiny_random import make_adapter
from vlora_sgl.heads import save_heads
from vlora_sgl.platforms.cpu import is_plain_cpu

pytestmark = pytest.mark.e2e

NAMES = (None, "J0", "J1", "J2", "J3")
PROMPT = question("Describe the image in one word.")
IMAGE_TOKENS, CHUNK = 48, 48
TRIES = 5


def load_activated(server: Server, root: Path) -> None:
    """The adapters of ``NAMES``, which start after the image."""
    for number, name in enumerate(NAMES[1:]):
        save_heads(make_adapter(root / name, server.model.path, 71 + number), [], invocation="after_image")
        load(server, name, root / name)


def ask_big(server: Server, **request: Any) -> Any:
    """What ``ask`` gives for this module's prompt, about an image whose prefix is worth sharing."""
    return ask(server, PROMPT, size=(224, 168), **request)


def cold_answers(server: Server, names: Sequence[str | None] = NAMES, **more: Any) -> dict[str | None, Any]:
    """Each name's answer when nothing is in the cache."""
    cold = {}
    for name in names:
        server.flush()
        cold[name] = ask_big(server, name=name, **more)
    server.flush()
    return cold


def assert_same(found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, answer in found.items():
        assert_same_tokens(answer, wanted[key])


def together(
    server: Server,
    asked: Mapping[Any, Mapping[str, Any]],
    abort: Sequence[str] = (),
    before: Callable[[], Any] = lambda: None,
    send: Callable[..., Any] = ask_big,
) -> tuple[dict[Any, Any], int, int]:
    """Answers to requests that an idle scheduler with an empty cache finds in its queue at once.

    Args:
        asked: what ``send`` takes beside the server, by any key.
        abort: ids of requests that are aborted before the scheduler sees them.
        before: what puts something in the cache first.
        send: what asks for an answer.

    Returns:
        The answers; the batches that ran for them; the images that were looked up in the encoder's cache.
    """
    for _ in range(TRIES):
        server.flush()
        before()
        batches, images = counts(server)
        with ThreadPoolExecutor(len(asked)) as pool:
            with server.held() as arrived:
                answers = {key: pool.submit(send, server, **request) for key, request in asked.items()}
                if abort:
                    arrived()
                for rid in abort:
                    requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=30)
            found = {key: answer.result() for key, answer in answers.items()}
        if queued_together(found.values()):
            after = counts(server)
            return found, after[0] - batches, after[1] - images
    pytest.fail(f"in {TRIES} tries the scheduler never found them at once")


def counts(server: Server) -> tuple[int, int]:
    """Batches so far, and images looked up in the encoder's cache."""
    now = stats(server)
    return sum(now["batches_by_mode"].values()), now["encoder"]["hits"] + now["encoder"]["misses"]


@pytest.fixture(scope="module")
def cold(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str | None, Any]]:
    """Cold answers of the base model and four activated adapters, which stay loaded."""
    load_activated(server, tmp_path_factory.mktemp("shared"))
    answers = cold_answers(server)
    assert len({tuple(answer["output_ids"]) for answer in answers.values()}) == len(NAMES)
    yield answers
    for name in NAMES[1:]:
        unload(server, name)


@pytest.fixture(scope="module")
def steps(server: Server, cold: Any) -> int:
    """Batches of one cold request alone: its prefill and its decode steps, one past its end where they overlap."""
    server.flush()
    before, _ = counts(server)
    ask_big(server)
    return counts(server)[0] - before


@pytest.mark.parametrize("mode", ["auto", "unmerged", "merged", "mixture"])
def test_they_are_one_prefill_with_the_answers_of_cold_runs(server: Server, cold: Any, steps: int, mode: str) -> None:
    assert change(server, **{f"vlora_mode:{mode}": 1})
    try:
        found, batches, images = together(server, {name: {"name": name} for name in NAMES})
    finally:
        assert change(server, **{"vlora_mode:auto": 1})
    assert_same(found, cold)
    assert batches == steps, "one prefill, and the decode steps of one"
    assert sorted(reuse(a)["cached_image_tokens"] for a in found.values()) == [0, *[IMAGE_TOKENS] * 4]
    assert sum(reuse(a)["shared_tokens"] > 0 for a in found.values()) == 4
    assert images == 1, "who needs the image's embedding"
    again = ask_big(server, name="J2")
    assert_same_tokens(again, cold["J2"])
    assert reuse(again)["cached_image_tokens"] == IMAGE_TOKENS


def test_two_new_images_are_one_prefill(server: Server, cold: Any, steps: int) -> None:
    asked = {(name, image): {"name": name, "images": (image,)} for name in ("J0", "J1") for image in (31, 32)}
    alone = {}
    for key, request in asked.items():
        server.flush()
        alone[key] = ask_big(server, **request)
    # The words before the image are in the cache, as they mostly are.
    found, batches, _ = together(server, asked, before=lambda: ask_big(server))
    assert_same(found, alone)
    assert batches == steps
    assert sorted(reuse(a)["cached_image_tokens"] for a in found.values()) == [0, 0, IMAGE_TOKENS, IMAGE_TOKENS]


def test_one_token_answers_and_logprobs(server: Server, cold: Any, steps: int) -> None:
    """The leader ends with the prefill; who wants the logprobs of the whole prompt computes it."""
    once = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    asked: dict[Any, Any] = {
        "leader": {"name": "J0", "sampling_params": once},
        "follower": {"name": "J1", "sampling_params": once, "return_logprob": True},
        "prompt": {"name": "J2", "sampling_params": once, "return_logprob": True, "logprob_start_len": 0},
        "second": {"name": "J0"},
    }
    alone = {}
    for key, request in asked.items():
        server.flush()
        alone[key] = ask_big(server, **request)
    found, batches, _ = together(server, asked)
    assert_same(found, alone)
    for key, field in (("follower", "output"), ("prompt", "output"), ("prompt", "input")):
        one, other = (
            [value for value, *_ in answers[key]["meta_info"][f"{field}_token_logprobs"] if value is not None]
            for answers in (found, alone)
        )
        close = 1e-4 if is_plain_cpu() else MARGIN  # a GPU has 16 bits, and another GEMM for more rows
        assert len(one) == len(other) > 0 and one == pytest.approx(other, abs=close)
    assert batches == steps


@pytest.mark.parametrize("aborted", [("J0",), ("J1", "J3"), NAMES[1:]], ids=["leader", "followers", "all"])
def test_aborts_in_the_queue_leave_the_others_right(
    server: Server, cold: Any, steps: int, aborted: tuple[str, ...]
) -> None:
    # J0 comes first, so it would lead.
    asked = {name: {"name": name, "rid": f"shared-{name}"} for name in (*NAMES[1:], None)}
    found, batches, _ = together(server, asked, abort=[f"shared-{name}" for name in aborted])
    left = [name for name in NAMES if name not in aborted]
    for name in aborted:
        assert found[name]["meta_info"]["finish_reason"]["type"] == "abort" and not found[name]["output_ids"]
    assert_same({name: found[name] for name in left}, {name: cold[name] for name in left})
    assert batches == steps
    server.flush()  # which needs an idle server, and that needs every slot accounted for
    assert_same_tokens(ask_big(server, name="J1"), cold["J1"])


@pytest.mark.slow
def test_small_chunks_and_a_full_cache(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter than the prefix, and a cache for three requests of five."""
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    iterations = tmp_path / "iterations.jsonl"
    flags = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "256", "--vlora-adapter-root", str(tmp_path)]
    flags += ["--vlora-iteration-log", str(iterations), "--max-loras-per-batch", "7", "--enable-metrics"]
    long = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    with serve(tiny_model, tmp_path / "log.txt", *flags) as server:
        load_activated(server, tmp_path)
        cold = cold_answers(server, sampling_params=long)
        prompt = reuse(cold[None])["prompt_tokens"]
        for _ in range(3):
            found, *_ = together(server, {name: {"name": name, "sampling_params": long} for name in NAMES})
            assert_same(found, cold)
            shared = max(reuse(answer)["cached_tokens"] for answer in found.values())
        server.flush()  # which needs an idle server, and that needs every slot accounted for
        groups = [set(row["groups"].values()) for row in map(json.loads, iterations.open()) if row.get("prefill")]
        assert any({prompt - CHUNK, prompt - shared} <= tokens for tokens in groups), (
            "a leader's last chunk, a follower"
        )
        log = server.log.read_text()
        assert "leak" not in log and "Error" not in log
