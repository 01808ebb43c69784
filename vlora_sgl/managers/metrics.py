"""Our metrics on SGLang's Prometheus endpoint (``--enable-metrics``), all under ``vlora:``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlora_sgl.core import JsonDict

if TYPE_CHECKING:
    # Not while running: prometheus_client decides at import whether its values go to files.
    from prometheus_client import CollectorRegistry

GAUGES: dict[str, tuple[str, ...]] = {
    "mode_share": ("Share of the iterations so far that ran in this mode.", "mode"),
    "iterations": ("Iterations so far in this mode.", "mode"),
    "switches": ("Changes of the merged adapter so far.",),
    "switch_seconds": ("Seconds spent on them, by the cost table.",),
    "starving_requests": ("Requests that have waited over half of the bound.",),
    "adapters": ("Adapters whose nearest copy is in this tier.", "tier"),
    "slot_hits": ("Uses of an adapter that found it in its slot.",),
    "slot_misses": ("Uses of an adapter that had to load it.",),
    "slot_reloads": ("Loads of an adapter evicted a moment ago: slot thrash.",),
    "adapter_requests": ("Requests of an adapter.", "adapter", "state"),
    "reuse_tokens": ("Tokens of requests so far, and those of them taken from the cache.", "kind"),
    "encoder_images": ("Look-ups of an image in the encoder's cache so far.", "found"),
    "head_requests": ("Requests of vision heads so far.", "answer"),
}
"""Name of a gauge -> what it shows, and its labels beside SGLang's."""

TOKENS = ("prompt", "prompt_image", "cached_text", "cached_image", "shared")
"""The label ``kind`` of ``vlora:reuse_tokens``; each shows the total of that name."""


class VLoraMetrics:
    """Gauges of one scheduler process.

    Made only after SGLang has set ``PROMETHEUS_MULTIPROC_DIR``: the values travel to the HTTP process through files
    there.

    Args:
        labels: SGLang's labels of this scheduler (model name, ranks).
        registry: where to register; by default prometheus_client's own.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Gauge

        self._labels, where = dict(labels), registry or REGISTRY
        self._gauges = {
            name: Gauge(f"vlora:{name}", text, (*labels, *more), multiprocess_mode="mostrecent", registry=where)
            for name, (text, *more) in GAUGES.items()
        }
        self._shown: set[tuple[str, str]] = set()

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name].labels(**self._labels, **labels).set(value)

    def update_reuse(self, reuse: Mapping[str, int], encoder: Mapping[str, int], heads: Mapping[str, int]) -> None:
        """Set what was saved: totals of the prefix cache, the encoder's cache and the heads."""
        for kind in TOKENS:
            self._set("reuse_tokens", reuse.get(f"{kind}_tokens", 0), kind=kind)
        self._set("encoder_images", encoder["hits"], found="yes")
        self._set("encoder_images", encoder["misses"], found="no")
        self._set("head_requests", heads["requests"] - heads["remembered"], answer="computed")
        self._set("head_requests", heads["remembered"], answer="remembered")

    def update(
        self,
        iterations: Mapping[str, int],
        planner: JsonDict,
        slots: JsonDict,
        in_host: int,
        waiting: Counter[str],
        running: Counter[str],
    ) -> None:
        """Set what concerns modes, slots and adapters.

        Args:
            iterations: iterations so far, by mode.
            planner: ``Planner.state()``.
            slots: ``SlotResidency.state()``.
            in_host: adapters loaded in host memory, those in slots included.
            waiting: waiting requests by adapter name.
            running: running requests by adapter name.
        """
        total = sum(iterations.values()) or 1
        for mode, count in iterations.items():
            self._set("iterations", count, mode=mode)
            self._set("mode_share", count / total, mode=mode)
        self._set("switches", planner["switches"])
        self._set("switch_seconds", planner["switch_seconds"])
        self._set("starving_requests", planner["starving"])
        for event in ("hits", "misses", "reloads"):
            self._set(f"slot_{event}", slots[event])
        self._set("adapters", slots["resident"], tier="device")
        self._set("adapters", in_host - slots["resident"], tier="host")
        present = {(adapter, state) for state, c in (("waiting", waiting), ("running", running)) for adapter in c}
        # An adapter that left reads 0 once: a gauge that vanished would keep its last value in the files.
        for adapter, state in self._shown | present:
            count = (waiting if state == "waiting" else running)[adapter]
            self._set("adapter_requests", count, adapter=adapter, state=state)
        self._shown = present
