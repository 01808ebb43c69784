"""A memory pool whose slots are filled from one piece of host memory an adapter, in a few copies.

SGLang's pool fills a slot matrix by matrix: for a 7B model 224 small copies, most of them of what was sliced, put
together and pinned anew. Here that happens once, when an adapter comes to host memory: SGLang's own method loads it
into a slot that is just large enough, and whose matrices lie behind each other in one pinned buffer. So what is packed
is what SGLang would have written. From there a load is, for every ``STAGING_BYTES``, one copy to a staging buffer on
the device and one call that spreads it over the slot; what the adapter lacks is zeroed in one call. Everything is
ordered on the stream that asks, behind the steps that read the slot before.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import LoRAAdapter
from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.lora.bulk import each, threads
from vlora_sgl.lora.expert_layers import with_linears
from vlora_sgl.lora.experts import is_expert
from vlora_sgl.lora.layout import layer_of
from vlora_sgl.lora.slot_residency import SlotResidency
from vlora_sgl.scaled import E4M3

# The staging buffer is device memory that caches nothing: large enough for the bus to be what a load waits for.
STAGING_BYTES = 64 << 20
# In elements: matrices begin where vectorized copies can begin.
_ALIGN = 64

EXPERTS = "_moe"
"""What SGLang's pool adds to the name of a kind of linears where they are experts'."""

Layers = Sequence[JsonDict]
"""The modules that SGLang has wrapped, by layer and name."""


class SlotTable(Protocol):
    """What slots hold beside their matrices (``lora.vectors``).

    Attributes:
        table: all of it.
    """

    table: torch.Tensor

    def attach(self, adapter: LoRAAdapter) -> None:
        """Compute what a slot will hold of an adapter, whose matrices are packed."""

    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Fill a slot."""


class Weight(NamedTuple):
    """One matrix of a slot: its side (``A`` or ``B``), its kind of module as the pool names it, its layer."""

    side: str
    kind: str
    layer: int


class Move(NamedTuple):
    """Of one side, a stretch of the packed buffer, the staging memory it goes to, what lies there, where that goes."""

    side: str
    stretch: slice
    staging: torch.Tensor
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the matrices of adapters with one rank and the same modules lie in their packed buffers.

    Attributes:
        weights: the matrices, all of side A before those of side B.
        shapes: of every matrix.
        begins: of every matrix, in elements; then the end of the last.
        routes: by slot, the moves into it and what they leave to be zeroed; filled as slots are.
    """

    weights: tuple[Weight, ...]
    shapes: tuple[torch.Size, ...]
    begins: tuple[int, ...]
    routes: dict[int, tuple[list[Move], list[torch.Tensor]]] = field(default_factory=dict)

    def views(self, buffer: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
        """Matrices ``first`` to ``last`` where ``buffer`` begins with the first of them."""
        begins = (begin - self.begins[first] for begin in self.begins[first:last])
        return [
            buffer[begin : begin + shape.numel()].view(shape)
            for begin, shape in zip(begins, self.shapes[first:last], strict=True)
        ]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """``(end, begin)`` of matrices that do not touch."""
        for shape, (begin, after) in zip(self.shapes, pairwise(self.begins), strict=True):
            if begin + shape.numel() < after:
                yield begin + shape.numel(), after

    def pieces(self, room: int) -> Iterator[tuple[int, int]]:
        """``(first, last)`` of matrices that fit ``room`` together; one side each, because sides differ in strides."""
        first = 0
        for i in range(1, len(self.weights) + 1):
            full = i == len(self.weights) or self.begins[i + 1] - self.begins[first] > room
            if full or self.weights[i].side != self.weights[first].side:
                yield first, i
                first = i


class Packed(NamedTuple):
    """An adapter's matrices in one piece of host memory. Its ``LoRAAdapter`` keeps it as ``packed``."""

    layout: Layout
    buffer: torch.Tensor

    def views(self, dtype: torch.dtype) -> dict[Weight, torch.Tensor]:
        """Each of them, as numbers of this type."""
        found = (view.view(dtype) for view in self.layout.views(self.buffer, 0, len(self.layout.weights)))
        return dict(zip(self.layout.weights, found, strict=True))


