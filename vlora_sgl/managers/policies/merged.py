"""Always merge: one adapter at a time ("merge only" in figure 19)."""

from __future__ import annotations

from vlora_sgl.core import BatchPlan
from vlora_sgl.managers.policies.base import Policy, QueueState, assemble


class MergedPolicy(Policy):
    """Serves the adapter of the oldest request, and every request of that adapter beside it, until that one is done.

    First come, first served between adapters, so nobody starves; base requests run on base weights. Running requests
    of other adapters finish in mixture mode while nothing of theirs is admitted.
    """

    name = "merged"

    def plan(self, state: QueueState) -> BatchPlan:
        """What runs, and admissions of one adapter."""
        requests = (*state.running, *state.waiting)
        if not requests:
            return assemble(state, (), merged=None)
        oldest = min(requests, key=lambda r: r.arrival)
        return assemble(state, state.waiting, oldest.adapter, only_merged=True)
