"""Requests that nobody should send, to the tests' server: it goes on, and answers others as before."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import requests

from tests.conftest import Server
from tests.soak import phases
from tests.support.fuzz.calls import Calls
from tests.support.fuzz.routes import SKIPPED
from tests.support.fuzz.run import Fuzzer
from tests.support.fuzz.schemas import Schemas

pytestmark = pytest.mark.e2e

REQUESTS = int(os.environ.get("VLORA_FUZZ_REQUESTS", "300"))
SECONDS = float(os.environ.get("VLORA_FUZZ_SECONDS", "45"))
SEED = int(os.environ.get("VLORA_FUZZ_SEED", "1"))
REFERENCE = {"text": "What is this?", "lora_path": "A", "sampling_params": {**phases.GREEDY, "max_new_tokens": 24}}


def test_nothing_that_is_sent_ends_hangs_or_fools_the_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    good = server.model.adapters["B"]
    calls = Calls(description, SEED, good, tmp_path, server.adapters)
    before, names = server.log.stat().st_size, set(phases.adapters(server))
    memory = phases.memory_mb(server.process.pid)
    fuzzer = Fuzzer(server.url, lambda: server.process.poll() is None, 6, REFERENCE)
    tally = fuzzer.run(calls.call, itertools.count() if REQUESTS == 0 else iter(range(REQUESTS)), SECONDS)
    grown = phases.memory_mb(server.process.pid) - memory
    with capsys.disabled():
        counts = f"{tally.requests} requests {dict(tally.statuses)}, {tally.reference} beside"
        print(f"\nseed {SEED}: {counts}, {grown:+.0f} MB")
    assert not tally.faults, "\n".join(tally.faults)
    for name in set(phases.adapters(server)) - names:
        assert phases.unload(server, name).status_code == 200
    assert set(phases.adapters(server)) == names and phases.users_left(server) == {}
    said = server.log.read_bytes()[before:].decode(errors="replace")
    assert "Traceback" not in said, said[max(0, said.index("Traceback") - 500) :][:3000]
    assert grown < 600


def test_every_route_is_fuzzed_or_named_with_its_reason(server: Server, tmp_path: Path) -> None:
    description = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    listed = {(route.method, route.path) for route in Schemas(description).routes()}
    calls = Calls(description, SEED, server.model.adapters["B"], tmp_path)
    fuzzed = {(route.method, route.path) for route in calls.routes}
    assert {path for _, path in listed - fuzzed} <= set(SKIPPED)
    unknown = set(SKIPPED) - {path for _, path in listed} - {"/v1/realtime"}
    assert not unknown, f"named, but no route: {unknown}"
    assert time.monotonic() and all(calls.call(number).path for number in range(len(calls.routes)))
