"""SGLang's scheduler with adapters, heads and prefix sharing: overrides, and the order in which they ask our parts.

One request: it arrives and gets its ``RequestState`` (``arrived``); each iteration asks whether it ``may_admit`` and
tells of those that are ``admitted``; the batch is ``formed``, planned and run (``run_batch``); its result is
``finished``. Each step asks the parts from top to bottom.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import GenerationBatchResult, Req, ScheduleBatch
from vlora_sgl.combined import members
from vlora_sgl.core import InferenceMode, JsonDict, RequestParams
from vlora_sgl.errors import ConfigError, HeadError, RequestError
from vlora_sgl.heads.scheduling import HeadScheduling
from vlora_sgl.managers import live
from vlora_sgl.managers.deadlines import ClockUpdate, Deadlines
from vlora_sgl.managers.draining import Draining
from vlora_sgl.managers.faults import Faults
from vlora_sgl.managers.planning import Announcements, PlannedOrder, Planning
from vlora_sgl.managers.policies.followed_costs import CostUpdate
from vlora_sgl.mem_cache.scheduling import PrefixScheduling
from vlora_sgl.multimodal import encoder_cache
from vlora_sgl.multimodal.early_encoding import EarlyEncoding
from vlora_sgl.request import RequestState, tell
from vlora_sgl.seams import Stage
from vlora_sgl.server_args import VLoraArgs, changed_while_serving

logger = logging.getLogger(__name__)


class VLoraScheduler(_sgl.Scheduler):
    """One per rank, in the scheduler process.

    Attributes:
        heads: which head a request means; nothing is decoded for it.
        prefixes: who computes a request's KV, and who waits for whom.
        early_encoding: the image encoder, started before a batch is formed.
        draining: unloads that wait for their adapter's last row.
        faults: requests that go wrong inside the engine, and end alone.
        deadlines: which were kept.
        planning: which requests run, and how their adapters are applied; ``None`` when LoRA is off.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.vlora_args = VLoraArgs.from_environment()
        super().__init__(*args, **kwargs)
        runner = self.tp_worker.model_runner
        self.embeddings = encoder_cache.install(self.vlora_args.encoder_cache_mb)
        self.heads = HeadScheduling(self.model_config.hf_config)
        self.prefixes = PrefixScheduling(self.tree_cache, runner, self.embeddings)
        self.early_encoding = EarlyEncoding(runner, self.embeddings, self._on_forward_stream, self.prefixes.cached)
        self.draining = Draining(self._adapters_in_use)
        self.faults = Faults(self.tree_cache)
        self.deadlines = Deadlines()
        self.planning: Planning | None = None
        if self.enable_lora:
            config, first = self.model_config.hf_text_config, self.ps.tp_rank == 0 and self.ps.pp_size == 1
            self.planning = Planning(
                self.vlora_args, self.lora_manager, config, self.device, self.max_running_requests, first
            )
            seams.own("Scheduler.policy", self, PlannedOrder(self.policy, self.planning.planner))
        made = ("Scheduler", "LoRAManager", "LoRAMemoryPool", "ModelRunner", "mm_utils")
        seams.verify(Stage.ENGINE, *made, otherwise=None if self.enable_lora else "LoRA is off")

    @property
    def lora_manager(self) -> Any:
        """This rank's LoRA manager, or ``None`` when LoRA is off."""
        return getattr(self.tp_worker.model_runner, "lora_manager", None)

    def run_event_loop(self) -> None:
        """SGLang's. What ends it ends the engine: the log says so in one line, before SGLang's traceback.

        What there is by now stays for good: Python's collector, which would take half a second to look through it
        whenever enough requests have passed, leaves it out from here on.
        """
        gc.collect()
        gc.freeze()
        try:
            super().run_event_loop()
        except Exception as error:
            logger.critical(
                "rank %d ends, and the engine with it: %s: %s", self.ps.tp_rank, type(error).__name__, error
            )
            raise

    def init_request_receiver(self) -> None:
        """SGLang's. What the first rank receives goes to all of them, and costs that it measured go with that."""
        self.input_blocker: Any = Announcements(
            self.input_blocker, lambda: self.planning.news() if self.planning else ()
        )
        super().init_request_receiver()

    # A request comes

    def handle_generate_request(self, recv_req: Any) -> None:
        """SGLang's. One that cannot be taken in is told so, and nobody else notices."""
        with self._taken_in(recv_req):
            super().handle_generate_request(recv_req)

    def handle_embedding_request(self, recv_req: Any) -> None:
        """SGLang's, as ``handle_generate_request``."""
        with self._taken_in(recv_req):
            super().handle_embedding_request(recv_req)

    @contextmanager
    def _taken_in(self, recv_req: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.waiting_queue[:] = [req for req in self.waiting_queue if req.rid != recv_req.rid]
            self.ipc_channels.send_to_tokenizer.send_output(self.faults.refused(recv_req, error), recv_req)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        """SGLang's, once our parts know the request; it comes here again when it was retracted."""
        if getattr(req, "vlora", None) is None:
            self.arrived(req)
        else:
            self.prefixes.returned(req)
        super()._add_request_to_queue(req, is_retracted)
        if not is_retracted and self._came_alone(req):
            self.early_encoding.came_alone(req)

    def arrived(self, req: Req) -> None:
        """Read what a request asks, find its head, settle who computes its KV; a head may want it computed anew."""
        req.vlora = RequestState(RequestParams())
        if req.lora_id is not None:
            try:
                req.vlora.adapter = self.lora_manager.description_of(req.lora_id)
            except RequestError as error:
                req.lora_id = None
                req.set_finish_with_abort(str(error))
        if req.to_finish is None:  # SGLang has nothing against it
            try:
                req.vlora.params = RequestParams.of(req.sampling_params)
                self.heads.arrived(req)
            except (RequestError, HeadError) as error:
                req.set_finish_with_abort(str(error))
        self.deadlines.arrived(req)
        self.prefixes.arrived(req)
        self.heads.recall(req)

    def _came_alone(self, req: Req) -> bool:
        """Whether nothing runs or is in flight, and the queue holds this request alone; SGLang may have refused it."""
        idle = self.running_batch.is_empty() and self.last_batch is None and self.chunked_req is None
        return idle and not self._engine_paused and self.waiting_queue == [req]

    # A batch is formed

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> object:
        """SGLang's, after rows that only wait for a head's answer have left."""
        self.heads.before_decoding(running_batch, last_batch, self.chunked_req)
        return super().get_next_batch_to_run(running_batch, last_batch)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Plan the iteration, then let SGLang form a prefill batch within the plan."""
        if self.planning is not None:
            self.planning.begin(self.waiting_queue, running_batch.reqs, self.chunked_req)
        self.prefixes.begin(self.waiting_queue, self._in_flight(), self.chunked_req)
        self.early_encoding.begin()
        formed = super().get_new_batch_prefill(running_batch)
        if formed.batch_to_run is not None:
            self.prefixes.formed(formed.batch_to_run.reqs)
        return formed

    def _can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """Whether this request goes into the batch that SGLang is forming."""
        # SGLang asks this of each waiting request, and after a yes matches its prefix in the tree at once. Between the
        # two it calls nothing of ours, and the match must see what ``admitted`` promises: so a yes is acted on here.
        # SGLang may still find no memory for the request and stop; it then asks again in the next iteration.
        if not self.may_admit(req) or not super()._can_schedule_lora_req(req, running_loras):
            return False
        self.admitted(req)
        return True

    def may_admit(self, req: Req) -> bool:
        """Whether the plan has this request, and its prefix need not be waited for. Asking changes nothing."""
        return self._planned(req) and self.prefixes.may_admit(req)

    def admitted(self, req: Req) -> None:
        """Promise its prefix to the tree, or let it lead others; start its images, if it is the batch's first."""
        self.prefixes.admitted(req)
        self.early_encoding.admitted(req)

    def _planned(self, req: Req) -> bool:
        return self.planning is None or self.planning.may_admit(req)

    # A batch runs

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: object = None) -> GenerationBatchResult:
        """Settle the plan on the batch as it stands (vetoes, chunks and retraction are behind it), and run it."""
        if self.planning is None or batch.forward_mode.is_idle():
            return super().run_batch(batch, pp_proxy_tensors)
        plan = self.planning.settle(batch)
        self.lora_manager.set_plan(plan)
        self.planning.launched(plan, batch, self.forward_ct + 1)
        result = super().run_batch(batch, pp_proxy_tensors)
        result.vlora_mode = plan.mode
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """SGLang's, which sends tokens out, once they carry what their clients are told."""
        for req, error in self.heads.finished(batch.reqs if batch.forward_mode.is_extend() else (), result):
            self.faults.end(req, "head", str(error))
        self.faults.finished(batch.reqs, result, self.lora_manager.lora_refs if self.lora_manager else {})
        tell(batch.reqs, getattr(result, "logits_output", None), getattr(result, "vlora_mode", None))
        super().process_batch_result(batch, result)
        self.deadlines.finished()
        if self.planning is not None:
            self.planning.finished(batch.forward_iter, batch.reqs)

    @contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        if not self.enable_overlap:
            yield
            return
        with self.forward_stream_ctx:
            self.forward_stream.wait_stream(self.schedule_stream)
            yield

    def _in_flight(self) -> list[Req]:
        """Requests whose prefill is under way, so that their KV is not in the tree yet."""
        last, chunked = self.last_batch, self.chunked_req
        in_flight = list(last.reqs) if last is not None and last.forward_mode.is_extend() else []
        return [*in_flight, *([chunked] if chunked is not None else ()), *self.heads.under_way]

    # An adapter leaves

    def unload_lora_adapter(self, recv_req: Any) -> object:
        """SGLang's reply, or ``None`` while rows use the adapter: the reply follows when they have ended."""
        return None if self.draining.waits(recv_req) else super().unload_lora_adapter(recv_req)

    def process_input_requests(self, recv_reqs: list[object]) -> None:
        """SGLang's, after our news; then unloads that have waited long enough. Every turn of the loop comes here."""
        requests: list[object] = []
        for one in recv_reqs:
            if not isinstance(one, CostUpdate | ClockUpdate):
                requests.append(one)
            elif self.planning is not None:
                self.planning.follow(one)
        super().process_input_requests(requests)
        self._unload_drained()

    def on_idle(self) -> None:
        """SGLang's, which may sleep until a message comes: not before the last row's adapter is gone."""
        self._unload_drained()
        if self.is_fully_idle():
            self.early_encoding.idle()
        super().on_idle()

    def _unload_drained(self) -> None:
        for req in self.draining.drained():
            self.ipc_channels.send_to_tokenizer.send_output(super().unload_lora_adapter(req), req)

    def _adapters_in_use(self) -> set[str | None]:
        rows = [*self.waiting_queue, *self.grammar_manager.grammar_queue, *self._in_flight()]
        for batch in (self.running_batch, self.last_batch):
            rows += batch.reqs if batch is not None else []
        return set(members(req.lora_id for req in rows))

    # Somebody asks

    def set_internal_state(self, recv_req: Any) -> object:
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
        if self.planning is not None:
            self.planning.change(self.vlora_args)
        return _sgl.SetInternalStateReqOutput(updated=True)

    def get_internal_state(self, recv_req: Any) -> object:
        """SGLang's state, with ours under ``vlora``; or what somebody who watches has asked for."""
        if (look := live.asked(recv_req.rid)) is not None:
            return _sgl.GetInternalStateReqOutput(internal_state=self.live_state(*look))
        output = super().get_internal_state(recv_req)
        output.internal_state["vlora"] = self.vlora_state()
        return output

    def live_state(self, since: int, whole: bool) -> JsonDict:
        """The steps after this number and the queue; with ``whole`` adapters, their slots and kept images as well."""
        manager = self.lora_manager
        nothing = {"steps": [], "requests": {}, "merged": "", "switches": 0}
        state = {"time": time.time(), **(self.planning.live(since) if self.planning is not None else nothing)}
        if whole:
            state["adapters"] = manager.adapter_state() if manager is not None else {}
            state["pool"] = manager.pool_state() if manager is not None else None
            state["images"] = live.images_shown(self.prefixes.kept_images(), manager.names() if manager else {})
        return state

    def vlora_state(self) -> JsonDict:
        """What ``/server_info`` shows about us: JSON scalars, lists and dicts only."""
        runner, manager = self.tp_worker.model_runner, self.lora_manager
        modes = self.planning.batches_by_mode if self.planning is not None else dict.fromkeys(InferenceMode, 0)
        graphs = runner.vision_graphs
        return {
            "scheduler": type(self).__name__,
            "mode": self.vlora_args.mode,
            "policy": self.vlora_args.policy,
            "chosen": self.server_args._vlora_chosen,
            "batches_by_mode": {str(mode): count for mode, count in modes.items()},
            "plan": self.planning.state() if self.planning is not None else None,
            **(manager.mode_state() if manager is not None else {}),
            "reuse": self.prefixes.state(),
            "encoder": {**self.embeddings.state(), **(graphs.state() if graphs is not None else {})},
            "prefill_graphs": getattr(runner.prefill_cuda_graph_runner, "replays", None),
            "heads": self.heads.totals,
            "faults": dict(self.faults.counts),
            "deadlines": self.deadlines.state(),
            "adapters": manager.adapter_state() if manager is not None else {},
            "pool": manager.pool_state() if manager is not None else None,
            "seams": seams.report(),
        }
