"""SGLang's scheduler with a plan for every batch: how its adapters are applied, decided just before it runs."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlora_sgl import _sgl
from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.errors import ConfigError
from vlora_sgl.heads.scheduling import HeadRequests
from vlora_sgl.managers.draining import AdapterDraining
from vlora_sgl.managers.forced_mode import choose_mode
from vlora_sgl.managers.metrics import VLoraMetrics
from vlora_sgl.managers.planner import Planner
from vlora_sgl.managers.policies import Limits, Policy, make_policy
from vlora_sgl.managers.policies.cost_table import CostTable, ModelShape, table_for
from vlora_sgl.managers.policies.iteration_log import IterationLog
from vlora_sgl.managers.reuse_metrics import ReuseMetrics
from vlora_sgl.mem_cache.reuse import PrefixReuse
from vlora_sgl.server_args import VLoraArgs, changed_while_serving

logger = logging.getLogger(__name__)

METRICS_EVERY = 16
"""Decode iterations between two updates of the metrics; prefills always update them."""


class VLoraScheduler(AdapterDraining, HeadRequests, PrefixReuse, _sgl.Scheduler):
    """One per rank, in the scheduler process.

    Before SGLang forms a batch, ``get_new_batch_prefill`` asks the policy for a plan; the plan orders the waiting
    queue (``PlannedOrder``) and vetoes requests (``_can_schedule_lora_req``). SGLang forms the batch; ``run_batch``
    settles the plan on the final batch (vetoes, chunking and retraction are behind it) and hands it to the LoRA
    manager, which carries it out on the forward stream.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.vlora_args = VLoraArgs.from_environment()
        self.batches_by_mode = dict.fromkeys(InferenceMode, 0)
        super().__init__(*args, **kwargs)

    @property
    def lora_manager(self) -> Any:
        """This rank's LoRA manager, or ``None`` when LoRA is off."""
        return getattr(self.tp_worker.model_runner, "lora_manager", None)

    def init_schedule_policy(self) -> None:
        """Put the plan's order behind SGLang's own."""
        super().init_schedule_policy()
        self.planner: Planner | None = None
        self.iteration_log: IterationLog | None = None
        if self.enable_lora:
            self.planner = self._make_planner()
            if self.vlora_args.iteration_log is not None and self.ps.tp_rank == 0:
                self.iteration_log = IterationLog(Path(self.vlora_args.iteration_log), self.planner.policy.costs)
            self.policy: Any = PlannedOrder(self.policy, self.planner)
            self.residency = self.lora_manager.residency
            collector = getattr(self.metrics_reporter, "metrics_collector", None)
            self.metrics = None if collector is None else VLoraMetrics(collector.labels)
            self.reuse_metrics = None if collector is None else ReuseMetrics(collector.labels)

    def _make_planner(self) -> Planner:
        args, config = self.vlora_args, self.model_config.hf_text_config
        shape = ModelShape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            intermediate=getattr(config, "intermediate_size", 4 * config.hidden_size),
            vocabulary=config.vocab_size,
            rank=self.lora_manager.max_lora_rank,
        )
        costs = table_for(device_name(self.device), shape, args.cost_table)
        logger.info("policy %s with costs: %s", args.policy, costs.provenance)
        # SGLang counts the base model as an adapter that holds a slot.
        return Planner(
            self._make_policy(costs),
            max_batch=self.max_running_requests,
            max_adapters=max(1, self.lora_manager.max_loras_per_batch - 1),
            can_merge=self.lora_manager.can_merge,
            fits=self.lora_manager.validate_lora_batch if self.lora_manager.slot_ranks else None,
        )

    def _make_policy(self, costs: CostTable) -> Policy:
        args = self.vlora_args
        return make_policy(args.policy, costs, Limits(theta=args.theta, wait_bound=args.wait_bound))

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """Plan the iteration, then let SGLang form a prefill batch within the plan."""
        if self.planner is not None:
            running = [req for req in running_batch.reqs if not req.finished()]
            self.planner.merged = self.lora_manager.merged  # an unload or a weight update may have unmerged
            plan = self.planner.next(self.waiting_queue, running, self.chunked_req)
            self.residency.want([plan.merged_adapter, *(req.lora_id for req in (*running, *self.waiting_queue))])
        return super().get_new_batch_prefill(running_batch)

    def _can_schedule_lora_req(self, req: Any, running_loras: set[str | None]) -> bool:
        """Whether the plan and SGLang both let this request in now."""
        # A forced mode takes every request as it comes.
        if self.planner is None or self.vlora_args.mode != "auto" or self.planner.planned(req.rid):
            return bool(super()._can_schedule_lora_req(req, running_loras))
        if self.enable_lora_overlap_loading:
            # Not its turn yet, but its adapter may come in on the side stream meanwhile, if a slot is free for it.
            self.lora_overlap_loader.try_overlap_load_lora(req.lora_id, running_loras)
        return False

    def plan(self, batch: Any) -> BatchPlan:
        """The plan of a batch that is about to run: the policy's, cut to SGLang's rows, or the forced mode."""
        assert self.planner is not None
        manager, adapters = self.lora_manager, [req.lora_id for req in batch.reqs]
        if self.vlora_args.mode == "auto":
            return self.planner.settle([(req.rid, req.lora_id) for req in batch.reqs])
        mode, merged = choose_mode(
            adapters, self.vlora_args.mode, manager.merged, lambda adapter: manager.refusal(adapter) is None
        )
        return BatchPlan(tuple(req.rid for req in batch.reqs), mode, merged)

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        """Plan the batch, hand the plan on, and run it."""
        if self.planner is None or batch.forward_mode.is_idle():
            return super().run_batch(batch, pp_proxy_tensors)
        plan = self.plan(batch)
        starts, adapters = self.place_invocations(batch)
        if self.lora_manager.refuses(plan.merged_adapter, adapters) is not None:
            plan = BatchPlan(plan.requests, InferenceMode.UNMERGED)
        plan = replace(plan, invocation_starts=starts)
        self.lora_manager.set_plan(plan)
        self.batches_by_mode[plan.mode] += 1
        prefill = batch.forward_mode.is_extend()
        tokens = batch.extend_lens if prefill else [1] * len(batch.reqs)
        rows = list(zip((req.lora_id for req in batch.reqs), tokens, strict=True))
        iteration = self.planner.ran(plan, rows, prefill)
        if self.iteration_log is not None:
            self.iteration_log.launched(self.forward_ct + 1, iteration)
        if self.metrics is not None and (prefill or self.forward_ct % METRICS_EVERY == 0):
            self.update_metrics()
        result = super().run_batch(batch, pp_proxy_tensors)
        trace_mode(batch, result, plan)
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """SGLang's, after noting the time."""
        super().process_batch_result(batch, result)
        if self.iteration_log is not None:
            self.iteration_log.done(batch.forward_iter)

    def set_internal_state(self, recv_req: Any) -> Any:
        """SGLang's, and ours (``POST /set_internal_state``): thresholds, policy and mode of a running server.

        SGLang takes numbers only, so a choice is a key of its own: ``{"vlora_policy:cost": 1}``.
        """
        ours = {key: value for key, value in recv_req.server_args.items() if key.startswith("vlora_")}
        if not ours:
            return super().set_internal_state(recv_req)
        try:
            self.vlora_args = changed_while_serving(self.vlora_args, ours)
        except ConfigError as error:
            logger.warning("settings unchanged: %s", error)
            return _sgl.SetInternalStateReqOutput(updated=False)
        if self.planner is not None:
            self.planner.use(self._make_policy(self.planner.policy.costs))
        return _sgl.SetInternalStateReqOutput(updated=True)

    def update_metrics(self) -> None:
        """Bring the Prometheus gauges up to date."""
        assert self.planner is not None and self.metrics is not None and self.reuse_metrics is not None
        self.reuse_metrics.update(self.reuse_state(), self.encoder_cache.state(), self.head_totals)

        def by_name(reqs: Any) -> Counter[str]:
            refs = self.lora_manager.lora_refs
            return Counter(refs[r.lora_id].lora_name if r.lora_id in refs else "base" for r in reqs)

        self.metrics.update(
            {str(mode): count for mode, count in self.batches_by_mode.items()},
            self.planner.state(),
            self.residency.state(),
            len(self.lora_manager.loras),
            by_name(self.waiting_queue),
            by_name(self.running_batch.reqs),
        )

    def get_internal_state(self, recv_req: Any) -> Any:
        """SGLang's state, with ours under ``vlora``."""
        output = super().get_internal_state(recv_req)
        output.internal_state["vlora"] = self.vlora_state()
        return output

    def vlora_state(self) -> dict[str, Any]:
        """What ``/server_info`` shows about us: JSON scalars, lists and dicts only."""
        runner = self.tp_worker.model_runner
        graphs = runner.vision_graphs
        return {
            "scheduler": type(self).__name__,
            "mode": self.vlora_args.mode,
            "policy": self.vlora_args.policy,
            "batches_by_mode": {str(mode): count for mode, count in self.batches_by_mode.items()},
            "plan": {**self.planner.state(), "slots": self.residency.state()} if self.planner is not None else None,
            **(self.lora_manager.mode_state() if self.lora_manager is not None else {}),
            "reuse": self.reuse_state(),
            "encoder": {**self.encoder_cache.state(), **(graphs.state() if graphs is not None else {})},
            "prefill_graphs": getattr(runner.prefill_cuda_graph_runner, "replays", None),
            "heads": self.head_totals,
            "adapters": self.lora_manager.adapter_state() if self.lora_manager is not None else {},
            "pool": self.lora_manager.pool_state() if self.lora_manager is not None else None,
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


class PlannedOrder:
    """SGLang's schedule policy, after which the waiting queue is put into the plan's order (stable).

    Args:
        inner: SGLang's own; everything but ``calc_priority`` is its.
        planner: holds the plan.
    """

    def __init__(self, inner: Any, planner: Planner) -> None:
        self.inner, self.planner = inner, planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def calc_priority(self, waiting_queue: list[Any], running_batch: Any = None) -> None:
        """Sort in place: SGLang's order, then the planned requests first, in their order."""
        self.inner.calc_priority(waiting_queue, running_batch)
        waiting_queue.sort(key=lambda req: self.planner.place(req.rid))


def device_name(device: str) -> str:
    """The card's name, or ``cpu``."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device
