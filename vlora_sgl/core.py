"""The nouns that every part of vlora_sgl shares: adapters, modes and plans.

Nothing here imports SGLang, torch or another module of ours, so that a policy, a kernel test and the simulator
can use these without starting anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

JsonDict = dict[str, Any]
"""A JSON object: what a request's body, an answer or a settings file says."""

AdapterId = str | None
"""Identity of an adapter inside the engine. ``None`` is the base model, which counts as an adapter everywhere."""


class InferenceMode(StrEnum):
    """How one iteration applies its adapters (V-LoRA, section 4.4).

    - ``UNMERGED``: nothing is merged; every adapter's rows go through the ATMM operator.
    - ``MERGED``: one adapter is merged into the weights; only its rows are in the batch; no LoRA kernel runs.
    - ``MIXTURE``: one adapter is merged; rows of others add their own adapter and subtract the merged one (deLoRA).
    """

    UNMERGED = "unmerged"
    MERGED = "merged"
    MIXTURE = "mixture"


class ServiceClass(StrEnum):
    """The latency class a request may carry; it enters a policy's credit."""

    REALTIME = "realtime"
    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a policy decided for one iteration.

    Attributes:
        requests: ids of the requests to run, in admission order.
        mode: how their adapters are applied.
        merged_adapter: the adapter merged into the base weights, or ``None`` if the weights are to be the base
            model's.
        invocation_starts: first position of the prompt that runs with the adapter, per row of a prefill; empty in
            decoding, which is behind all of them.

    Raises:
        ValueError: the merged adapter contradicts the mode.
    """

    requests: tuple[str, ...]
    mode: InferenceMode
    merged_adapter: AdapterId = None
    invocation_starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.mode is InferenceMode.UNMERGED) != (self.merged_adapter is None):
            raise ValueError(f"mode {self.mode} does not go with merged_adapter={self.merged_adapter!r}")


def row_pairs(adapter: AdapterId, merged: AdapterId) -> tuple[tuple[str, float], ...]:
    """The ``(adapter, weight)`` pairs of a row of ``adapter`` while ``merged`` is merged (design table of modes).

    >>> row_pairs("x", None), row_pairs("x", "m"), row_pairs("m", "m"), row_pairs(None, "m")
    ((('x', 1.0),), (('x', 1.0), ('m', -1.0)), (), (('m', -1.0),))
    """
    if adapter == merged:
        return ()
    own = ((adapter, 1.0),) if adapter is not None else ()
    undo = ((merged, -1.0),) if merged is not None else ()
    return own + undo


def adapters_in(plan_rows: Iterable[AdapterId], merged: AdapterId) -> frozenset[str]:
    """Adapters that must hold a device slot to run these rows: every one named, and the merged one."""
    return frozenset(a for a in (*plan_rows, merged) if a is not None)
