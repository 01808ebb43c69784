"""Planning in the scheduler: which requests an iteration may take, and how the batch that was formed is run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vlora_sgl._sgl_types import Req, ScheduleBatch
from vlora_sgl.combined import is_combined, members
from vlora_sgl.core import BatchPlan, InferenceMode, JsonDict
from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.managers.deadlines import ClockUpdate, WallClock, shorten
from vlora_sgl.managers.fetch_ahead import FetchAhead
from vlora_sgl.managers.forced_mode import forced_mode
from vlora_sgl.managers.live import LiveSteps
from vlora_sgl.managers.planner import Planner
from vlora_sgl.managers.policies import Limits, Policy, make_policy
from vlora_sgl.managers.policies.cost_table import CostTable, ModelShape, table_for
from vlora_sgl.managers.policies.followed_costs import CostUpdate, FollowedCosts
from vlora_sgl.managers.policies.iteration_log import IterationLog, IterationTimes, Sink
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)


class Planning:
    """One per scheduler that serves adapters.

    Args:
        args: our settings.
        lora_manager: this rank's.
        hf_config: the language model's configuration.
        device: ``cuda`` or ``cpu``.
        max_batch: most requests that run at once.
        measures: whether this rank measures iterations: it writes the log, if one is asked for, and follows the costs.

    Attributes:
        batches_by_mode: batches run so far.
        residency: which adapters keep their device slots.
        ahead: brings adapters to slots before a plan needs them, unless that is off.
        wall: how far the planner's clock is behind the wall's, on the rank that measures.
        followed: where the costs of the next iterations come from, on the rank that measures, unless a table is given.
        watched: the last steps, while somebody watches.
    """

    def __init__(
        self, args: VLoraArgs, lora_manager: Any, hf_config: Any, device: str, max_batch: int, measures: bool
    ) -> None:
        self.args, self.lora_manager = args, lora_manager
        self.batches_by_mode = dict.fromkeys(InferenceMode, 0)
        shape = ModelShape(
            hidden=hf_config.hidden_size,
            layers=hf_config.num_hidden_layers,
            heads=hf_config.num_attention_heads,
            kv_heads=getattr(hf_config, "num_key_value_heads", hf_config.num_attention_heads),
            intermediate=getattr(hf_config, "intermediate_size", 4 * hf_config.hidden_size),
            vocabulary=hf_config.vocab_size,
            rank=lora_manager.max_lora_rank,
        )
        costs = table_for(torch.cuda.get_device_name() if device == "cuda" else device, shape, args.cost_table)
        logger.info("policy %s with costs: %s", args.policy, costs.provenance)
        # SGLang counts the base model as an adapter that holds a slot.
        self.planner = Planner(
            make_policy_of(args, costs),
            max_batch=max_batch,
            max_adapters=max(1, lora_manager.max_loras_per_batch - 1),
            can_merge=lora_manager.can_merge,
            fits=lora_manager.validate_lora_batch if lora_manager.slot_ranks else None,
        )
        self.followed = FollowedCosts(costs) if measures and args.cost_table is None else None
        self.cost_error: dict[str, float] = {}
        self.wall = WallClock()
        sinks: list[Sink] = [] if not measures else [self.wall]
        if self.followed is not None:
            sinks.append(self.followed)
        if measures and args.iteration_log is not None:
            sinks.append(IterationLog(Path(args.iteration_log), costs))
        self.times = IterationTimes(sinks) if sinks else None
        self.residency: SlotResidency = lora_manager.residency
        self.ahead = FetchAhead(lora_manager, args.fetch_ahead, self._load_seconds) if args.fetch_ahead else None
        self.watched: LiveSteps | None = None

    def _load_seconds(self, adapter: str) -> float:
        return self.planner.policy.costs.load_host * float(self.lora_manager.load_share(adapter))

    def change(self, args: VLoraArgs) -> None:
        """Decide by other settings from the next iteration on."""
        self.args = args
        self.planner.use(make_policy_of(args, self.planner.policy.costs))

    def news(self) -> Iterator[CostUpdate | ClockUpdate]:
        """What all ranks are to plan by from now on, if it has changed: costs, and the time."""
        for source in (self.followed, self.wall):
            if source is not None and (update := source.take()) is not None:
                yield update

    def follow(self, update: CostUpdate | ClockUpdate) -> None:
        """Plan by other costs, or later, from the next iteration on."""
        if isinstance(update, ClockUpdate):
            self.planner.clock += update.behind
            return
        self.cost_error = update.error
        self.planner.follow(make_policy_of(self.args, update.table))

    def begin(self, waiting: Sequence[Req], running: Sequence[Req], chunked: Req | None) -> None:
        """Plan an iteration, before its batch is formed."""
        self.planner.merged = self.lora_manager.merged  # an unload or a weight update may have unmerged
        running = [req for req in running if not req.finished()]
        self.planner.next(waiting, running, chunked)
        planned, others = self.planner.adapters()
        wanted = {adapter: self.lora_manager.holders(adapter) for adapter in (*planned, *others)}
        self.residency.want(uid for holders in wanted.values() for uid in holders)
        if self.ahead is None:
            return
        absent = self.ahead.begin(self.planner.clock, wanted, len(planned))
        if absent and (running or chunked is not None):  # with nothing to run meanwhile, the batch waits for them
            self.planner.without(absent)

    def may_admit(self, req: Req) -> bool:
        """Whether a request is in the plan. A forced mode takes every request as it comes."""
        return self.args.mode != "auto" or self.planner.planned(req.rid)

    def settle(self, batch: ScheduleBatch) -> BatchPlan:
        """The plan of a batch that is about to run, for good: the policy's cut to SGLang's rows, or the forced mode.

        Where the LoRA manager refuses to merge under these rows, they run unmerged.
        """
        adapters = [req.lora_id for req in batch.reqs]
        if self.args.mode == "auto":
            plan = self.planner.settle([(req.rid, req.lora_id) for req in batch.reqs])
        else:
            mode, merged = forced_mode(
                adapters,
                InferenceMode(self.args.mode),
                self.lora_manager.merged,
                lambda adapter: self.lora_manager.refusal(adapter) is None,
            )
            plan = BatchPlan(tuple(req.rid for req in batch.reqs), mode, merged)
        starts: tuple[int, ...] = ()
        if batch.forward_mode.is_extend():
            starts = tuple(req.vlora.invocation_start for req in batch.reqs)
            if any(done < start for done, start in zip(batch.prefix_lens, starts, strict=True)):
                adapters.append(None)  # rows before an invocation start are the base model's
        if plan.merged_adapter is not None and self.lora_manager.refuses(plan.merged_adapter, adapters) is not None:
            plan = BatchPlan(plan.requests, InferenceMode.UNMERGED)
        return replace(plan, invocation_starts=starts)

    def launched(self, plan: BatchPlan, batch: ScheduleBatch, number: int) -> None:
        """Account for a batch that is launched as the ``number``-th."""
        self.batches_by_mode[plan.mode] += 1
        prefill = batch.forward_mode.is_extend()
        tokens = batch.extend_lens if prefill else [1] * len(batch.reqs)
        rows = list(zip((req.lora_id for req in batch.reqs), tokens, strict=True))
        iteration = self.planner.ran(plan, rows, prefill)
        if self.watched is not None and not self.watched.launched(number, iteration):
            self.watched = None
        if self.times is not None:
            self.times.launched(number, iteration)

    def finished(self, number: int, reqs: Sequence[Req]) -> None:
        """Note the time at which a batch's result is there, and which of its requests ended with it."""
        if self.times is not None:
            self.times.done(number)
        for req in reqs:
            if req.finished():
                self.planner.left(req.rid)

    def requests(self) -> dict[str, Counter[str]]:
        """Unfinished requests by the name of their adapter, those that wait and those that run; ``""`` is the base.

        One that combines adapters counts for each of them.
        """
        refs = self.lora_manager.lora_refs
        counts: dict[str, Counter[str]] = {}
        for state, by_id in self.planner.requests().items():
            counts[state] = Counter()
            for combined, count in by_id.items():
                for adapter in members([combined]):
                    counts[state][refs[adapter].lora_name if adapter in refs else adapter or ""] += count
        return counts

    def live(self, since: int) -> JsonDict:
        """What somebody who watches is shown: the steps after this number, the queue, the merged adapter."""
        if self.watched is None:
            self.watched = LiveSteps()
        name_of = self.watched.names(self.lora_manager.lora_refs)
        return {
            "steps": self.watched.since(since, name_of),
            "requests": {state: dict(counts) for state, counts in self.requests().items()},
            "merged": name_of(self.lora_manager.merged),
            "switches": self.planner.switches,
        }

    def state(self) -> JsonDict:
        """Figures for ``/server_info`` and the metrics."""
        requests = {state: dict(counts) for state, counts in self.requests().items()}
        combined = {
            state: sum(count for adapter, count in by_id.items() if is_combined(adapter))
            for state, by_id in self.planner.requests().items()
        }
        return {
            **self.planner.state(),
            "cost_error": self.cost_error,
            "slots": {**self.residency.state(), "coming": 0 if self.ahead is None else len(self.ahead.coming)},
            "requests": requests,
            "combined_requests": combined,
        }


