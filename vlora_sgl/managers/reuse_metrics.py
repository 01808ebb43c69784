"""What the prefix cache, the image encoder's cache and the heads saved, on SGLang's Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKENS = {
    "prompt": "prompt_tokens",
    "prompt_image": "prompt_image_tokens",
    "cached_text": "cached_text_tokens",
    "cached_image": "cached_image_tokens",
    "shared": "shared_tokens",
}
"""The label ``kind`` of ``vlora:reuse_tokens`` -> the total it shows."""


class ReuseMetrics:
    """Totals of one scheduler process; made, like ``VLoraMetrics``, once SGLang has set up Prometheus.

    Args:
        labels: SGLang's labels of this scheduler (model name, ranks).
        registry: where to register; by default prometheus_client's own.
    """

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Gauge

        self.labels = dict(labels)

        def total(name: str, text: str, label: str) -> Any:
            names = (*self.labels, label)
            return Gauge(f"vlora:{name}", text, names, multiprocess_mode="mostrecent", registry=registry or REGISTRY)

        self.tokens = total(
            "reuse_tokens", "Tokens of requests so far, and those of them taken from the cache.", "kind"
        )
        self.encoder = total("encoder_images", "Look-ups of an image in the encoder's cache so far.", "found")
        self.heads = total("head_requests", "Requests of vision heads so far.", "answer")

    def update(self, reuse: Mapping[str, int], encoder: Mapping[str, int], heads: Mapping[str, int]) -> None:
        """Set everything: ``reuse_state()``, ``EncoderCache.state()`` and the heads' totals."""
        for kind, name in TOKENS.items():
            self.tokens.labels(**self.labels, kind=kind).set(reuse.get(name, 0))
        for found, name in (("yes", "hits"), ("no", "misses")):
            self.encoder.labels(**self.labels, found=found).set(encoder[name])
        remembered = heads["remembered"]
        for answer, count in (("computed", heads["requests"] - remembered), ("remembered", remembered)):
            self.heads.labels(**self.labels, answer=answer).set(count)
