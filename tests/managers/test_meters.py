"""What is counted by adapter, as Prometheus reads it back."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vlora_sgl.managers.meters import EACH_TOKEN_S, FIRST_TOKEN_S, Meters, Times, families, lora_requests_info
from vlora_sgl.managers.metrics import Scrape


def scraped(meters: Meters, *loaded: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels; of what is loaded, each a letter and the digits of its versions."""
    labels = {"model_name": 'm"'}
    shown = meters.of_loaded({name: [*map(int, numbers)] for name, *numbers in loaded})
    requests = {"running": {"": 1, "b": 2, "a": 1}, "waiting": {}}
    registry = CollectorRegistry()
    registry.register(Scrape(labels, (), [*families(labels, shown), lora_requests_info(requests, 7)]))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            named = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name, *named.values()] = sample.value
    return found


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_S, EACH_TOKEN_S])
def test_buckets_are_cumulative_and_bounds_are_in_theirs(bounds: tuple[float, ...]) -> None:
    times = Times(bounds)
    assert list(bounds) == sorted(bounds)
    for seconds in (*bounds, 0.0, 1e9):
        times.add(seconds)
    counts = [count for _, count in times.buckets()]
    assert counts == [*range(2, len(bounds) + 2), len(bounds) + 2]


def test_requests_tokens_and_times_are_an_adapter_s_own() -> None:
    meters = Meters()
    meters.finished(("a", 1), "stop", 10, 5, 0.2, 1.0)
    meters.finished(("a", 1), "length", 10, 1, 0.2, 0.2)
    meters.finished(None, "stop", 3, 0, 0.0, 0.1)
    meters.aborted(("b", 1))
    found = scraped(meters, "a1", "b1")
    assert found["vlora:prompt_tokens_total", "a", "1"] == 20 and found["vlora:generation_tokens_total", "a", "1"] == 6
    ended = {key[1:]: value for key, value in found.items() if key[0] == "vlora:request_success_total"}
    assert ended["a", "stop", "1"] == ended["a", "length", "1"] == ended["b", "abort", "1"] == 1
    assert found["vlora:time_to_first_token_seconds_count", "a", "1"] == 2
    assert found["vlora:time_per_output_token_seconds_sum", "a", "1"] == pytest.approx(0.2), "(1.0 - 0.2) / 4"
    assert found["vlora:time_per_output_token_seconds_count", "a", "1"] == 1
    assert found["vlora:time_to_first_token_seconds_count", "base", ""] == 0, "it had no token"
    assert ("vllm:lora_requests_info", "7", "a,b", "") in found


def test_versions_are_apart_and_those_that_have_gone_are_counted_together() -> None:
    meters = Meters()
    for number, tokens in ((1, 10), (2, 20), (3, 30), (4, 40)):
        meters.finished(("a", number), "stop", tokens, 1, 0.2, 0.2)
    for loaded, shown in (("a1234", {1: 10, 2: 20, 3: 30, 4: 40}), ("a34", {"past": 30, 3: 30, 4: 40})):
        found = scraped(meters, loaded)
        name = "vlora:prompt_tokens_total"
        assert {key[2]: value for key, value in found.items() if key[0] == name and key[1] == "a"} == {
            str(number): tokens for number, tokens in shown.items()
        }
    meters.finished(("a", 4), "stop", 1, 1, 0.2, 0.2)
    found = scraped(meters, "a5")
    assert found["vlora:prompt_tokens_total", "a", "past"] == 101 and found["vlora:prompt_tokens_total", "a", "5"] == 0
    assert found["vlora:time_to_first_token_seconds_count", "a", "past"] == 5, "histograms, too"


def test_adapters_that_have_gone_leave_nothing() -> None:
    meters = Meters()
    meters.finished(("a", 1), "stop", 10, 5, 0.2, 1.0)
    assert not [key for key in scraped(meters) if "a" in key]
    assert scraped(meters, "a1")["vlora:prompt_tokens_total", "a", "1"] == 0, "a new adapter of that name begins anew"


def test_an_adapter_called_base_is_not_the_base_model() -> None:
    meters = Meters()
    meters.finished(("base", 1), "stop", 10, 1, 0.2, 0.2)
    meters.finished(None, "stop", 3, 1, 0.2, 0.2)
    labels = {"model_name": "m"}
    shown = meters.of_loaded({"base": [1]})
    (prompt, *_) = families(labels, shown)
    assert {sample.labels["adapter"]: sample.value for sample in prompt.samples} == {"base": 10, "": 3}
