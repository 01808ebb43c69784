"""The plan of a batch that was formed, settled once: the policy or the forced mode, and what can be carried out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode
from vlora_sgl.managers.planning import Planning
from vlora_sgl.server_args import VLoraArgs

UNMERGED, MERGED, MIXTURE = InferenceMode
Positions = tuple[int, ...]


class Manager:
    """A LoRA manager that merges anything but x, and nothing under rows of the base model."""

    merged: AdapterId = "held"

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[AdapterId]]] = []

    def refusal(self, adapter: str) -> str | None:
        return "x is never merged" if adapter == "x" else None

    def refuses(self, merged: str, adapters: list[AdapterId]) -> str | None:
        self.asked.append((merged, list(adapters)))
        return "base rows" if None in adapters else self.refusal(merged)


def planning(mode: str = "auto", merged: AdapterId = None, chosen: InferenceMode = UNMERGED) -> Any:
    """What is under test, with a policy that has decided."""
    made: Any = Planning.__new__(Planning)
    made.args, made.lora_manager = VLoraArgs(mode=mode), Manager()

    def settle(rows: list[tuple[str, AdapterId]]) -> BatchPlan:
        return BatchPlan(tuple(rid for rid, _ in rows), chosen, merged)

    made.planner = SimpleNamespace(settle=settle, planned=lambda rid: rid == "planned")
    return made


def batch(
    *adapters: AdapterId, prefill: bool = False, done: tuple[int, ...] = (), starts: tuple[int, ...] = ()
) -> Any:
    states = starts or (0,) * len(adapters)
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(rid=f"r{i}", lora_id=adapter, vlora=SimpleNamespace(invocation_start=start))
            for i, (adapter, start) in enumerate(zip(adapters, states, strict=True))
        ],
        forward_mode=SimpleNamespace(is_extend=lambda: prefill),
        prefix_lens=list(done) or [0] * len(adapters),
    )


def test_the_policys_plan_stands_where_nothing_is_refused() -> None:
    made = planning(merged="m", chosen=MERGED)
    assert made.settle(batch("m", "m")) == BatchPlan(("r0", "r1"), MERGED, "m")
    assert made.lora_manager.asked == [("m", ["m", "m"])]
    unmerged = planning()
    assert unmerged.settle(batch("a", None)) == BatchPlan(("r0", "r1"), UNMERGED)
    assert unmerged.lora_manager.asked == [], "there is nothing to refuse"


@pytest.mark.parametrize(("merged", "rows"), [("x", ("x", "x")), ("m", ("m", None))])
def test_what_cannot_be_merged_runs_unmerged(merged: str, rows: tuple[AdapterId, ...]) -> None:
    assert planning(merged=merged, chosen=MIXTURE).settle(batch(*rows)) == BatchPlan(("r0", "r1"), UNMERGED)


def test_rows_before_an_invocation_start_are_base_rows() -> None:
    made = planning(merged="m", chosen=MERGED)
    behind = made.settle(batch("m", "m", prefill=True, done=(5, 9), starts=(5, 0)))
    assert (behind.mode, behind.invocation_starts) == (MERGED, (5, 0))
    before = made.settle(batch("m", "m", prefill=True, done=(4, 9), starts=(5, 0)))
    assert (before.mode, before.invocation_starts) == (UNMERGED, (5, 0))
    decoding = made.settle(batch("m", "m", done=(4, 9), starts=(5, 0)))
    assert (decoding.mode, decoding.invocation_starts) == (MERGED, ())


def test_a_forced_mode_takes_every_request_and_asks_the_manager_too() -> None:
    made = planning("mixture")
    assert made.may_admit(SimpleNamespace(rid="any")) and not planning().may_admit(SimpleNamespace(rid="any"))
    assert planning().may_admit(SimpleNamespace(rid="planned"))
    plan = made.settle(batch("a", "b", "b"))
    assert (plan.mode, plan.merged_adapter) == (MIXTURE, "b")
    assert made.settle(batch("x", "x")).merged_adapter == "held", "what is merged stays under rows that cannot be"
    assert made.settle(batch("b", None)).mode is UNMERGED
