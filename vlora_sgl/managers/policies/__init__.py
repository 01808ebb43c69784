"""Scheduling policies, one file each behind one signature."""

from __future__ import annotations

from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.base import Limits, Policy, QueueState, RequestState, mode_of
from vlora_sgl.managers.policies.cost import CostPolicy
from vlora_sgl.managers.policies.cost_table import CostTable
from vlora_sgl.managers.policies.dlora import DLoraPolicy
from vlora_sgl.managers.policies.merged import MergedPolicy
from vlora_sgl.managers.policies.unmerged import UnmergedPolicy
from vlora_sgl.managers.policies.vlora import VLoraPolicy

__all__ = ["POLICIES", "Limits", "Policy", "QueueState", "RequestState", "make_policy", "mode_of"]

POLICIES: dict[str, type[Policy]] = {
    p.name: p for p in (CostPolicy, VLoraPolicy, DLoraPolicy, MergedPolicy, UnmergedPolicy)
}


def make_policy(name: str, costs: CostTable, limits: Limits | None = None) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](costs, limits)
