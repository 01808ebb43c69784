"""What each adapter's requests were and how long they took, for ``/metrics``: counted where answers come together.

Names and labels are vLLM's where it has such (behind ``vlora:``), so that its dashboards need another prefix only.
``vllm:lora_requests_info`` is named as it is, because llm-d's picker of endpoints looks for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlora_sgl.core import Version
from vlora_sgl.managers.metrics import label_of, printable

if TYPE_CHECKING:
    # Not while running: prometheus_client decides at import whether its values go to files.
    from prometheus_client import Metric

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
EACH_TOKEN_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.0, 2.5)
OUTCOMES = ("stop", "length", "abort")
"""The label ``finished_reason``, always shown; SGLang may have others."""


class Times:
    """A histogram.

    Args:
        bounds: upper bounds of its buckets, in seconds; one more takes the rest.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def merge(self, other: Times) -> None:
        """Count what another of the same bounds has counted."""
        self._counts = [*map(sum, zip(self._counts, other._counts, strict=True))]
        self.sum += other.sum

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Each bound, and how many were at most that."""
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield bound, total


@dataclass
class Meter:
    """Of one adapter, or the base model."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    first_token: Times = field(default_factory=lambda: Times(FIRST_TOKEN_S))
    each_token: Times = field(default_factory=lambda: Times(EACH_TOKEN_S))

    def add(self, other: Meter) -> None:
        """Count what another has counted."""
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.outcomes += other.outcomes
        self.first_token.merge(other.first_token)
        self.each_token.merge(other.each_token)


class Meters:
    """By version of adapter; ``None`` is the base model. Names that are loaded no longer are forgotten; versions that
    are not, of a name that is, are counted together, as its version 0."""

    def __init__(self) -> None:
        self._meters: dict[Version | None, Meter] = {}

    def finished(
        self, adapter: Version | None, outcome: str, prompt: int, tokens: int, first_s: float, whole_s: float
    ) -> None:
        """Count a request that has been answered.

        Args:
            outcome: SGLang's type of the finish reason.
            prompt: its tokens.
            tokens: of the answer.
            first_s: seconds to the first of them.
            whole_s: seconds to the end.
        """
        meter = self._meters.setdefault(adapter, Meter())
        meter.outcomes[outcome] += 1
        meter.prompt_tokens += prompt
        meter.generation_tokens += tokens
        if tokens:
            meter.first_token.add(first_s)
        if tokens > 1:
            meter.each_token.add((whole_s - first_s) / (tokens - 1))

    def aborted(self, adapter: Version | None) -> None:
        """Count a request that ended without an answer."""
        self._meters.setdefault(adapter, Meter()).outcomes["abort"] += 1

    def of_loaded(self, loaded: Mapping[str, Collection[int]]) -> dict[Version | None, Meter]:
        """The base model's and those of the loaded adapters; the others are forgotten.

        Args:
            loaded: numbers of the loaded versions, by name.
        """
        kept: dict[Version | None, Meter] = {None: Meter()}
        kept |= {(name, number): Meter() for name, numbers in loaded.items() for number in numbers}
        for version, meter in self._meters.items():
            if version in kept:
                kept[version].add(meter)
            elif version is not None and version[0] in loaded:
                kept.setdefault((version[0], 0), Meter()).add(meter)
        self._meters = dict(kept)
        return kept


def families(labels: Mapping[str, str], meters: Mapping[Version | None, Meter]) -> Iterator[Metric]:
    """The same for ``prometheus_client``.

    Args:
        labels: that all have.
        meters: by version.
    """
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    names, values = [*labels, "adapter", "version"], list(labels.values())
    loaded = {version[0] for version in meters if version is not None}
    prompt = CounterMetricFamily("vlora:prompt_tokens", "Tokens of prompts.", labels=names)
    answers = CounterMetricFamily("vlora:generation_tokens", "Tokens of answers.", labels=names)
    ended = CounterMetricFamily("vlora:request_success", "Requests by outcome.", labels=[*names, "finished_reason"])
    first = HistogramMetricFamily(
        "vlora:time_to_first_token_seconds", "From a request's coming to its first token.", labels=names
    )
    each = HistogramMetricFamily(
        "vlora:time_per_output_token_seconds", "Of each token of an answer behind the first.", labels=names
    )
    for version, meter in meters.items():
        name, number = version or (None, None)
        of = [*values, label_of(name, loaded), version_label(number)]
        prompt.add_metric(of, meter.prompt_tokens)
        answers.add_metric(of, meter.generation_tokens)
        for outcome in dict.fromkeys((*OUTCOMES, *meter.outcomes)):
            ended.add_metric([*of, outcome], meter.outcomes[outcome])
        first.add_metric(of, list(meter.first_token.buckets()), meter.first_token.sum)
        each.add_metric(of, list(meter.each_token.buckets()), meter.each_token.sum)
    yield from (prompt, answers, ended, first, each)


def version_label(number: int | None) -> str:
    """The label ``version``: empty for the base model, ``past`` for versions that are loaded no longer."""
    return "" if number is None else str(number or "past")


def lora_requests_info(requests: Mapping[str, Mapping[str, int]], slots: int) -> Metric:
    """vLLM's gauge of which adapters run and wait; its value is the time.

    Args:
        requests: by state and adapter; the base model's key is the empty name.
        slots: for adapters.
    """
    from prometheus_client.core import GaugeMetricFamily

    labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
    found = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on LoRA requests.", labels=labels)
    listed = [printable(",".join(sorted(filter(None, requests[state])))) for state in ("running", "waiting")]
    found.add_metric([*listed, str(slots)], time.time())
    return found
