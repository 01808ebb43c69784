"""vLLM as a peer: how its server is started and asked, over a stub with its routes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils

from benchmarks.serving import bench_e2e
from benchmarks.serving.apis import BASE, GENERATE, IMAGE_MARK, OPENAI
from benchmarks.serving.replay import Outcome, replay
from benchmarks.serving.systems import WORDS_FOR_AN_IMAGE, Deployment
from benchmarks.summary import read
from tests.support import openai_stub


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stub was asked."""
    monkeypatch.setenv(openai_stub.LOG, str(tmp_path))
    return tmp_path / "requests.jsonl"


def asked(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def body(model: str | None, tokens: int, images: int = 0) -> dict[str, Any]:
    """As ``Speaker`` writes them."""
    more = {"image_data": [f"data:image/jpeg;base64,{n}" for n in range(images)]} if images else {}
    return {
        "text": IMAGE_MARK * images + " one two",
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
        "lora_path": model,
        "stream": True,
        **more,
    }


def played(*bodies: dict[str, Any]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with test_utils.TestServer(openai_stub.application([BASE, "a0", "breaks"])) as server:
            return await replay(str(server.make_url("")).rstrip("/"), [(0.0, one) for one in bodies], OPENAI)

    return asyncio.run(run())


@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("tokens", [1, 7])
def test_an_answer_has_as_many_tokens_and_gaps_as_were_streamed(log: Path, tokens: int, images: int) -> None:
    (outcome,) = played(body("a0", tokens, images))
    assert outcome.error == "" and (outcome.tokens, outcome.prompt, outcome.cached) == (tokens, 10, openai_stub.CACHED)
    assert len(outcome.gaps) == tokens - 1, "neither the opening of a chat nor the usage is a token"
    assert 0 < outcome.first <= outcome.last
    assert outcome.last == pytest.approx(outcome.first + sum(outcome.gaps))


def test_images_go_into_a_chat_and_words_into_a_completion(log: Path) -> None:
    played(body("a0", 3, images=2), body(None, 5))
    by_route = {one["route"]: one for one in asked(log)}
    chat, plain = by_route["/v1/chat/completions"], by_route["/v1/completions"]
    (message,) = chat["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert message["content"][-1]["text"] == " one two" and "1" in message["content"][1]["image_url"]["url"]
    assert (chat["model"], chat["max_tokens"], plain["model"], plain["max_tokens"]) == ("a0", 3, BASE, 5)
    assert plain["prompt"] == " one two" and plain["ignore_eos"] is True and plain["temperature"] == 0


def test_what_goes_wrong_is_an_error_of_that_request(log: Path) -> None:
    unknown, broken, good = played(body("nobody", 2), body("breaks", 2), body("a0", 2))
    assert unknown.error.startswith("404") and "it broke" in broken.error and good.error == ""


def test_sglangs_own_route_is_asked_as_before() -> None:
    one = body("a0", 3, images=1)
    assert GENERATE.body(one) is one and GENERATE.route(one) == "/generate"
    line = {"meta_info": {"completion_tokens": 3, "prompt_tokens": 9, "cached_tokens": 4}}
    assert GENERATE.counts(line) == (3, 9, 4)


def test_its_server_is_started_as_its_users_do(tmp_path: Path) -> None:
    made = Deployment(
        tmp_path / "m", {"a0": tmp_path / "x"}, 1, 64, 32, False, True, tmp_path, vllm_python="/v/python"
    )
    command = made.command("vllm", 1234)
    assert command[:5] == ["/v/python", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "m")]
    assert {"--enable-lora", "--limit-mm-per-prompt", f"a0={tmp_path}/x"} <= set(command)
    assert command[command.index("--port") + 1] == "1234"
    assert not any(flag.startswith(("--attention", "--mm-", "--compilation")) for flag in command), "its own defaults"


def test_a_cell_of_its_server(tmp_path: Path, log: Path) -> None:
    """Servers and traffic over HTTP; it does not start with the tower, so words stand for images."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {openai_stub.__file__} --blind "$@"\n')
    python.chmod(0o755)
    out = ["--out", str(tmp_path / "out"), "--summary", str(tmp_path / "summary.json")]
    flags = ["--systems", "vllm", "--shape", "tiny", "--quick", "--vllm-python", str(python), *out]
    assert bench_e2e.main(flags) == 0
    (row,) = map(json.loads, (tmp_path / "out" / "e2e-default-retrieval.jsonl").read_text().splitlines())
    assert row["failed"] == 0 < row["requests"] and row["system"] == "vllm" and row["attention"] == "default"
    assert row["words"] == WORDS_FOR_AN_IMAGE["7b"]
    calls = asked(log)
    starts = [one for one in calls if one["route"] == "start"]
    assert len(starts) == 2 and starts[-1]["development"] == "1"
    assert any(one["route"] == "/reset_prefix_cache" for one in calls), "cells begin with an empty cache"
    streamed = [one for one in calls if one.get("stream")]
    assert {one["route"] for one in streamed} == {"/v1/completions"}
    assert all(len(one["prompt"].split()) > WORDS_FOR_AN_IMAGE["7b"] for one in streamed)
    assert read(tmp_path / "summary.json") == [], "one system alone is no figure"
