"""SGLang's LoRA manager with routed adapters: adapters without weights, whose members must all hold slots.

To the rest of the engine a routed adapter's row is a row of its members with weight zero. Before the first decoder
layer, when the input embeddings are there, the router's decision takes the place of those zeros, for all layers of
that forward.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlora_sgl import _sgl
from vlora_sgl.core import AdapterId
from vlora_sgl.errors import AdapterError
from vlora_sgl.heads.store import load_heads, read_description
from vlora_sgl.kernels.atmm import DENSE_MAX_ROWS, Pairs
from vlora_sgl.kernels.atmm.row_routing import is_dense
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.described import DescribedAdapter, DescribedLoRAManager
from vlora_sgl.lora.pool import fits
from vlora_sgl.routed.regroup import Routed, add_gates, device_tiles, host_groups, others, put
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import MODALITIES, RoutedSpec, is_routed, read_routed
from vlora_sgl.server_args import VLoraArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRouted:
    """A routed adapter in service: what it is, the ids of its members, and its place in the tables."""

    spec: RoutedSpec
    members: tuple[str, ...]
    index: int


class RoutingLoRAManager(DescribedLoRAManager):
    """The LoRA manager of this package.

    Attributes:
        routed: by adapter id; present exactly while the routed adapter is loaded.
        router_tables: the routers, or ``None`` where ``--vlora-max-routed 0`` or another LoRA backend than ATMM rules
            them out.
    """

    router_tables: RouterTables | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.routed: dict[str, LoadedRouted] = {}
        self._rows: list[RoutedRows] = []
        self._routed_rows = np.zeros(0, dtype=np.int64)
        super().__init__(*args, **kwargs)

    # Loading

    def bind_pools(self, req_to_token: torch.Tensor, token_slots: int) -> None:
        """Make room for routers, once the KV cache is there and before graphs are captured.

        Args:
            req_to_token: SGLang's table [requests, context] of KV slots.
            token_slots: KV slots, the padding ones included.
        """
        capacity = VLoraArgs.from_environment().max_routed
        if not (self._routed and capacity):
            return
        config = self.base_hf_config
        rows = DENSE_MAX_ROWS if is_dense(DENSE_MAX_ROWS, self.max_loras_per_batch) else 0
        self.router_tables = RouterTables(capacity, config.hidden_size, config.vocab_size, rows, self.device)
        self.router_tables.bind(req_to_token, token_slots)
        self._first_layer().register_forward_pre_hook(self._route_tokens, with_kwargs=True)

    def _first_layer(self) -> Any:
        name = next(iter(self.lora_modules[0]))
        head, marker, _ = name.partition("layers.0.")
        return self.base_model.get_submodule(head + marker.rstrip("."))

    def _load_lora_adapter(self, lora_ref: Any) -> Any:
        if not is_routed(lora_ref.lora_path):
            return super()._load_lora_adapter(lora_ref)
        try:
            self._load_routed(lora_ref)
        except Exception as error:  # whatever it is, the client gets it as a refusal and the engine goes on
            logger.warning("routed adapter %s was refused: %s", lora_ref.lora_name, error)
            return self.create_lora_update_result(success=False, error_message=str(error))
        self.lora_refs[lora_ref.lora_id] = lora_ref
        spec = self.routed[lora_ref.lora_id].spec
        how = "by a network" if spec.router else "by token ids"
        report = f"a routed adapter of {', '.join(spec.members)}, routed {how}"
        logger.info("routed adapter %s: %s", lora_ref.lora_name, report)
        return self.create_lora_update_result(success=True, error_message=report)

    def _load_routed(self, lora_ref: Any) -> None:
        if self.router_tables is None:
            raise AdapterError(
                "no room for routed adapters: they need --lora-backend atmm and --vlora-max-routed above 0, and come "
                "by /load_lora_adapter once the server runs, not by --lora-paths"
            )
        if lora_ref.pinned:
            raise AdapterError("a routed adapter has no slot of its own; pin its members")
        directory = allowed_directory(lora_ref.lora_path, VLoraArgs.from_environment().adapter_root)
        config = self.base_hf_config
        spec = read_routed(directory, lora_ref.lora_name, config.hidden_size, config.vocab_size)
        by_name = {ref.lora_name: uid for uid, ref in self.lora_refs.items()}
        missing = [name for name in spec.members if name not in by_name]
        if missing:
            raise AdapterError(f"members {missing} are not loaded; loaded are {sorted(by_name)}")
        members = tuple(by_name[name] for name in spec.members)
        for name, uid in zip(spec.members, members, strict=True):
            if uid in self.routed:
                raise AdapterError(f"member {name!r} is a routed adapter itself")
            if self.described[uid].description.invocation is not None:
                raise AdapterError(f"member {name!r} starts after a prefix; the router says where a member applies")
        if len(members) + 1 > self.max_loras_per_batch:
            raise AdapterError(
                f"{len(members)} members and the base model need {len(members) + 1} slots at once; "
                f"--max-loras-per-batch is {self.max_loras_per_batch}"
            )
        ranks = [self.loras[uid].config.r for uid in members]
        if self.slot_ranks and not fits(ranks, self.slot_ranks):
            raise AdapterError(f"members of ranks {ranks} do not fit slots of ranks {self.slot_ranks} at once")
        description = read_description(directory)
        heads = load_heads(directory, config.hidden_size, self.device, description)
        index = self.router_tables.put(spec)
        if index is None:
            raise AdapterError(
                f"--vlora-max-routed is {self.router_tables.capacity}, and as many are loaded; unload one first"
            )
        identity = hashlib.blake2b(spec.canonical(), digest_size=32)
        for uid in members:
            identity.update(self.described[uid].digest.encode())
        self.described[lora_ref.lora_id] = DescribedAdapter(description, heads, identity.hexdigest())
        self.routed[lora_ref.lora_id] = LoadedRouted(spec, members, index)

    def _unload_lora_adapter(self, lora_ref: Any) -> Any:
        routed = self.routed.pop(lora_ref.lora_id, None)
        if routed is not None:
            assert self.router_tables is not None
            self.router_tables.remove(routed.index)
            self.described.pop(lora_ref.lora_id)
            del self.lora_refs[lora_ref.lora_id]
            return self.create_lora_update_result(success=True)
        return super()._unload_lora_adapter(lora_ref)

    # What a routed adapter needs of the pool

    def _with_members(self, adapters: Iterable[AdapterId]) -> set[AdapterId]:
        found: set[AdapterId] = set()
        for adapter in adapters:
            routed = self.routed.get(adapter) if adapter is not None else None
            found.update((adapter,) if routed is None else routed.members)
        return found

    def refusal(self, adapter: str) -> str | None:
        """As the base class's; a routed adapter is never merged."""
        if adapter in self.routed:
            return "it is a routed adapter, and differs from token to token"
        return super().refusal(adapter)

    def validate_lora_batch(self, lora_ids: set[AdapterId]) -> bool:
        """As the base class's, the members of routed adapters counted."""
        return super().validate_lora_batch(self._with_members(lora_ids))

    def fetch_new_loras(self, new_loras: set[AdapterId], running_loras: set[AdapterId] | None = None) -> None:
        """As the base class's, the members of routed adapters counted."""
        super().fetch_new_loras(self._with_members(new_loras), self._with_members(running_loras or set()))

    # One batch

    def _slot_pairs(self, adapter: AdapterId, merged: AdapterId) -> Pairs:
        routed = self.routed.get(adapter) if adapter is not None else None
        if routed is None:
            return super()._slot_pairs(adapter, merged)
        return (*((self._slot(uid), 0.0) for uid in routed.members), *super()._slot_pairs(None, merged))

    def _in_graph(self, forward_batch: Any) -> bool:
        return super()._in_graph(forward_batch) and not self.exceeds_graph(forward_batch)

    def exceeds_graph(self, forward_batch: Any) -> bool:
        """Whether a batch has routed adapters but more rows than a captured graph can route."""
        rows = self.router_tables.max_rows if self.router_tables is not None else 0
        return forward_batch.batch_size > rows and self.has_routed(forward_batch.lora_ids)

    def can_use_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """SGLang's verdict; a prefill with routed rows runs eagerly: its tiles depend on what the router says."""
        return super().can_use_prefill_cuda_graph(forward_batch) and not self.has_routed(forward_batch.lora_ids)

    def has_routed(self, adapters: Iterable[AdapterId] | None) -> bool:
        """Whether any of these is a routed adapter."""
        return bool(self.routed) and any(adapter in self.routed for adapter in adapters or ())

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """The base class's, then what the router will have to know of the batch."""
        super().prepare_lora_batch(forward_batch)
        self._rows = []
        batch = self.lora_backend.batch_info
        if self.router_tables is None or batch is None or _sgl.capture_mode.get_is_capture_mode():
            return
        if batch.in_graph:
            if batch.prefill or forward_batch.batch_size > self.router_tables.max_rows:
                return
            indices = [self.routed[a].index if a in self.routed else -1 for a in forward_batch.lora_ids]
            named = {a for a in forward_batch.lora_ids if a in self.routed}
            self.router_tables.refresh(indices, {self.routed[a].index: self._members_of(a) for a in named})
        elif self.has_routed(forward_batch.lora_ids):
            self._rows = self._rows_by_adapter(forward_batch)

    def _members_of(self, routed: str) -> list[tuple[int, float]]:
        return [(self._slot(uid), float(self.loras[uid].scaling)) for uid in self.routed[routed].members]

    def _rows_by_adapter(self, forward_batch: Any) -> list[RoutedRows]:
        lengths = self._rows_of(forward_batch)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if forward_batch.forward_mode.is_extend():
            prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        else:
            prefixes = [int(n) - 1 for n in forward_batch.seq_lens_cpu]
        inputs = forward_batch.mm_inputs or [None] * len(lengths)
        found: list[RoutedRows] = []
        routed: list[np.ndarray] = []
        for name in dict.fromkeys(a for a in forward_batch.lora_ids if a in self.routed):
            # rows, modality, first, request, prefix of ``RoutedRows``
            columns: list[list[np.ndarray]] = [[], [], [], [], []]
            at = 0
            for i, adapter in enumerate(forward_batch.lora_ids):
                if adapter != name:
                    continue
                n, prefix = lengths[i], prefixes[i]
                rows = np.arange(starts[i], starts[i] + n)
                constant = (np.full(n, value) for value in (at, i, prefix))
                for column, values in zip(
                    columns, (rows, modalities_of(inputs[i], prefix, n), *constant), strict=True
                ):
                    column.append(values)
                at += n
            routed.append(np.concatenate(columns[0]))
            on_device = put([np.concatenate(column, dtype=np.int64) for column in columns], self.device)
            on_device[3] = forward_batch.req_pool_indices[on_device[3]]
            found.append(RoutedRows(self.routed[name].index, *on_device))
        self._routed_rows = np.concatenate(routed)
        return found

    def _route_tokens(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the first decoder layer: ``layer(positions, hidden_states, forward_batch, residual)``."""
        batch, tables = self.lora_backend.batch_info, self.router_tables
        if batch is None or tables is None:
            return
        _, x, forward_batch, *_ = (*args, *kwargs.values())
        if batch.in_graph:
            if not batch.prefill and x.shape[0] <= tables.max_rows:
                tables.route_decode(
                    batch.routing.gates, x, forward_batch.input_ids, forward_batch.req_pool_indices,
                    forward_batch.seq_lens, forward_batch.out_cache_loc,
                )  # fmt: skip
            return
        if not self._rows:
            return
        always = super()._slot_pairs(None, self.plan.merged_adapter if self.switcher is not None else None)
        by_index = {routed.index: routed for routed in self.routed.values()}
        weights_of = tables.weights_of if self.device.type == "cpu" else tables.route_prefill
        parts = []
        for part in self._rows:
            routed = by_index[part.index]
            weights = weights_of(part, x, forward_batch.input_ids, forward_batch.out_cache_loc)
            slots = [self._slot(uid) for uid in routed.members]
            parts.append(Routed(part.rows, weights, slots, routed.spec.top_k, always))
        routing = batch.routing
        if self.device.type == "cpu":
            routing.groups = host_groups(parts, others(routing.groups, routing.rows, self._routed_rows))
        elif routing.gates is not None:
            for rows in parts:
                add_gates(routing, rows)
        else:
            batch.routing = device_tiles(routing, parts, others(routing.groups, routing.rows, self._routed_rows))


def modalities_of(inputs: Any, start: int, length: int) -> np.ndarray:
    """[length] int64 into ``MODALITIES``: what the tokens [start, start + length) of a prompt are.

    Args:
        inputs: SGLang's ``MultimodalInputs`` of the request, or ``None``.
    """
    kinds = np.zeros(length, dtype=np.int64)
    for item in inputs.mm_items if inputs is not None else ():
        kind = MODALITIES.index("video" if item.modality.name == "VIDEO" else "image")
        for first, last in item.offsets or ():
            kinds[max(first - start, 0) : max(last + 1 - start, 0)] = kind
    return kinds
