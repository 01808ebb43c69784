"""Keeps the queue state that policies read, from what the scheduler tells it: arrivals, queues, iterations.

Nothing here knows SGLang beyond the few attributes of a request that it reads, and nothing reads a clock, so that the
planners of all tensor-parallel ranks hold the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vlora_sgl._sgl_types import Req
from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode, JsonDict, adapters_in
from vlora_sgl.managers.policies import Policy, QueueState, RequestState, mode_of
from vlora_sgl.managers.policies.base import Memory, visible
from vlora_sgl.managers.policies.iteration_log import Iteration

OUTPUT_GUESS = 64.0
"""Output tokens expected of the first requests; after that the running mean of finished ones."""


class Planner:
    """One per rank, beside the scheduler.

    Args:
        policy: decides.
        max_batch: most requests that run at once.
        max_adapters: most adapters (base excluded) one iteration can use.
        can_merge: whether this engine can merge an adapter into its weights.
        window: waiting requests shown to the policy (``visible``).
        fits: ``QueueState.fits``.
    """

    def __init__(
        self,
        policy: Policy,
        max_batch: int,
        max_adapters: int,
        can_merge: bool = True,
        window: int = 256,
        fits: Callable[[set[AdapterId]], bool] | None = None,
    ) -> None:
        self.policy = policy
        self.max_batch, self.max_adapters, self.window = max_batch, max_adapters, window
        self.can_merge, self.fits = can_merge, fits
        self.clock = 0.0
        self.merged: AdapterId = None
        self.memory: Memory = {}
        self.switches = 0
        self.switch_seconds = 0.0
        self.seconds_by_mode = dict.fromkeys(InferenceMode, 0.0)
        self.starving = 0
        self._states: dict[str, RequestState] = {}
        self._started: set[str] = set()
        self._arrivals = 0
        self._mean_output = OUTPUT_GUESS
        self._queues: QueueState | None = None
        self._plan: BatchPlan | None = None
        self._order: dict[str, int] = {}

    def next(self, waiting: Sequence[Req], running: Sequence[Req], chunked: Req | None = None) -> BatchPlan:
        """Plan the next iteration.

        Args:
            waiting: SGLang requests not started (or retracted), in any order.
            running: SGLang requests that decode.
            chunked: the one in the middle of a chunked prefill, which is in neither queue.
        """
        states: dict[str, RequestState] = {}
        rows: list[RequestState] = []
        late: list[RequestState] = []
        for request in running:
            state = states[request.rid] = self._state(request)
            state.prompt = 0
            state.generated = len(request.output_ids)
            state.context = len(request.origin_input_ids) + state.generated
            rows.append(state)
        for request in waiting:
            state = states[request.rid] = self._state(request)
            if not state.prompt:  # retracted: its cache is gone
                state.prompt = len(request.origin_input_ids) + len(request.output_ids)
            late.append(state)
        late.sort(key=lambda state: state.arrival)
        if chunked is not None and chunked.rid not in states:
            states[chunked.rid] = self._state(chunked)
            late.insert(0, states[chunked.rid])
        self._forget(states)
        self._started = {state.rid for state in rows} | ({chunked.rid} if chunked is not None else set())
        queues = QueueState(
            clock=self.clock,
            waiting=visible(late, self.window),
            running=rows,
            merged=self.merged,
            max_batch=self.max_batch,
            max_adapters=self.max_adapters,
            can_merge=self.can_merge,
            chunked=None if chunked is None else chunked.rid,
            memory=self.memory,
            fits=self.fits,
        )
        bound = self.policy.limits.wait_bound / 2
        self.starving = sum(self.clock - state.progress > bound for state in states.values())
        return self._decide(queues)

    def without(self, absent: Sequence[AdapterId]) -> BatchPlan:
        """The plan of the same iteration, where it has to do without some adapters."""
        assert self._queues is not None
        return self._decide(replace(self._queues, absent=absent))

    def _decide(self, queues: QueueState) -> BatchPlan:
        self._queues = queues
        self._plan = self.policy.plan(queues)
        self._order = {rid: i for i, rid in enumerate(self._plan.requests)}
        return self._plan

    def adapters(self) -> tuple[list[AdapterId], list[AdapterId]]:
        """The adapters that the present plan runs, those needed first, and the others that somebody waits for."""
        assert self._queues is not None and self._plan is not None
        requests = (self._states[rid].adapter for rid in self._plan.requests)
        planned = dict.fromkeys((self.merged, self._plan.merged_adapter, *requests))
        waiting = dict.fromkeys(state.adapter for state in self._queues.waiting)
        return list(planned), [adapter for adapter in waiting if adapter not in planned]

    def planned(self, rid: str) -> bool:
        """Whether the current plan lets this request run."""
        return rid in self._order

    def place(self, rid: str) -> int:
        """The request's place in the current plan; those left out come last."""
        return self._order.get(rid, len(self._order))

    def settle(self, rows: Sequence[tuple[str, AdapterId]]) -> BatchPlan:
        """The current plan, cut to the rows of the batch that was formed: its mode follows from them."""
        target = self._plan.merged_adapter if self._plan is not None else None
        if len(adapters_in((adapter for _, adapter in rows), target)) > self.max_adapters:
            target = None
        return BatchPlan(tuple(rid for rid, _ in rows), mode_of((a for _, a in rows), target), target)

    def ran(self, plan: BatchPlan, rows: Sequence[tuple[AdapterId, int]], prefill: bool) -> Iteration:
        """Account for an iteration that is launched, and return what it is.

        Args:
            plan: what ``settle`` returned for it.
            rows: adapter and tokens of each request of ``plan``, in its order.
            prefill: whether it was a prefill.
        """
        costs, before, started = self.policy.costs, self.merged, self.clock
        if plan.merged_adapter != before:
            seconds = costs.switch_seconds(before, plan.merged_adapter)
            self.switches += 1
            self.switch_seconds += seconds
            self.clock += seconds
            self.merged = plan.merged_adapter
        # SGLang forms the batch after ``next`` saw the queues: a row it may have put in since has no state yet.
        states = [self._states.get(rid) for rid in plan.requests]
        self._started.update(plan.requests)
        groups: Counter[AdapterId] = Counter()
        context = 0.0
        for (adapter, tokens), state in zip(rows, states, strict=True):
            groups[adapter] += tokens
            context += tokens * tokens / 2 if prefill else state.context if state is not None else 0
        seconds = (costs.prefill if prefill else costs.decode).seconds(groups, context, self.merged)
        self.clock += seconds
        self.seconds_by_mode[plan.mode] += seconds
        self.memory = self.policy.remember(self.memory, prefill, groups, self.merged)
        for state in states:
            if state is not None:
                state.progress = self.clock
                state.remaining = max(1, state.remaining - (not prefill))
        return Iteration(prefill, groups, context, before, self.merged, plan.mode, self.clock - started)

    def left(self, rid: str) -> None:
        """A request has ended, or is in no queue any more: drop it, and learn the usual length from it."""
        state = self._states.pop(rid, None)
        if state is not None and state.generated:
            self._mean_output += 0.02 * (state.generated - self._mean_output)

    def use(self, policy: Policy) -> None:
        """Decide by another policy from the next iteration on; what the one before remembered is dropped."""
        self.policy, self.memory = policy, {}

    def follow(self, policy: Policy) -> None:
        """Go on with the same policy by other costs, with what it remembers."""
        self.policy = policy

    def requests(self) -> dict[str, Counter[AdapterId]]:
        """Unfinished requests by adapter, those that wait and those that run, as of the last iteration."""
        counts: dict[str, Counter[AdapterId]] = {"waiting": Counter(), "running": Counter()}
        for rid, state in self._states.items():
            counts["running" if rid in self._started else "waiting"][state.adapter] += 1
        return counts

    def state(self) -> JsonDict:
        """Figures for ``/server_info`` and the metrics; the seconds are the cost table's."""
        return {
            "planned_seconds": self.clock,
            "seconds_by_mode": {str(mode): seconds for mode, seconds in self.seconds_by_mode.items()},
            "merged": self.merged,
            "switches": self.switches,
            "switch_seconds": self.switch_seconds,
            "starving": self.starving,
            "costs": self.policy.costs.provenance,
        }

    def _state(self, request: Req) -> RequestState:
        """The request's state, made at first sight."""
        state = self._states.get(request.rid)
        if state is None:
            asked = request.vlora.params
            most = request.sampling_params.max_new_tokens or OUTPUT_GUESS
            state = RequestState(
                rid=request.rid,
                adapter=request.lora_id,
                arrival=self._arrivals,
                arrived=self.clock,
                progress=self.clock,
                prompt=len(request.origin_input_ids),
                remaining=max(1, round(min(most, self._mean_output))),
                service=asked.service,
                deadline=asked.deadline,
            )
            self._arrivals += 1
            self._states[request.rid] = state
        return state

    def _forget(self, present: Mapping[str, RequestState]) -> None:
        for rid in [rid for rid in self._states if rid not in present]:
            self.left(rid)
