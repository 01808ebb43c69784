"""Rows of routed adapters: what their routers must know of a batch, and the routing once they have spoken.

To the rest of the engine a routed adapter's row is a row of its members with weight zero. Before the first decoder
layer, when the input embeddings are there, the router's decision takes the place of those zeros, for all layers of
that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from itertools import combinations
from typing import Any

import numpy as np
import torch

from vlora_sgl._sgl_types import ForwardBatch, ModelRunner, MultimodalInputs
from vlora_sgl.kernels.atmm import Pairs, Routing
from vlora_sgl.routed.regroup import (
    Dispatch,
    FixedTables,
    Routed,
    add_gates,
    device_tiles,
    fill_tiles,
    host_groups,
    others,
    put,
)
from vlora_sgl.routed.router_tables import BASE, RoutedRows, RouterTables
from vlora_sgl.routed.spec import MODALITIES, RoutedSpec
from vlora_sgl.routed.token_router import MAX_MEMBERS
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
        self._named: list[str] = []  # the routed adapters of the batch
        self._rows: RoutedRows | None = None
        self._taken = np.zeros(0, dtype=np.int64)  # the rows of all of them
        self._always: Pairs = ()
        self._fixed: FixedTables | None = None  # what decode graphs read of a dispatch

    def reserve(self, rows: int, pairs: int) -> None:
        """Have room for the rows of decode graphs, whose tiles have ``pairs`` slots; before they are captured."""
        self._tables.reserve(rows)
        first = Dispatch.room(self._tables.capacity, self._backend.most_targets, pairs)
        self._fixed = FixedTables(first, self._tables.device)

    def rows_of(self, forward_batch: ForwardBatch) -> np.ndarray:
        """The numbers of a batch's routed rows."""
        mine = [adapter in self._loaded for adapter in forward_batch.lora_ids or ()]
        return np.flatnonzero(np.repeat(mine, row_lengths(forward_batch))) if any(mine) else np.zeros(0, np.int64)

    def fits_tiles(self, forward_batch: ForwardBatch, pairs: int) -> bool:
        """Whether a graph's tables hold the tiles of a batch's routed rows, with ``pairs`` slots for a row's members.

        They do where every row applies its members in one pass, and these make no more sets than there are slots.
        """
        asked = dict.fromkeys(forward_batch.lora_ids or ())
        named = [self._loaded[one] for one in asked if one is not None and one in self._loaded]
        parts = [(one.members, Routed(0, tuple(range(len(one.members))), one.spec.top_k)) for one in named]
        sets = {frozenset(some) for members, part in parts for some in combinations(members, part.width)}
        if any(part.passes > 1 or part.width > pairs for _, part in parts):
            return False
        return len(sets) + 1 <= self._backend.most_targets

    def prepare(self, forward_batch: ForwardBatch, always: Pairs) -> None:
        """Note what the routers will have to know of the batch that runs next.

        Args:
            forward_batch: SGLang's ``ForwardBatch``; the backend has its routing.
            always: the pairs that every row applies (a merged adapter, taken out).
        """
        self._named, self._rows, self._always = [], None, always
        batch, adapters = self._backend.batch_info, forward_batch.lora_ids
        if batch is None:
            return
        self._named = [one for one in dict.fromkeys(adapters) if one is not None and one in self._loaded]
        if batch.prefill or not batch.in_graph:
            self._rows = self._rows_of(forward_batch) if self._named else None
        elif self._tables.max_rows:
            indices = [self._loaded[a].index if a is not None and a in self._loaded else -1 for a in adapters]
            members = {
                self._loaded[name].index: [
                    (self._slot_of(uid), self._scaling_of(uid)) for uid in self._loaded[name].members
                ]
                for name in self._named
            }
            self._tables.refresh(indices, members)
            if self._named and batch.routing.gates is None and self._fixed is not None:
                self._fixed.write(self._dispatched(batch.routing))

    def no_rows(self) -> None:
        """The batch that runs next has no routed rows, and the decode graphs' tables say so."""
        self._named, self._rows = [], None

    def _rows_of(self, forward_batch: ForwardBatch) -> RoutedRows:
        lengths = row_lengths(forward_batch)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if forward_batch.forward_mode.is_extend():
            prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        else:
            prefixes = [int(n) - 1 for n in forward_batch.seq_lens_cpu]
        inputs = forward_batch.mm_inputs or [None] * len(lengths)
        of_sequence = [
            self._loaded[one].index if one is not None and one in self._loaded else BASE
            for one in forward_batch.lora_ids
        ]
        modality = np.zeros(starts[-1], dtype=np.int32)
        for start, n, before, image, index in zip(starts, lengths, prefixes, inputs, of_sequence, strict=False):
            if index != BASE:
                modality[start : start + n] = modalities_of(image, before, n)
        columns = (
            np.repeat(column, lengths) for column in (of_sequence, starts[:-1], np.arange(len(lengths)), prefixes)
        )
        routed, first, request, prefix = (column.astype(np.int32) for column in columns)
        self._taken = np.flatnonzero(routed != BASE)
        used = [self._loaded[name] for name in self._named]
        learned = np.asarray([one.index for one in used if one.spec.router is not None], dtype=np.int32)
        on_device = put([routed, modality, first, request, prefix, learned], self._tables.device)
        whose, kinds, begins, requests, offsets, networks = on_device
        requests = forward_batch.req_pool_indices[requests].int()
        return RoutedRows(whose, kinds, begins, requests, offsets, networks, tuple(one.index for one in used))

    def route(self, x: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Before the first decoder layer, decide by the input embeddings [T, hidden] which members apply where."""
        batch, tables = self._backend.batch_info, self._tables
        if batch is None:
            return
        if not batch.in_graph:
            if self._rows is not None:
                batch.routing = self._routed(batch.routing, self._rows, x, forward_batch)
        elif not batch.prefill and tables.max_rows:
            tables.route_decode(
                batch.routing.gates, x, forward_batch.input_ids, forward_batch.req_pool_indices,
                forward_batch.seq_lens, forward_batch.out_cache_loc,
            )  # fmt: skip
            if batch.routing.gates is None:
                assert self._fixed is not None
                (*shared, words), rows = self._fixed.tensors, x.shape[0]
                fill_tiles(batch.routing, batch.counts, tables.weights[:rows], tables.row_routed[:rows], shared, words)

    @property
    def is_ahead(self) -> bool:
        """Whether the prefill that runs next has routed rows, which ``route_ahead`` is to route."""
        batch = self._backend.batch_info
        return batch is not None and batch.in_graph and self._rows is not None

    def route_ahead(self, x: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Before a prefill's graph is replayed, put its routed rows into the tables that the graph reads.

        Args:
            x: [T, hidden] input embeddings of the batch, without padding.
        """
        batch, rows = self._backend.batch_info, self._rows
        assert rows is not None
        weights = self._tables.route_prefill(rows, x, forward_batch.input_ids, forward_batch.out_cache_loc)
        if batch.routing.gates is not None:
            add_gates(batch.routing.gates[: len(weights)], weights, rows.routed, *self._members_on_device())
            return
        *shared, words = put(self._dispatched(batch.routing), self._tables.device)
        fill_tiles(batch.routing, batch.counts, weights, rows.routed, shared, words)

    def _routed(self, routing: Routing, rows: RoutedRows, x: torch.Tensor, forward_batch: ForwardBatch) -> Routing:
        """The batch's routing with its routed rows, given the input embeddings x [M, hidden]."""
        tables = self._tables
        on_host = tables.device.type == "cpu"
        weights_of = tables.weights_of if on_host else tables.route_prefill
        weights = weights_of(rows, x, forward_batch.input_ids, forward_batch.out_cache_loc)
        if routing.gates is not None and not on_host:
            add_gates(routing.gates, weights, rows.routed, *self._members_on_device())
            return routing
        parts, rest = self._parts(), others(routing.groups, routing.rows, self._taken)
        if not on_host:
            return device_tiles(routing, weights, rows.routed, self._dispatch(routing), rest)
        routing.groups = host_groups(weights, rows.routed, parts, self._always, rest)
        return routing

    def _parts(self) -> list[Routed]:
        """The routed adapters of the batch."""
        used = (self._loaded[name] for name in self._named)
        return [Routed(one.index, tuple(map(self._slot_of, one.members)), one.spec.top_k) for one in used]

    def _dispatched(self, routing: Routing) -> list[np.ndarray]:
        """What the tiles of a graph's batch are made by: the arrays of ``Dispatch.room``."""
        assert routing.tile_slots is not None
        dispatch = self._dispatch(routing)
        return [*dispatch.shared(), dispatch.words_of(0, routing.tile_slots.shape[1])]

    def _dispatch(self, routing: Routing) -> Dispatch:
        return Dispatch(routing, self._parts(), self._always, self._tables.capacity)

    def _members_on_device(self) -> list[torch.Tensor]:
        """(slots [X, MAX_MEMBERS] int64, scalings float32) of the batch's routed adapters, by their numbers."""
        slots = np.zeros((self._tables.capacity, MAX_MEMBERS), dtype=np.int64)
        scales = np.zeros(slots.shape, dtype=np.float32)
        for one in (self._loaded[name] for name in self._named):
            slots[one.index, : len(one.members)] = [self._slot_of(uid) for uid in one.members]
            scales[one.index, : len(one.members)] = [self._scaling_of(uid) for uid in one.members]
        return put([slots, scales], self._tables.device)


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
