"""The policy of least estimated completion time, from the cost table, with a bound on waiting.

Three decisions, each from seconds of the table:

1. *Which adapter to merge.* A metrical task system: staying in the wrong merge costs a little every iteration,
   changing it costs a switch. The memory holds, per adapter, the seconds that recent iterations would have saved with
   it merged (a one-sided sum, never below zero). When that sum, plus what the known work will save, exceeds the price
   of the switch there and back, switch. It needs no forecast of the traffic, and what it can lose against the best
   fixed merge is a small multiple of the switches made.
2. *Whom to admit.* The realtime class and deadlines at risk first, by due time; then one starving request of each
   adapter that has none running; then arrival. (Letting every starving request jump the queue would only fill the
   batch with more adapters when load is highest.) A request that starves for want of an adapter slot closes the door
   to other adapters' requests (the hot one's last) until a slot drains.
3. *When to admit.* At once, but where places are short: there admissions are gathered (``gathers``), because a prefill
   costs a fixed time that all rows wait for.
"""

from __future__ import annotations

from collections import Counter
from math import sqrt

from vlora_sgl.combined import is_combined, members
from vlora_sgl.core import AdapterId, BatchPlan, ServiceClass
from vlora_sgl.managers.policies.base import (
    Memory,
    Policy,
    QueueState,
    RequestState,
    assemble,
    group_sizes,
    largest_group,
)
from vlora_sgl.managers.policies.cost_table import Groups

LOOKAHEAD = 16
"""Decode iterations of the present batch that are counted as known work: about how long a batch keeps its rows."""

SWITCH_FACTOR = 3.0
"""How many times its price a switch must have paid back; over 1, so that traffic without a favourite does not flap."""

CANDIDATES = 4
"""Adapters considered for merging in one decision, the largest groups first: bounds the work of a decision."""


