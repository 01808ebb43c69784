"""A live server with a key for users and one for its operator. It is one of its own, so it runs with ``--slow`` only.

``tests/entrypoints/test_adapters.py`` checks the same guard on every route without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.conftest import Server, TinyModel, serve
from tests.support.head_reference import data_url, make_image
from vlora_sgl import page

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

USER, OPERATOR = "Bearer user", "Bearer operator"
TEXT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Holds A and B; B is to come again as C."""
    log = tmp_path_factory.mktemp("access") / "log.txt"
    with serve(tiny_model, log, "--api-key", "user", "--admin-api-key", "operator") as running:
        yield running


def call(server: Server, method: str, route: str, key: str | None, body: Any = None) -> requests.Response:
    headers = {} if key is None else {"Authorization": key}
    return requests.request(method, f"{server.url}/{route}", json=body, headers=headers, timeout=120)


def ask(server: Server, key: str | None, name: str | None) -> requests.Response:
    return call(server, "POST", "generate", key, {"text": TEXT, "lora_path": name, "sampling_params": GREEDY})


def test_health_is_open_and_answers_are_for_users(server: Server) -> None:
    assert call(server, "GET", "health", None).status_code == 200
    picture = [{"type": "image_url", "image_url": {"url": data_url(make_image(0))}}]
    for method, route, body in (
        ("POST", "generate", {"text": TEXT, "sampling_params": GREEDY}),
        ("POST", "v1/completions", {"model": "A", "prompt": TEXT, "max_tokens": 2}),
        ("POST", "v1/vision/classify", {"model": "A", "input": picture}),
        ("GET", "lora_adapters", None),
        ("GET", "v1/models", None),
    ):
        for key in (None, "Bearer wrong"):
            assert call(server, method, route, key, body).status_code == 401, route
        # A has no heads, which only somebody who may ask is told.
        assert call(server, method, route, USER, body).status_code == (400 if "vision" in route else 200), route


def test_the_page_is_open_and_what_it_shows_is_not(server: Server) -> None:
    for path in page.FILES:
        assert call(server, "GET", path[1:], None).status_code == 200
        assert call(server, "POST", path[1:], None, {}).status_code == 401
    question = {"model": "A", "input": [{"type": "text", "text": TEXT}]}
    for key in (None, "Bearer wrong"):
        assert call(server, "GET", "vlora/live", key).status_code == 401
        assert call(server, "POST", "v1/vision/ask", key, question).status_code == 401
    assert call(server, "POST", "v1/vision/ask", USER, question).json()["model"] == "A"
    with requests.get(f"{server.url}/vlora/live", headers={"Authorization": USER}, stream=True, timeout=60) as live:
        assert live.status_code == 200 and next(live.iter_lines()).startswith(b'data: {"time"')


def test_adapters_are_changed_by_the_operator_alone(server: Server) -> None:
    path = str(server.model.adapters["B"])
    wanted = {name: ask(server, USER, name).json()["output_ids"] for name in (None, "A", "B")}
    assert len({tuple(ids) for ids in wanted.values()}) == 3, "the adapters must change the answer"
    for route, body, then in (
        ("load_lora_adapter", {"lora_name": "C", "lora_path": path}, 200),
        ("reload_lora_adapter", {"lora_name": "C"}, 200),
        ("pin_lora_adapter", {"lora_name": "C"}, 200),
        ("unload_lora_adapter", {"lora_name": "C"}, 404),
    ):
        before = ask(server, USER, "C")
        for key in (None, "Bearer wrong", USER):
            assert call(server, "POST", route, key, body).status_code == 401, (route, key)
        assert ask(server, USER, "C").status_code == before.status_code, "a refused call did something"
        assert call(server, "POST", route, OPERATOR, body).status_code == 200, route
        after = ask(server, USER, "C")
        assert after.status_code == then
        assert then == 404 or after.json()["output_ids"] == wanted["B"]
