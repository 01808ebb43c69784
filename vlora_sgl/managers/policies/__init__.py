"""Scheduling policies, one file each behind one signature."""

from __future__ import annotations

from importlib import import_module

from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.base import Limits, Policy, QueueState, RequestState, mode_of
from vlora_sgl.managers.policies.cost import CostPolicy
from vlora_sgl.managers.policies.cost_table import CostTable
from vlora_sgl.managers.policies.merged import MergedPolicy
from vlora_sgl.managers.policies.unmerged import UnmergedPolicy
from vlora_sgl.managers.policies.vlora import VLoraPolicy

__all__ = ["POLICIES", "Limits", "Policy", "QueueState", "RequestState", "make_policy", "mode_of", "policy_class"]

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (CostPolicy, VLoraPolicy, MergedPolicy, UnmergedPolicy)}


def policy_class(name: str) -> type[Policy]:
    """The policy of that name, or the one at the import path ``module:Class``.

    Raises:
        ConfigError: there is none; the message says what was expected and what came.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in POLICIES:
            raise ConfigError(f"no policy {name!r}; there are: {', '.join(POLICIES)}, or module:Class")
        return POLICIES[name]
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--vlora-policy: expected module:Class that can be imported, got {name!r}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)) or found is Policy:
        raise ConfigError(
            f"--vlora-policy: expected a subclass of {Policy.__module__}.Policy, got {name!r}: {found!r}"
        )
    return found


def make_policy(name: str, costs: CostTable, limits: Limits | None = None) -> Policy:
    """The policy that ``policy_class`` finds, over these costs."""
    return policy_class(name)(costs, limits)
