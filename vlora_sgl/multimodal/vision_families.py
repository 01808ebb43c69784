"""The structures of the encoders of SGLang's models, and of ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import MultimodalDataItem
from vlora_sgl.multimodal.encoders import INTERN, Rows
from vlora_sgl.multimodal.vision_structures import Given, Grid, Structure

COMMON = ((224, 224), (336, 336), (448, 448), (512, 512), (480, 640), (640, 480))
"""Height and width of images that any client may send, in pixels."""


class Patches(Structure):
    """Of Qwen models, whose images come cut into patches: ``forward(x [S, pixels], grid_thw [images, 3])``."""

    method = "forward"
    least = 56 * 56
    """Pixels that the processor makes of a smaller image."""

    def __init__(self, encoder: Any) -> None:
        super().__init__(encoder, encoder, encoder.blocks)
        self.patch_embed = encoder.patch_embed
        self.attentions = [block.attn for block in encoder.blocks]

    def grids(self, x: torch.Tensor, grid_thw: Any = None) -> list[Grid] | None:
        known = isinstance(grid_thw, torch.Tensor) and grid_thw.device.type == "cpu"
        return list(map(tuple, grid_thw.tolist())) if known else None

    def grids_of(self, item: MultimodalDataItem) -> list[Grid]:
        return list(map(tuple, item.model_specific_data["image_grid_thw"].tolist()))

    def shape(self, grid: Grid, count: int) -> tuple[int, ...]:
        return count * math.prod(grid), self.patch_embed.proj.weight[0].numel()

    def rows(self, grid: Grid) -> Rows:
        patches = math.prod(grid)
        return patches, patches // self.encoder.spatial_merge_size**2

    def rest(self, grid: Grid, count: int) -> tuple[Any, ...]:
        return (torch.tensor([grid] * count),)

    def common(self) -> list[Grid]:
        patch, merged = self.patch_embed.proj.weight.shape[-1], self.encoder.spatial_merge_size
        sizes = [fitted(*size, unit=patch * merged, least=self.least) for size in COMMON]
        return list(dict.fromkeys((1, height // patch, width // patch) for height, width in sizes))


def fitted(height: int, width: int, unit: int, least: int) -> tuple[int, int]:
    """The size that an image is given before it is cut into patches: whole units, at least so many pixels.

    As ``smart_resize`` of transformers' processors, of images that are not too large.
    """
    found = [max(unit, round(side / unit) * unit) for side in (height, width)]
    if math.prod(found) < least:
        larger = math.sqrt(least / (height * width))
        found = [math.ceil(side * larger / unit) * unit for side in (height, width)]
    return found[0], found[1]


class Qwen2(Patches):
    """Qwen2-VL's."""

    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        hidden = self.encoder.patch_embed(x).unsqueeze(1)
        for block, named in zip(self.blocks, given, strict=True):
            hidden = block(hidden, **named)
        answer: torch.Tensor = self.encoder.merger(hidden)
        return answer