class Slots:
    """Slots of linear layers, and how one is filled from a packed buffer.

    Attributes:
        A_buffer, B_buffer: by kind of module, one matrix of all slots for each layer.
        slot_dtype: theirs. E4m3 is moved about as bytes: torch has few operations on it.
        max_lora_rank: rank of the largest slot.
        staging: on the device, shared by all loads; none loads before it is there.
    """

    A_buffer: dict[str, list[torch.Tensor]]
    B_buffer: dict[str, list[torch.Tensor]]
    max_lora_rank: int
    slot_dtype: torch.dtype
    staging: torch.Tensor

    def __init__(self) -> None:
        self._layouts: weakref.WeakValueDictionary[tuple[object, ...], Layout] = weakref.WeakValueDictionary()
        self._stream: torch.cuda.Stream | None = None

    @property
    def moved_as(self) -> torch.dtype:
        """What packed buffers and the staging buffer hold."""
        return torch.uint8 if self.slot_dtype == E4M3 else self.slot_dtype

    @property
    def nbytes(self) -> int:
        """Memory of all slots; views of one tensor are counted once for each."""
        tensors = [t for buffers in (self.A_buffer, self.B_buffer) for layers in buffers.values() for t in layers]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def make_staging(self, weights: Sequence[Weight], device: torch.device) -> None:
        """Make the staging buffer, for adapters that have all of these."""
        largest = self._layout(weights, self.max_lora_rank)
        room = max(STAGING_BYTES // self.slot_dtype.itemsize, *(_aligned(shape.numel()) for shape in largest.shapes))
        sizes = [largest.begins[last] - largest.begins[first] for first, last in largest.pieces(room)]
        self.staging = torch.empty(max(sizes), dtype=self.moved_as, device=device)

    def fill(self, packed: Packed, slot: int, rank: int, everything: Callable[[], set[Weight]]) -> None:
        """Fill a slot with an adapter.

        Args:
            rank: the adapter's.
            everything: gives the weights that layers read; what the adapter lacks of them is zeroed.
        """
        layout, buffer = packed
        if slot not in layout.routes:
            layout.routes[slot] = self._route(layout, slot, rank, everything())
        moves, lacking = layout.routes[slot]
        self._wait_for_staging()
        spoiled = []
        for move in moves:
            # The adapter may be unloaded before this copy has run: torch gives pinned memory out again only when the
            # copies out of it, which it records here, are over.
            move.staging.copy_(buffer[move.stretch], non_blocking=True)
            spoiled.append(not_finite(move.staging))
            if move.side == "B":
                _finite(move.staging)
            torch._foreach_copy_(move.targets, move.sources)
        if moves:
            _spoil(moves[0].targets[0], torch.stack(spoiled).any())
        if lacking:
            torch._foreach_zero_(lacking)

    def _wait_for_staging(self) -> None:
        """Loads on one stream follow each other; one on another stream waits for the staging buffer."""
        if self.staging.device.type == "cuda":
            stream = torch.cuda.current_stream()
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def _part(self, weight: Weight, slot: int, rank: int) -> torch.Tensor:
        """What an adapter of this rank occupies of a slot's matrix."""
        if weight.side == "B":
            return self.B_buffer[weight.kind][weight.layer][slot, ..., :rank].view(self.moved_as)
        matrix = self.A_buffer[weight.kind][weight.layer][slot]  # of experts one for each
        rows = rank * (matrix.shape[-2] // self.max_lora_rank)  # of stacked projections
        return matrix[..., :rows, :].view(self.moved_as)

    def _layout(self, weights: Sequence[Weight], rank: int) -> Layout:
        key = (rank, *weights)
        layout = self._layouts.get(key)
        if layout is None:
            shapes = tuple(self._part(weight, 0, rank).shape for weight in weights)
            begins = [0]
            for shape in shapes:
                begins.append(begins[-1] + _aligned(shape.numel()))
            layout = self._layouts[key] = Layout(tuple(weights), shapes, tuple(begins))
        return layout

    def _route(
        self, layout: Layout, slot: int, rank: int, everything: set[Weight]
    ) -> tuple[list[Move], list[torch.Tensor]]:
        moves = []
        for first, last in layout.pieces(len(self.staging)):
            stretch = slice(layout.begins[first], layout.begins[last])
            staging = self.staging[: stretch.stop - stretch.start]
            targets = [self._part(weight, slot, rank) for weight in layout.weights[first:last]]
            moves.append(
                Move(layout.weights[first].side, stretch, staging, layout.views(staging, first, last), targets)
            )
        return moves, [self._part(weight, slot, rank) for weight in sorted(everything.difference(layout.weights))]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """SGLang's pool says of every call what it was given; the report of a load says it once."""
    logger = logging.getLogger(_sgl.LoRAMemoryPool.__module__)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class PackedPool(Slots, _sgl.LoRAMemoryPool):
    """SGLang's pool of linear layers, loaded as the module says; what it holds besides is loaded as SGLang does.

    Args:
        experts: whether layers of experts are ours, and read the slots as this class fills them.
        residency: whom it asks who is evicted, in place of SGLang's policy.
        ranks: the rank that every slot holds, by default all the same.
        places: index of every slot in the buffers, by default its number.
        eight_bits: keep linears' factors in e4m3 (``lora.eight_bits``).
        options: SGLang's.

    Attributes:
        packs: whether it does; not where experts are SGLang's, nor where what lies past an adapter's rank is cleared.
        vectors: what slots hold besides, where adapters may have more than factors.
    """

    dtype: Any
    vectors: SlotTable | None = None

    def __init__(
        self,
        residency: SlotResidency | None = None,
        ranks: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
        experts: bool = False,
        eight_bits: bool = False,
        **options: Any,
    ) -> None:
        slots = options["max_loras_per_batch"]
        self.slot_dtype = E4M3 if eight_bits else options["dtype"]
        self.ranks: Sequence[int] = ranks or (options["max_lora_rank"],) * slots
        self.places: Sequence[int] = places or range(slots)
        self._slots = {place: slot for slot, place in enumerate(self.places)}  # the base model's comes before others'
        Slots.__init__(self)
        _sgl.LoRAMemoryPool.__init__(self, **options)
        if residency is not None:
            seams.own("LoRAMemoryPool.eviction_policy", self, residency)
        everything = [buffer for buffers in (self.A_buffer, self.B_buffer) for buffer in buffers.values()]
        linear = bool(everything) and all(m.ndim == 3 or experts for layers in everything for m in layers)
        self.packs = linear and not _sgl.dense_lora_b
        if self.packs:
            weights = [Weight(side, kind, i) for side in "AB" for kind in self.A_buffer for i in range(self.num_layer)]
            self.make_staging(weights, next(matrix.device for layers in everything for matrix in layers))

    def init_buffers(self, base_model: Any) -> None:
        """SGLang's, in the slots' type; what it holds of the vocabulary stays in the engine's."""
        wide, self.dtype = self.dtype, self.slot_dtype
        super().init_buffers(base_model)
        self.dtype = wide
        for side in (*self._sides, self.new_embeddings_buffer) if self.slot_dtype != wide else ():
            side.update({kind: torch.zeros_like(buffer, dtype=wide) for kind, buffer in side.items()})

    def state(self) -> JsonDict:
        """For ``/server_info``: the rank and the type of each slot, and the bytes of all on this rank."""
        more = [*self._vocabulary, *([] if self.vectors is None else [self.vectors.table])]
        size = self.nbytes + sum(t.untyped_storage().nbytes() for t in more)
        return {"ranks": list(self.ranks), "bytes": size, "dtype": str(self.slot_dtype).removeprefix("torch.")}

    def has_room(self, rank: int, keep: Collection[AdapterId]) -> bool:
        """Whether an adapter of this rank finds a slot that is empty, or an adapter's that is not to be kept."""
        held = {slot: uid for uid, slot in self.uid_to_buffer_id.items()}
        return any(
            most >= rank and (slot not in held or held[slot] not in keep) for slot, most in enumerate(self.ranks)
        )

    def lacking(self, lora_modules: Layers) -> str | None:
        """A wrapped module that the slots have no room for, if there is one: SGLang gives dense MLPs and shared
        experts of models with experts none, or that of other sizes."""
        has_experts = any(matrix.ndim > 3 for layers in self.B_buffer.values() for matrix in layers)
        for number, layer in enumerate(lora_modules if self.packs and has_experts else ()):
            for name, module in with_linears(layer).items():
                buffers = self.B_buffer.get(self._kind(name))
                wanted = getattr(module, "columns", None)
                if buffers is None or (wanted is not None and buffers[number].shape[-2] != wanted[-1]):
                    return name
        return None

    def reserve(
        self, names: Collection[str], rank: int, lora_modules: Layers
    ) -> tuple[Packed, dict[str, torch.Tensor]]:
        """Host memory for an adapter of this rank, and its matrices there by name: what is read to them need not be
        copied by ``pack``, whose adapter is to have the memory as ``reserved``.

        Args:
            names: of its linears' weights, as SGLang's adapters have them.
        """
        weights = self._weights({name: layer_of(name) for name in names}, lora_modules)
        packed = self._room(sorted(weights), rank)
        views = packed.views(self.slot_dtype)
        return packed, {name: views[weight] for weight, name in weights.items()}

    def pack(self, adapter: LoRAAdapter, lora_modules: Layers) -> Packed:
        """Lay an adapter's linear layers out in one piece of host memory, pinned where there is a GPU; once.

        Its own weights become views of that, so that nothing is held twice: this rank's part of them.
        """
        packed: Packed | None = getattr(adapter, "packed", None)
        if packed is not None:
            return packed
        names = self._weights(
            {name: number for number, layer in enumerate(adapter.layers) for name in layer.weights}, lora_modules
        )
        reserved: Packed | None = getattr(adapter, "reserved", None)
        if reserved is not None and reserved.layout is self._layout(sorted(names), adapter.config.r):
            packed = reserved
        else:
            packed = self._room(sorted(names), adapter.config.r)
        adapter.reserved = None
        views = packed.views(self.slot_dtype)
        self._write(views, adapter, lora_modules, self._lacking_weights(views, names, adapter, lora_modules))
        for weight, name in names.items():
            adapter.layers[weight.layer].weights[name] = views[weight]
        adapter.packed = packed
        return packed

    def _weights(self, layers: Mapping[str, int | None], lora_modules: Layers) -> dict[Weight, str]:
        """Of named weights of these layers, those that the pool has room for, and the layers read."""
        wrapped, found = self._wrapped(lora_modules), {}
        for name, number in layers.items():
            with contextlib.suppress(ValueError):  # of a kind the pool lacks: SGLang warns below, or refuses it
                weight = self._weight(name, number if number is not None else -1)
                if weight in wrapped:
                    found[weight] = name
        return found

    def _room(self, weights: Sequence[Weight], rank: int) -> Packed:
        layout = self._layout(weights, rank)
        pinned = self.pin_memory_available and self.staging.device.type != "cpu"
        buffer = torch.empty(layout.begins[-1], dtype=self.moved_as, pin_memory=pinned)
        for end, begin in layout.gaps():
            buffer[end:begin].zero_()
        return Packed(layout, buffer)

    def _lacking_weights(
        self,
        views: Mapping[Weight, torch.Tensor],
        names: Mapping[Weight, str],
        adapter: LoRAAdapter,
        lora_modules: Layers,
    ) -> list[int]:
        """The layers that have weights which are not where they are to be, as this rank has them."""
        there = dict.fromkeys(range(self.num_layer), 0)
        modules = [{self._kind(name): one for name, one in with_linears(layer).items()} for layer in lora_modules]
        for weight, name in names.items():
            whole, module = adapter.layers[weight.layer].weights[name], modules[weight.layer][weight.kind]
            if _is_same(whole, views[weight]) and not is_expert(name):
                cut = module.slice_lora_a_weights if weight.side == "A" else module.slice_lora_b_weights
                there[weight.layer] += _is_same(cut(whole), views[weight])
        return [number for number, count in there.items() if count < len(adapter.layers[number].weights)]

    def _write(
        self, views: Mapping[Weight, torch.Tensor], adapter: LoRAAdapter, lora_modules: Layers, layers: Sequence[int]
    ) -> None:
        """SGLang's load of an adapter's linears in some layers, with these matrices for a slot; experts' are written
        here."""
        count = min(threads(), len(layers))
        with _quietly():
            each(lambda first: self._write_layers(views, adapter, lora_modules, layers[first::count]), range(count))

    def _write_layers(
        self, views: Mapping[Weight, torch.Tensor], adapter: LoRAAdapter, lora_modules: Layers, layers: Sequence[int]
    ) -> None:
        rest = [self._write_experts(views, i, adapter.layers[i].weights, lora_modules[i]) for i in layers]
        slot: Any = copy.copy(self)
        nothing = torch.empty(1, 1, device="meta")  # takes the zeros of what the adapter lacks
        for side, buffers in (("A", self.A_buffer), ("B", self.B_buffer)):
            kinds = [kind for kind in buffers if not kind.endswith(EXPERTS)]
            found = {kind: [views.get(Weight(side, kind, i), nothing)[None] for i in layers] for kind in kinds}
            setattr(slot, f"{side}_buffer", found)
        slot.num_layer = len(layers)
        slot.embedding_A_buffer = slot.embedding_B_buffer = slot.lm_head_A_buffer = slot.lm_head_B_buffer = {}
        slot.new_embeddings_buffer = {}
        slot.pin_memory_available = False
        layers_left = [SimpleNamespace(weights=weights, pinned_weights={}) for weights in rest]
        linears = SimpleNamespace(config=adapter.config, layers=layers_left, embedding_layers={})
        modules = [lora_modules[i] for i in layers]
        _sgl.LoRAMemoryPool.load_lora_weight_to_buffer(slot, adapter.uid, 0, linears, modules, None, None)

    def _write_experts(
        self, views: Mapping[Weight, torch.Tensor], number: int, weights: Mapping[str, torch.Tensor], modules: JsonDict
    ) -> dict[str, torch.Tensor]:
        """Write what a layer has for experts; returns the rest."""
        linears = {self._kind(name): module for name, module in with_linears(modules).items()}
        for name in filter(is_expert, weights):
            weight = self._weight(name, number)
            views[weight].copy_(linears[weight.kind].shard(weight.side, weights[name]))
        return {name: weight for name, weight in weights.items() if not is_expert(name)}

    def load_lora_weight_to_buffer(
        self, uid: AdapterId, buffer_id: int, lora_adapter: Any, lora_modules: Layers, *embeddings: object
    ) -> None:
        """Fill a slot; ``uid`` ``None`` clears it for the base model."""
        if uid is None or not self.packs:
            super().load_lora_weight_to_buffer(uid, buffer_id, lora_adapter, lora_modules, *embeddings)
            return
        if self.vectors is not None:
            self.vectors.load(self._slots[buffer_id], lora_adapter)
        packed = self.pack(lora_adapter, lora_modules)
        self.fill(packed, buffer_id, lora_adapter.config.r, lambda: self._wrapped(lora_modules))
        if self.embedding_A_buffer or self.lm_head_A_buffer or lora_adapter.embedding_layers:
            for buffer in self._vocabulary:
                buffer[buffer_id].zero_()  # SGLang leaves what the adapter before had beyond this one's
            rest: Any = copy.copy(self)
            rest.num_layer = 0
            _sgl.LoRAMemoryPool.load_lora_weight_to_buffer(rest, uid, buffer_id, lora_adapter, [], *embeddings)

    @property
    def _vocabulary(self) -> list[torch.Tensor]:
        """The slots of the input embedding and the LM head."""
        return [buffer for side in self._sides for buffer in side.values()]

    @property
    def _sides(self) -> tuple[dict[str, torch.Tensor], ...]:
        return self.embedding_A_buffer, self.embedding_B_buffer, self.lm_head_A_buffer, self.lm_head_B_buffer

    def _weight(self, name: str, layer: int) -> Weight:
        return Weight("A" if "lora_A" in name else "B", self._kind(name), layer)

    def _kind(self, name: str) -> str:
        return kind_in_pool(name, self.target_modules)

    def _wrapped(self, lora_modules: Layers) -> set[Weight]:
        """The matrices that layers of this model read."""
        return {
            Weight(side, self._kind(name), number)
            for number, layer in enumerate(lora_modules)
            for name in with_linears(layer)
            for side in "AB"
        }


def kind_in_pool(name: str, target_modules: Collection[str]) -> str:
    """The pool's name for the kind of a module, or of a weight of one.

    Raises:
        ValueError: it is of none of these kinds.
    """
    return str(_sgl.get_target_module_name(name, target_modules)) + (EXPERTS if is_expert(name) else "")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        *(other.data_ptr(), other.dtype, other.shape, other.stride()),
    )


def not_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether any of these is a NaN or an infinity: a bool on their device. Bytes are e4m3, which has NaNs alone."""
    if values.dtype == torch.uint8:
        return _is_nan(values).any()
    low, high = torch.aminmax(values)
    return ~torch.isfinite(low * 0 + high * 0)


def _finite(values: torch.Tensor) -> None:
    """Put zeros for NaNs and infinities."""
    if values.dtype == torch.uint8:
        values.masked_fill_(_is_nan(values), 0)
    else:
        torch.nan_to_num(values, 0.0, 0.0, 0.0, out=values)


def _is_nan(numbers: torch.Tensor) -> torch.Tensor:
    """Of e4m3 numbers as bytes."""
    return (numbers & 0x7F) == 0x7F


def _spoil(matrix: torch.Tensor, spoiled: torch.Tensor) -> None:
    """Put a NaN into a matrix, if ``spoiled``; nothing waits for that."""
    nan = 0x7F if matrix.dtype == torch.uint8 else torch.nan
    matrix[0, 0] = torch.where(spoiled, nan, matrix[0, 0])


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
