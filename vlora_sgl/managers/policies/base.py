"""What every policy sees, what it may answer, and the few rules they share.

A policy is a pure function of an explicit ``QueueState``: it holds no state and asks no clock. Seconds are the cost
table's, added up over the iterations that ran, so that every tensor-parallel rank sees the same state and answers
alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from vlora_sgl.combined import is_combined, members
from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode, ServiceClass, adapters_in
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_table import CostTable, Groups

CLASS_WEIGHT = {ServiceClass.REALTIME: 4.0, ServiceClass.INTERACTIVE: 1.0, ServiceClass.BATCH: 0.25}
"""How much faster a class gathers credit than ``interactive``."""


@dataclass(slots=True)
class RequestState:
    """One unfinished request. The scheduler writes it, a policy only reads it.

    Attributes:
        rid: its id.
        adapter: its adapter, ``None`` for the base model.
        arrival: sequence number of its arrival; unique.
        arrived: clock at its arrival.
        progress: clock when it last ran, or arrived.
        prompt: tokens still to prefill; 0 once it decodes.
        context: tokens in its KV cache.
        remaining: output tokens it is expected to need still.
        generated: output tokens it has.
        service: its latency class.
        deadline: seconds after arrival by which it is to be finished, or ``None``.
    """

    rid: str
    adapter: AdapterId
    arrival: int
    arrived: float = 0.0
    progress: float = 0.0
    prompt: int = 0
    context: int = 0
    remaining: int = 64
    generated: int = 0
    service: ServiceClass = ServiceClass.INTERACTIVE
    deadline: float | None = None


Memory = dict[AdapterId, float]
"""What a policy wants to remember of past iterations: explicit, and part of the state."""


@dataclass(slots=True)
class QueueState:
    """Everything a decision may depend on.

    Attributes:
        clock: seconds of all iterations so far, by the cost table.
        waiting: requests not started, in order of arrival, as ``visible`` picked them.
        running: requests that hold KV cache, in order of admission; every plan holds them all.
        merged: the adapter merged into the weights.
        max_batch: most requests that may run at once.
        max_adapters: most adapters (base excluded, merged included) that one iteration may use.
        can_merge: whether an adapter can be merged at all.
        chunked: id of the request in the middle of a chunked prefill; it must be in the plan.
        memory: what ``Policy.remember`` returned last.
        fits: whether adapters hold slots at the same time, where that depends on more than their number.
        absent: adapters on their way to a slot, those needed first first: their requests are passed over, none of them
            is merged, and the slots they come to are not given to others.
    """

    clock: float
    waiting: Sequence[RequestState]
    running: Sequence[RequestState]
    merged: AdapterId = None
    max_batch: int = 32
    max_adapters: int = 8
    can_merge: bool = True
    chunked: str | None = None
    memory: Memory = field(default_factory=dict)
    fits: Callable[[set[AdapterId]], bool] | None = None
    absent: Sequence[AdapterId] = ()

    def room(self, adapters: Iterable[AdapterId]) -> bool:
        """Whether one iteration may use these adapters (the base model does not count)."""
        named = set(members(adapters)) - {None}
        return len(named) <= self.max_adapters and (self.fits is None or self.fits(named))


R = TypeVar("R", bound=RequestState)


def visible(waiting: Sequence[R], window: int) -> Sequence[R]:
    """The part of a long queue that a policy is shown, which bounds the work of a decision.

    The first ``window`` in order of arrival; behind them up to as many again that must not be overlooked: the first of
    an adapter that has none in sight yet, and those of class ``realtime`` or with a deadline.
    """
    if len(waiting) <= window:
        return waiting
    shown = list(waiting[:window])
    seen = {r.adapter for r in shown}
    for r in waiting[window:]:
        if r.adapter not in seen or r.service is ServiceClass.REALTIME or r.deadline is not None:
            seen.add(r.adapter)
            shown.append(r)
            if len(shown) >= 2 * window:
                break
    return shown


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of the policies, in seconds.

    Attributes:
        theta: credit above which a request starves (Algorithm 1).
        wait_bound: longest a request may be kept from running for the sake of others.
        reserve: share of the batch that requests of class ``batch`` may not take.
    """

    theta: float = 0.5
    wait_bound: float = 2.0
    reserve: float = 0.125

    def __post_init__(self) -> None:
        if not (self.theta > 0 and self.wait_bound > 0 and 0 <= self.reserve < 1):
            raise ConfigError(f"limits want theta > 0, wait_bound > 0 and 0 <= reserve < 1, got {self}")


def mode_of(rows: Iterable[AdapterId], merged: AdapterId) -> InferenceMode:
    """The mode in which rows run while ``merged`` is in the weights: the weights leave no choice."""
    if merged is None:
        return InferenceMode.UNMERGED
    return InferenceMode.MERGED if all(row == merged for row in rows) else InferenceMode.MIXTURE


