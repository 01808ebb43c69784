"""The nouns that every part of vlora_sgl shares: adapters, modes, plans and segments.

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
class AdapterRef:
    """A loaded adapter as the control plane knows it.

    Attributes:
        name: the name clients use, in ``model="base:name"`` or ``lora_path``.
        adapter_id: identity inside the engine; a reload gives a new one.
        digest: hex digest of the adapter's content; equal digests mean interchangeable KV cache entries.
        max_rank: the largest rank over its modules.
    """

    name: str
    adapter_id: str
    digest: str
    max_rank: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a policy decided for one iteration.

    Attributes:
        requests: ids of the requests to run, in admission order.
        mode: how their adapters are applied.
        merged_adapter: the adapter merged into the base weights, or ``None`` if the weights are to be the base
            model's.

    Raises:
        ValueError: the merged adapter contradicts the mode.
    """

    requests: tuple[str, ...]
    mode: InferenceMode
    merged_adapter: AdapterId = None

    def __post_init__(self) -> None:
        if (self.mode is InferenceMode.UNMERGED) != (self.merged_adapter is None):
            raise ValueError(f"mode {self.mode} does not go with merged_adapter={self.merged_adapter!r}")


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, end)`` that apply the same adapters: ``y[t] += sum_j w_j * s_j * (x[t] A_j^T) B_j^T``.

    Attributes:
        start: first row.
        end: one past the last row; an empty segment is legal.
        pairs: ``(slot, weight)`` per adapter applied. The weight multiplies the slot's own LoRA scaling s: +1 for the
            request's adapter, -1 to take the merged one out again (deLoRA), a gate value for a routed row. Empty for
            rows that run on the weights as they are.
    """

    start: int
    end: int
    pairs: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"segment rows must satisfy 0 <= start <= end, got [{self.start}, {self.end})")


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
