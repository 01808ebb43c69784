"""SGLang's LoRA backend ``atmm``: keeps the batch's routing and runs the operator for the layers of ``lora.layers``.

Captured graphs read their routing from tensors allocated once; ``route`` refreshes them in place with one copy,
so a replay allocates nothing and never waits for the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.kernels.atmm import (
    DENSE_MAX_ROWS,
    Rotation,
    Routing,
    ScaledInput,
    Vectors,
    atmm,
    atmm_linear,
    atmm_rotated,
    atmm_scaled,
    atmm_silu_and_mul,
    make_routing,
    on_kernels,
)
from vlora_sgl.kernels.atmm.experts import device_experts, host_experts
from vlora_sgl.kernels.atmm.launch import library_linear
from vlora_sgl.kernels.atmm.row_routing import (
    DENSE_MAX_SLOTS,
    TILE_ROWS,
    RowTuples,
    Run,
    active_slots,
    active_table,
    check_groups,
    check_slot,
    grouped_tables,
    groups_of,
    is_dense,
    mark,
    tuple_tables,
)
from vlora_sgl.kernels.rotary import rotate_and_store
from vlora_sgl.lora.vocabulary import cut, embed, embed_in_graph
from vlora_sgl.routed.regroup import others
from vlora_sgl.scaled import Scaled

GRAPH_PAIRS = 2
MANY_ROWS = 256  # of a prefill: groups of rows are taken to fill large tiles
_ALIGN = 16  # 4-byte words: each table of the shared buffer starts at a 64-byte boundary


@dataclass(slots=True)
class Batch:
    """What SGLang's layers look at (``batch_info``): present while a batch needs its adapters.

    Attributes:
        routing: the operator's tables.
        in_graph: whether a captured graph will read them, so that no launch may be left out for want of adapters.
        prefill: whether that is a graph of a prefill.
        counts: of a graph's row tiles, [2] int32: how many there are before routed rows get theirs, and the slots that
            those all apply.
        head_runs: of the rows that the LM head sees, where those are not the batch's; none where it has no adapters.
        has_active_lora: set and read by SGLang.
    """

    routing: Routing
    in_graph: bool
    prefill: bool = False
    counts: torch.Tensor | None = None
    head_runs: Sequence[Run] | None = None
    has_active_lora: bool = False


class GraphTables:
    """Routing tables at fixed addresses, for every number of rows up to ``max_rows``, refreshed by one copy.

    The words of all tables lie in one int32 buffer: the list of active slots, and the gate table (dense kernels) or
    the row tiles (grouped kernels: more rows, or more slots in use). A refresh writes a pinned host buffer, one of a
    ring, and copies it; it allocates nothing on the device and waits for the device only if that lags a whole ring
    behind.

    Args:
        max_rows: rows of the largest graph.
        places: index of each slot in the pool tensors.
        block: rows per tile of the grouped kernels; by default what suits decode.
        both: whether graphs of few rows come with either family of kernels, where the pool has slots for it.
        marked: whether slots may have vectors, so that rows are marked for them.
        tuples: whether layers gather rows anew on the device (``Routing.tuples``).
        routed: whether rows may be routed on the device, which then have tiles of their own.
        most_dense: slots in use up to which the dense kernels run in this pool.
        pairs: slots that a row of the grouped kernels applies at most.
    """

    RING = 4

    def __init__(
        self,
        max_rows: int,
        places: Sequence[int],
        device: torch.device,
        block: int | None = None,
        *,
        both: bool = False,
        marked: bool = False,
        tuples: bool = False,
        routed: bool = False,
        most_dense: int = DENSE_MAX_SLOTS,
        pairs: int = GRAPH_PAIRS,
    ) -> None:
        self.pairs = pairs
        self.routed, self.most_dense = routed, most_dense
        self.places, self.max_rows, self.device, self.marked = tuple(places), max_rows, device, marked
        slots = self.slots = len(places)
        self.dense_rows = min(max_rows, DENSE_MAX_ROWS) if both or is_dense(1, slots, most_dense) else 0
        self.block = block or TILE_ROWS[slots <= DENSE_MAX_SLOTS]  # many slots, few rows each
        self.many = both and not is_dense(1, slots, most_dense)
        self.max_tiles = self._most_tiles(max_rows) if self.many or max_rows > self.dense_rows else 0
        sizes = {
            "active": 2 + 2 * slots,
            "gates": self.dense_rows * slots,
            "n_tiles": 1,
            "counts": 2,
            "tile_rows": self.max_tiles * self.block,
            "tile_slots": self.max_tiles * self.pairs,
            "tile_gates": self.max_tiles * self.pairs * self.block,
            "marks": max_rows * marked,
            "row_tuples": max_rows * tuples,
            "tuple_words": self._most_tiles(0) * self.pairs * tuples,
            "tuple_gates": self._most_tiles(0) * self.pairs * tuples,
        }
        self.tuples = tuples
        self.at: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = slice(end, end + size)
            end = -(-(end + size) // _ALIGN) * _ALIGN
        self.buffer = torch.zeros(end, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._ring = [torch.zeros(end, dtype=torch.int32, pin_memory=on_gpu) for _ in range(self.RING)]
        self._views = [source.numpy() for source in self._ring]
        self._copied = [torch.cuda.Event() for _ in self._ring] if on_gpu else []
        self._turn = 0
        self._routings: dict[tuple[int, bool], Routing] = {}
        self._captured: set[int] = set()

    def holds(self, rows: int, active: int, pairs: int, tuples: int) -> bool:
        """Whether a batch has room: rows, slots in use, slots that a row applies at most, different sets of those."""
        if self.is_dense(rows, active) and not self.tuples:
            return True
        return pairs <= self.pairs and tuples <= self._most_tiles(0)

    def is_dense(self, rows: int, active: int) -> bool:
        """Whether the graph that runs a batch is one of the dense kernels."""
        return self._padded(rows) <= self.dense_rows and is_dense(rows, active, self.most_dense)

    def _padded(self, rows: int) -> int:
        """Rows of the graph that runs a batch of so many."""
        return min((size for size in self._captured if size >= rows), default=self.max_rows)

    def _most_tiles(self, rows: int) -> int:
        """Every tile but each group's last is full; a group is a slot tuple: each slot's own, or base rows; and those
        of routed rows."""
        return 2 * self.slots + 1 + self.most_targets + rows // self.block

    @property
    def most_targets(self) -> int:
        """Sets of slots that routed rows may apply."""
        return most_targets(self.slots) * self.routed

    @property
    def counts(self) -> torch.Tensor:
        """``Batch.counts``."""
        return self.buffer[self.at["counts"]]

    def routing(self, rows: int, many: bool = False) -> Routing:
        """The tables as a captured launch of ``rows`` rows sees them; ``many``: of the grouped kernels."""
        if (rows, many) not in self._routings:
            self._routings[rows, many] = self._views_for(rows, rows <= self.dense_rows and not many)
        return self._routings[rows, many]

    def _views_for(self, rows: int, dense: bool) -> Routing:
        words, at = self.buffer, self.at
        view = Routing(rows, self.slots, [], places=self.places, most_dense=self.most_dense)
        if self.marked:
            view.marks = words[at["marks"]][:rows]
        if self.tuples:
            own, gates = (words[at[name]].view(-1, self.pairs) for name in ("tuple_words", "tuple_gates"))
            view.tuples = RowTuples(words[at["row_tuples"]][:rows], own, gates.view(torch.float32))
        if dense:
            view.active = words[at["active"]]
            view.gates = words[at["gates"]].view(torch.float32).view(-1, self.slots)[:rows]
        else:
            view.n_tiles = words[at["n_tiles"]]
            most = self._most_tiles(rows)  # tiles of rows past the batch come last
            view.tile_rows = words[at["tile_rows"]].view(-1, self.block)[:most]
            view.tile_slots = words[at["tile_slots"]].view(-1, self.pairs)[:most]
            view.tile_gates = words[at["tile_gates"]].view(torch.float32).view(-1, self.pairs, self.block)[:most]
        return view

    def refresh(
        self,
        runs: Sequence[Run],
        ranks: Sequence[int],
        scalings: Sequence[float],
        many: bool | None = None,
        vectored: Collection[int] = (),
        routed: np.ndarray | None = None,
        always: int = 0,
    ) -> Routing:
        """Write a batch's routing; rows past it (padding of the graph) become base rows.

        Args:
            routed: rows that get their tiles on the device, and always: slots that each of them applies besides.
            many: take the tables of more slots than the dense kernels have room for; by default where there are.
            vectored: slots whose adapters have vectors.

        Raises:
            ConfigError: more slots per row or more slot tuples than the tables were sized for.
            ValueError: a run is routed to a slot that is out of range or holds no adapter.
        """
        turn = self._turn = (self._turn + 1) % self.RING
        if self._copied:
            self._copied[turn].synchronize()  # returns at once, unless the device is RING steps behind
        host = self._views[turn]
        rows = sum(count for _, count in runs)
        if many is not None:
            self._captured.add(rows)  # only a capture says
        else:
            active = len(active_slots((count, pairs) for pairs, count in runs))
            many = self.many and not is_dense(1, active, self.most_dense)
        if rows <= self.dense_rows and not many:
            self._put_gates(host, runs, ranks, scalings)
        # A batch of few rows may be padded up to a graph of many, whose kernels are the grouped ones.
        if many or self.max_rows > self.dense_rows:
            read = many or self._padded(rows) > self.dense_rows
            self._put_tiles(host, runs, ranks, scalings, read, () if routed is None else routed)
            host[self.at["counts"]] = host[self.at["n_tiles"]][0], always
        if self.marked:
            marks = host[self.at["marks"]]
            words = [mark(pairs, vectored) for pairs, _ in runs]
            marks[:rows] = np.repeat(words, [count for _, count in runs])
            marks[rows:] = 0
        if self.tuples:
            self._put_tuples(host, runs, ranks, scalings)
        self.buffer.copy_(self._ring[turn], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        return self.routing(rows, many)

    def _put_gates(
        self, host: np.ndarray, runs: Sequence[Run], ranks: Sequence[int], scalings: Sequence[float]
    ) -> None:
        cells: dict[int, float] = {}
        used = set()
        row = 0
        for pairs, count in runs:
            for slot, weight in pairs:
                check_slot(slot, ranks)
                used.add(slot)
                for cell in range(row * self.slots + slot, (row + count) * self.slots + slot, self.slots):
                    cells[cell] = cells.get(cell, 0.0) + weight * scalings[slot]
            row += count
        gates = host[self.at["gates"]].view(np.float32)
        gates.fill(0.0)
        gates[list(cells)] = list(cells.values())  # one assignment: numpy's overhead per call is what costs here
        active = active_table(used, ranks, self.places)
        start = self.at["active"].start
        host[start : start + len(active)] = active

    def _put_tuples(
        self, host: np.ndarray, runs: Sequence[Run], ranks: Sequence[int], scalings: Sequence[float]
    ) -> None:
        groups, rows = groups_of(runs)
        of_rows, words, gates = tuple_tables(groups, rows, ranks, scalings, self.places)
        count, width = words.shape
        if count > self._most_tiles(0) or width > self.pairs:
            raise ConfigError(
                f"{count} slot tuples with {width} slots a row exceed the graph's tables "
                f"({self._most_tiles(0)}, {self.pairs})"
            )
        host[self.at["row_tuples"]][:rows], host[self.at["row_tuples"]][rows:] = of_rows, 0
        for name, table in (("tuple_words", words), ("tuple_gates", gates.view(np.int32))):
            held = host[self.at[name]].reshape(-1, self.pairs)
            held[:] = 0
            held[:count, :width] = table

    def _put_tiles(
        self,
        host: np.ndarray,
        runs: Sequence[Run],
        ranks: Sequence[int],
        scalings: Sequence[float],
        read: bool,
        routed: np.ndarray | Sequence[int],
    ) -> None:
        groups, rows = groups_of(runs)
        check_groups(groups, rows, ranks)
        groups = others(groups, rows, routed) if len(routed) else groups
        # Routed rows' tiles come behind these: then there must be none past those of the graph that runs the batch.
        spare = np.arange(rows, self._padded(rows) if len(routed) else self.max_rows, dtype=np.int32)
        tiles, slots, gates = grouped_tables([*groups, (spare, ())], ranks, scalings, self.places, self.block)
        count, width = slots.shape
        if count > self.max_tiles or width > self.pairs:
            if not read:
                host[self.at["n_tiles"]] = 0
                return
            raise ConfigError(
                f"{count} row tiles with {width} slots a row exceed the graph's tables "
                f"({self.max_tiles}, {self.pairs}); lower --cuda-graph-max-bs to {DENSE_MAX_ROWS}"
            )
        host[self.at["n_tiles"]] = count
        host[self.at["tile_rows"]].reshape(-1, self.block)[:count] = tiles
        every = host[self.at["tile_slots"]].reshape(-1, self.pairs)
        every[:] = 0
        every[:count, :width] = slots
        all_gates = host[self.at["tile_gates"]].view(np.float32).reshape(-1, self.pairs, self.block)
        all_gates[:count, :width] = gates


def most_targets(slots: int) -> int:
    """Of routed rows, in the tables of a graph: each slot's, and that of rows without a member."""
    return slots + 1


