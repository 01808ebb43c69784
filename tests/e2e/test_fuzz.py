"""Requests that nobody should send, to the tests' server: it goes on, and answers others as before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.conftest import Server
from tests.support.fuzz.calls import Calls
from tests.support.fuzz.leftovers import Before
from tests.support.fuzz.routes import SKIPPED
from tests.support.fuzz.run import REFERENCE, Fuzzer
from tests.support.fuzz.schemas import Schemas

pytestmark = pytest.mark.e2e

REQUESTS, SECONDS, SEED = 400, 45, 1


@pytest.fixture
def calls(server: Server, tmp_path: Path) -> Calls:
    description = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    return Calls(description, SEED, server.model.adapters["B"], tmp_path, server.adapters)


def test_nothing_that_is_sent_ends_hangs_or_fools_the_server(server: Server, calls: Calls) -> None:
    before = Before.of(server)
    fuzzer = Fuzzer(server.url, lambda: server.process.poll() is None, 6, REFERENCE)
    tally = fuzzer.run(calls.call, range(REQUESTS), SECONDS)
    print(f"seed {SEED}: {tally}")
    assert not tally.faults, "\n".join(tally.faults)
    assert not (left := list(before.faults())), "\n".join(left)
    # A busy machine gets through fewer in that time.
    assert tally.requests > REQUESTS / 10 and tally.reference > 1


def test_every_route_is_fuzzed_or_named_with_its_reason(server: Server, calls: Calls) -> None:
    description = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    listed = {(route.method, route.path) for route in Schemas(description).routes()}
    left_out = {path for _, path in listed - {(route.method, route.path) for route in calls.routes}}
    assert left_out == SKIPPED.keys() - {"/v1/realtime"}  # OpenAPI lists no websockets
    first = [calls.call(number) for number in range(len(calls.routes))]
    assert len({(call.method, call.path) for call in first}) > 0.9 * len(calls.routes)


def test_who_asks_for_log_probabilities_beside_who_does_not_ends_nothing(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}

    def ask(ids: list[int] | None) -> int:
        more = {} if ids is None else {"token_ids_logprob": ids}
        row = server.generate(text="x", return_logprob=True, sampling_params=sampling, **more)
        return len((row["meta_info"].get("output_token_ids_logprobs") or [()])[0])

    with ThreadPoolExecutor(4) as pool, server.held():  # in one batch
        told = [pool.submit(ask, ids) for ids in ([1, 2], None, [3], None)]
    assert [one.result() for one in told] == [2, 0, 1, 0]
