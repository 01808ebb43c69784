"""What stands before every route, without an engine: bounded and strict bodies, names of models, routes refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given as given_
from hypothesis import strategies as st
from starlette.websockets import WebSocketDisconnect

from tests.test_combined import WRONG
from vlora_sgl import _sgl, seams
from vlora_sgl.combined import parts
from vlora_sgl.entrypoints import adapters, bodies, own_routes
from vlora_sgl.entrypoints.body_limit import BodyLimit
from vlora_sgl.entrypoints.refused import OPERATORS, REFUSED
from vlora_sgl.errors import RequestError
from vlora_sgl.managers.adapter_lifecycle import AdapterLifecycle
from vlora_sgl.managers.adapter_registry import UnknownAdapterResponse
from vlora_sgl.managers.model_names import NAMED, adapter_named

# Every function that SGLang 0.5.17 answers a route by. What a new release adds is to be put into one of these, or into
# REFUSED or OPERATORS, once it is known what it does with a model's name, and with nonsense.
MODEL = {
    *("generate_request", "encode_request", "classify_request", "sagemaker_chat_completions", "retrieve_model"),
    *(f"openai_v1_{name}" for name in ("completions", "chat_completions", "embeddings", "classify")),
    *("openai_v1_tokenize", "openai_v1_detokenize", "v1_score_request", "v1_responses_request", "v1_rerank_request"),
    *("anthropic_v1_messages", "anthropic_v1_count_tokens"),
}
NONE = {
    *("openapi", "swagger_ui_html", "swagger_ui_redirect", "redoc_html", "sglang_root", "sagemaker_health"),
    *("health_generate", "get_model_info", "model_info", "weight_version", "get_server_info", "server_info"),
    *("get_load", "get_loads", "set_internal_state", "flush_cache", "available_models", "set_trace_level"),
    *("add_external_corpus", "remove_external_corpus", "list_external_corpora", "freeze_gc_async"),
    *("clear_hicache_storage_backend_deprecated", "clear_hicache_storage_backend", "hicache_storage_backend_status"),
    *("attach_hicache_storage_backend", "detach_hicache_storage_backend", "update_weight_version"),
    *("get_weights_by_name", "load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"),
    *("open_session", "close_session", "configure_logging", "abort_request", "parse_function_call_request"),
    "separate_reasoning_request",
}
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # of FastAPI, which SGLang answers by

NAMES = {"A": "/a", "B": "/b"}


def endpoints(routes: Any) -> Iterator[tuple[str, Any]]:
    """Name of the function and route, of every route, those of included routers too."""
    for route in routes:
        if hasattr(route, "original_router"):
            yield from endpoints(route.original_router.routes)
        elif hasattr(route, "endpoint"):
            yield route.endpoint.__name__, route


FOUND = list(endpoints(_sgl.http_server.app.routes))


async def no_ranks(message: object) -> list[Any]:
    """There is no engine, and nothing is asked of it."""
    return []


@pytest.fixture(scope="module")
def manager() -> Any:
    """As much of a tokenizer manager as names need."""
    args = SimpleNamespace(model_path="/models/base", admin_api_key=None)
    refs = {name: SimpleNamespace(lora_name=name, lora_path=path, lora_id=name) for name, path in NAMES.items()}
    shutdown = SimpleNamespace(asked=False)
    adapters = AdapterLifecycle(SimpleNamespace(lora_paths=None), lambda: "base", refs, asyncio.Lock(), no_ranks)
    return SimpleNamespace(
        served_model_name="base", server_args=args, lora_ref_cache=refs, shutdown=shutdown, adapters=adapters
    )


@pytest.fixture(scope="module")
def client(manager: Any) -> Iterator[TestClient]:
    """SGLang's application as the launcher makes it, before a manager that only knows names; it is put back after."""
    server = _sgl.http_server
    app = FastAPI()
    app.router.route_class = server.app.router.route_class
    app.exception_handlers.update(server.app.exception_handlers)
    included = [route.original_router.routes for route in server.app.routes if hasattr(route, "original_router")]
    before = [list(routes) for routes in included]
    read, found = server.ORJSONRequest.json, dict(seams._found)
    app.router.routes[:] = list(server.app.router.routes)
    for part in (own_routes, adapters, bodies):
        part.mount(app)
    app.state.openai_serving_chat = SimpleNamespace(tokenizer_manager=manager)
    yield TestClient(app, raise_server_exceptions=False)
    server.ORJSONRequest.json = read
    seams._found.clear()
    seams._found.update(found)
    for routes, old in zip(included, before, strict=True):
        routes[:] = old


