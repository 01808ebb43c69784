"""Our metrics on SGLang's Prometheus endpoint (``--enable-metrics``), all under ``vlora:``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class VLoraMetrics:
    """Gauges and counters of one scheduler process.

    Made only after SGLang has set ``PROMETHEUS_MULTIPROC_DIR``: the values travel to the HTTP process through files
    there.

    Args:
        labels: SGLang's labels of this scheduler (model name, ranks).
        registry: where to register; by default prometheus_client's own.
    """

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Gauge

        self.labels = dict(labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(
                f"vlora:{name}",
                text,
                labelnames=(*self.labels, *more),
                multiprocess_mode="mostrecent",
                registry=registry or REGISTRY,
            )

        self.mode_share = gauge("mode_share", "Share of the iterations so far that ran in this mode.", "mode")
        self.iterations = gauge("iterations", "Iterations so far in this mode.", "mode")
        self.switches = gauge("switches", "Changes of the merged adapter so far.")
        self.switch_seconds = gauge("switch_seconds", "Seconds spent on them, by the cost table.")
        self.starving = gauge("starving_requests", "Requests that have waited over half of the bound.")
        self.adapters = gauge("adapters", "Adapters whose nearest copy is in this tier.", "tier")
        self.slot_hits = gauge("slot_hits", "Uses of an adapter that found it in its slot.")
        self.slot_misses = gauge("slot_misses", "Uses of an adapter that had to load it.")
        self.slot_reloads = gauge("slot_reloads", "Loads of an adapter evicted a moment ago: slot thrash.")
        self.requests = gauge("adapter_requests", "Requests of an adapter.", "adapter", "state")
        self._shown: set[tuple[str, str]] = set()

    def update(
        self,
        iterations: Mapping[str, int],
        planner: Mapping[str, Any],
        slots: Mapping[str, Any],
        in_host: int,
        waiting: Counter[str],
        running: Counter[str],
    ) -> None:
        """Set everything.

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
            self.iterations.labels(**self.labels, mode=mode).set(count)
            self.mode_share.labels(**self.labels, mode=mode).set(count / total)
        for gauge, value in (
            (self.switches, planner["switches"]),
            (self.switch_seconds, planner["switch_seconds"]),
            (self.starving, planner["starving"]),
            (self.slot_hits, slots["hits"]),
            (self.slot_misses, slots["misses"]),
            (self.slot_reloads, slots["reloads"]),
        ):
            gauge.labels(**self.labels).set(value)
        for tier, count in (("device", slots["resident"]), ("host", in_host - slots["resident"])):
            self.adapters.labels(**self.labels, tier=tier).set(count)
        present = {(adapter, state) for state, c in (("waiting", waiting), ("running", running)) for adapter in c}
        # An adapter that left reads 0 once: a gauge that vanished would keep its last value in the files.
        for adapter, state in self._shown | present:
            count = (waiting if state == "waiting" else running)[adapter]
            self.requests.labels(**self.labels, adapter=adapter, state=state).set(count)
        self._shown = present
