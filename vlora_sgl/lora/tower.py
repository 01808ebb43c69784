"""Slots of the vision tower: adapters of the image encoder and its projector, beside SGLang's of the language model.

SGLang leaves an encoder out of its LoRA layers and its pool. Here its linear layers are wrapped by the same classes,
their slots have the numbers of the language model's, and merging an adapter merges both parts. There are slots for
the kinds of modules that loaded adapters have, as large as the largest rank among them, and none while nobody has any:
then the encoder is SGLang's own. An encoder is some percent of a model, so making other slots, when an adapter comes
that needs them, is a matter of milliseconds, for which the device has to be idle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vlora_sgl import _sgl, seams
from vlora_sgl._sgl_types import LoRAAdapter
from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.errors import AdapterError
from vlora_sgl.kernels.atmm import on_kernels
from vlora_sgl.kernels.merge import MergeTable
from vlora_sgl.lora.layers import layer_class, pair_activations
from vlora_sgl.lora.layout import BaseLayout, is_tower, kind_of
from vlora_sgl.lora.merge_bound import BaseSize, UpdateSize, base_sizes, merge_refusal, update_sizes
from vlora_sgl.lora.merge_targets import largest_of_ranks, merge_targets, why_not_mergeable
from vlora_sgl.lora.mode_switcher import MergeOperand, ModeSwitcher
from vlora_sgl.lora.packed import Packed, Slots, Weight
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.lora.stacking import StackedAdapter
from vlora_sgl.lora.tower_routing import Feed, TowerRouting
from vlora_sgl.multimodal.encoders import SERVED, encoder_of
from vlora_sgl.seams import Place, Places
from vlora_sgl.server_args import SLOT_UNIT

logger = logging.getLogger(__name__)

FEEDS = ("get_image_feature", "get_video_feature")
"""The methods of SGLang's models that are given the images of an encoder call."""

LAYERS, IMAGES = "VisionAttention.qkv_proj", "Qwen2VLForConditionalGeneration.get_image_feature"
ACTIVATIONS = "Qwen2_5_VLMLP.act"
"""Rows of ``plugin.TABLE``."""


def why_not_adapted(model: nn.Module, backend: str) -> str | None:
    """Why adapters of a model's vision tower cannot be served, or ``None`` if they can."""
    encoder = encoder_of(model)
    if encoder is None:
        return f"this model's image encoder is not one of {SERVED}"
    if backend != "atmm":
        return "it needs --lora-backend atmm"
    if getattr(encoder.module, "use_data_parallel", False):
        return "with --mm-enable-dp-encoder the ranks encode images of their own"
    if _sgl.envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get():
        return "SGLang's graphs of the encoder (SGLANG_VIT_ENABLE_CUDA_GRAPH) know no adapters"
    return None