def test_of_every_route_it_is_known_what_it_does_with_a_models_name() -> None:
    found = {name for name, _ in FOUND}
    groups = [MODEL, NONE, set(REFUSED), OPERATORS]
    assert found == set().union(*groups)
    assert sum(map(len, groups)) == len(found), "each in one group"


@pytest.mark.parametrize("name", REFUSED)
def test_a_route_that_is_not_served_is_refused_by_name(client: TestClient, name: str) -> None:
    route = next(route for found, route in FOUND if found == name)
    if not route.__dict__.get("methods"):  # a socket
        with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect(route.path):
            pass
        assert closed.value.code == 1008 and "is not served: " in closed.value.reason
        return
    for method in route.methods:
        path = route.path.replace("{response_id}", "resp_1")
        answer = client.request(method, path, json={"model": "A"} if method != "GET" else None)
        assert answer.status_code == 501 and "is not served: " in answer.text and "\n" not in answer.text


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_what_may_end_the_server_is_for_an_operator(client: TestClient, name: str) -> None:
    route = next(route for found, route in endpoints(client.app.routes) if found == name)  # type: ignore[attr-defined]
    assert route.endpoint._auth_level is _sgl.AuthLevel.ADMIN_OPTIONAL, "with the key set, it is asked for"
    for method in route.methods:
        answer = client.request(method, route.path)
        assert answer.status_code == 403 and "--admin-api-key" in answer.text


HOSTILE: dict[str, tuple[bytes, str, int]] = {
    "deep": (b"[" * 100_000, "application/json", 400),
    "not UTF-8": (b"\xff{}", "application/json", 400),
    "NaN": (b'{"model": NaN}', "application/json", 400),
    "a key twice": (b'{"model": "A", "model": "B"}', "application/json", 400),
    "a list": (b"[]", "application/json", 400),
    "null": (b"null", "application/json", 400),
    "text": (b'"x"', "application/json", 400),
    "half": (b'{"model"', "application/json", 400),
    "nothing": (b"", "application/json", 400),
    "a form": (b"model=A", "application/x-www-form-urlencoded", 415),
    "much of another type": (b"x" * 10**6, "text/plain", 415),
    "no type": (b'{"model": "A"}', "", 415),
    "no type of a model": (b'{"model": ["A"]}', "application/json", 400),
    "a long name": (b'{"model": "%s"}' % (b"x" * 10**6), "application/json", 404),
    "an unknown name": (b'{"model": "nobody", "stream": true}', "application/json", 404),
    "an unknown adapter": (b'{"model": "base:nobody"}', "application/json", 404),
    "another base": (b'{"model": "gpt:A"}', "application/json", 404),
}
POSTED = sorted(
    {route.path for name, route in FOUND if name in MODEL - {"retrieve_model"}}
    | {*(f"/{verb}_lora_adapter" for verb in ("load", "unload", "reload", "pin")), "/set_internal_state"}
    | {f"/v1/vision/{task}" for task in ("classify", "count", "detect", "ask")}
)


