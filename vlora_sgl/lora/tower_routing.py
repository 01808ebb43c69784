"""Which rows of the image encoder apply which slots: told before each of its calls.

Rows of the encoder are patches, of one image after the other; an image belongs to a request, and a request to an
adapter. Rows of the projectors are fewer, by patches that are merged to one token or a class token that is left out.
So there are two routings of one call, and two backends that keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vlora_sgl._sgl_types import LoRAAdapter, MultimodalDataItem
from vlora_sgl.core import AdapterId, row_pairs
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.kernels.atmm import Pairs
from vlora_sgl.kernels.atmm.row_routing import TILE_ROWS
from vlora_sgl.lora.backend import GRAPH_PAIRS, MANY_ROWS, AtmmBackend, Batch, GraphTables
from vlora_sgl.lora.layout import in_blocks
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.multimodal.encoders import Encoder, Rows
from vlora_sgl.multimodal.vision_graphs import VisionGraphs

Tables = tuple[GraphTables, GraphTables]
"""Of a captured call, those of the patches and those of the tokens."""


class TowerSlots(Protocol):
    """What there is of the vision tower in a slot (``lora.tower.Tower``)."""

    @property
    def merged(self) -> AdapterId: ...
    def holds(self, adapter: str, slot: int) -> bool: ...


class TowerBackend(AtmmBackend):
    """The operator for layers whose input has more dimensions than two."""

    def linear(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        """As ``AtmmBackend.linear``, of x [..., K]."""
        return super().linear(x.reshape(-1, x.shape[-1]), *operands).view(*x.shape[:-1], -1)

    def add(self, y: torch.Tensor, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        """As ``AtmmBackend.add``, of x [..., K] and y [..., N]."""
        return super().add(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), *operands).view(y.shape)

    def silu_and_mul(self, y: torch.Tensor, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        """As ``AtmmBackend.silu_and_mul``, of x [..., K] and y [..., 2 I]."""
        answer = super().silu_and_mul(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), *operands)
        return answer.view(*y.shape[:-1], -1)


class TowerRouting:
    """The routing of one encoder call after the other.

    Args:
        rows: the language model's slots; those of the tower have the same numbers.
        tower: its slots.
        encoder: that is called.
        device: that it runs on.

    Attributes:
        graphs: captured encoders, if there are any.
    """

    def __init__(self, rows: RowRouting, tower: TowerSlots, encoder: Encoder, device: torch.device) -> None:
        self._rows, self._tower, self.encoder, self._device = rows, tower, encoder, device
        self._patches, self._tokens = (TowerBackend(rows.slots, device) for _ in range(2))
        self._applied: Sequence[tuple[Pairs, Rows]] = ()
        self.graphs: VisionGraphs | None = None

    def backend_of(self, name: str) -> TowerBackend:
        """The backend of a module, by its canonical name."""
        return self._patches if in_blocks(name) else self._tokens

    def pairs_of(self, adapter: AdapterId) -> Pairs:
        """What an image of this adapter applies; of ``None``, and of adapters without weights for the tower, as well.

        Raises:
            UnknownAdapterError: an adapter that it needs is in no slot.
        """
        pairs = []
        for uid, weight in row_pairs(adapter, self._tower.merged):
            slot = self._rows.slot_of(uid)
            if not self._tower.holds(uid, slot):
                raise UnknownAdapterError(uid, ())
            pairs.append((slot, weight))
        return tuple(pairs)

    @contextmanager
    def encoding(self, items: Sequence[MultimodalDataItem], kind: str) -> Iterator[None]:
        """While this lasts, the encoder is called with these images.

        Args:
            items: with their adapter's id as ``vlora_adapter``, where that has weights for the tower.
            kind: ``"image"`` or ``"video"``.
        """
        applied = [(self.pairs_of(adapter_of(item)), rows) for item in items for rows in self.encoder.rows(item, kind)]
        if not any(pairs for pairs, _ in applied):
            yield
            return
        self._applied = applied
        if self.graphs is None:
            self.route()
        try:
            yield
        finally:
            self._applied = ()
            self._reset()

    @property
    def images(self) -> Sequence[Pairs]:
        """What each image of the present call applies; empty where none applies anything."""
        return [pairs for pairs, _ in self._applied]

    def route(self) -> None:
        """Have the layers apply it: for an encoder that replays no graphs, which read tables of their own."""
        for place, backend in enumerate((self._patches, self._tokens)) if self._applied else ():
            backend.route(*self._rows.tables_of([(pairs, rows[place]) for pairs, rows in self._applied], size_of))

    def _reset(self) -> None:
        self._patches.reset_batch_state()
        self._tokens.reset_batch_state()

    # Graphs of images of one size (``multimodal.vision_graphs``)

    def applied_by(self, items: Sequence[MultimodalDataItem]) -> list[Pairs] | None:
        """What each image of these items would apply now; ``None`` if an adapter that they need is in no slot."""
        try:
            return [self.pairs_of(adapter_of(item)) for item in items for _ in self.encoder.rows(item, "image")]
        except UnknownAdapterError:
            return None

    def fit(self, applied: Sequence[Pairs]) -> bool:
        """Whether the tables of a graph have room for images that apply this."""
        return max(map(len, applied)) <= GRAPH_PAIRS and len(set(applied)) <= 2 * self._rows.slots

    def tables(self, rows: Rows, pairs: int) -> Tables:
        """Tables at fixed addresses, for graphs of images that have so many rows together and apply so many slots."""
        places = range(self._rows.slots)
        blocks = (TILE_ROWS[True] if count >= MANY_ROWS else None for count in rows)
        made = (
            GraphTables(count, places, self._device, block, pairs=pairs)
            for count, block in zip(rows, blocks, strict=True)
        )
        first, second = made
        return first, second

    def refresh(self, tables: Tables, applied: Sequence[Pairs]) -> None:
        """Write what each image applies to the tables of their graph; all of them have as many rows."""
        for one in tables:
            rows = one.max_rows // len(applied)
            one.refresh(*self._rows.tables_of([(pairs, rows) for pairs in applied], size_of)[:3])

    @contextmanager
    def reading(self, tables: Tables | None) -> Iterator[None]:
        """While this lasts, the layers read these tables, as those of a captured graph will; without any, the base."""
        backends = self._patches, self._tokens
        before = [backend.batch_info for backend in backends]
        for backend, one in zip(backends, tables or (None, None), strict=True):
            backend.reset_batch_state()
            if one is not None:
                backend.batch_info = Batch(one.routing(one.max_rows), in_graph=True, prefill=True)
        try:
            yield
        finally:
            for backend, info in zip(backends, before, strict=True):
                backend.batch_info = info

    def forget_graphs(self) -> None:
        """Drop the graphs that read slots which are about to go."""
        if self.graphs is not None:
            self.graphs.forget_adapted()


class Feed:
    """Stands in the place of a method of SGLang's models that encodes images, or videos.

    Args:
        encode: the model's method.
        routing: told of the items.
    """

    def __init__(self, encode: Callable[[Sequence[MultimodalDataItem]], Any], routing: TowerRouting) -> None:
        self._encode, self._routing = encode, routing
        # SGLang asks whose method it is, to know whether the features have to be moved to the device first.
        self.__self__, self.__name__ = getattr(encode, "__self__", None), getattr(encode, "__name__", "")
        self._kind = "video" if "video" in self.__name__ else "image"

    def __call__(self, items: Sequence[MultimodalDataItem]) -> Any:
        """As the method."""
        with self._routing.encoding(items, self._kind):
            return self._encode(items)


def adapter_of(item: MultimodalDataItem) -> AdapterId:
    """The adapter that an image is to be encoded with; ``None``: as the base model does."""
    return getattr(item, "vlora_adapter", None)


def size_of(adapter: LoRAAdapter) -> tuple[int, float, bool]:
    """Rank and scaling of an adapter in the vision tower, where none has vectors."""
    return adapter.tower.rank, adapter.tower.scale, False
