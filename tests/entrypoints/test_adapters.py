"""Who may change adapters: with an admin key set, every such route answers 401 without it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from vlora_sgl import _sgl
from vlora_sgl.entrypoints import adapters

ROUTES: dict[str, dict[str, Any]] = {
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/load_lora_adapter_from_tensors": {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": []},
    "/reload_lora_adapter": {"lora_name": "a"},
    "/pin_lora_adapter": {"lora_name": "a"},
    "/promote_lora_adapter": {"lora_name": "a@2"},
    "/roll_back_lora_adapter": {"lora_name": "a"},
}


class Manager:
    """Notes what reached it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.adapters = self

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            self.calls.append(name)
            return _sgl.LoadLoRAAdapterReqOutput(success=True)

        return call


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's application with our routes and its own guard, in front of a manager that only listens."""
    from fastapi import FastAPI

    server, manager = _sgl.http_server, Manager()
    app = FastAPI()
    app.router.routes[:] = list(server.app.router.routes)
    adapters.mount(app)
    app.state.openai_serving_chat = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(server, "_global_state", SimpleNamespace(tokenizer_manager=manager), raising=False)
    guard = sys.modules[_sgl.auth_level.__module__].add_api_key_middleware
    guard(app, api_key="user", admin_api_key="admin")
    client = TestClient(app)
    client.manager = manager  # type: ignore[attr-defined]
    return client


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_that_changes_adapters_needs_the_admin_key(client: Any, route: str) -> None:
    for key in (None, "user", "wrong"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        assert client.post(route, json=ROUTES[route], headers=headers).status_code == 401
    assert client.manager.calls == []
    reply = client.post(route, json=ROUTES[route], headers={"Authorization": "Bearer admin"})
    assert reply.status_code == 200, reply.text
    assert client.manager.calls == [
        route[1:] if "load_lora" in route and "reload" not in route else route[1:].removesuffix("_lora_adapter")
    ]


def test_the_replaced_routes_are_there_once(client: Any) -> None:
    for path, method in (("/generate", "POST"), ("/generate", "PUT"), ("/v1/models", "GET")):
        found = [r for r in client.app.routes if getattr(r, "path", "") == path and method in r.methods]
        assert [route.endpoint.__module__ for route in found] == [adapters.__name__]
