"""Algorithm 1 of V-LoRA (section 4.4.3), as written."""

from __future__ import annotations

from vlora_sgl.core import BatchPlan
from vlora_sgl.managers.policies.base import Policy, QueueState, assemble, largest_group


class VLoraPolicy(Policy):
    """Merged when it can be, mixture when some starve, unmerged when many do.

    MaxBS is what a batch could hold now: the batch limit, or the number of requests if there are fewer.
    """

    name = "vlora"

    def plan(self, state: QueueState) -> BatchPlan:
        """Lines 2 to 16; requests of the largest group first, the starving before them."""
        requests = (*state.running, *state.waiting)
        starving = [r for r in requests if self.credit(r, state) > self.limits.theta]  # line 2
        hot, count = largest_group(requests, state.merged)  # line 4
        group = [r for r in requests if r.adapter == hot] if hot is not None else []
        size = min(state.max_batch, len(requests))
        if state.can_merge and 2 * len(starving) <= size and 2 * count > size:  # line 5
            if not starving:  # lines 6-8
                return assemble(state, group, hot, only_merged=True)
            return assemble(state, (*starving, *group), hot)  # lines 10-12
        return assemble(state, (*starving, *state.waiting), merged=None)  # lines 14-15
