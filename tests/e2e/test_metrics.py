"""``/metrics`` of a running server: true whenever it is asked for, and of what is loaded now."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Server
from tests.soak.phases import GREEDY, adapters, answer, load, stream, unload

pytestmark = pytest.mark.e2e

COMING = 60
"""Adapters that are loaded and unloaded; each takes a few hundredths of a second."""


def gauges(server: Server) -> dict[tuple[str, ...], float]:
    """Ours: name and values of its own labels -> value."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith("vlora:") else ():
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[family.name.removeprefix("vlora:"), *labels.values()] = sample.value
    return found


def requests_now(server: Server) -> dict[tuple[str, ...], float]:
    """Requests by adapter and state, less those that are none."""
    return {
        key: value for key, value in gauges(server).items() if "requests" in key[0] and value and len(key) in (3, 4)
    }


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within seconds."""
    deadline = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def test_an_idle_server_shows_no_request(server: Server) -> None:
    for name in ("A", "B", None):
        server.generate(text="x", lora_path=name, sampling_params={**GREEDY, "max_new_tokens": 64})
        assert requests_now(server) == {}
    shown = gauges(server)
    assert shown["engine_answers",] == 1
    assert all(shown["adapter_requests", name, state, "1"] == 0 for name in "AB" for state in ("waiting", "running"))


def test_a_request_is_shown_while_it_runs_and_no_longer_once_its_client_has_left(server: Server) -> None:
    chunks = stream(server, "x", "A", max_new_tokens=2000)
    next(chunks)
    assert requests_now(server) == {("adapter_requests", "A", "running", "1"): 1}
    chunks.close()
    assert soon(lambda: requests_now(server) == {})


def test_requests_that_left_before_they_ran_are_not_shown_as_waiting(server: Server) -> None:
    with server.held() as arrived, contextlib.suppress(requests.Timeout):
        body = {"text": ["x"] * 8, "lora_path": "B", "sampling_params": {**GREEDY, "max_new_tokens": 2000}}
        with contextlib.suppress(requests.Timeout):
            requests.post(f"{server.url}/generate", json=body, timeout=2)
        arrived()
    assert soon(lambda: requests_now(server) == {})


def test_only_what_is_loaded_has_series_and_each_shows_where_it_is(server: Server) -> None:
    before = gauges(server)
    for number in range(COMING):
        name = f"passing {number}"
        load(server, name, server.model.adapters["A"]).raise_for_status()
        if number % 19 == 0:
            answer(server, "x", name)
            assert gauges(server)["adapter_residency", name, "device", "1"] == 1
        unload(server, name).raise_for_status()
    after = gauges(server)
    assert {key[:2] for key in after} == {key[:2] for key in before}
    listed = {(row["name"], row["residency"], "1") for row in adapters(server).values()}
    assert {key[1:] for key in after if key[0] == "adapter_residency"} == listed
    tiers = Counter(tier for _, tier, _ in listed)
    assert {tier: after["adapters", tier] for tier in ("device", "host", "disk")} == {
        tier: tiers[tier] for tier in ("device", "host", "disk")
    }


def test_a_path_that_nobody_serves_makes_no_series(server: Server) -> None:
    for number in range(3):
        assert requests.get(f"{server.url}/made-up/{number}", timeout=30).status_code == 404
        assert requests.put(f"{server.url}/made-up-{number}", timeout=30).status_code == 404
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    assert "made-up" not in text and 'endpoint="other"' in text
