"""The gauges of a scrape: what is shown, of which adapters, and that names cannot break the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.managers.metrics import GAUGES, TOKENS, Scrape, samples_of
from vlora_sgl.mem_cache.radix_cache import Reuse, ReuseTotals


def state(**requests: dict[str, int]) -> dict[str, Any]:
    """What a scheduler says of us, as far as the gauges show it."""
    totals = ReuseTotals()
    totals.add(Reuse(100, 60, 70, 30, 40, 20, 1, 2))
    slots = SlotResidency(memory=4)
    for one in "aba":
        slots.mark_used(one)
    with slots.before_use():
        slots.mark_used("c")
    requests = {"waiting": {}, "running": {}, **requests}
    return {
        "reuse": {f"{kind}_tokens": getattr(totals, f"{kind}_tokens") for kind in TOKENS},
        "encoder": {"hits": 5, "misses": 6},
        "heads": {"requests": 9, "remembered": 4},
        "faults": {"nonfinite": 2, "head": 0},
        "deadlines": {"realtime": {"met": 7, "missed": 2}, "batch": {"met": 0, "missed": 0}},
        "batches_by_mode": {"merged": 3, "unmerged": 1, "mixture": 0},
        "plan": {
            "switches": 3,
            "switch_seconds": 0.5,
            "starving": 1,
            "cost_error": {"decode": 0.02, "prefill": 0.07},
            "slots": slots.state(),
            "requests": requests,
            "combined_requests": {"waiting": 0, "running": 3},
        },
    }


def adapter(name: str, tier: str = "host") -> dict[str, Any]:
    return {"name": name, "adapter": name, "version": 1, "share": 1.0, "residency": tier}


def scraped(said: dict[str, Any], adapters: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Gauge and the values of its own labels -> value, read back from the text that Prometheus gets."""
    registry = CollectorRegistry()
    registry.register(Scrape({"model_name": "m"}, samples_of(said, adapters)))
    found: dict[tuple[Any, ...], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m" and family.type == "gauge"
            key = (sample.name.removeprefix("vlora:"), *sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def test_every_gauge_shows_what_the_engine_says() -> None:
    shown = scraped(state(waiting={"A": 2}, running={"A": 1, "": 4}), [adapter("A", "device"), adapter("B", "disk")])
    assert {key[0] for key in shown} == set(GAUGES)
    tokens = {kind: shown["reuse_tokens", kind] for kind in TOKENS}
    assert tokens == {"prompt": 100, "prompt_image": 60, "cached_text": 30, "cached_image": 40, "shared": 20}
    assert (shown["encoder_images", "yes"], shown["encoder_images", "no"]) == (5, 6)
    assert (shown["head_requests", "computed"], shown["head_requests", "remembered"]) == (5, 4)
    assert (shown["cost_error", "decode"], shown["cost_error", "prefill"]) == (0.02, 0.07)
    assert (shown["faults", "nonfinite"], shown["faults", "head"]) == (2, 0)
    assert (shown["mode_share", "merged"], shown["iterations", "unmerged"]) == (0.75, 1)
    assert (shown["switches",], shown["switch_seconds",], shown["starving_requests",]) == (3, 0.5, 1)
    assert (shown["slot_hits",], shown["slot_misses",], shown["slot_reloads",]) == (1, 2, 0)
    assert shown["slot_ahead",] == 1
    assert (shown["deadlines", "realtime", "yes"], shown["deadlines", "realtime", "no"]) == (7, 2)
    assert shown["deadlines", "batch", "no"] == 0
    assert (shown["combined_requests", "waiting"], shown["combined_requests", "running"]) == (0, 3)
    assert [shown["adapters", tier] for tier in ("device", "host", "disk")] == [1, 0, 1]
    residency = {key[1:] for key in shown if key[0] == "adapter_residency"}
    assert residency == {("A", "device", "1"), ("B", "disk", "1")}
    assert (shown["adapter_requests", "A", "waiting", "1"], shown["adapter_requests", "base", "running", ""]) == (2, 4)
    assert (shown["adapter_requests", "B", "running", "1"], shown["unloaded_requests", "running"]) == (0, 0)


def test_adapters_that_are_gone_have_no_series_and_their_last_requests_one_in_common() -> None:
    shown = scraped(state(running={"x": 1, "y": 2, "A": 1}), [adapter("A")])
    assert {key[1] for key in shown if key[0].startswith("adapter_")} == {"A", "base"}
    assert (shown["unloaded_requests", "running"], shown["unloaded_requests", "waiting"]) == (3, 0)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "base", "ä \u202e", "a}b{", "\x00", "\ud800", "x" * 1024])
def test_a_name_of_any_kind_is_one_series(name: str) -> None:
    shown = scraped(state(waiting={name: 2}, running={"": 1}), [adapter(name)])
    (count,) = (v for (gauge, *labels), v in shown.items() if gauge == "adapter_requests" and v == 2)
    assert count == 2
    assert len([key for key in shown if key[0] == "adapter_requests"]) == 4


def test_without_adapters_what_does_not_concern_them_is_shown() -> None:
    shown = scraped({**state(), "plan": None}, [])
    anyway = {"engine_answers", "reuse_tokens", "encoder_images", "head_requests", "deadlines", "faults"}
    assert {key[0] for key in shown} == anyway
