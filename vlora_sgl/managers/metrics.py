"""Our gauges on ``/metrics`` (``--enable-metrics``), all under ``vlora:``, made from the engine's state at a scrape.

Nothing is kept between two scrapes: what is shown is true when it is asked for, also of an idle server, and there is a
series only for the adapters that are loaded. ``prometheus_client``'s own gauges cannot do that here: between processes
they travel through files, which keep every value that was ever set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlora_sgl.core import AdapterId, JsonDict

if TYPE_CHECKING:
    # Not while running: prometheus_client decides at import whether its values go to files.
    from prometheus_client import Metric

GAUGES: dict[str, tuple[str, ...]] = {
    "engine_answers": ("Whether the engine answered this scrape in time; without it the others are left out.",),
    "mode_share": ("Share of the iterations so far that ran in this mode.", "mode"),
    "iterations": ("Iterations so far in this mode.", "mode"),
    "switches": ("Changes of the merged adapter so far.",),
    "switch_seconds": ("Seconds spent on them, by the cost table.",),
    "starving_requests": ("Requests that have waited over half of the bound.",),
    "adapters": ("Loaded adapters whose nearest copy is in this tier.", "tier"),
    "adapter_residency": ("1 for the tier of a loaded adapter's nearest copy.", "adapter", "version", "tier"),
    "adapter_share": ("Share of the conversations that a loaded version has of its adapter.", "adapter", "version"),
    "slot_hits": ("Uses of an adapter that found it in its slot.",),
    "cost_error": (
        "How far iterations were lately from their planned seconds, relatively: the median.",
        "phase",
    ),
    "slot_misses": ("Uses of an adapter that had to load it.",),
    "slot_ahead": ("Loads of an adapter that began before a batch needed it.",),
    "slot_reloads": ("Loads of an adapter evicted a moment ago: slot thrash.",),
    "adapter_loads": ("Times that a loaded adapter came to a device slot.", "adapter", "version"),
    "adapter_requests": ("Requests of a loaded adapter, or of the base model.", "adapter", "version", "state"),
    "combined_requests": ("Requests that combine adapters; each counts for every one of them as well.", "state"),
    "unloaded_requests": ("Requests of adapters that were unloaded while they ran.", "state"),
    "reuse_tokens": ("Tokens of requests so far, and those of them taken from the cache.", "kind"),
    "encoder_images": ("Look-ups of an image in the encoder's cache so far.", "found"),
    "head_requests": ("Requests of vision heads so far.", "answer"),
    "deadlines": ("Requests with a deadline that ended so far, in time or not.", "class", "kept"),
    "faults": ("Requests that went wrong inside the engine so far, and ended alone.", "kind"),
}
"""Name of a gauge -> what it shows, and its labels beside those that all have."""

TOKENS = ("prompt", "prompt_image", "cached_text", "cached_image", "shared")
"""The label ``kind`` of ``vlora:reuse_tokens``; each shows the total of that name."""

TIERS = ("device", "host", "disk")
BASE = "base"
"""The label ``adapter`` of requests without one; an empty one where an adapter has this name."""

Sample = tuple[str, float, dict[str, str]]
"""A gauge's name, its value, and the values of its labels."""


class Scrape:
    """What ``prometheus_client`` collects once (``CollectorRegistry.register``).

    Args:
        labels: what every gauge has.
        samples: by the names in ``GAUGES``.
        others: what is no gauge of those.
    """

    def __init__(self, labels: Mapping[str, str], samples: Iterable[Sample], others: Iterable[Metric] = ()) -> None:
        self._labels, self._samples, self._others = dict(labels), samples, others

    def collect(self) -> Iterator[Metric]:
        """The gauges that have a sample, and the others."""
        from prometheus_client.core import GaugeMetricFamily

        found: dict[str, GaugeMetricFamily] = {}
        for name, value, labels in self._samples:
            text, *more = GAUGES[name]
            family = found.setdefault(name, GaugeMetricFamily(f"vlora:{name}", text, labels=[*self._labels, *more]))
            family.add_metric([printable(one) for one in (*self._labels.values(), *map(labels.get, more))], value)
        yield from found.values()
        yield from self._others


