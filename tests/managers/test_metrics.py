"""The gauges of the prefix cache, the encoder's cache and the heads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from vlora_sgl.managers.metrics import TOKENS, VLoraMetrics
from vlora_sgl.mem_cache.radix_cache import Reuse, ReuseTotals


def test_totals_arrive_under_their_labels() -> None:
    registry = CollectorRegistry()
    metrics = VLoraMetrics({"model": "m"}, registry)
    totals = ReuseTotals()
    totals.add(Reuse(100, 60, 70, 30, 40, 20, 1, 2))
    state = {f"{kind}_tokens": getattr(totals, f"{kind}_tokens") for kind in TOKENS}
    metrics.update_reuse(state, {"hits": 5, "misses": 6}, {"requests": 9, "remembered": 4})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vlora:{name}", {"model": "m", **labels})

    shown = {kind: value("reuse_tokens", kind=kind) for kind in TOKENS}
    assert shown == {"prompt": 100, "prompt_image": 60, "cached_text": 30, "cached_image": 40, "shared": 20}
    assert (value("encoder_images", found="yes"), value("encoder_images", found="no")) == (5, 6)
    assert (value("head_requests", answer="computed"), value("head_requests", answer="remembered")) == (5, 4)
