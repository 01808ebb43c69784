"""Several adapters as one in a request: PEFT's weighted adapter, in every mode, in company, on every route."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server
from tests.e2e.test_adapters import load, unload
from tests.e2e.test_serving import encoded, picture, prompt
from tests.support.engine_runs import EngineProcess
from tests.support.modes import HALF, MORE, THREE, TWO, Expected, check_all
from tests.support.reference import Reference

pytestmark = pytest.mark.e2e

Answers = dict[str | None, Expected]
MODES = ("unmerged", "merged", "mixture")
BATCHES: dict[str, list[str | None]] = {
    "alone": [TWO],
    "with its hottest, merged": ["all", TWO, "all", "all"],
    "with the merged at scale one": ["all", MORE, "all"],
    "all kinds": ["mlp", THREE, None, "all", TWO, "all", HALF, "attention", "all", MORE],
    "beside another that is merged": ["attention", "attention", TWO, HALF],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
def test_combined_rows_answer_as_peft_does_in_every_mode_and_company(
    modes_engine: EngineProcess, expected_combined: Answers, mode: str, batch: str
) -> None:
    modes_engine.force_mode(mode)
    modes_engine.flush()
    names = BATCHES[batch]
    cold, warm = (check_all(modes_engine, names, expected_combined) for _ in range(2))
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in warm.answers)
    ran = {step.plan[1] for step in cold.steps if step.rows == len(names)}
    if mode != "unmerged" and "all" in names:
        assert ran == {"mixture"}


def choices(server: Server, path: str, **body: Any) -> str:
    """The text that a route of OpenAI's answers."""
    greedy = {"temperature": 0, "model": "default", "ignore_eos": True, **body}
    answer = requests.post(f"{server.url}{path}", json=greedy, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if "output" in found:
        return str(found["output"][-1]["content"][0]["text"])
    (choice,) = found["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


QUESTION, PICTURE = "How many objects are there?", picture(3)
SUM = {"A": 0.6, "B": 0.5}


def answers(server: Server, adapters: Sequence[Any], **request: Any) -> list[dict[str, Any]]:
    text = prompt(QUESTION, image=True)
    images = [encoded(PICTURE)] * len(adapters)
    found = server.generate(text=[text] * len(adapters), image_data=images, adapters=list(adapters), **request)
    return list(found)


def test_a_combination_of_an_image_equals_peft_and_shares_by_content(server: Server, tmp_path: Path) -> None:
    reference = Reference(server.model.path, server.model.adapters)
    reference.model.add_weighted_adapter(list(SUM), list(SUM.values()), "sum", combination_type="cat")
    text = prompt(QUESTION, image=True)
    wanted = {name: reference.generate(text, name, PICTURE) for name in ("sum", "A", "B", None)}
    assert len({tuple(ids) for ids in wanted.values()}) == 4, "a combination is none of its adapters"
    server.flush()
    got = answers(server, [SUM, {"A": 1}, None, {"B": 1.0, "A": 0}, {"A": 0.0}])
    expected = [wanted[name] for name in ("sum", "A", None, "B", None)]
    assert [answer["output_ids"] for answer in got] == expected
    shown = [answer["meta_info"]["vlora"] for answer in got]
    assert (shown[0]["adapter"], shown[0]["adapters"]) == (None, SUM)
    assert [one["adapter"] for one in shown[1:3]] == ["A", None]

    def cached(adapter: Any) -> int:
        return int(answers(server, [adapter])[0]["meta_info"]["cached_tokens"])

    plain = server.generate(text=text, image_data=encoded(PICTURE), lora_path="A")["meta_info"]["cached_tokens"]
    assert plain > 30, "at scale one it is the adapter, and shares its cache"
    assert cached({"A": 1}) == cached({"B": 0.5, "A": 0.6}) == cached({"A": 0}) == plain
    assert cached({"A": 0.6, "B": 0.4}) == 0 and cached({"A": 0.5}) == 0
    assert load(server, "A2", server.model.adapters["A"]).status_code == 200
    try:
        assert cached({"A2": 0.6, "B": 0.5}) == plain, "the same content by another name"
    finally:
        assert unload(server, "A2").status_code == 200


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}),
        ("/v1/completions", {"prompt": prompt(QUESTION), "max_tokens": 12}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 12}),
    ],
)
def test_openais_routes_take_it_in_extra_body(server: Server, path: str, asks: dict[str, Any]) -> None:
    base, a, both = (choices(server, path, **asks, **more) for more in ({}, {"adapters": {"A": 1}}, {"adapters": SUM}))
    assert a == choices(server, path, **asks, model="A") and len({base, a, both}) == 3
    if path == "/v1/completions":
        text = prompt(QUESTION)
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        assert both == server.generate(text=text, adapters=SUM, sampling_params=sampling)["text"]


def test_it_streams_and_is_counted_for_each_adapter(server: Server) -> None:
    body = {"text": prompt(QUESTION), "adapters": SUM, "stream": True, "sampling_params": {"temperature": 0}}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=120) as response:
        assert response.status_code == 200
        events = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith(b"data: {")]
    assert events[-1]["meta_info"]["vlora"]["adapters"] == SUM
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    assert "vlora:combined_requests" in text and "0.6" not in text.partition("vlora:adapter_requests")[2][:2000]


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({"adapters": {"A": 0.5, "nobody": 0.5}}, 404, "no adapter named 'nobody'"),
        ({"adapters": {}}, 400, "adapters must be"),
        ({"adapters": {"A": 1e3}}, 400, "adapters must be"),
        ({"adapters": {"A": 0.5}, "lora_path": "B"}, 400, "give one of them"),
        ({"lora_path": '{"A": 1e3}'}, 400, "lora_path must be"),
        ({"adapters": {"A": 0.5}, "head": "x"}, 400, "have no heads"),
    ],
)
def test_what_cannot_be_is_refused_and_the_server_goes_on(
    server: Server, more: dict[str, Any], status: int, message: str
) -> None:
    for stream in (False, True):
        answer = requests.post(f"{server.url}/generate", json={"text": "x", "stream": stream, **more}, timeout=60)
        assert answer.status_code == status and message in answer.text, answer.text
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200


def test_an_adapter_in_use_by_a_combination_is_unloaded_after_it(server: Server) -> None:
    assert load(server, "leaving", server.model.adapters["B"]).status_code == 200
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    body = {"text": prompt(QUESTION), "adapters": {"leaving": 0.5, "A": 0.5}, "sampling_params": sampling}
    alone = server.generate(**{**body, "adapters": {"B": 0.5, "A": 0.5}})["output_ids"]
    streaming = requests.post(f"{server.url}/generate", json={**body, "stream": True}, stream=True, timeout=120)
    with streaming as response, ThreadPoolExecutor() as pool:
        lines = response.iter_lines()
        next(lines)
        unloaded = pool.submit(unload, server, "leaving")
        events = [json.loads(line[5:]) for line in lines if line.startswith(b"data: {")]
    assert events[-1]["output_ids"] == alone and unloaded.result().status_code == 200
