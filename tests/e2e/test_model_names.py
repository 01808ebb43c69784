"""Every route that takes a model's name serves that adapter, or says which names there are."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import requests

from tests.conftest import Server

pytestmark = pytest.mark.e2e

TEXT = "<|im_start|>user\nHow many objects are there?<|im_end|>\n<|im_start|>assistant\n"
TURNS = [{"role": "user", "content": "How many objects are there?"}]
GREEDY = {"temperature": 0, "max_tokens": 6}
SAMPLING = {"temperature": 0, "max_new_tokens": 6}

# Route -> a body less its model, and what of the answer depends on the adapter; None: the same for all.
ROUTES: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None]] = {
    "generate": ({"text": TEXT, "sampling_params": SAMPLING}, lambda a: a["output_ids"]),
    "v1/completions": ({"prompt": TEXT, **GREEDY}, lambda a: a["choices"][0]["text"]),
    "v1/chat/completions": ({"messages": TURNS, **GREEDY}, lambda a: a["choices"][0]["message"]["content"]),
    "invocations": ({"messages": TURNS, **GREEDY}, lambda a: a["choices"][0]["message"]["content"]),
    "v1/responses": (
        {"input": TURNS, "temperature": 0, "max_output_tokens": 6},
        lambda a: a["output"][0]["content"][0]["text"],
    ),
    "v1/messages": ({"messages": TURNS, **GREEDY}, lambda a: a["content"][0]["text"]),
    "v1/score": (
        {"query": TEXT, "items": ["1", "2"], "label_token_ids": [16, 17]},
        lambda a: np.array(a["scores"]).round(6),
    ),
    "v1/messages/count_tokens": ({"messages": TURNS}, None),
    "v1/tokenize": ({"prompt": TEXT}, None),
    "v1/detokenize": ({"tokens": [16, 17]}, None),
}
# What a model that writes cannot do; names are looked at first.
OTHERS: dict[str, dict[str, Any]] = {
    "encode": {"text": TEXT},
    "classify": {"text": TEXT},
    "v1/embeddings": {"input": TEXT},
    "v1/classify": {"input": TEXT},
    "v1/rerank": {"query": TEXT, "documents": ["a", "b"]},
    "v1/vision/classify": {"input": [{"type": "text", "text": "x"}]},
}


def post(server: Server, route: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/{route}", json=body, timeout=120)


@pytest.fixture
def logged(server: Server) -> Iterator[Callable[[], str]]:
    """What the server has logged since the test began; there is no traceback in it."""
    before = server.log.stat().st_size

    def new() -> str:
        requests.get(f"{server.url}/health", timeout=60)
        return server.log.read_bytes()[before:].decode()

    yield new
    assert "Traceback" not in new()


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_serves_the_adapter_that_its_model_names(
    server: Server, logged: Callable[[], str], route: str
) -> None:
    body, answer_of = ROUTES[route]
    answers = {}
    for model in ("default", "A", "default:A", "B"):
        reply = post(server, route, model=model, **body)
        assert reply.status_code == 200, reply.text
        answers[model] = answer_of(reply.json()) if answer_of else None
        assert reply.json().get("model", model) == model
    if answer_of:
        assert len({str(answers[model]) for model in ("default", "A", "B")}) == 3, (
            "the adapters must change the answer"
        )
    assert str(answers["A"]) == str(answers["default:A"])


def test_all_routes_mean_the_same_adapter(server: Server) -> None:
    body, answer_of = ROUTES["generate"]
    assert answer_of is not None
    for name in ("A", "B"):
        by_path = server.generate(text=TEXT, lora_path=name, sampling_params=SAMPLING)
        by_model = post(server, "generate", model=name, **body).json()
        assert by_model["output_ids"] == by_path["output_ids"]
        assert by_model["meta_info"]["vlora"]["adapter"] == name
    chats = {
        route: ROUTES[route][1](post(server, route, model="A", **ROUTES[route][0]).json())  # type: ignore[misc]
        for route in ("v1/chat/completions", "invocations", "v1/messages", "v1/responses")
    }
    assert len({text[:2] for text in chats.values()}) == 1, chats


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [*ROUTES, *OTHERS])
def test_a_name_that_is_not_served_is_a_404_with_the_names(
    server: Server, logged: Callable[[], str], route: str, stream: bool
) -> None:
    body = ROUTES[route][0] if route in ROUTES else OTHERS[route]
    for model in ("nobody", "default:nobody"):
        reply = post(server, route, model=model, **body, **({"stream": True} if stream else {}))
        assert reply.status_code == 404, reply.text
        assert "no adapter named 'nobody'; loaded: A, B" in reply.text
    lines = [line for line in logged().splitlines() if "nobody" in line]
    assert len(lines) == 2, lines


def test_an_unknown_adapter_beside_the_base_is_a_404_too(server: Server, logged: Callable[[], str]) -> None:
    reply = post(server, "v1/chat/completions", model="default", lora_path="nobody", messages=TURNS)
    assert reply.status_code == 404 and "loaded: A, B" in reply.text
    assert requests.get(f"{server.url}/v1/models/nobody", timeout=60).status_code == 404


def test_answers_of_v1_responses_are_not_kept(server: Server, logged: Callable[[], str]) -> None:
    body, _ = ROUTES["v1/responses"]
    first = post(server, "v1/responses", model="A", store=True, **body).json()
    assert first["store"] is False
    for more in ({"previous_response_id": first["id"]}, {"background": True}):
        reply = post(server, "v1/responses", model="A", **body, **more)
        assert reply.status_code == 400 and "no answers are kept" in reply.text
    kept = requests.get(f"{server.url}/v1/responses/{first['id']}", timeout=60)
    assert kept.status_code == 501 and "not served" in kept.text


@pytest.mark.parametrize(
    "route",
    [
        "api/chat",
        "api/generate",
        "api/show",
        "vertex_generate",
        "start_expert_distribution_record",
        "scale_elastic_ep",
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server: Server, logged: Callable[[], str], route: str) -> None:
    reply = post(server, route, model="A", prompt="x")
    assert reply.status_code == 501 and f"/{route} is not served: " in reply.text
    assert server.generate(text=TEXT, sampling_params=SAMPLING)["output_ids"]


def test_what_nonsense_could_end_is_for_an_operator(server: Server, logged: Callable[[], str]) -> None:
    reply = post(server, "update_weights_from_disk", model_path=str(server.model.path), load_format="nonsense")
    assert reply.status_code == 403 and "--admin-api-key" in reply.text
    assert post(server, "configure_logging", log_level="loud").status_code == 400
    for route, body in (("parse_function_call", {"tools": [], "tool_call_parser": "x"}), ("separate_reasoning", {})):
        reply = post(server, route, text="x", reasoning_parser="x", **body)
        assert reply.status_code == 400, reply.text
    assert server.generate(text=TEXT, sampling_params=SAMPLING)["output_ids"]


def test_a_body_that_never_ends_is_a_413(server: Server, logged: Callable[[], str]) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 2**20

    for route in ("generate", "v1/messages", "v1/vision/classify"):
        reply = requests.post(
            f"{server.url}/{route}", data=endless(), headers={"Content-Type": "application/json"}, timeout=120
        )
        assert reply.status_code == 413 and "134217728 bytes at most (--vlora-max-body-bytes)" in reply.text
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60) as connection:
        lines = (
            "POST /generate HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            "Content-Length: 999999999999",
        )
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("name", ["a:b", "default", "", " x", "a\nb", "x" * 300, "a=b"])
def test_a_name_that_no_adapter_can_have_is_one_line(server: Server, logged: Callable[[], str], name: str) -> None:
    path = str(server.model.adapters["A"])
    reply = post(server, "load_lora_adapter", lora_name=name, lora_path=path)
    assert reply.status_code == 400 and json.loads(reply.text)["success"] is False
    assert len(logged().splitlines()) == 1


@pytest.mark.parametrize("path", ["/nowhere", "", "\0", "x" * 5000, "y" * 300, "a/" + "b" * 400])
def test_a_directory_that_holds_no_adapter_is_one_line(server: Server, logged: Callable[[], str], path: str) -> None:
    reply = post(server, "load_lora_adapter", lora_name="new", lora_path=path)
    assert reply.status_code == 400 and len(reply.json()["error_message"]) < 300
    assert len(logged().splitlines()) == 1