@pytest.mark.parametrize("path", POSTED)
def test_a_wrong_body_is_one_line_on_every_route(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    for what, (body, kind, status) in HOSTILE.items():
        caplog.clear()
        with caplog.at_level(logging.INFO):
            answer = client.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code == status, (what, answer.text)
        assert len(answer.text) < 1000 and "\\n" not in answer.text and ".py" not in answer.text, what
        assert status != 404 or "A, B" in answer.text, f"{what}: the names are listed"
        lines = [record for record in caplog.records if record.name.startswith(("vlora_sgl", "sglang"))]
        assert len(lines) <= 1 and not any(record.exc_info for record in lines), what
        assert status != 404 or lines, f"{what}: an operator sees wrong names"


@pytest.mark.parametrize(
    ("model", "adapter"),
    [("A", "A"), ("base:A", "A"), ("default: B ", "B"), ("/models/base:B", "B")]
    + [(name, None) for name in ("base", "default", "/models/base")],
)
def test_whom_a_model_names(manager: Any, model: str, adapter: str | None) -> None:
    assert adapter_named(manager, model) == adapter
    bodies.accept({"model": model}, "/generate", manager)
    assert NAMED.get() == adapter
    bodies.accept({"text": "x"}, "/generate", manager)
    assert NAMED.get() is None


@pytest.mark.parametrize("model", ["", " ", ":", "base:", "base:C", ":A", "a", " A", "A:base", "gpt:A", "base:A:B"])
def test_whom_no_model_names(manager: Any, model: str) -> None:
    with pytest.raises(UnknownAdapterResponse, match="A, B"):
        adapter_named(manager, model)


COMBINED = {"A": 0.7, "B": 0.3}
TEXT = '{"A": 0.7, "B": 0.3}'
NOT_JSON = {"null", "infinite", "no number", "beyond any word", "a number for a name"}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/encode"])
def test_adapters_as_one_are_whom_a_body_names_on_every_route(manager: Any, path: str) -> None:
    assert "adapters" not in bodies.accept({"model": "base", "adapters": COMBINED}, path, manager)
    assert NAMED.get() == TEXT
    bodies.accept({"adapters": {"A": 1}}, path, manager)
    assert NAMED.get() == "A"
    bodies.accept({"adapters": None}, path, manager)
    assert NAMED.get() is None


def test_prompts_of_a_batch_have_their_own(manager: Any) -> None:
    body = bodies.accept({"text": ["x", "y", "z"], "adapters": [COMBINED, None, {"A": 1}]}, "/generate", manager)
    assert body == {"text": ["x", "y", "z"], "lora_path": [TEXT, None, "A"]} and NAMED.get() is None


@pytest.mark.parametrize("name", sorted(MODEL - {"retrieve_model"}))
@pytest.mark.parametrize("wrong", [*sorted(set(WRONG) - NOT_JSON)])
def test_what_cannot_be_combined_is_refused_on_every_route(client: TestClient, name: str, wrong: str) -> None:
    route = next(route for found, route in FOUND if found == name)
    answer = client.post(route.path, json={"adapters": WRONG[wrong]})
    assert answer.status_code == 400 and "adapters must be" in answer.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["A", "B", "", "{", ":"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["A", "B", "C", ""]), inner),
    max_leaves=6,
)


@given_(VALUES, st.sampled_from(["/generate", "/v1/chat/completions", "/v1/responses"]))
def test_whatever_comes_for_adapters_is_one_or_refused(manager: Any, given: Any, path: str) -> None:
    try:
        body = bodies.accept({"adapters": given}, path, manager)
    except (RequestError, UnknownAdapterResponse) as error:
        assert "adapters must be" in str(error) or "no adapter named" in str(error)
        return
    for one in body.get("lora_path") or [NAMED.get()]:
        assert one is None or all(name in NAMES and abs(scale) <= 100 for name, scale in parts(one))


@pytest.mark.parametrize("more", [{"model": "A"}, {"model": "base:B"}, {"lora_path": "A"}, {"lora_path": ["A"]}])
def test_adapters_beside_another_adapter_are_refused(client: TestClient, more: Any) -> None:
    answer = client.post("/generate", json={"text": "x", "adapters": COMBINED, **more})
    assert answer.status_code == 400 and "give one of them" in answer.text


