"""The rules that every plan keeps."""

from __future__ import annotations

from vlora_sgl.combined import is_combined
from vlora_sgl.core import BatchPlan, adapters_in
from vlora_sgl.managers.policies import QueueState, mode_of


def check_plan(state: QueueState, plan: BatchPlan, parks: bool = False) -> None:
    """Raise ``AssertionError`` naming the first rule that ``plan`` breaks.

    Args:
        state: what the plan was made for.
        plan: the plan.
        parks: whether it may leave running requests out.
    """
    requests = {r.rid: r for r in (*state.running, *state.waiting)}
    rows = [requests[rid] for rid in plan.requests]
    assert len(set(plan.requests)) == len(plan.requests), "a request is planned twice"
    assert rows or not requests, "there is work and none is planned"
    assert len(set(plan.requests) | {r.rid for r in state.running}) <= state.max_batch, "more requests than fit"
    assert parks or {r.rid for r in state.running} <= set(plan.requests), "a running request is left out"
    assert state.chunked is None or state.chunked in plan.requests, "a chunked prefill is left out"
    need = adapters_in((r.adapter for r in rows), plan.merged_adapter)
    assert state.room(need), "more adapters than slots"
    assert not is_combined(plan.merged_adapter), "a combination is merged"
    assert state.can_merge or plan.merged_adapter is None, "nothing can be merged"
    assert plan.mode is mode_of((r.adapter for r in rows), plan.merged_adapter), "the mode contradicts the rows"
