"""Policies that leave running requests out of an iteration, which the simulator can carry out and the server cannot.

A parked request keeps its KV cache and its place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from benchmarks.serving.policies.dlora import DLoraPolicy
from vlora_sgl.core import AdapterId, BatchPlan
from vlora_sgl.managers.policies import Policy, QueueState, RequestState, mode_of
from vlora_sgl.managers.policies.base import group_sizes
from vlora_sgl.managers.policies.cost import CostPolicy
from vlora_sgl.managers.policies.merged import MergedPolicy
from vlora_sgl.managers.policies.unmerged import UnmergedPolicy
from vlora_sgl.managers.policies.vlora import VLoraPolicy


def park(state: QueueState, plan: BatchPlan, parked: Iterable[RequestState]) -> BatchPlan:
    """The plan without ``parked``, of which a chunked prefill is none; unchanged if nobody else would run."""
    out = {r.rid for r in parked} - {state.chunked}
    adapters = {r.rid: r.adapter for r in (*state.running, *state.waiting)}
    rows = tuple(rid for rid in plan.requests if rid not in out)
    if not rows:
        return plan
    return BatchPlan(rows, mode_of((adapters[rid] for rid in rows), plan.merged_adapter), plan.merged_adapter)


def others(state: QueueState, merged: AdapterId) -> list[RequestState]:
    """Running requests of other adapters."""
    return [r for r in state.running if r.adapter != merged]


class ParkingVLora(VLoraPolicy):
    """Algorithm 1 to the letter: with an adapter merged only its rows and the starving run."""

    def plan(self, state: QueueState) -> BatchPlan:
        """As ``VLoraPolicy``; rows that neither starve nor are of the merged adapter are parked."""
        plan = super().plan(state)
        if plan.merged_adapter is None:
            return plan
        calm = (r for r in others(state, plan.merged_adapter) if self.credit(r, state) <= self.limits.theta)
        return park(state, plan, calm)


class ParkingMerged(MergedPolicy):
    """One adapter at a time, without mixture mode."""

    def plan(self, state: QueueState) -> BatchPlan:
        """As ``MergedPolicy``; rows of other adapters than the oldest request's are parked."""
        plan = super().plan(state)
        requests = (*state.running, *state.waiting)
        return park(state, plan, others(state, min(requests, key=lambda r: r.arrival).adapter)) if requests else plan


class ParkingDLora(DLoraPolicy):
    """dLoRA, which merges as soon as one adapter holds over half of the requests."""

    parks = True

    def plan(self, state: QueueState) -> BatchPlan:
        """As ``DLoraPolicy``; while an adapter is merged, rows of others are parked."""
        plan = super().plan(state)
        return plan if plan.merged_adapter is None else park(state, plan, others(state, plan.merged_adapter))


class ParkingCost(CostPolicy):
    """Parks where that shortens the sum of completion times.

    Running only the merged adapter's n_m of n rows is faster per iteration and idles the others. The sum of completion
    times falls only if ``n_m / t_merged > n / t_mixture``; then the others sit out a number of iterations that
    minimises ``(f t_mixture + (1 - f) t_merged) (h + (1 - h) / f)``, h = n_m / n, over the fraction f in which they
    run.
    """

    def plan(self, state: QueueState) -> BatchPlan:
        """As ``CostPolicy``, less the rows that sit this iteration out."""
        plan = super().plan(state)
        return (
            park(state, plan, others(state, plan.merged_adapter)) if self.pauses(state, plan.merged_adapter) else plan
        )

    def pauses(self, state: QueueState, merged: AdapterId) -> bool:
        """Whether the rows of other adapters than ``merged`` sit this iteration out."""
        mine, rest = [r for r in state.running if r.adapter == merged], others(state, merged)
        if merged is None or not mine or not rest or any(r.deadline is not None for r in rest):
            return False
        context = sum(r.context for r in state.running)
        mixed = self.costs.decode.seconds(group_sizes(state.running), context, merged)
        alone = self.costs.decode.seconds({merged: len(mine)}, sum(r.context for r in mine), merged)
        share = len(mine) / len(state.running)
        if share * mixed <= alone:
            return False
        fraction = sqrt((1 - share) * alone / (share * (mixed - alone)))
        pause = min((1 / fraction - 1) * alone, 0.5 * self.limits.wait_bound) if fraction < 1 else 0.0
        return state.clock - min(r.progress for r in rest) < pause


POLICIES: dict[str, type[Policy]] = {
    p.name: p for p in (ParkingCost, ParkingVLora, ParkingDLora, ParkingMerged, UnmergedPolicy)
}
