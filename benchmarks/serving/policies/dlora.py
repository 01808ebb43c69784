"""dLoRA's policy, as the paper describes it: merged or unmerged by workload, no mixture."""

from __future__ import annotations

from vlora_sgl.core import BatchPlan
from vlora_sgl.managers.policies.base import Policy, QueueState, assemble, largest_group


class DLoraPolicy(Policy):
    """Merged when one adapter holds over half of the requests and nobody starves, else unmerged.

    Leaving merged mode for the starving costs two switches each time: what mixture mode was invented against.

    Attributes:
        parks: whether running requests of others may sit out while one adapter is merged.
    """

    name = "dlora"
    parks = False

    def plan(self, state: QueueState) -> BatchPlan:
        """Merged and alone, or unmerged and first come, first served."""
        requests = (*state.running, *state.waiting)
        hot, count = largest_group(requests, state.merged)
        starving = [r for r in requests if state.clock - r.progress > self.limits.theta]
        alone = self.parks or all(r.adapter == hot for r in state.running)
        if state.can_merge and 2 * count > len(requests) and not starving and alone:
            return assemble(state, requests, hot, only_merged=True)
        return assemble(state, (*starving, *requests), merged=None)
