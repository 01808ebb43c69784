"""The nouns that every part of vlora_sgl shares: adapters, modes, plans, and what a request may ask.

Nothing here imports SGLang or torch, so that a policy, a kernel test, a client and the simulator can use these without
starting anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vlora_sgl.combined import is_combined, members, parts
from vlora_sgl.errors import RequestError

JsonDict = dict[str, Any]
"""A JSON object: what a request's body, an answer or a settings file says."""

AdapterId = str | None
"""Identity of an adapter inside the engine. ``None`` is the base model, which counts as an adapter everywhere; of
several adapters as one it is the text of ``combined``."""

Version = tuple[str, int]
"""An adapter's name, and the number of one of its versions."""

MAX_IMAGE_PIXELS = 2**26
"""Most pixels of an image that is opened, unless told otherwise: what a telephone's camera of 64 megapixels takes."""


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
class RequestParams:
    """What a request may ask of us besides its adapter. It travels in SGLang's ``sampling_params.custom_params``.

    Attributes:
        head: the vision head that is to answer (``vlora_head``).
        service: its latency class (``vlora_class``).
        deadline: seconds in which it should be answered (``vlora_deadline_ms``, there in milliseconds).
        trace: whether the answer is to say in which mode each token was computed (``vlora_trace``).
        due: when that is, by ``time.perf_counter`` (``vlora_due``, which the engine's front writes).
    """

    head: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE
    deadline: float | None = None
    trace: bool = False
    due: float | None = None

    @classmethod
    def from_custom_params(cls, given: JsonDict | None) -> RequestParams:
        """Read our keys; others are somebody else's.

        Raises:
            RequestError: a value that its key cannot have; names the key, what it takes and what came.
        """
        if not given:
            return _NOTHING_ASKED
        if not isinstance(given, Mapping):
            raise RequestError(f"custom_params must be an object; got {given!r}")
        head, trace, due = given.get("vlora_head"), given.get("vlora_trace"), given.get("vlora_due")
        service, milliseconds = given.get("vlora_class"), given.get("vlora_deadline_ms")
        if head is not None and not isinstance(head, str):
            raise RequestError(f"vlora_head must be the name of a head; got {head!r}")
        if service is not None and service not in tuple(ServiceClass):
            raise RequestError(f"vlora_class must be one of {', '.join(ServiceClass)}; got {service!r}")
        if milliseconds is not None and not _is_positive(milliseconds):
            raise RequestError(f"vlora_deadline_ms must be a positive number of milliseconds; got {milliseconds!r}")
        if trace is not None and not isinstance(trace, bool):
            raise RequestError(f"vlora_trace must be true or false; got {trace!r}")
        if due is not None and not _is_positive(due):
            raise RequestError(f"vlora_due is written by the engine; got {due!r}")
        return cls(
            head,
            ServiceClass.INTERACTIVE if service is None else ServiceClass(service),
            None if milliseconds is None else milliseconds / 1000,
            bool(trace),
            due,
        )

    def to_custom_params(self) -> JsonDict:
        """What ``from_custom_params`` reads; a key for each thing asked."""
        asked = {
            "vlora_head": self.head,
            "vlora_class": None if self.service is ServiceClass.INTERACTIVE else str(self.service),
            "vlora_deadline_ms": None if self.deadline is None else self.deadline * 1000,
            "vlora_trace": self.trace or None,
            "vlora_due": self.due,
        }
        return {key: value for key, value in asked.items() if value is not None}

    @classmethod
    def of(cls, sampling: Any) -> RequestParams:
        """Read them from sampling parameters: a request's JSON, SGLang's object, or ``None``.

        Raises:
            RequestError: see ``from_custom_params``.
        """
        json = isinstance(sampling, Mapping)
        return cls.from_custom_params(
            sampling.get("custom_params") if json else getattr(sampling, "custom_params", None)
        )

    def added_to(self, sampling: JsonDict) -> JsonDict:
        """Sampling parameters (or a chat request, which has theirs at its top) that ask for this too."""
        return {**sampling, "custom_params": {**(sampling.get("custom_params") or {}), **self.to_custom_params()}}


_NOTHING_ASKED = RequestParams()


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a policy decided for one iteration.

    Attributes:
        requests: ids of the requests to run, in admission order.
        mode: how their adapters are applied.
        merged_adapter: the adapter merged into the base weights, or ``None`` if the weights are to be the base
            model's.
        invocation_starts: first prompt position that runs with the adapter, per row of a prefill; empty in decoding,
            which is behind all of them.

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

    Of a merged adapter within a combination, what it lacks of its scale is added.

    >>> row_pairs("x", None), row_pairs("x", "m"), row_pairs("m", "m"), row_pairs(None, "m")
    ((('x', 1.0),), (('x', 1.0), ('m', -1.0)), (), (('m', -1.0),))
    >>> row_pairs('{"m": 0.25, "x": 2.0}', "m"), row_pairs('{"m": 1.0, "x": 2.0}', "m")
    ((('m', -0.75), ('x', 2.0)), (('x', 2.0),))
    """
    if adapter == merged:
        return ()
    if is_combined(adapter):
        weights = dict(parts(str(adapter)))
        if merged is not None:
            weights[merged] = weights.get(merged, 0.0) - 1.0
        return tuple((one, weight) for one, weight in weights.items() if weight)
    own = ((adapter, 1.0),) if adapter is not None else ()
    undo = ((merged, -1.0),) if merged is not None else ()
    return own + undo


def adapters_in(plan_rows: Iterable[AdapterId], merged: AdapterId) -> frozenset[str]:
    """Adapters that must hold a device slot to run these rows: every one named, and the merged one."""
    return frozenset(a for a in members({*plan_rows, merged}) if a is not None)