def group_sizes(requests: Iterable[RequestState]) -> Counter[AdapterId]:
    """Requests per adapter, in order of first appearance."""
    return Counter(r.adapter for r in requests)


def largest_group(requests: Iterable[RequestState], merged: AdapterId) -> tuple[AdapterId, int]:
    """The adapter with the most requests, and how many; what cannot be merged (the base, combinations) is not counted.

    Ties go to the merged adapter, then to the one that appears first. ``(None, 0)`` without any adapter.
    """
    sizes = {a: n for a, n in group_sizes(requests).items() if a is not None and not is_combined(a)}
    if not sizes:
        return None, 0
    best = max(sizes.values())
    if merged is not None and sizes.get(merged) == best:
        return merged, best
    return next((a, n) for a, n in sizes.items() if n == best)


class Policy(ABC):
    """Turns queue state into the plan of the next iteration.

    ``plan.requests`` names the requests that may run: waiting ones are to be admitted (prefilled) in this order, as
    far as memory allows; if none is admitted, the running ones decode.

    Args:
        costs: the seconds of an iteration.
        limits: thresholds.
    """

    name: ClassVar[str]

    def __init__(self, costs: CostTable, limits: Limits | None = None) -> None:
        self.costs = costs
        self.limits = limits or Limits()

    @abstractmethod
    def plan(self, state: QueueState) -> BatchPlan:
        """The next iteration; non-empty whenever ``state`` holds a request. Pure: same state, same plan."""

    def remember(self, memory: Memory, prefill: bool, groups: Groups, merged: AdapterId, repeats: int = 1) -> Memory:
        """What to keep after ``repeats`` iterations over ``groups`` while ``merged`` was in the weights. Pure."""
        return memory

    def credit(self, request: RequestState, state: QueueState) -> float:
        """Algorithm 1, line 2: waiting time, execution time in the current mode, and mode switch latency, in seconds.

        A service class scales the waiting time; a deadline makes a request starve (credit above ``theta``) once half
        of its time is used up, counting the work that is left.
        """
        waited = state.clock - request.progress
        execution = self.execution_seconds(request, state.merged)
        switch = 0.0 if request.adapter == state.merged else self.costs.switch_seconds(state.merged, request.adapter)
        credit = CLASS_WEIGHT[request.service] * waited + execution + switch
        if request.deadline is not None:
            used = state.clock - request.arrived + self.remaining_seconds(request, state.merged)
            credit = max(credit, self.limits.theta * used / (0.5 * request.deadline))
        return credit

    def execution_seconds(self, request: RequestState, merged: AdapterId) -> float:
        """The request's next iteration, alone, while ``merged`` is in the weights."""
        if request.prompt:
            return self.costs.prefill.seconds({request.adapter: request.prompt}, 0, merged)
        return self.costs.decode.seconds({request.adapter: 1}, request.context, merged)

    def remaining_seconds(self, request: RequestState, merged: AdapterId) -> float:
        """All that is left of the request, alone, while ``merged`` is in the weights."""
        step = self.costs.decode.seconds({request.adapter: 1}, request.context, merged)
        prefill = self.execution_seconds(request, merged) if request.prompt else 0.0
        return prefill + request.remaining * step


def assemble(
    state: QueueState, order: Sequence[RequestState], merged: AdapterId, only_merged: bool = False
) -> BatchPlan:
    """The plan that runs what runs, then requests in ``order``, as far as the batch and the adapter slots go.

    Args:
        state: the queues.
        order: requests that may be admitted, most urgent first; those that run are passed over.
        merged: the adapter to be merged during the iteration; dropped if those that must run need its slot.
        only_merged: admit no other adapter's requests.
    """
    chosen = [*state.running, *(r for r in state.waiting if r.rid == state.chunked)]
    taken = {r.rid for r in chosen}
    if merged in state.absent:
        merged = state.merged
    only = merged
    unfit = not state.can_merge or is_combined(merged)
    if unfit or not state.room(adapters_in((r.adapter for r in chosen), merged)):
        merged = None
    adapters = set(adapters_in((r.adapter for r in chosen), merged))
    for adapter in state.absent:
        if adapter is not None and state.room({*adapters, adapter}):
            adapters.add(adapter)
    for request in order:
        if len(chosen) >= state.max_batch:
            break
        if request.rid in taken or request.adapter in state.absent or (only_merged and request.adapter != only):
            continue
        if request.adapter is not None and request.adapter not in adapters:
            if not state.room({*adapters, request.adapter}):
                continue
            adapters.add(request.adapter)
        taken.add(request.rid)
        chosen.append(request)
    if not chosen and merged is not None and not only_merged:
        # The merged adapter, though nobody asks for it, holds the slot that the others need.
        return assemble(state, order, merged=None)
    mode = mode_of((r.adapter for r in chosen), merged)
    return BatchPlan(tuple(r.rid for r in chosen), mode, merged)