class Windowed(Patches):
    """Qwen2.5-VL's: most blocks attend within windows, whose patches are put beside each other."""

    def constants(self, grid: Grid, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged patches by window, and where each is then."""
        order, _ = self.encoder.get_window_index(*self.rest(grid, count))
        order = order.to(self.device)
        return order, torch.argsort(order)

    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        order, back = constants
        hidden = self.encoder.patch_embed(x)
        rows, unit = len(hidden), self.encoder.spatial_merge_unit
        hidden = hidden.reshape(rows // unit, unit, -1)[order].reshape(rows, 1, -1)
        for block, named in zip(self.blocks, given, strict=True):
            hidden = block(hidden, **named)
        answer: torch.Tensor = self.encoder.merger(hidden)[back]
        return answer


class Deepstack(Patches):
    """Qwen3-VL's, with experts or without: positions are added to patches, and inner states are embeddings too."""

    least = 256 * 256

    def constants(self, grid: Grid, count: int) -> tuple[Grid, int]:
        return grid, count

    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        encoder, (grid, count) = self.encoder, constants
        hidden = encoder.patch_embed(x)
        # Interpolated from weights, by the device alone. SGLang's other way, for many images, waits for the device; it
        # gives the same.
        hidden += encoder.fast_pos_embed_interpolate_from_list([grid]).repeat(count, 1)
        inner: list[torch.Tensor] = []
        hidden = hidden.unsqueeze(1)
        for number, (block, named) in enumerate(zip(self.blocks, given, strict=True)):
            hidden = block(hidden, **named)
            if number in encoder.deepstack_visual_indexes:  # now: the next block changes its input in place
                inner.append(encoder.deepstack_merger_list[len(inner)](hidden))
        return torch.cat([encoder.merger(hidden), *inner], dim=1)


class Tiles(Structure):
    """Encoders of whole images of one size, or tiles of images: ``extract_feature(x [images, 3, height, width])``."""

    method = "extract_feature"
    side: int
    """Pixels across an image."""

    def grids(self, x: torch.Tensor, grid_thw: Any = None) -> list[Grid] | None:
        return [tuple(x.shape[1:])] * len(x) if x.ndim == 4 else None

    def grids_of(self, item: MultimodalDataItem) -> list[Grid]:
        found = self.grids(item.feature) if isinstance(item.feature, torch.Tensor) else None
        return found or []

    def shape(self, grid: Grid, count: int) -> tuple[int, ...]:
        return count, *grid

    def common(self) -> list[Grid]:
        return [(3, self.side, self.side)]


class Intern(Tiles):
    """InternVL's, with the projector behind it."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.vision_model, model.vision_model.encoder.layers)
        self.side = model.vision_model.embeddings.image_size
        self.attentions = [layer.attn.attn for layer in self.blocks]

    def rows(self, grid: Grid) -> Rows:
        patches = math.prod(side // self.encoder.embeddings.patch_size for side in grid[1:])
        return 1 + patches, int(patches * self.owner.downsample_ratio**2)

    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        model = self.owner
        hidden = self.encoder.embeddings(x)
        for block, named in list(zip(self.blocks, given, strict=True))[: self._depth]:
            hidden = block(hidden, **named)
        side = math.isqrt(hidden.shape[1] - 1)
        hidden = hidden[:, 1:].reshape(len(hidden), side, side, -1)
        hidden = model.pixel_shuffle(hidden, scale_factor=model.downsample_ratio)
        answer: torch.Tensor = model.mlp1(hidden.reshape(len(hidden), -1, hidden.shape[-1]))
        return answer

    @property
    def _depth(self) -> int:
        """Blocks before the states that become embeddings."""
        return range(len(self.blocks) + 1)[self.owner.select_layer]


class Clip(Tiles):
    """Our LLaVA's (``multimodal.llava``): where its attention is ours, nothing of it is the host's work."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.vision_tower, ())
        vision = model.vision_tower.vision_model
        self.side = vision.embeddings.image_size
        self.attentions = [layer.self_attn for layer in vision.encoder.layers]
        self._extract = partial(type(model).extract_feature, model)  # also where something stands in its place

    def rows(self, grid: Grid) -> Rows:
        found: Rows = self.owner.rows_of_size(*grid[1:])
        return found

    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        answer: torch.Tensor = self._extract(x)
        return answer


PATCHES: dict[str, Callable[[Any], Structure]] = {
    "Qwen2VisionTransformer": Qwen2,
    "Qwen2_5_VisionTransformer": Windowed,
    "Qwen3VLMoeVisionModel": Deepstack,
}
"""SGLang's encoders, by their names in ``_sgl.NAMES``."""

KNOWN = f"{', '.join(PATCHES)}, {INTERN} or our CLIP tower"


def structure_of(model: Any) -> Structure | None:
    """The structure of a model's image encoder, or ``None`` if it is none that is known."""
    encoder: Any = getattr(model, "visual", None)
    for name, structure in PATCHES.items():
        if _sgl.is_a(encoder, name):
            return structure(encoder)
    if _sgl.is_a(model, "InternVLChatModel") and _sgl.is_a(model.vision_model, INTERN):
        return Intern(model)
    return Clip(model) if hasattr(model, "rows_of_size") else None  # a model of ours


def known_structure(model: Any) -> Structure | str:
    """As ``structure_of``, if it is on a GPU; else why there is none, in words."""
    found = structure_of(model)
    if found is None:
        return f"its image encoder is none of {KNOWN}"
    return found if found.device.type == "cuda" else "its image encoder is not on a GPU"