class AtmmBackend(_sgl.BaseLoRABackend):
    """The operator behind SGLang's interface.

    Attributes:
        is_moe_lora: whether layers have adapters on experts; SGLang sets it when it wraps such a layer.
        most_dense: slots in use up to which the dense kernels run; the manager sets it when it makes the pool.
    """

    name = "atmm"
    supports_prefill_cuda_graph = True

    def __init__(self, max_loras_per_batch: int, device: torch.device, **_: object) -> None:
        super().__init__(max_loras_per_batch, torch.device(device))
        self.graph_tables: GraphTables | None = None
        self.prefill_tables: dict[int, GraphTables] = {}
        self.places: Sequence[int] = range(max_loras_per_batch)
        self.marks_rows = self.routes_tokens = False
        self.most_dense = DENSE_MAX_SLOTS

    def place_slots(self, places: Sequence[int]) -> None:
        """Say where each slot begins in the pool tensors, where that is not its number; before graphs are captured."""
        self.places = places

    # One batch

    def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        """Allocate what captured decode graphs read."""
        rows = max_bs_in_cuda_graph * num_tokens_per_req
        self.graph_tables = GraphTables(
            rows, self.places, self.device, both=True, marked=self.marks_rows, tuples=self.is_moe_lora,
            routed=self.routes_tokens, most_dense=self.most_dense,
        )  # fmt: skip

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int) -> None:
        """Take batches of up to so many tokens for captured prefill graphs; a size gets its tables when captured."""
        self.prefill_cuda_graph_max_bs = self.prefill_cuda_graph_max_tokens = max_num_tokens

    @property
    def most_targets(self) -> int:
        """Sets of slots that the routed rows of a graph's batch may apply."""
        return most_targets(len(self.places))

    def dense_in_graph(self, rows: int, active: int) -> bool:
        """Whether the decode graph of a batch is one of the dense kernels, which alone have adapters on embeddings."""
        return self.graph_tables is None or self.graph_tables.is_dense(rows, active)

    def graph_holds(self, prefill: bool, rows: int, active: int, pairs: int, tuples: int) -> bool:
        """Whether captured graphs have room for a batch (see ``GraphTables.holds``)."""
        if prefill:
            return pairs <= GRAPH_PAIRS and tuples <= 2 * len(self.places) + 1
        return self.graph_tables is None or self.graph_tables.holds(rows, active, pairs, tuples)

    def _tables_of_prefill(self, tokens: int) -> GraphTables:
        """The tables that the graph of a prefill of this many tokens reads."""
        if tokens not in self.prefill_tables:
            block = TILE_ROWS[True] if tokens >= MANY_ROWS else None
            self.prefill_tables[tokens] = GraphTables(
                tokens, self.places, self.device, block, marked=self.marks_rows, routed=self.routes_tokens,
                most_dense=self.most_dense,
            )  # fmt: skip
        return self.prefill_tables[tokens]

    def route(
        self,
        runs: Sequence[Run],
        ranks: Sequence[int],
        scalings: Sequence[float],
        vectored: Collection[int] = (),
        *,
        use_cuda_graph: bool = False,
        prefill_tokens: int | None = None,
        many: bool | None = None,
        routed: np.ndarray | None = None,
        always: int = 0,
    ) -> None:
        """Set the routing of the forward that follows.

        Args:
            runs: rows in order with their (slot, weight) pairs, for every mode.
            ranks, scalings: per slot, 0 for slots that hold no adapter.
            vectored: slots whose adapters have vectors.
            use_cuda_graph: the forward replays (or captures) a decode graph.
            prefill_tokens: size of the prefill graph that the forward replays (or captures), if it does.
            many: of a decode graph, whether it is that of more slots in use than the dense kernels have room for.
            routed, always: as ``GraphTables.refresh`` has them.

        Raises:
            ValueError: a row is routed to a slot that holds no adapter.
        """
        tables = None
        if prefill_tokens is not None:
            tables = self._tables_of_prefill(prefill_tokens)
        elif use_cuda_graph:
            tables = self.graph_tables
            if tables is None:
                raise RuntimeError("a decode graph was announced before init_cuda_graph_batch_info")
        if tables is not None:
            routing = tables.refresh(runs, ranks, scalings, many, vectored, routed, always)
            if prefill_tokens is not None:
                routing = tables.routing(prefill_tokens)
            routing.ranks, routing.scalings = tuple(ranks), tuple(scalings)
        else:
            groups, rows = groups_of(runs)
            routing = make_routing(
                groups, rows, ranks, scalings, self.device, places=self.places, vectored=vectored,
                tuples=self.is_moe_lora and on_kernels(self.device), most_dense=self.most_dense,
            )  # fmt: skip
        prefill, counts = prefill_tokens is not None, None if tables is None else tables.counts
        self.batch_info = Batch(routing, tables is not None, prefill, counts)

    # The operator

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: Sequence[int],
        vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x W^T + bias`` with this batch's adapters (see ``kernels.atmm.atmm_linear``)."""
        batch = self.batch_info
        if not batch.in_graph and not batch.routing.has_adapters:
            return library_linear(x, weight, bias)
        return atmm_linear(x, weight, bias, a, b, batch.routing, offsets, vectors=vectors)

    def scaled(
        self,
        x: torch.Tensor,
        weight: Scaled,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: Sequence[int],
        vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``linear`` of few rows on a weight in e4m3 (see ``kernels.atmm.atmm_scaled``)."""
        numbers, scale = _sgl.quantise_rows(x.contiguous())
        given = ScaledInput(numbers, scale, weight.scale)
        return atmm_scaled(x, given, weight.weight, bias, a, b, self.batch_info.routing, offsets, vectors=vectors)

    @property
    def few_rows(self) -> bool:
        """Whether this batch has adapters, and the dense kernels add them."""
        batch = self.batch_info
        return batch.routing.gates is not None and (batch.in_graph or batch.routing.has_adapters)

    def rotated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: Sequence[int],
        rotation: Rotation,
    ) -> torch.Tensor:
        """``linear`` on stacked q, k and v, rotated and stored (see ``kernels.atmm.atmm_rotated``): q."""
        batch = self.batch_info
        if not batch.in_graph and not batch.routing.has_adapters:
            return rotate_and_store(library_linear(x, weight, bias), *rotation.operands)
        return atmm_rotated(x, weight, bias, a, b, batch.routing, offsets, rotation)

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: Sequence[int],
        vectors: Vectors | None = None,
    ) -> torch.Tensor:
        """Add this batch's adapters to a base layer's output, in place (see ``kernels.atmm.atmm``)."""
        batch = self.batch_info
        if not batch.in_graph and not batch.routing.has_adapters:
            return y
        return atmm(y, x, a, b, batch.routing, offsets, vectors=vectors)

    @property
    def defers_activation(self) -> bool:
        """Whether this batch's adapters on gate_up are for ``silu_and_mul`` to add: many rows, and adapters to add."""
        batch = self.batch_info
        return batch.routing.gates is None and (batch.in_graph or batch.routing.has_adapters)

    def silu_and_mul(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: Sequence[int],
        vectors: Vectors | None = None,
    ) -> torch.Tensor:
        """The activation of gate and up with this batch's adapters (see ``kernels.atmm.atmm_silu_and_mul``)."""
        return atmm_silu_and_mul(y, x, a, b, self.batch_info.routing, offsets, vectors=vectors)

    # The vocabulary

    def embed(self, y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add this batch's adapters to its input embeddings, in place (see ``vocabulary.embed``)."""
        batch = self.batch_info
        if not batch.in_graph:
            embed(y, ids, a, b, batch.routing)
        elif batch.routing.gates is not None and not batch.prefill:
            embed_in_graph(y, ids, a, b, batch.routing.gates)
        # Batches that have adapters on embeddings replay no other graph (``VLoraManager``).

    def add_to_logits(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        """Add this batch's adapters to logits, in place.

        Raises:
            RuntimeError: x has not the rows that were announced.
        """
        batch = self.batch_info
        if batch.prefill or batch.head_runs == []:
            return
        if batch.head_runs is None:
            self.add(y, x, a, b, offsets)
            return
        first = (self._lm_head_pass_idx or 0) * _sgl.envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
        groups, rows = groups_of(cut(batch.head_runs, first, len(x)))
        if rows != len(x):
            raise RuntimeError(f"the LM head was to see {rows} rows, and sees {len(x)}")
        ranks, scalings = batch.routing.ranks, batch.routing.scalings
        atmm(y, x, a, b, make_routing(groups, rows, ranks, scalings, self.device, places=self.places), offsets)

    # Experts

    def init_cuda_graph_moe_buffers(self, *_: object, **__: object) -> None:
        """SGLang's buffers for its own kernels: the operator needs none."""

    @property
    def applies(self) -> bool:
        """Whether this batch's rows may apply adapters."""
        batch = self.batch_info
        return bool(batch.in_graph or batch.routing.has_adapters)

    def experts(
        self, ids: torch.Tensor, weights: torch.Tensor, count: int, *, base: bool = False
    ) -> tuple[Routing, Routing]:
        """This batch's routing of tokens' choices of experts.

        Args:
            ids, weights: [M, TOPK] of the choices.
            count: how many experts there are.
            base: whether an activation will need the choices too that apply nothing.

        Returns:
            Of inputs that are tokens, and of inputs that are choices; in a GPU's second the choices' weights are in.
        """
        routing = self.batch_info.routing
        if on_kernels(ids.device):
            return device_experts(routing, ids, weights, count, base=base)
        return host_experts(routing, ids, count, ids.shape[1]), host_experts(routing, ids, count, 1)

    def add_experts(self, y: torch.Tensor, x: torch.Tensor, linear: Any, routing: Routing) -> torch.Tensor:
        """Add this batch's adapters to what experts put out, in place.

        Args:
            y: [P, N], a row for each choice; x: [M, K] or [P, K].
            linear: ``lora.expert_layers.ExpertLinear``.
            routing: of ``experts``.
        """
        return atmm(y, x, linear.a.flatten(0, 1), linear.b.flatten(0, 1), routing, linear.offsets)

    def silu_experts(
        self, y: torch.Tensor, out: torch.Tensor, x: torch.Tensor, linear: Any, routing: Routing
    ) -> torch.Tensor:
        """The activation of experts' gate and up, y [P, 2 I], with this batch's adapters: ``out`` [P, I].

        As ``add_experts``, of a routing with ``base``.
        """
        a, b = linear.a.flatten(0, 1), linear.b.flatten(0, 1)
        return atmm_silu_and_mul(y, x, a, b, routing, linear.offsets, out=out)