def trained_layout(layout: BaseLayout, model: nn.Module) -> BaseLayout:
    """An engine's layout with the sizes that adapters were trained with.

    SGLang pads the inner size of Qwen2.5-VL's encoder to a multiple of 8 (3,420 of the 7B model).
    """
    config: Any = getattr(getattr(model, "config", None), "vision_config", None)
    inner = getattr(config, "intermediate_size", None)
    if inner is None or not inner % 8:
        return layout
    leaves = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    shapes = dict(layout.shapes)
    for name, shape in layout.shapes.items():
        side = leaves.get(name.rpartition(".")[2])
        if side is not None and is_tower(name) and shape[side] == -(-inner // 8) * 8:
            shapes[name] = (inner, shape[1]) if side == 0 else (shape[0], inner)
    return replace(layout, shapes=shapes)


@dataclass(eq=False)
class TowerWeights:
    """What an adapter has for the vision tower; its ``LoRAAdapter`` keeps it as ``tower``.

    Attributes:
        rank, scale: of every module.
        tensors: as of a ``StackedAdapter``; of this tensor-parallel rank's part once they are packed.
        digest: of all that decides an image's embedding. Equal digests mean interchangeable embeddings.
        update_sizes: see ``merge_bound.update_sizes``.
        packed: the tensors in one piece of host memory.
    """

    rank: int
    scale: float
    tensors: Mapping[str, torch.Tensor]
    digest: str
    update_sizes: Mapping[str, tuple[UpdateSize, ...]]
    packed: Packed | None = None

    @classmethod
    def of(cls, stacked: StackedAdapter, layout: BaseLayout, digest: str) -> TowerWeights:
        """Those of an adapter that was stacked, for an engine with this layout; ``digest`` of what it was read to."""
        return cls(stacked.rank, stacked.scale, stacked.tensors, digest, update_sizes(stacked, layout))

    @property
    def modules(self) -> set[str]:
        """The engine's canonical names of the modules that it has weights for."""
        return {name.rsplit(".", 2)[0] for name in self.tensors}


class Tower(Slots):
    """The tower's slots of one rank.

    Args:
        model: the base model.
        layout: the engine's.
        rows: the language model's slots.
        dtype: of the slots.
        device: of the model.
        copy: where the copy of the encoder's weights lies (``base_copies``), or ``None``: it is never merged.

    Attributes:
        routing: tells the wrapped layers which rows apply which slots.
        switcher: the mode switch of the tower; ``None`` while there are no slots, or nothing can be merged.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: BaseLayout,
        rows: RowRouting,
        dtype: torch.dtype,
        device: torch.device,
        copy: str | None,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.slot_dtype, self.device = model, dtype, dtype, device
        self._slots, self._copy = rows.slots, copy
        self._paths = {name: path for name, path in layout.paths.items() if is_tower(name)}
        encoder = encoder_of(model)
        assert encoder is not None
        self.routing = TowerRouting(rows, self, encoder, device)
        self._feeds = feeds(model)
        self._nothing()

    # Memory

    def provide(self, loaded: Iterable[TowerWeights]) -> None:
        """Have slots for these, and none if there are none; what is merged of the tower leaves it if slots change.

        Raises:
            AdapterError: the device has no room for them. What there was is gone; call it again with less.
        """
        loaded = list(loaded)
        kinds = {kind_of(name) for tower in loaded for name in tower.modules}
        rank = -(-max((tower.rank for tower in loaded), default=0) // SLOT_UNIT) * SLOT_UNIT
        held = {*map(kind_of, self.modules)}
        if (not loaded and held) or kinds - held or rank > self.max_lora_rank:
            self._change(kinds | held if loaded else kinds, max(rank, self.max_lora_rank) if loaded else 0)
        for tower in loaded:
            self.pack(tower)

    def _change(self, kinds: set[str], rank: int) -> None:
        self._wait()  # steps that are under way read the slots, and the layers
        self._remove()
        try:
            self._make(kinds, rank)
        except torch.OutOfMemoryError:
            self._remove()
            raise AdapterError(
                f"no room on the device for {self._slots} slots of rank {rank} of the vision tower; load such an "
                "adapter with --lora-paths, so that the KV cache leaves room for them, or lower --mem-fraction-static"
            ) from None
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _remove(self) -> None:
        """Give the encoder SGLang's layers back, and the memory of all slots."""
        self.restore()
        self.routing.forget_graphs()
        for place in [*(self._place(*one) for one in self._originals.items()), *self._activations, *self._feeds]:
            place.put()
        for layout in self._layouts.values():
            layout.routes.clear()
        self._nothing()

    def _nothing(self) -> None:
        self.A_buffer, self.B_buffer, self.max_lora_rank = {}, {}, 0
        self.modules: dict[str, Any] = {}
        self._originals: dict[str, nn.Module] = {}
        self._activations: list[Place] = []
        self.switcher: ModeSwitcher | None = None
        self.staging = torch.empty(0)
        self._base_sizes: dict[str, tuple[BaseSize, ...]] = {}
        self._held: dict[int, str] = {}
        for row in (LAYERS, ACTIVATIONS, IMAGES):
            seams.record(row, "no loaded adapter has weights for the vision tower")

    def _make(self, kinds: set[str], rank: int) -> None:
        self.max_lora_rank = rank
        if not kinds:
            return
        for name, path in self._paths.items():
            if kind_of(name) in kinds:
                self._originals[name] = self.model.get_submodule(path)
                self.modules[name] = module = wrap(name, self._originals[name], self.routing.backend_of(name))
                base = module.base_layer
                inner = getattr(base, "input_size_per_partition", base.input_size)
                out = getattr(base, "output_size_per_partition", base.output_size)
                self.A_buffer[name] = [self._zeros(rank * parts(name, base), inner)]
                self.B_buffer[name] = [self._zeros(out, rank)]
                module.set_lora_info(self.A_buffer[name][0], self.B_buffer[name][0])
        self.make_staging(sorted(self._everything()), self.device)
        self.switcher = self._make_switcher()
        places = [self._place(name, module) for name, module in self.modules.items()]
        seams.place(LAYERS, places)
        seams.place(ACTIVATIONS, self._pair_activations())
        seams.place(IMAGES, [Place(owner, key, Feed(feed, self.routing)) for owner, key, feed in self._feeds])

    def _pair_activations(self) -> Places:
        """The activations that add what their gate_up leaves them."""
        if not on_kernels(self.device):
            return "it runs on a CPU"
        pairs = pair_activations(self.routing.encoder.module)
        self._activations = [Place(one.owner, one.key, one.value.base_layer) for one in pairs]
        return pairs

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(self._slots, *shape, dtype=self.dtype, device=self.device)

    def _place(self, name: str, module: nn.Module) -> Place:
        owner, _, key = self._paths[name].rpartition(".")
        return Place(self.model.get_submodule(owner), key, module)

    def _everything(self) -> set[Weight]:
        return {Weight(side, name, 0) for name in self.modules for side in "AB"}

    def state(self) -> JsonDict:
        """For ``/server_info``: the rank of the slots, the kinds of modules that they hold, and all their bytes."""
        kinds = sorted({kind_of(name).removeprefix("visual ") for name in self.modules})
        return {"rank": self.max_lora_rank, "modules": kinds, "bytes": self.nbytes}

    # Slots

    def pack(self, tower: TowerWeights) -> None:
        """Lay an adapter's weights out in one piece of host memory, pinned where there is a GPU; once."""
        if tower.packed is not None:
            return
        names = {Weight("A" if "lora_A" in name else "B", name.rsplit(".", 2)[0], 0): name for name in tower.tensors}
        layout = self._layout(sorted(names), tower.rank)
        buffer = torch.zeros(layout.begins[-1], dtype=self.dtype, pin_memory=self.device.type != "cpu")
        views = dict(zip(layout.weights, layout.views(buffer, 0, len(layout.weights)), strict=True))
        for weight, name in names.items():
            module = self.modules[weight.kind]
            cut = module.slice_lora_a_weights if weight.side == "A" else module.slice_lora_b_weights
            views[weight].copy_(cut(tower.tensors[name]))
        tower.tensors = {name: views[weight] for weight, name in names.items()}
        tower.packed = Packed(layout, buffer)

    def fetch(self, adapters: Mapping[str, LoRAAdapter], slots: Mapping[AdapterId, int]) -> None:
        """Fill the slots of adapters that have come to one of the language model's.

        Args:
            adapters: that are loaded, by id.
            slots: of the language model's, by id.
        """
        if not self.modules:
            return
        for uid, slot in slots.items():
            tower = tower_of(adapters.get(uid)) if uid is not None else None
            if uid is not None and tower is not None and tower.packed is not None and self._held.get(slot) != uid:
                self.fill(tower.packed, slot, tower.rank, self._everything)
                self._held[slot] = uid

    def holds(self, adapter: str, slot: int) -> bool:
        """Whether the slot has this adapter's weights."""
        return self._held.get(slot) == adapter

    # Merging

    def _make_switcher(self) -> ModeSwitcher | None:
        reasons = {name: reason for name, module in self.modules.items() if (reason := why_not_mergeable(module))}
        if self._copy is None or reasons:
            for name, reason in list(reasons.items())[:1]:
                logger.warning("the vision tower is never merged: %s: %s", name, reason)
            return None
        entries = [(kind_of(name), name, module) for name, module in self.modules.items()]
        try:
            table = MergeTable(merge_targets(sorted(entries, key=lambda entry: entry[0]), self._copy, {}))
        except torch.OutOfMemoryError:
            logger.warning("the vision tower is never merged: no room on the device for a copy of its weights")
            return None
        table.warm_up(self.max_lora_rank)
        self._base_sizes = base_sizes(table.targets, largest_of_ranks)
        return ModeSwitcher(table)

    def refusal(self, tower: TowerWeights) -> str | None:
        """Why these cannot be merged, or ``None`` if they can."""
        if self.switcher is None:
            return "it has weights for the vision tower, which is never merged"
        return merge_refusal(tower.update_sizes, self._base_sizes, tower.scale, self.dtype)

    def merge(self, adapter: str, tower: TowerWeights | None, slot: int) -> None:
        """Bring the tower's weights to what goes with this merged adapter, on the current stream."""
        if self.switcher is None:
            return
        if tower is None:
            self.switcher.restore()
        else:
            groups = frozenset(map(kind_of, tower.modules))
            self.switcher.merge(MergeOperand(adapter, slot, tower.rank, tower.scale, groups))

    def restore(self) -> None:
        """Bring the base model's weights back, on the current stream."""
        if self.switcher is not None:
            self.switcher.restore()

    def rebase(self) -> None:
        """Take the present weights as the base model's."""
        if self.switcher is not None:
            self.switcher.rebase()
            self._base_sizes = base_sizes(self.switcher.table.targets, largest_of_ranks)

    @property
    def merged(self) -> AdapterId:
        """The adapter merged into the tower, or ``None``."""
        return None if self.switcher is None else self.switcher.merged


def tower_of(adapter: LoRAAdapter | None) -> TowerWeights | None:
    """What an adapter has for the vision tower."""
    return getattr(adapter, "tower", None)


def feeds(model: nn.Module) -> list[Place]:
    """Where a model's methods that encode images are looked up: by name, and by kind of what is encoded."""
    found = [Place(model, name, getattr(model, name)) for name in FEEDS if hasattr(model, name)]
    table: Any = getattr(model, "external_mm_data_embedding_funcs", {})
    return found + [Place(table, *one) for one in table.items() if one[1] in [place.value for place in found]]


def parts(name: str, layer: nn.Module) -> int:
    """Stacked projections of an encoder's linear. A Qwen model's q, k and v were trained as one matrix."""
    if isinstance(layer, _sgl.QKVParallelLinear):
        return 1 if name.endswith(".attn.qkv") else 3
    return len(layer.output_sizes) if isinstance(layer, _sgl.MergedColumnParallelLinear) else 1


def wrap(name: str, layer: nn.Module, backend: Any) -> Any:
    """A linear of the encoder, wrapped for the operator."""
    ours = layer_class(layer)
    assert ours is not None
    wrapped: Any = ours(layer, backend)
    if parts(name, layer) == 1 and hasattr(wrapped, "output_offset_cpu"):
        wrapped.output_offset_cpu = wrapped.output_offset_cpu[[0, -1]]
    return wrapped
