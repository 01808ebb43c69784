"""Never merge: the policy of S-LoRA, Punica and stock SGLang."""

from __future__ import annotations

from vlora_sgl.core import BatchPlan
from vlora_sgl.managers.policies.base import Policy, QueueState, assemble


class UnmergedPolicy(Policy):
    """First come, first served; every adapter through the operator."""

    name = "unmerged"

    def plan(self, state: QueueState) -> BatchPlan:
        """All that runs, and admissions in order of arrival."""
        return assemble(state, state.waiting, merged=None)
