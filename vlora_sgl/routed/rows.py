"""Rows of routed adapters: what their routers must know of a batch, and the routing once they have spoken.

To the rest of the engine a routed adapter's row is a row of its members with weight zero. Before the first decoder
layer, when the input embeddings are there, the router's decision takes the place of those zeros, for all layers of
that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch

from vlora_sgl._sgl_types import ForwardBatch, ModelRunner, MultimodalInputs
from vlora_sgl.kernels.atmm import Pairs, Routing
from vlora_sgl.routed.regroup import Routed, add_gates, device_tiles, host_groups, others, put
from vlora_sgl.routed.router_tables import RoutedRows, RouterTables
from vlora_sgl.routed.spec import MODALITIES, RoutedSpec
from vlora_sgl.seams import Place, Places


@dataclass(frozen=True)
class LoadedRouted:
    """A routed adapter in service: what it is, the ids of its members, and its place in the tables."""

    spec: RoutedSpec
    members: tuple[str, ...]
    index: int


class TokenRouting:
    """Routes the rows of routed adapters, token by token.

    Args:
        tables: the routers.
        loaded: routed adapters by id.
        slot_of: pool slot of an adapter, by id.
        scaling_of: LoRA scaling of an adapter, by id.
        backend: keeps the routing of the batch that runs next, ``batch_info``; ``None`` where no row has adapters.
    """

    def __init__(
        self,
        tables: RouterTables,
        loaded: Mapping[str, LoadedRouted],
        slot_of: Callable[[str], int],
        scaling_of: Callable[[str], float],
        backend: Any,
    ) -> None:
        self._tables, self._loaded, self._backend = tables, loaded, backend
        self._slot_of, self._scaling_of = slot_of, scaling_of
        self._parts: list[tuple[LoadedRouted, RoutedRows]] = []
        self._taken = np.zeros(0, dtype=np.int64)  # the rows of all parts
        self._always: Pairs = ()

    def exceeds_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a batch has routed adapters but more rows than a captured graph can route."""
        many = forward_batch.batch_size > self._tables.max_rows
        return many and any(adapter in self._loaded for adapter in forward_batch.lora_ids or ())

    def prepare(self, forward_batch: ForwardBatch, always: Pairs) -> None:
        """Note what the routers will have to know of the batch that runs next.

        Args:
            forward_batch: SGLang's ``ForwardBatch``; the backend has its routing.
            always: the pairs that every row applies (a merged adapter, taken out).
        """
        self._parts, self._always = [], always
        batch, adapters = self._backend.batch_info, forward_batch.lora_ids
        if batch is None:
            return
        named = [adapter for adapter in dict.fromkeys(adapters) if adapter is not None and adapter in self._loaded]
        if not batch.in_graph:
            self._parts = self._parts_of(named, forward_batch)
        elif not batch.prefill and forward_batch.batch_size <= self._tables.max_rows:
            indices = [self._loaded[a].index if a is not None and a in self._loaded else -1 for a in adapters]
            members = {
                self._loaded[name].index: [
                    (self._slot_of(uid), self._scaling_of(uid)) for uid in self._loaded[name].members
                ]
                for name in named
            }
            self._tables.refresh(indices, members)

    def _parts_of(self, named: Sequence[str], forward_batch: ForwardBatch) -> list[tuple[LoadedRouted, RoutedRows]]:
        lengths = row_lengths(forward_batch)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if forward_batch.forward_mode.is_extend():
            prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        else:
            prefixes = [int(n) - 1 for n in forward_batch.seq_lens_cpu]
        inputs = forward_batch.mm_inputs or [None] * len(lengths)
        parts = []
        taken = []
        for name in named:
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
            taken += columns[0]
            on_device = put([np.concatenate(column, dtype=np.int64) for column in columns], self._tables.device)
            on_device[3] = forward_batch.req_pool_indices[on_device[3]]
            routed = self._loaded[name]
            parts.append((routed, RoutedRows(routed.index, *on_device)))
        self._taken = np.concatenate([*taken, self._taken[:0]])
        return parts

    def route(self, x: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Before the first decoder layer, decide by the input embeddings [T, hidden] which members apply where."""
        batch, tables = self._backend.batch_info, self._tables
        if batch is None:
            return
        if not batch.in_graph:
            if self._parts:
                batch.routing = self._routed(batch.routing, x, forward_batch)
        elif not batch.prefill and x.shape[0] <= tables.max_rows:
            tables.route_decode(
                batch.routing.gates, x, forward_batch.input_ids, forward_batch.req_pool_indices,
                forward_batch.seq_lens, forward_batch.out_cache_loc,
            )  # fmt: skip

    def _routed(self, routing: Routing, x: torch.Tensor, forward_batch: ForwardBatch) -> Routing:
        """The batch's routing with its routed rows, given the input embeddings x [M, hidden]."""
        on_host = self._tables.device.type == "cpu"
        weights_of = self._tables.weights_of if on_host else self._tables.route_prefill
        parts = []
        for routed, rows in self._parts:
            weights = weights_of(rows, x, forward_batch.input_ids, forward_batch.out_cache_loc)
            slots = [self._slot_of(uid) for uid in routed.members]
            parts.append(Routed(rows.rows, weights, slots, routed.spec.top_k, self._always))
        if on_host:
            routing.groups = host_groups(parts, others(routing.groups, routing.rows, self._taken))
        elif routing.gates is not None:
            for part in parts:
                add_gates(routing, part)
        else:
            return device_tiles(routing, parts, others(routing.groups, routing.rows, self._taken))
        return routing


def row_lengths(forward_batch: ForwardBatch) -> list[int]:
    """Tokens of every row of SGLang's ``ForwardBatch``."""
    if forward_batch.forward_mode.is_extend():
        return [int(n) for n in forward_batch.extend_seq_lens_cpu]
    return [1] * forward_batch.batch_size


def modalities_of(inputs: MultimodalInputs | None, start: int, length: int) -> np.ndarray:
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


def token_routing(runner: ModelRunner) -> Places:
    """What stands in the place of the first decoder layer's ``forward``."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None or manager.token_routing is None:
        return "no routed adapter can be loaded (--vlora-max-routed 0, or not --lora-backend atmm)"
    layer, routing = manager.first_layer(), manager.token_routing
    own = layer.forward
    names = list(signature(own).parameters)
    places = [(name, names.index(name)) for name in ("hidden_states", "forward_batch")]  # they differ by model

    def forward(*args: object, **kwargs: object) -> Any:
        x, forward_batch = (args[at] if at < len(args) else kwargs[name] for name, at in places)
        routing.route(x, forward_batch)
        return own(*args, **kwargs)

    return [Place(layer, "forward", forward)]