@pytest.mark.parametrize("given", [{"A": 0.5, "nobody": 0.5}, {"nobody": 0}, [None, {"nobody": 1}]])
def test_an_unknown_adapter_among_several_is_a_404(client: TestClient, given: Any) -> None:
    answer = client.post("/generate", json={"text": ["x", "y"], "adapters": given, "stream": True})
    assert answer.status_code == 404 and "no adapter named 'nobody'" in answer.text


def test_responses_leave_nothing_behind(manager: Any) -> None:
    assert bodies.accept({"input": "x", "store": True}, "/v1/responses", manager) == {"input": "x", "store": False}
    for wrong in ({"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}):
        with pytest.raises(RequestError, match="no answers are kept"):
            bodies.accept({"input": "x", **wrong}, "/v1/responses", manager)


def limited(
    parts: list[bytes],
    told: int | None,
    most: int = 10,
    patience: float = 0.05,
    path: str = "/x",
    kind: bytes = b"application/json; charset=utf-8",
    forms: dict[str, int] | None = None,
) -> tuple[int, bytes]:
    """Status, and what an application read, of a body that comes in parts; what is missing of it never comes."""
    read, parts = bytearray(), [*parts]

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        body = parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": body != b""}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["more_body"]:
            read.extend(message["body"])

    headers = [(b"content-type", kind)]
    headers += [] if told is None else [(b"content-length", b"%d" % told)]
    try:
        scope = {"type": "http", "headers": headers, "path": path}
        asyncio.run(BodyLimit(app, most, patience, forms)(scope, receive, None))
    except bodies.HTTPException as refusal:
        return refusal.status_code, bytes(read)
    return 200, bytes(read)


@pytest.mark.parametrize(
    ("parts", "told", "expected"),
    [
        ([b"x" * 10, b""], 10, (200, b"x" * 10)),
        ([b"x" * 10, b""], None, (200, b"x" * 10)),
        ([b"x" * 6, b"x" * 5, b""], None, (413, b"x" * 6)),
        ([b"x" * 6, b"x" * 5, b""], 6, (413, b"x" * 6)),
        ([b"x", b""], 11, (413, b"")),
        ([b"x"], 5, (408, b"x")),
        ([], None, (408, b"")),
    ],
    ids=["as much as told", "untold", "more than allowed", "more than told", "much told", "half", "nothing"],
)
def test_a_body_is_bounded_whatever_is_told_of_it(parts: list[bytes], told: int | None, expected: Any) -> None:
    assert limited(parts, told) == expected
    form: Any = {"path": "/load", "kind": b"multipart/form-data; boundary=x"}
    assert limited(parts, told, **form, forms={"/load": 10}, most=1) == expected, "a form has a limit of its own"
    for forms in ({}, {"/other": 10}):
        assert limited([b"x", b""], None, **form, forms=forms)[0] == 415


@pytest.mark.parametrize("wrong", ["x", [], 5, [{}]])
def test_a_type_that_sglangs_schemas_do_not_foresee_is_refused(client: TestClient, wrong: Any) -> None:
    body = {"model": "A", "messages": [{"role": "user", "content": "x"}], "response_format": wrong}
    for path in ("/v1/chat/completions", "/invocations"):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "\n" not in answer.text
        assert client.post(path, json=[body]).status_code == 400


def test_a_score_without_labels_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/score", json={"model": "A", "query": "x", "items": ["a"], "label_token_ids": []})
    assert answer.status_code == 400 and "label_token_ids must have one token at least" in answer.text


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
@pytest.mark.parametrize("tokens", [[-1], [1, 2**32], [[1], [2, -5]], [[2**63]]])
def test_numbers_that_are_no_token_ids_are_refused(client: TestClient, path: str, tokens: Any) -> None:
    answer = client.post(path, json={"model": "A", "tokens": tokens})
    assert answer.status_code == 400 and "tokens must be token ids; got " in answer.text
