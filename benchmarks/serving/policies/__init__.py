"""Policies that are compared with the server's: dLoRA's, and all of them leaving running requests out (parking).

A server takes one by its import path: ``--vlora-policy benchmarks.serving.policies.dlora:DLoraPolicy``.
"""

from __future__ import annotations

from benchmarks.serving.policies import parking
from benchmarks.serving.policies.dlora import DLoraPolicy
from vlora_sgl.managers.policies import POLICIES as SERVED
from vlora_sgl.managers.policies import Limits, Policy
from vlora_sgl.managers.policies.cost_table import CostTable

POLICIES: dict[str, type[Policy]] = {**SERVED, DLoraPolicy.name: DLoraPolicy}


def compared_policy(name: str, costs: CostTable, limits: Limits | None = None, park: bool = False) -> Policy:
    """The policy of that name; with ``park``, the one that may leave running requests out of its plans."""
    return (parking.POLICIES if park else POLICIES)[name](costs, limits)
