"""SGLang's LoRA manager with modes: it carries out the plan of each batch just before the batch runs.

The scheduler asks ``refuses`` and calls ``set_plan``; SGLang then builds the forward batch on the forward stream and
calls ``fetch_new_loras`` and ``prepare_lora_batch`` from there, which makes the latter the place to switch weights.
The work is done by parts: ``AdapterStore`` loads, ``Merger`` switches, ``RowRouting`` and ``TokenRouting`` route.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import ForwardBatch, LoRAConfig, LoRARef
from vlora_sgl.combined import is_combined, parts
from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode, JsonDict, adapters_in
from vlora_sgl.errors import AdapterError, ConfigError, RequestError
from vlora_sgl.kernels.atmm.row_routing import Run, dense_slots, is_dense
from vlora_sgl.lora.adapter import AdapterBuilder, engine_layout
from vlora_sgl.lora.arrivals import Arrivals
from vlora_sgl.lora.backend import GRAPH_PAIRS
from vlora_sgl.lora.invocation import split_batch
from vlora_sgl.lora.merger import Merger
from vlora_sgl.lora.packed import PackedPool
from vlora_sgl.lora.pool import SizedPool
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.lora.store import AdapterStore, DescribedAdapter
from vlora_sgl.lora.tower import Tower, why_not_adapted
from vlora_sgl.lora.vectors import SlotVectors, has_vectors
from vlora_sgl.lora.vocabulary import seen_by_head
from vlora_sgl.multimodal.vision_graphs import VisionGraphs
from vlora_sgl.routed.router_tables import RouterTables
from vlora_sgl.routed.rows import TokenRouting, row_lengths
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

ROUTING_BACKEND = "atmm"
MANY = "lora_many"
"""The decode graph of steps that use more slots than the dense kernels have room for."""

UNMERGED = BatchPlan(requests=(), mode=InferenceMode.UNMERGED)

# Parts of a multimodal model that are not its language model. SGLang wraps any module below a ``layers.N`` whose last
# name matches, so CLIP and SigLIP towers would get language-shaped pool buffers.
_TOWERS = re.compile(r"(^|\.)(visual|vision\w*|image\w*|audio\w*|speech\w*|\w+_tower|multi_modal_projector)(\.|$)")


class PrefillGraphs(Protocol):
    """What captures and replays prefills.

    Attributes:
        variant: of the graph being captured, ``"lora"`` or ``"nolora"``; ``None`` otherwise.
        embeds_outside: whether input embeddings are there before a graph is replayed.
    """

    variant: str | None

    embeds_outside: bool

    def tokens_of(self, forward_batch: ForwardBatch) -> int | None:
        """Tokens of the graph that this batch captures or will replay; ``None`` if it runs eagerly or decodes."""


class VLoraManager(_sgl.LoRAManager):
    """One per rank. Slots are SGLang's pool buffers; the base model keeps one, so that padding rows have a target.

    Attributes:
        plan: the plan of the batch that runs next.
        residency: which adapters hold slots, and who is evicted.
        combines: whether a request has combined adapters yet; until then no batch is looked through for it.
        token_routing: what routed adapters need of a batch, if there can be any.
        tower: the slots of the vision tower, if adapters of it can be served.
    """

    plan = UNMERGED
    memory_pool: Any = None
    target_modules: set[str]
    max_lora_rank: int
    _prefill_graphs: PrefillGraphs | None = None
    token_routing: TokenRouting | None = None
    combines = False
    tower: Tower | None = None
    _prepared: tuple[object, object] | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._routes_rows = kwargs.get("lora_backend") == ROUTING_BACKEND
        self._vlora = vlora = VLoraArgs.from_environment()
        self.slot_ranks = vlora.slot_ranks
        # Forcing "unmerged" for debugging, or the baseline policy: then the copy of the base weights would be memory
        # for nothing.
        merges = vlora.mode != InferenceMode.UNMERGED and vlora.policy != InferenceMode.UNMERGED
        self._copy = vlora.merge_copy if merges else None
        super().__init__(*args, **kwargs)
        if self.max_loras_per_batch < 2:
            raise ConfigError(
                f"--max-loras-per-batch={self.max_loras_per_batch} leaves no slot for an adapter: one is the base's"
            )
        vectors = self._room_for_vectors() if self._vlora.dora or has_vectors(self.loras.values()) else None
        modules = (self.lora_modules, self.target_modules, self.device)
        self._merger = Merger(
            self.loras, self.memory_pool, self._rows, *modules, self._copy, self.tower, self._vlora.merge_tolerance
        )
        if vectors is not None:
            vectors.base = self._merger.base

    # What is loaded

    def init_lora_adapters(self, lora_paths: Collection[_sgl.LoRARef] | None = None) -> None:
        """SGLang's tables, and the adapters of the command line.

        Raises:
            RuntimeError: one of them was refused.
        """
        super().init_lora_adapters()
        self._check_weights()
        no_tower = why_not_adapted(self.base_model, self.lora_backend.name)
        self._store = AdapterStore(
            self.loras,
            self.configs,
            self.lora_refs,
            builder=AdapterBuilder(
                *(self.base_model, self.base_hf_config, self.load_config, self.lora_backend, self.dtype, no_tower),
                self._eight_bits,
            ),
            device=self.device,
            slots=self.max_loras_per_batch,
            slot_ranks=self.slot_ranks,
            roots=self._vlora.readable,
        )
        for lora_ref in lora_paths or ():
            result = self._load_lora_adapter(lora_ref)
            if not result.success:
                raise RuntimeError(f"Failed to load LoRA adapter {lora_ref.lora_name}: {result.error_message}")

    @property
    def described(self) -> Mapping[str, DescribedAdapter]:
        """Description, heads and digest by adapter id, of every adapter that is loaded."""
        return self._store.described

    def description_of(self, adapter: str) -> DescribedAdapter:
        """What is known of an adapter, or of several as one.

        Raises:
            RequestError: they cannot be combined on this engine.
        """
        if not is_combined(adapter):
            return self.described[adapter]
        if not self._routes_rows:
            raise RequestError(f"adapters are combined by --lora-backend {ROUTING_BACKEND}")
        self.combines = True
        return self._store.describe_combined(adapter)

    def has_routed(self, adapters: Iterable[AdapterId] | None) -> bool:
        """Whether any of these is a routed adapter."""
        return self._store.has_routed(adapters)

    def load_lora_adapter(self, lora_ref: LoRARef) -> Any:
        """SGLang's, without its log of free memory: to know that, it empties torch's cache of the device's twice, or
        on a CPU starts a program twice."""
        return self._load_lora_adapter(lora_ref)

    def unload_lora_adapter(self, lora_ref: LoRARef) -> Any:
        """SGLang's, likewise."""
        return self._unload_lora_adapter(lora_ref)

    def _load_lora_adapter(self, lora_ref: LoRARef) -> Any:
        """Load an adapter, or pin or unpin one.

        The reply of a success carries the load report in ``error_message``; the tokenizer manager moves it to a field
        of its own. A refusal carries the reason there.
        """
        try:
            report = self._store.load(lora_ref)
        except Exception as error:  # whatever it is, the client gets it as a refusal and the engine goes on
            logger.warning("adapter %s was refused: %s", lora_ref.lora_name, error)
            return self.create_lora_update_result(success=False, error_message=str(error))
        self.num_pinned_loras = len(self._store.pinned)
        logger.info("adapter %s: %s", lora_ref.lora_name, report or f"pinned: {bool(lora_ref.pinned)}")
        return self.create_lora_update_result(success=True, error_message=report)

    def load_lora_weights_from_tensors(self, lora_ref: LoRARef, tensors: dict[str, torch.Tensor]) -> None:
        """Load weights; an adapter that comes as tensors has no heads.

        Raises:
            AdapterError: the slots hold eight bits, and nobody has rounded these tensors to them.
        """
        if self._eight_bits:
            raise AdapterError("--vlora-adapter-weights fp8 takes adapters as files, in bodies too")
        super().load_lora_weights_from_tensors(lora_ref, tensors)
        self._store.describe(self.loras[lora_ref.lora_id])

    def validate_new_adapter(self, lora_config: LoRAConfig, lora_ref: LoRARef) -> None:
        """Whether the pool can hold an adapter (``AdapterStore.check``)."""
        self._store.check(lora_config, lora_ref)

    def _unload_lora_adapter(self, lora_ref: LoRARef) -> Any:
        if self._store.unload_routed(lora_ref.lora_id):
            return self.create_lora_update_result(success=True)
        self._merger.forget(lora_ref.lora_id)
        if self.plan.merged_adapter == lora_ref.lora_id:
            self.plan = UNMERGED
        result = super()._unload_lora_adapter(lora_ref)
        if lora_ref.lora_id not in self.loras:
            self._store.forget(lora_ref.lora_id)
            self.residency.unloaded(lora_ref.lora_id)
        return result

    def adapter_state(self) -> dict[str, JsonDict]:
        """What ``/server_info`` shows of every adapter in memory, by id; ``never_merged`` says why, if it is not,
        ``merge_loss`` what folding it into FP8 weights loses, ``loads`` how often it came to a slot."""
        state = self._store.state()
        for adapter, shown in state.items():
            shown["never_merged"] = self.refusal(adapter) if self.can_merge else None
            shown["merge_loss"] = self._merger.loss(adapter) if adapter in self.loras else None
            shown["loads"] = self.residency.loads[adapter]
        return state

    def names(self) -> dict[str, str]:
        """The names of the loaded adapters by their digests."""
        return {known.digest: self.lora_refs[uid].lora_name for uid, known in self.described.items()}

    # The pool

    def init_memory_pool(self) -> None:
        """Slots as large as the largest rank, or of the ranks that ``--vlora-slot-ranks`` names.

        Raises:
            ConfigError: such slots do not go with another setting.
        """
        self.residency = SlotResidency(memory=self.max_loras_per_batch)
        same = (
            *("base_hf_config", "max_loras_per_batch", "dtype", "tp_size", "tp_rank", "attn_tp_size", "max_lora_rank"),
            *("target_modules", "base_model", "eviction_policy", "lora_added_tokens_size"),
            *("experts_shared_outer_loras", "enable_lora_overlap_loading", "residency"),
        )
        options = {name: getattr(self, name) for name in same}
        options["strict_loading"] = self.lora_strict_loading
        if self.slot_ranks:
            self._check_slot_ranks()
            pool: PackedPool = SizedPool(self.slot_ranks, eight_bits=self._eight_bits, **options)
            self.lora_backend.place_slots(pool.places)
        else:
            pool = PackedPool(experts=self._routes_rows, eight_bits=self._eight_bits, **options)
        seams.own("LoRAManager.memory_pool", self, pool)
        if self._routes_rows:
            self.lora_backend.most_dense = dense_slots(self.max_lora_rank)
        if (lacking := pool.lacking(self.lora_modules)) is not None:
            raise ConfigError(
                f"{lacking} lies beside experts, and SGLang's slots have no room of its size; leave gate_up_proj "
                "and down_proj out of --lora-target-modules"
            )
        self._arrivals = Arrivals(self.device, self.pending_lora_load_events)
        self._rows = RowRouting(self.memory_pool, self.loras, self._store.routed, self._arrivals)
        if why_not_adapted(self.base_model, self.lora_backend.name) is None:
            layout = engine_layout(self.base_model)
            self.tower = Tower(self.base_model, layout, self._rows, self.dtype, self.device, self._copy)
        self.fetch_new_loras({None})
        self._store.serve(self.memory_pool, self.lora_modules, self.tower)

    def _room_for_vectors(self) -> SlotVectors:
        """A table beside the slots, once the layers know their columns; filled for the adapters that were loaded."""
        if not self._routes_rows or not self.memory_pool.packs:
            raise ConfigError(
                f"--vlora-dora needs --lora-backend {ROUTING_BACKEND}, and not SGLANG_EXPERIMENTAL_LORA_OPTI"
            )
        vectors = self.memory_pool.vectors = SlotVectors(self.lora_modules, self.max_loras_per_batch, self.device)
        self.lora_backend.marks_rows = True
        self._store.rebase()
        return vectors

    @property
    def _eight_bits(self) -> bool:
        return self._vlora.adapter_weights == "fp8"

    def _check_weights(self) -> None:
        if not self._eight_bits:
            return
        if self.dtype == torch.float16:
            # Its products with A, times the scale that makes up for larger numbers, would lie below float16's range.
            raise ConfigError("--vlora-adapter-weights fp8 needs --dtype bfloat16 or float32")
        if not self._routes_rows or _sgl.dense_lora_b:
            raise ConfigError(
                f"--vlora-adapter-weights fp8 needs --lora-backend {ROUTING_BACKEND}, and not "
                "SGLANG_EXPERIMENTAL_LORA_OPTI"
            )

    def _check_slot_ranks(self) -> None:
        asked = (self.max_loras_per_batch, self.max_lora_rank)
        if asked != (len(self.slot_ranks) + 1, max(self.slot_ranks)):
            raise ConfigError(
                f"--vlora-slot-ranks {' '.join(map(str, self.slot_ranks))} means --max-loras-per-batch "
                f"{len(self.slot_ranks) + 1} and --max-lora-rank {max(self.slot_ranks)}, got {asked[0]} and {asked[1]}"
            )
        if not self._routes_rows:
            raise ConfigError(f"--vlora-slot-ranks needs --lora-backend {ROUTING_BACKEND}")
        if _sgl.dense_lora_b:  # SGLang would clear what lies past an adapter's rank
            raise ConfigError("--vlora-slot-ranks does not go with SGLANG_EXPERIMENTAL_LORA_OPTI")

    def pool_state(self) -> JsonDict:
        """What the device slots are: the rank of each, and the bytes of all on this rank; and the vision tower's."""
        return {**self.memory_pool.state(), "tower": None if self.tower is None else self.tower.state()}

    def use_vision_graphs(self, graphs: VisionGraphs) -> None:
        """From now on images are encoded by ``graphs``, where it has captured them."""
        if self.tower is not None:
            self.tower.routing.graphs, graphs.adapters = graphs, self.tower.routing

    def bind_pools(self, req_to_token: torch.Tensor, token_slots: int) -> None:
        """Make room for routers, once the KV cache is there and before graphs are captured.

        Args:
            req_to_token: SGLang's table [requests, context] of KV slots.
            token_slots: KV slots, the padding ones included.
        """
        if not (self._routes_rows and self._vlora.max_routed):
            return
        config = self.base_hf_config
        tables = RouterTables(self._vlora.max_routed, config.hidden_size, config.vocab_size, 0, self.device)
        tables.bind(req_to_token, token_slots)
        self._store.accept_routed(tables)
        self.token_routing = TokenRouting(
            tables,
            self._store.routed,
            self._rows.slot_of,
            lambda uid: float(self.loras[uid].scaling),
            self.lora_backend,
        )
        self.lora_backend.routes_tokens = True

    def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        """SGLang's, and room for the rows that decode graphs route."""
        super().init_cuda_graph_batch_info(max_bs_in_cuda_graph, num_tokens_per_req)
        if self.token_routing is not None:
            self.token_routing.reserve(max_bs_in_cuda_graph * num_tokens_per_req, GRAPH_PAIRS)

    def first_layer(self) -> Any:
        """The first decoder layer, whose ``forward`` takes ``hidden_states`` and ``forward_batch``."""
        name = next(iter(self.lora_modules[0]))
        head, marker, _ = name.partition("layers.0.")
        return self.base_model.get_submodule(head + marker.rstrip("."))

    # One batch

    @property
    def merged(self) -> AdapterId:
        """The adapter merged into the weights now, ``None`` while they are the base model's."""
        return self._merger.merged

    @property
    def can_merge(self) -> bool:
        """Whether any adapter may be merged at all."""
        return self._merger.switcher is not None

    @property
    def two_slots_a_row(self) -> bool:
        """Whether rows may apply two slots: a merged adapter taken out beside their own, or two routed members."""
        return self.can_merge or self.token_routing is not None

    def refusal(self, adapter: str) -> str | None:
        """Why this adapter can never be merged into the weights, or ``None`` if it can.

        Raises:
            UnknownAdapterError: it is not loaded.
        """
        if is_combined(adapter):
            return "it is several adapters, with scales of a request's own"
        if adapter in self._store.routed:
            return "it is a routed adapter, and differs from token to token"
        return self._merger.refusal(adapter)

    def refuses(self, merged: AdapterId, adapters: Collection[AdapterId]) -> str | None:
        """Why ``merged`` cannot be merged under a batch, or ``None`` if it can. Changes nothing.

        Args:
            merged: the adapter to be merged; ``None``, the base weights, never is refused.
            adapters: those of the batch's rows; ``None`` for base rows, also those before an invocation start.

        Raises:
            UnknownAdapterError: ``merged`` is not loaded.
        """
        if merged is None:
            return None
        reason = self.refusal(merged)
        if reason is None and not self.validate_lora_batch({merged, *adapters}):
            return "it has no slot beside the batch's other adapters and the pinned ones"
        if reason is None and not self._routes_rows and any(adapter != merged for adapter in adapters):
            return f"only --lora-backend {ROUTING_BACKEND} takes it out of other rows again"
        return reason

    def set_plan(self, plan: BatchPlan) -> None:
        """Take the plan of the batch that runs next; ``refuses`` must have nothing against it."""
        self.plan = plan

    def validate_lora_batch(self, lora_ids: set[AdapterId]) -> bool:
        """Whether these adapters fit beside the base model's permanent slot.

        The merged adapter counts only if it is among them: one that is not can be unmerged, and must not keep
        waiting requests out for ever.
        """
        holders = {*self._store.holders(lora_ids), None}
        return super().validate_lora_batch(holders) and self._store.fit_sized_slots(holders)

    def fetch_new_loras(self, new_loras: set[AdapterId], running_loras: set[AdapterId] | None = None) -> None:
        """Load adapters into slots; the base model and the adapter to be merged are always among them.

        The merged adapter needs its slot for as long as rows of others must take it out again. Called where the batch
        will be launched, it has that wait for adapters that are not there.
        """
        self._arrivals.read_here()
        wanted = self._store.holders({*new_loras, None, self.plan.merged_adapter})
        if not wanted <= self.memory_pool.uid_to_buffer_id.keys():
            self._arrivals.wait_for_all()  # what comes takes slots, theirs perhaps
            self._prepared = None
        self._fill_slots(wanted, self._store.holders(running_loras or ()))

    def fetch_ahead(self, adapter: str, keep: Collection[AdapterId]) -> bool:
        """Begin to copy an adapter to a slot, beside the steps that are launched from now on.

        Args:
            adapter: that is loaded and holds no slot; neither routed nor combined.
            keep: adapters that keep theirs, whether they hold one or not.

        Returns:
            Whether there was a slot for it.
        """
        pool = self.memory_pool
        kept = {None, *self._store.pinned, *keep} & pool.uid_to_buffer_id.keys()
        if not pool.has_room(self.loras[adapter].config.r, kept):
            return False
        self._prepared = None
        with self.residency.before_use(), self._arrivals.beside(adapter):
            self._fill_slots({adapter}, kept)
        return True

    def _fill_slots(self, new: set[AdapterId], kept: set[AdapterId]) -> None:
        super().fetch_new_loras(new, kept)
        if self.tower is not None:
            self.tower.fetch(self.loras, self.memory_pool.uid_to_buffer_id)

    @property
    def resident(self) -> Collection[AdapterId]:
        """The adapters that hold a slot, those included whose copy to it is under way."""
        return self.memory_pool.uid_to_buffer_id.keys()

    def holders(self, adapter: AdapterId) -> list[str]:
        """The adapters that need a slot for a row of this one; none where an adapter is not loaded any more."""
        return sorted(uid for uid in self._store.holders([adapter]) if uid is not None and uid in self.loras)

    def load_share(self, adapter: str) -> float:
        """The bytes of an adapter's slot over those of the largest."""
        return float(self.loras[adapter].config.r / self.max_lora_rank)

    def prepare_lora_batch(self, forward_batch: ForwardBatch) -> None:
        """Switch weights as planned, and tell the backend which rows apply which slots.

        A batch whose rows all run on the weights as they are (all of the merged adapter, or all base on base weights)
        leaves the backend without metadata: then no LoRA kernel runs. A decode step right behind another of the same
        rows is the same to the backend: its tables stay as they are.

        Raises:
            UnknownAdapterError: a row's adapter holds no slot.
        """
        variant = self._captured_variant()
        if variant is not None:
            self._prepared = None
            # Captured with metadata of base rows; replays refresh it in place.
            base: list[Run] = [((), n) for n in row_lengths(forward_batch)]
            self._route(forward_batch, base, variant != "nolora", many=variant == MANY)
            return
        merged = self._merger.carry_out(self.plan.merged_adapter)
        step = self._step_of(forward_batch, merged)
        if step is not None and self._prepared is not None and self._prepared[0] == step:
            self.lora_backend.batch_info = self._prepared[1]
            if self.token_routing is not None:
                self.token_routing.no_rows()
            return
        batch = split_batch(forward_batch, self.plan.invocation_starts)
        runs = self._rows.runs_of(batch, merged)
        self._route(batch, runs, any(pairs for pairs, _ in runs))
        if self._routes_rows and self.lm_head_module is not None and self.lora_backend.batch_info is not None:
            self.lora_backend.batch_info.head_runs = self._head_runs(forward_batch, merged)
        if self.token_routing is not None:
            self.token_routing.prepare(forward_batch, self._rows.pairs_of(None, merged))
        self._prepared = step, self.lora_backend.batch_info

    def _step_of(self, batch: ForwardBatch, merged: AdapterId) -> object:
        """What decides the tables of a decode step; ``None`` of a batch that has to be prepared whatever came before.

        An adapter's id is of one content, so which slots they hold says what those apply.
        """
        adapters = batch.lora_ids
        if not self._routes_rows or not batch.forward_mode.is_decode() or self._store.has_routed(adapters):
            return None
        return merged, tuple(adapters or ()), tuple(self.memory_pool.buffer_id_to_uid)

    def _head_runs(self, forward_batch: ForwardBatch, merged: AdapterId) -> list[Run] | None:
        seen = seen_by_head(forward_batch, self.plan.invocation_starts)
        if seen is None:
            return None
        if not self._store.on_vocabulary(forward_batch.lora_ids or (), "lm_head"):
            return []
        return [(self._rows.pairs_of(adapter, merged), rows) for adapter, rows in seen]

    def _captured_variant(self) -> str | None:
        if _sgl.capture_mode.get_is_capture_mode():
            variant: str | None = _sgl.capture_mode.get_capture_lora_variant()
            if variant is not None:
                return variant
        return self._prefill_graphs.variant if self._prefill_graphs is not None else None

    def _route(self, batch: ForwardBatch, runs: list[Run], kernels: bool, many: bool | None = None) -> None:
        if not kernels:
            self.lora_backend.reset_batch_state()
        elif self._routes_rows:
            tokens = self._prefill_graphs.tokens_of(batch) if self._prefill_graphs is not None else None
            tables = self._rows.tables_of(runs)
            graph, routed = self._in_graph(batch), None
            if self.token_routing is not None:
                routed = self.token_routing.rows_of(batch)
            always = int(self.merged is not None)
            self.lora_backend.route(
                *tables, use_cuda_graph=graph, prefill_tokens=tokens, many=many, routed=routed, always=always
            )
        else:
            super().prepare_lora_batch(batch)

    @property
    def decode_variants(self) -> tuple[str, ...]:
        """The decode graphs with LoRA kernels: one more where a step may use more slots than the dense ones take."""
        many = self._routes_rows and not is_dense(1, self.max_loras_per_batch, self.lora_backend.most_dense)
        return ("lora", MANY) if many else ("lora",)

    def prepared_variant(self) -> str:
        """The decode graph of the batch that was prepared last."""
        prepared = self.lora_backend.batch_info
        if prepared is None:
            return "nolora"
        return MANY if MANY in self.decode_variants and prepared.routing.gates is None else "lora"

    def _in_graph(self, batch: ForwardBatch) -> bool:
        """Whether a captured graph will run this batch."""
        fits = batch.batch_size <= getattr(self, "max_bs_in_cuda_graph", 0)
        return bool(fits and batch.forward_mode.is_cuda_graph()) and not self.exceeds_graph(batch)

    def use_prefill_graphs(self, graphs: PrefillGraphs) -> None:
        """From now on prefills are captured and replayed by ``graphs``."""
        self._prefill_graphs = graphs

    def exceeds_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a decoding batch has what a captured graph cannot route: routed adapters whose rows its tables of
        tiles have no room for, or rows of more adapters than those have."""
        if self._combines_too_many(forward_batch, prefill=False):
            return True
        adapters = forward_batch.lora_ids or ()
        embeds = self.embed_tokens_module is not None and self._store.on_vocabulary(adapters, "embed_tokens")
        if not self._routes_rows or not (embeds or self.has_routed(adapters)):
            return False
        active = len(adapters_in(self._store.holders(adapters), self.plan.merged_adapter))
        if self.lora_backend.dense_in_graph(forward_batch.batch_size, active):
            return False
        return embeds or not self._tiles_hold(forward_batch)

    def _tiles_hold(self, forward_batch: ForwardBatch) -> bool:
        """Whether captured graphs have room for the tiles of a batch's routed rows."""
        routing, merged = self.token_routing, self.plan.merged_adapter is not None
        return routing is None or routing.fits_tiles(forward_batch, GRAPH_PAIRS - merged)

    def _combines_too_many(self, forward_batch: ForwardBatch, prefill: bool) -> bool:
        """Whether a batch has rows of more adapters than captured graphs have room for."""
        if not self.combines:
            return False
        adapters, merged = set(forward_batch.lora_ids or ()), self.plan.merged_adapter
        pairs = max((len(parts(one)) for one in adapters if one is not None), default=0) + (merged is not None)
        # Besides its adapters' rows a batch may have base rows, and a graph has padding.
        bounds = forward_batch.batch_size, len(adapters_in(adapters, merged)), pairs, len(adapters) + 2
        return not self.lora_backend.graph_holds(prefill, *bounds)

    def can_use_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """SGLang's verdict; a prefill with rows of more adapters than the tables have room for runs eagerly."""
        if not super().can_use_prefill_cuda_graph(forward_batch):
            return False
        if self.has_routed(forward_batch.lora_ids):
            outside = self._prefill_graphs is not None and self._prefill_graphs.embeds_outside
            if not outside or not self._tiles_hold(forward_batch):
                return False
        wrapped = self.embed_tokens_module is not None or self.lm_head_module is not None
        if wrapped and self._store.on_vocabulary(forward_batch.lora_ids or ()):
            return False
        return not self._combines_too_many(forward_batch, prefill=True)

    # Between batches

    def unmerge(self) -> None:
        """Bring the base weights back before the current stream's next work, from any thread of control."""
        self._merger.unmerge()
        self.plan = UNMERGED

    def rebase(self) -> None:
        """Take the present weights as the base model's, after they were updated."""
        self._arrivals.wait_for_all()
        self._merger.rebase()
        self._store.rebase()

    def mode_state(self) -> JsonDict:
        """What ``/server_info`` shows: the merged adapter's name, and the count and seconds of switches by kind."""
        switcher, merged = self._merger.switcher, self.merged
        if switcher is None:
            return {"merging": False}
        name = None if merged is None else self.lora_refs[merged].lora_name
        return {"merging": True, **switcher.state(), "merged": name}

    # The wrapped modules

    def init_lora_shapes(self, max_lora_rank: int | None = None, target_modules: set[str] | None = None) -> None:
        """SGLang's; where the command line's adapters have weights for the vision tower only, as for any others."""
        super().init_lora_shapes(max_lora_rank, target_modules)
        self.target_modules = self.target_modules or {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        if max_lora_rank is None:
            self.max_lora_rank = max([self.max_lora_rank, *(one.rank for one in self._store.towers())])

    def init_lora_modules(self) -> None:
        """Wrap the language model's modules, and no vision tower's by accident."""
        model = self.base_model
        everything = model.named_modules

        def language_model_only(*args: object, **kwargs: object) -> Iterator[tuple[str, Any]]:
            return ((name, module) for name, module in everything(*args, **kwargs) if not _TOWERS.search(name))

        row = "LoRAManager.init_lora_modules.named_modules"
        with seams.swapped(row, model, "named_modules", language_model_only):
            super().init_lora_modules()
