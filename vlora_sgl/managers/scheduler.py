"""SGLang's scheduler with a plan for every batch: how its adapters are applied, decided just before it runs."""

from __future__ import annotations

from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.managers.head_requests import HeadRequests
from vlora_sgl.managers.mode_choice import choose_mode
from vlora_sgl.managers.reuse import PrefixReuse
from vlora_sgl.server_args import VLoraArgs


class VLoraScheduler(HeadRequests, PrefixReuse, _sgl.Scheduler):
    """One per rank, in the scheduler process.

    SGLang forms the batch; ``run_batch`` decides its plan on the final batch (vetoes, chunking and retraction are
    behind it) and hands it to the LoRA manager, which carries it out on the forward stream.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.vlora_args = VLoraArgs.from_environment()
        self.batches_by_mode = dict.fromkeys(InferenceMode, 0)
        super().__init__(*args, **kwargs)

    @property
    def lora_manager(self) -> Any:
        """This rank's LoRA manager, or ``None`` when LoRA is off."""
        return getattr(self.tp_worker.model_runner, "lora_manager", None)

    def plan(self, batch: Any) -> BatchPlan:
        """The plan of a batch that is about to run."""
        manager = self.lora_manager
        mode, merged = choose_mode(
            [req.lora_id for req in batch.reqs],
            self.vlora_args.mode,
            manager.folded,
            lambda adapter: manager.refusal(adapter) is None,
        )
        return BatchPlan(tuple(req.rid for req in batch.reqs), mode, merged)

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        """Plan the batch, hand the plan on, and run it."""
        manager = self.lora_manager
        if manager is None or batch.forward_mode.is_idle():
            return super().run_batch(batch, pp_proxy_tensors)
        # The manager's word counts: it runs unmerged what it cannot fold.
        plan = manager.set_plan(self.plan(batch), self.place_forks(batch))
        self.batches_by_mode[plan.mode] += 1
        result = super().run_batch(batch, pp_proxy_tensors)
        trace_mode(batch, result, plan)
        return result

    def get_internal_state(self, recv_req: Any) -> Any:
        """SGLang's state, with ours under ``vlora``."""
        output = super().get_internal_state(recv_req)
        output.internal_state["vlora"] = self.vlora_state()
        return output

    def vlora_state(self) -> dict[str, Any]:
        """What ``/server_info`` shows about us: JSON scalars, lists and dicts only."""
        return {
            "scheduler": type(self).__name__,
            "mode": self.vlora_args.mode,
            "policy": self.vlora_args.policy,
            "batches_by_mode": {str(mode): count for mode, count in self.batches_by_mode.items()},
            **(self.lora_manager.mode_state() if self.lora_manager is not None else {}),
            "reuse": self.reuse_state(),
            "heads": self.head_totals,
        }


def trace_mode(batch: Any, result: Any, plan: BatchPlan) -> None:
    """Add the mode of this step to the answers of requests with ``custom_params={"vlora_trace": true}``.

    Their ``meta_info["vlora"]`` becomes a list with one mode per output token, the first that of the prefill. Batches
    without such a request pay nothing.
    """
    asked = [bool((req.sampling_params.custom_params or {}).get("vlora_trace")) for req in batch.reqs]
    output = getattr(result, "logits_output", None)
    if output is not None and any(asked):
        modes = [str(plan.mode) if wanted else None for wanted in asked]
        output.customized_info = {**(output.customized_info or {}), "vlora": modes}