def label_of(name: AdapterId, loaded: Collection[str]) -> str:
    """The label ``adapter`` of the base model or of a loaded adapter."""
    return printable(name) if name is not None else BASE if BASE not in loaded else ""


def printable(label: object) -> str:
    return str(label).encode(errors="backslashreplace").decode()  # Prometheus reads UTF-8, which not every name has


def samples_of(state: JsonDict, adapters: Sequence[JsonDict]) -> Iterator[Sample]:
    """All there is to show.

    Args:
        state: what the scheduler says of us (``internal_states[].vlora`` of ``/server_info``).
        adapters: the loaded adapters (``AdapterLifecycle.listed``).
    """
    yield "engine_answers", 1, {}
    yield from _saved(state["reuse"], state["encoder"], state["heads"])
    for service, counts in state["deadlines"].items():
        yield "deadlines", counts["met"], {"class": service, "kept": "yes"}
        yield "deadlines", counts["missed"], {"class": service, "kept": "no"}
    yield from (("faults", count, {"kind": kind}) for kind, count in state["faults"].items())
    if state["plan"] is not None:
        yield from _planned(state["batches_by_mode"], state["plan"])
        yield from _adapters(adapters)
        yield from _requests(adapters, state["plan"]["requests"])
        yield from (
            ("combined_requests", count, {"state": name}) for name, count in state["plan"]["combined_requests"].items()
        )


def _saved(reuse: Mapping[str, int], encoder: Mapping[str, int], heads: Mapping[str, int]) -> Iterator[Sample]:
    """Totals of the prefix cache, the encoder's cache and the heads."""
    for kind in TOKENS:
        yield "reuse_tokens", reuse.get(f"{kind}_tokens", 0), {"kind": kind}
    yield "encoder_images", encoder["hits"], {"found": "yes"}
    yield "encoder_images", encoder["misses"], {"found": "no"}
    yield "head_requests", heads["requests"] - heads["remembered"], {"answer": "computed"}
    yield "head_requests", heads["remembered"], {"answer": "remembered"}


def _planned(iterations: Mapping[str, int], plan: JsonDict) -> Iterator[Sample]:
    """Modes, switches and slots."""
    total = sum(iterations.values()) or 1
    for mode, count in iterations.items():
        yield "iterations", count, {"mode": mode}
        yield "mode_share", count / total, {"mode": mode}
    yield "switches", plan["switches"], {}
    yield "switch_seconds", plan["switch_seconds"], {}
    yield "starving_requests", plan["starving"], {}
    yield from (("cost_error", error, {"phase": phase}) for phase, error in plan["cost_error"].items())
    for event in ("hits", "misses", "ahead", "reloads"):
        yield f"slot_{event}", plan["slots"][event], {}


def _adapters(adapters: Sequence[JsonDict]) -> Iterator[Sample]:
    """Where the loaded adapters are."""
    for tier in TIERS:
        yield "adapters", sum(row["residency"] == tier for row in adapters), {"tier": tier}
    for row in adapters:
        version = {"adapter": row["adapter"], "version": str(row["version"])}
        yield "adapter_residency", 1, {**version, "tier": row["residency"]}
        yield "adapter_share", row["share"], version
        yield "adapter_loads", row.get("loads", 0), version


def _requests(adapters: Sequence[JsonDict], requests: Mapping[str, Mapping[str, int]]) -> Iterator[Sample]:
    """Requests by state and adapter; the base model's key is the empty name."""
    loaded = {row["name"] for row in adapters}
    base = label_of(None, {row["adapter"] for row in adapters})
    for state, counts in requests.items():
        yield "adapter_requests", counts.get("", 0), {"adapter": base, "version": "", "state": state}
        for row in adapters:
            version = {"adapter": row["adapter"], "version": str(row["version"])}
            yield "adapter_requests", counts.get(row["name"], 0), {**version, "state": state}
        gone = sum(count for name, count in counts.items() if name and name not in loaded)
        yield "unloaded_requests", gone, {"state": state}


def counted_path(original: Callable[[Any], tuple[str, bool]], request: Any) -> tuple[str, bool]:
    """Wraps what SGLang counts a request by: paths that no route has are one, so that a client cannot make series."""
    path, handled = original(request)
    return (path if handled else "other"), handled