def make_policy_of(args: VLoraArgs, costs: CostTable) -> Policy:
    """The policy that the settings name."""
    return make_policy(args.policy, costs, Limits(theta=args.theta, wait_bound=args.wait_bound))


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

    def calc_priority(self, waiting_queue: list[Req], running_batch: ScheduleBatch | None = None) -> None:
        """Sort in place: SGLang's order, then the planned requests first, in their order."""
        self.inner.calc_priority(waiting_queue, running_batch)
        waiting_queue.sort(key=lambda req: self.planner.place(req.rid))


class Announcements:
    """SGLang's input blocker, after which the first rank's news joins what it has received: ranks hear it together.

    Requests with a deadline are told what is left of it, which one rank's clock has to say as well.

    Args:
        inner: SGLang's own, where there is one.
        news: announcements, or ``None``.
    """

    def __init__(self, inner: Any, news: Callable[[], Iterable[object] | None]) -> None:
        self.inner, self.news = inner, news

    def handle(self, recv_reqs: list[object] | None) -> list[object] | None:
        """What came in since the last iteration; ``None`` on ranks that are told by another."""
        if self.inner is not None:
            recv_reqs = self.inner.handle(recv_reqs)
        if recv_reqs is not None:
            shorten(recv_reqs)
            recv_reqs.extend(self.news() or ())
        return recv_reqs
