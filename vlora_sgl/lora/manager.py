"""SGLang's LoRA manager with modes: it carries out the plan of each batch just before the batch runs.

The scheduler calls ``set_plan``; SGLang then builds the forward batch on the forward stream and calls
``fetch_new_loras`` and ``prepare_lora_batch`` from there, which makes the latter the place to switch weights.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl.core import AdapterId, BatchPlan, InferenceMode, row_pairs
from vlora_sgl.errors import AdapterError, ConfigError, UnknownAdapterError
from vlora_sgl.kernels.atmm import on_kernels
from vlora_sgl.kernels.merge import MergeTable, MergeTarget
from vlora_sgl.lora.adapter import load_adapter, pin_adapter
from vlora_sgl.lora.layers import pair_activations, wrap_layer
from vlora_sgl.lora.mode_switcher import MergeOperand, ModeSwitcher, base_copies
from vlora_sgl.lora.packed import PackedPool
from vlora_sgl.lora.pool import SizedPool, fits
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)

ROUTED_BACKEND = "atmm"

Run = tuple[tuple[tuple[int, float], ...], int]
"""``(pairs, n_rows)``: the next ``n_rows`` rows apply these ``(slot, weight)`` pairs (see ``core.Segment``)."""

# Parts of a multimodal model that are not its language model. SGLang wraps any module below a ``layers.N`` whose last
# name matches, so CLIP and SigLIP towers would get language-shaped pool buffers.
_TOWERS = re.compile(r"(^|\.)(visual|vision\w*|image\w*|audio\w*|speech\w*|\w+_tower|multi_modal_projector)(\.|$)")


class VLoraManager(_sgl.LoRAManager):
    """One per rank. Slots are SGLang's pool buffers; the base model keeps one, so that padding rows have a target.

    Attributes:
        plan: the plan of the batch that runs next.
        switcher: the mode switch, or ``None`` when nothing may or can be merged.
        incoming: adapters that were read but not yet taken over, by id; empty between loads.
        prefill_graphs: the runner of captured prefills, if there is one.
    """

    plan = BatchPlan(requests=(), mode=InferenceMode.UNMERGED)
    switcher: ModeSwitcher | None = None
    prefill_graphs: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._routed = kwargs.get("lora_backend") == ROUTED_BACKEND
        self._refused: dict[str, str | None] = {}
        self._groups: dict[str, frozenset[str]] = {}
        self.incoming: dict[str, Any] = {}
        self._forward_stream: Any = None
        vlora = VLoraArgs.from_environment()
        self.slot_ranks = vlora.slot_ranks
        super().__init__(*args, **kwargs)
        if self.max_loras_per_batch < 2:
            raise ConfigError(
                f"--max-loras-per-batch={self.max_loras_per_batch} leaves no slot for an adapter: one is the base's"
            )
        # Forcing "unmerged" for debugging, or the baseline policy: then the copy of the base weights would be memory
        # for nothing.
        if vlora.mode != InferenceMode.UNMERGED and vlora.policy != InferenceMode.UNMERGED:
            self._init_switcher(vlora.merge_copy)

    @property
    def merged(self) -> AdapterId:
        """The adapter merged into the weights now, ``None`` while they are the base model's."""
        return None if self.switcher is None else self.switcher.merged

    @property
    def can_merge(self) -> bool:
        """Whether any adapter may be merged."""
        return self.switcher is not None

    # The pool

    def init_memory_pool(self) -> None:
        """Slots as large as the largest rank, or of the ranks that ``--vlora-slot-ranks`` names.

        Raises:
            ConfigError: such slots do not go with another setting.
        """
        options = {
            "base_hf_config": self.base_hf_config,
            "max_loras_per_batch": self.max_loras_per_batch,
            "dtype": self.dtype,
            "tp_size": self.tp_size,
            "tp_rank": self.tp_rank,
            "attn_tp_size": self.attn_tp_size,
            "max_lora_rank": self.max_lora_rank,
            "target_modules": self.target_modules,
            "base_model": self.base_model,
            "eviction_policy": self.eviction_policy,
            "lora_added_tokens_size": self.lora_added_tokens_size,
            "experts_shared_outer_loras": self.experts_shared_outer_loras,
            "strict_loading": self.lora_strict_loading,
            "enable_lora_overlap_loading": self.enable_lora_overlap_loading,
        }
        if self.slot_ranks:
            self._check_slot_ranks()
            self.memory_pool = SizedPool(self.slot_ranks, **options)
            self.lora_backend.places = self.memory_pool.places
        else:
            self.memory_pool = PackedPool(**options)
        self.fetch_new_loras({None})
        for adapter in self.loras.values():
            self.pack(adapter)

    def _check_slot_ranks(self) -> None:
        asked = (self.max_loras_per_batch, self.max_lora_rank)
        if asked != (len(self.slot_ranks) + 1, max(self.slot_ranks)):
            raise ConfigError(
                f"--vlora-slot-ranks {' '.join(map(str, self.slot_ranks))} means --max-loras-per-batch "
                f"{len(self.slot_ranks) + 1} and --max-lora-rank {max(self.slot_ranks)}, got {asked[0]} and {asked[1]}"
            )
        if not self._routed:
            raise ConfigError(f"--vlora-slot-ranks needs --lora-backend {ROUTED_BACKEND}")
        # SGLang would load on a side stream while a step reads the slots; and clear what lies past an adapter's rank.
        if self.enable_lora_overlap_loading or _sgl.dense_lora_b:
            raise ConfigError(
                "--vlora-slot-ranks goes neither with --enable-lora-overlap-loading nor with "
                "SGLANG_EXPERIMENTAL_LORA_OPTI"
            )

    def pack(self, adapter: Any) -> None:
        """Lay an adapter out in host memory as loads to a slot want it; those of the command line once slots exist."""
        pool = getattr(self, "memory_pool", None)
        if pool is None:
            return
        if pool.packs:
            pool.pack(adapter, self.lora_modules)
        if torch.cuda.is_available():
            adapter.pin_weights_in_cpu()  # of embeddings and experts: what is packed is pinned

    def pool_state(self) -> dict[str, Any]:
        """What the device slots are: the rank of each, and the bytes of all on this rank."""
        pool = self.memory_pool
        sized = isinstance(pool, SizedPool)
        tensors = [t for buffers in (pool.A_buffer, pool.B_buffer) for layers in buffers.values() for t in layers]
        return {
            "ranks": list(pool.capacities) if sized else [pool.max_lora_rank] * pool.max_loras_per_batch,
            "bytes": sum(t.untyped_storage().nbytes() for t in tensors),
        }

    # What can merge

    def _init_switcher(self, merge_copy: str) -> None:
        self._unmergeable: dict[str, str] = dict.fromkeys(_sgl.EMBEDDING_NAMES, "embeddings are shared with the input")
        modules: list[tuple[str, str, Any]] = []
        for layer in self.lora_modules:
            for name, module in layer.items():
                group = self._group_of(name)
                reason = self._why_not_mergeable(module)
                if reason is None:
                    modules.append((group, name, module))
                else:
                    self._unmergeable.setdefault(group, f"{name}: {reason}")
        modules = [entry for entry in modules if entry[0] not in self._unmergeable]
        for group, reason in sorted(self._unmergeable.items()):
            if group in self.target_modules:
                logger.warning("%s is never merged into the weights (%s)", group, reason)
        if not modules:
            logger.warning("no module can be merged: every batch runs unmerged")
            return
        modules.sort(key=lambda entry: entry[0])
        weights = [module.base_layer.weight.data for _, _, module in modules]
        copies = base_copies(weights, merge_copy)
        targets = []
        for (group, name, module), weight, base_weights in zip(modules, weights, copies, strict=True):
            lora_a = module.A_buffer_qkv if hasattr(module, "A_buffer_qkv") else module.A_buffer
            lora_b = module.B_buffer_qkv if hasattr(module, "B_buffer_qkv") else module.B_buffer
            bounds = module.output_offset_cpu.tolist()
            for index, (start, end) in enumerate(pairwise(bounds)):
                rows = slice(start, end)
                targets.append(
                    MergeTarget(
                        f"{name}[{index}]", group, weight[rows], base_weights[rows], lora_a, lora_b[:, rows], index
                    )
                )
        table = MergeTable(targets)
        table.warm_up(self.max_lora_rank)
        self.switcher = ModeSwitcher(table)
        size = sum(w.numel() * w.element_size() for w in weights)
        logger.info(
            "copy of the base weights of %d mergeable weights: %.2f GB on %s", len(weights), size / 2**30, merge_copy
        )

    @staticmethod
    def _why_not_mergeable(module: Any) -> str | None:
        layer: Any = getattr(module, "base_layer", None)
        weight: Any = getattr(layer, "weight", None)
        if not isinstance(module, (_sgl.ColumnParallelLinearWithLoRA, _sgl.RowParallelLinearWithLoRA)):
            return f"a {type(module).__name__} has no single weight matrix"
        if not isinstance(layer.quant_method, _sgl.UnquantizedLinearMethod):
            return f"quantised with {type(layer.quant_method).__name__}"
        if weight is None or weight.ndim != 2 or not weight.is_contiguous() or not weight.is_floating_point():
            return "its weight is not stored as a plain matrix"
        pool = module.A_buffer_qkv if hasattr(module, "A_buffer_qkv") else module.A_buffer
        if weight.dtype != pool.dtype:
            return f"its weight is {weight.dtype}, adapters are {pool.dtype}"
        if module.output_offset_cpu[-1] != weight.shape[0]:
            return "adapters cover part of its rows only"
        return None

    def _group_of(self, name: str) -> str:
        return str(_sgl.get_target_module_name(name, self.target_modules))

    def _groups_of_adapter(self, adapter: str) -> frozenset[str]:
        if adapter not in self._groups:
            self._groups[adapter] = self._find_groups(adapter)
        return self._groups[adapter]

    def _find_groups(self, adapter: str) -> frozenset[str]:
        lora = self.loras[adapter]
        names = [name for layer in lora.layers for name in layer.weights] + list(lora.embedding_layers or ())
        found = set()
        for name in names:
            # The pool skips (with a warning) weights of modules it has no buffers for.
            with contextlib.suppress(ValueError):
                found.add(self._group_of(name))
        return frozenset(found)

    def refusal(self, adapter: str) -> str | None:
        """Why this adapter cannot be merged into the weights, or ``None`` if it can.

        Raises:
            UnknownAdapterError: it is not loaded.
        """
        if adapter not in self.loras:
            raise UnknownAdapterError(adapter, self.loras)
        if adapter not in self._refused:
            self._refused[adapter] = self._find_refusal(adapter)
            if self._refused[adapter] is not None:
                logger.warning("adapter %s is never merged: %s", adapter, self._refused[adapter])
        return self._refused[adapter]

    def _find_refusal(self, adapter: str) -> str | None:
        if self.switcher is None:
            return "merging is off"
        outside = self._groups_of_adapter(adapter) - self.switcher.table.groups
        if outside:
            group = min(outside)
            return f"it has weights for {group} ({self._unmergeable.get(group, 'not a wrapped module')})"
        return None

    # One batch

    def refuses(self, merged: str, adapters: Collection[AdapterId]) -> str | None:
        """Why ``merged`` cannot be merged under a batch of these adapters; ``None`` if it can.

        Args:
            merged: the adapter to merge.
            adapters: those of the rows, ``None`` among them if rows, or parts of them, are the base model's.
        """
        reason = self.refusal(merged)
        if reason is not None:
            return reason
        if not self.validate_lora_batch({merged, *adapters}):
            return "pinned adapters hold the slots that it needs"
        if not self._routed and any(adapter != merged for adapter in adapters):
            return f"only {ROUTED_BACKEND} can take it out again row by row"
        return None

    def set_plan(self, plan: BatchPlan) -> None:
        """Take the plan of the batch that runs next."""
        self.plan = plan

    def validate_lora_batch(self, lora_ids: set[AdapterId]) -> bool:
        """Whether these adapters fit beside the base model's permanent slot.

        The merged adapter counts only if it is among them: one that is not can be unmerged, and must not keep
        waiting requests out for ever.
        """
        if not super().validate_lora_batch({*lora_ids, None}):
            return False
        if not self.slot_ranks:
            return True
        pinned = {uid for uid, ref in self.lora_refs.items() if ref.pinned}
        return fits((self.loras[uid].config.r for uid in {*lora_ids, *pinned} - {None}), self.slot_ranks)

    def fetch_new_loras(self, new_loras: set[AdapterId], running_loras: set[AdapterId] | None = None) -> None:
        """Load adapters into slots; the base model and the adapter to be merged are always among them.

        The merged adapter needs its slot for as long as rows of others must take it out again.
        """
        wanted = {*new_loras, None}
        if self.plan.merged_adapter is not None:
            wanted.add(self.plan.merged_adapter)
        super().fetch_new_loras(wanted, running_loras or set())

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Switch weights as planned, and tell the backend which rows apply which slots.

        A batch whose rows all run on the weights as they are (all of the merged adapter, or all base on pristine
        weights) leaves the backend without metadata: then no LoRA kernel runs.

        Raises:
            UnknownAdapterError: a row's adapter holds no slot.
        """
        variant = _sgl.capture_mode.get_capture_lora_variant() if _sgl.capture_mode.get_is_capture_mode() else None
        variant = variant or (self.prefill_graphs and self.prefill_graphs.variant)
        if variant is None and self.device.type == "cuda":
            self._forward_stream = torch.cuda.current_stream()
        if variant == "lora":
            # Captured with metadata of base rows; replays refresh it in place.
            self._route(forward_batch, [((), rows) for rows in self._rows_of(forward_batch)])
            return
        if variant == "nolora":
            self.lora_backend.reset_batch_state()
            return
        if not self._routed and any(adapter != self.plan.merged_adapter for adapter in forward_batch.lora_ids):
            # Rows before an adapter's activation are base rows that the plan did not count; only ATMM can serve those
            # on merged weights.
            self.plan = BatchPlan(requests=self.plan.requests, mode=InferenceMode.UNMERGED)
        merged = self._switch()
        pairs = [self._slot_pairs(adapter, merged) for adapter in forward_batch.lora_ids]
        if not any(pairs):
            self.lora_backend.reset_batch_state()
        else:
            self._route(forward_batch, list(zip(pairs, self._rows_of(forward_batch), strict=True)))

    def _switch(self) -> AdapterId:
        merged = self.plan.merged_adapter
        if self.switcher is None:
            return None
        if merged is None:
            self.switcher.restore()
        elif self.switcher.merged != merged:
            lora = self.loras[merged]
            groups = self._groups_of_adapter(merged)
            place = self.lora_backend.places[self._slot(merged)] if self._routed else self._slot(merged)
            self.switcher.merge(MergeOperand(merged, place, lora.config.r, float(lora.scaling), groups))
        return merged

    def _slot(self, adapter: AdapterId) -> int:
        slots = self.memory_pool.uid_to_buffer_id
        if adapter not in slots:
            # SGLang would leave index 0 here and answer with whatever adapter holds that slot.
            raise UnknownAdapterError(str(adapter), map(str, slots))
        return int(slots[adapter])

    def _slot_pairs(self, adapter: AdapterId, merged: AdapterId) -> tuple[tuple[int, float], ...]:
        return tuple((self._slot(uid), weight) for uid, weight in row_pairs(adapter, merged))

    @staticmethod
    def _rows_of(forward_batch: Any) -> list[int]:
        if forward_batch.forward_mode.is_extend():
            return [int(n) for n in forward_batch.extend_seq_lens_cpu]
        return [1] * forward_batch.batch_size

    def _route(self, forward_batch: Any, rows: Sequence[Run]) -> None:
        if not self._routed:
            super().prepare_lora_batch(forward_batch)
            return
        runs = [(pairs, sum(n for _, n in same)) for pairs, same in groupby(rows, key=lambda run: run[0])]
        ranks, scalings = [0] * self.max_loras_per_batch, [0.0] * self.max_loras_per_batch
        for slot in {slot for pairs, _ in runs for slot, _ in pairs}:
            lora = self.loras[self.memory_pool.buffer_id_to_uid[slot]]
            ranks[slot], scalings[slot] = lora.config.r, float(lora.scaling)
        self.lora_backend.prepare_lora_batch(
            forward_batch=forward_batch,
            runs=runs,
            lora_ranks=ranks,
            scalings=scalings,
            use_cuda_graph=self._in_graph(forward_batch),
            prefill_tokens=self.prefill_graphs and self.prefill_graphs.tokens_of(forward_batch),
        )

    def _in_graph(self, forward_batch: Any) -> bool:
        """Whether a captured graph will run this batch."""
        fits = forward_batch.batch_size <= getattr(self, "max_bs_in_cuda_graph", 0)
        return bool(fits and forward_batch.forward_mode.is_cuda_graph())

    # Between batches

    def unmerge(self) -> None:
        """Bring the base weights back before the current stream's next work, from any thread of control.

        The copy runs on the forward stream, behind a step that may still be in flight, and the current stream waits
        for both. Call it before adapters are unloaded and before weights are read, replaced, saved or freed.
        """
        with self._on_forward_stream():
            if self.switcher is not None:
                self.switcher.restore()
        self.plan = BatchPlan(requests=(), mode=InferenceMode.UNMERGED)

    def rebase(self) -> None:
        """Take the present weights as the base model's, after they were updated."""
        if self.switcher is not None:
            self.switcher.rebase()

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        if self._forward_stream is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._forward_stream.wait_stream(caller)
        with torch.cuda.stream(self._forward_stream):
            yield
        caller.wait_stream(self._forward_stream)

    def validate_new_adapter(self, lora_config: Any, lora_ref: Any) -> None:
        """Whether the pool can hold an adapter. Names are the front's: a replacement has its predecessor's.

        Raises:
            AdapterError: its rank or its kinds of modules have no room in the pool, or there are too many pins.
        """
        pool = getattr(self, "memory_pool", None)
        if pool is not None and lora_config.r > pool.max_lora_rank:
            raise AdapterError(
                f"rank {lora_config.r} does not fit the slots of rank {pool.max_lora_rank} (--max-lora-rank)"
            )
        if pool is not None and not pool.can_support(lora_config):
            raise AdapterError(
                f"adapts {', '.join(sorted(lora_config.target_modules))}; the slots hold "
                f"{', '.join(sorted(pool.target_modules))} (--lora-target-modules)"
            )
        if lora_ref.pinned:
            self.check_pins(lora_config.r)

    def check_pins(self, rank: int) -> None:
        """Whether one more adapter may be pinned: the base model keeps a slot, and one must stay for everybody else.

        Args:
            rank: of the adapter.

        Raises:
            AdapterError: it may not.
        """
        limit = self.max_loras_per_batch - 2
        if self.num_pinned_loras >= limit:
            raise AdapterError(
                f"{self.num_pinned_loras} adapters are pinned; --max-loras-per-batch={self.max_loras_per_batch} "
                f"allows {limit}, so that a slot stays for the others"
            )
        pins = [self.loras[uid].config.r for uid, ref in self.lora_refs.items() if ref.pinned]
        if self.slot_ranks and not fits([*pins, rank, max(self.slot_ranks)], self.slot_ranks):
            raise AdapterError(
                f"with rank {rank} pinned beside {pins}, no slot of rank {max(self.slot_ranks)} stays for the others "
                "(--vlora-slot-ranks)"
            )

    def adapter_state(self) -> dict[str, dict[str, Any]]:
        """Of every adapter in memory, by id: its slot (``None``: host memory only), rank, bytes, kinds of modules."""
        return {
            uid: {
                "slot": self.memory_pool.uid_to_buffer_id.get(uid),
                "rank": adapter.config.r,
                "host_bytes": adapter.report.nbytes,
                "digest": adapter.report.digest,
            }
            for uid, adapter in self.loras.items()
        }

    def _load_lora_adapter(self, lora_ref: Any) -> Any:
        return pin_adapter(self, lora_ref) if lora_ref.lora_id in self.loras else load_adapter(self, lora_ref)

    def load_lora_weights(self, lora_ref: Any) -> None:
        """Take over the adapter that ``load_adapter`` has read and checked."""
        self.loras[lora_ref.lora_id] = self.incoming.pop(lora_ref.lora_id)

    def _unload_lora_adapter(self, lora_ref: Any) -> Any:
        # The pool clears the slot from the scheduler's stream, while a step in flight may still subtract it.
        with self._on_forward_stream():
            if self.switcher is not None and self.switcher.merged == lora_ref.lora_id:
                self.switcher.restore()
        if self.plan.merged_adapter == lora_ref.lora_id:
            self.plan = BatchPlan(requests=(), mode=InferenceMode.UNMERGED)
        self._refused.pop(lora_ref.lora_id, None)
        self._groups.pop(lora_ref.lora_id, None)
        return super()._unload_lora_adapter(lora_ref)

    def set_lora_module(self, module_name: str, module: Any) -> Any:
        """Wrap one module; for ATMM with the layers that compute base and adapters together."""
        if not self._routed:
            return super().set_lora_module(module_name, module)
        wrapped = wrap_layer(module, self.lora_backend)
        _sgl.replace_submodule(self.base_model, module_name, wrapped)
        return wrapped

    def init_lora_modules(self) -> None:
        """Wrap the language model's modules, and no vision tower's by accident."""
        model = self.base_model
        everything = model.named_modules

        def language_model_only(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return ((name, module) for name, module in everything(*args, **kwargs) if not _TOWERS.search(name))

        model.named_modules = language_model_only
        try:
            super().init_lora_modules()
        finally:
            del model.named_modules
        if self._routed and on_kernels(self.device):
            logger.info("%d activations add the adapters' part of gate_up in a prefill", pair_activations(model))

    def mode_state(self) -> dict[str, Any]:
        """What ``/server_info`` shows: the merged adapter's name, and the count and seconds of switches by kind."""
        if self.switcher is None:
            return {"merging": False}
        state = self.switcher.state()
        if state["merged"] is not None:
            state["merged"] = self.lora_refs[state["merged"]].lora_name
        return {"merging": True, **state}