class CostPolicy(Policy):
    """Least estimated mean completion time."""

    name = "cost"

    def plan(self, state: QueueState) -> BatchPlan:
        """Choose the merge, then the order of admission."""
        merged = self.choose_merge(state)
        late = [] if self.gathers(state, merged) else self.admission_order(state, merged)
        return assemble(state, late, merged)

    def remember(self, memory: Memory, prefill: bool, groups: Groups, merged: AdapterId, repeats: int = 1) -> Memory:
        """Add to each candidate's sum what these iterations would have saved with it merged."""
        phase = self.costs.prefill if prefill else self.costs.decode
        now = phase.lora_seconds(groups, merged)
        absent = now - phase.lora_seconds(groups, "\0absent")
        sums: Memory = {}
        for adapter in {*memory, *groups, None} - {merged}:
            if is_combined(adapter):
                continue  # cannot be merged
            saved = absent
            if adapter is None or adapter in groups:
                saved = now - phase.lora_seconds(groups, adapter)
            if (total := memory.get(adapter, 0.0) + repeats * saved) > 0:
                sums[adapter] = total
        return sums

    def choose_merge(self, state: QueueState) -> AdapterId:
        """The adapter to have merged next."""
        decode: Counter[AdapterId] = group_sizes(state.running)
        prefill: Counter[AdapterId] = Counter()
        for r in state.waiting[: max(0, state.max_batch - len(state.running))]:
            prefill[r.adapter] += r.prompt
            decode[r.adapter] += 1
        plain = [a for a, _ in decode.most_common() if not is_combined(a)]
        names: list[AdapterId] = [a for a in plain[:CANDIDATES] if a is not None]
        names += [a for a in (None, state.merged) if a not in names]
        best, best_gain = state.merged, 0.0
        now = self._known_seconds(decode, prefill, state.merged)
        for adapter in names:
            if adapter == state.merged:
                continue
            gain = state.memory.get(adapter, 0.0) + now - self._known_seconds(decode, prefill, adapter)
            price = SWITCH_FACTOR * (
                self.costs.switch_seconds(state.merged, adapter) + self.costs.switch_seconds(adapter, state.merged)
            )
            if gain - price > best_gain:
                best, best_gain = adapter, gain - price
        if best not in decode and not state.room({*decode, best}):
            return None  # nobody in sight asks for it, and its slot is needed
        return best

    def _known_seconds(self, decode: Groups, prefill: Groups, merged: AdapterId) -> float:
        """What adapters add to the work in sight while ``merged`` is in the weights."""
        return self.costs.prefill.lora_seconds(prefill, merged) + LOOKAHEAD * self.costs.decode.lora_seconds(
            decode, merged
        )

    def gathers(self, state: QueueState, merged: AdapterId) -> bool:
        """Whether admissions wait, so that one prefill serves several requests.

        Only where places are short. A prefill takes ``F`` seconds whatever it holds, and all n rows wait for it; a
        place that waits for others to come free does no work. With ``L`` seconds of decoding a request takes
        ``L / (n - (k - 1) / 2) + F / k`` of the engine if k are admitted at a time, least for ``k = n sqrt(2 F / L)``.
        Where there is a place for everybody who waits, nobody does: the rows would gain what the first tokens lose.
        """
        rows, free = len(state.running), state.max_batch - len(state.running)
        if not rows or len(state.waiting) <= free or state.chunked is not None:
            return False
        groups = group_sizes(state.running)
        for r in state.waiting:
            if r.service is ServiceClass.REALTIME or r.deadline is not None:
                return False
            if r.adapter not in groups and self.starves(r, state):
                return False
        prefill = self.costs.prefill
        fixed = prefill.fixed + prefill.lora_enabled + prefill.lora_fixed
        context = sum(r.context for r in state.running)
        step = self.costs.decode.seconds(groups, context, merged)
        length = sum(r.generated + r.remaining for r in state.running) / rows
        return free < min(rows * sqrt(2 * fixed / (length * step)), state.max_batch / 4)

    def starves(self, request: RequestState, state: QueueState) -> bool:
        """Whether a request is to be served before its turn.

        At half the bound: the other half is for the place it needs to come free.
        """
        if request.deadline is not None and self.credit(request, state) > self.limits.theta:
            return True
        return state.clock - request.progress > 0.5 * self.limits.wait_bound

    def admission_order(self, state: QueueState, merged: AdapterId) -> list[RequestState]:
        """Waiting requests that may be admitted, most urgent first."""
        running = group_sizes(state.running)
        urgent: list[tuple[float, int, RequestState]] = []
        idle: list[RequestState] = []
        rest: list[RequestState] = []
        served = set(running)
        for r in state.waiting:
            if r.service is ServiceClass.REALTIME or (r.deadline is not None and self.starves(r, state)):
                urgent.append((r.arrived + (r.deadline or 0.0), r.arrival, r))
            elif r.adapter not in served and self.starves(r, state):
                served.add(r.adapter)
                idle.append(r)
            else:
                rest.append(r)
        first = [*(r for _, _, r in sorted(urgent, key=lambda u: u[:2])), *idle]
        order = [*first, *rest]
        used = set(members(running)) - {None}
        held = used | ({merged} - {None})
        needy = {r.adapter for r in first if not held.issuperset(members([r.adapter]))}
        kept_out = {adapter for adapter in needy if not state.room({*held, adapter})}
        if kept_out:
            # Adapters leave their slots only as their rows finish: admit nobody whose adapter is to leave. The hottest
            # may stay, unless it holds the very slot that is needed.
            hot, _ = largest_group((*state.running, *state.waiting), merged)
            stays = {hot} if all(state.room({hot, adapter}) for adapter in kept_out) else set()
            leaving = used - stays or used
            order = [r for r in order if r.adapter in kept_out or leaving.isdisjoint(members([r.adapter]))]

        at_risk = any(r.deadline is not None and self.credit(r, state) > self.limits.theta for r in state.running)
        places = int((1 - self.limits.reserve) * state.max_batch)
        places -= sum(r.service is ServiceClass.BATCH for r in state.running)
        admitted: list[RequestState] = []
        for r in order:
            if r.service is ServiceClass.BATCH:
                # A prefill of batch work would delay the row whose deadline is near; and it never takes the reserve.
                if (at_risk or places <= 0) and state.running:
                    continue
                places -= 1
            admitted.append(r)
        return admitted
