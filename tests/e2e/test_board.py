"""The Grafana board: every query names what a running server exports, with labels that it has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Server
from tests.soak.phases import GREEDY, stream

pytestmark = pytest.mark.e2e

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "vlora.json").read_text())
SERIES = re.compile(r"((?:vlora|vllm|sglang):\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")


def queries() -> Iterator[tuple[str, str]]:
    """Title and query of every panel, and of every variable."""
    for panel in BOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["label"], variable["query"]["query"]


def exported(server: Server) -> dict[str, set[str]]:
    """Series -> the names of its labels."""
    found: dict[str, set[str]] = defaultdict(set)
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


@pytest.fixture(scope="module")
def series(server: Server) -> dict[str, set[str]]:
    for name in (None, "A", "B"):
        server.generate(text="x y z", lora_path=name, sampling_params={**GREEDY, "max_new_tokens": 4})
    return exported(server)


@pytest.mark.parametrize(("title", "query"), [*queries()], ids=lambda text: text[:40])
def test_a_query_names_series_and_labels_that_there_are(title: str, query: str, series: dict[str, set[str]]) -> None:
    named = SERIES.findall(query)
    assert named, f"{title}: {query} names no series"
    grouped = {label.strip() for labels in BY.findall(query) for label in labels.split(",")}
    for name, selector in named:
        assert name in series, f"{title}: no series {name}"
        asked = set(re.findall(r"(\w+)\s*=~?", selector or "")) | grouped
        assert asked <= series[name], f"{title}: {name} has {series[name]}, not {asked}"


def test_no_gauge_of_ours_is_missing_from_the_board(series: dict[str, set[str]]) -> None:
    shown = {name for _, query in queries() for name, _ in SERIES.findall(query)}
    ours = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in series if name.startswith("vlora:")}
    hidden = {name for name in ours if not any(one.startswith(name) for one in shown)}
    assert hidden <= {"vlora:mode_share", "vlora:cost_error"}, "steps are shown as rates; errors of costs come late"


def counted(server: Server) -> dict[tuple[str, ...], float]:
    """What is counted by adapter: series and its own labels -> value."""
    found = {}
    for family in text_string_to_metric_families(requests.get(f"{server.url}/metrics", timeout=30).text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name, *labels.values()] = sample.value
    return found


def test_requests_are_counted_for_their_adapter(server: Server) -> None:
    before = counted(server)
    for name, tokens in (("A", 8), ("A", 1), (None, 5)):
        server.generate(text="x y z", lora_path=name, sampling_params={**GREEDY, "max_new_tokens": tokens})
    left = stream(server, "x", "B", max_new_tokens=2000)
    next(left)
    left.close()

    def more(*key: str) -> float:
        return counted(server).get(key, 0) - before.get(key, 0)

    assert (
        more("vlora:generation_tokens_total", "A", "1") == 9 and more("vlora:generation_tokens_total", "base", "") == 5
    )
    assert more("vlora:request_success_total", "A", "length", "1") == 2
    assert more("vlora:time_to_first_token_seconds_count", "A", "1") == 2
    assert more("vlora:time_per_output_token_seconds_count", "A", "1") == 1, "one token has no further ones"
    assert more("vlora:prompt_tokens_total", "A", "1") > 0 < counted(server)["vlora:adapter_loads", "A", "1"]
    from tests.e2e.test_metrics import soon

    assert soon(lambda: more("vlora:request_success_total", "B", "abort", "1") == 1)


def test_llm_d_finds_which_adapters_run(server: Server) -> None:
    chunks = stream(server, "x", "A", max_new_tokens=2000)
    next(chunks)
    infos: list[Any] = [key for key in counted(server) if key[0] == "vllm:lora_requests_info"]
    chunks.close()
    assert [key[1:] for key in infos] == [("6", "A", "")]
