"""Image encoders whose linear layers get the rows of one image after the other, and how many rows an image has.

Rows of an encoder's blocks are patches, and a class token where there is one; the projector behind it has fewer. Where
an item is several tiles, or frames, their rows lie behind each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import MultimodalDataItem

Rows = tuple[int, int]
"""Of an image: in the encoder's blocks, and in its projector."""

QWEN = ("Qwen2VisionTransformer", "Qwen2_5_VisionTransformer", "Qwen3VLMoeVisionModel")
INTERN = "InternVisionModel"
SERVED = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL, or LLaVA with a CLIP tower"


@dataclass(frozen=True)
class Encoder:
    """A model's image encoder.

    Attributes:
        module: SGLang's.
        rows: of each image, tile or frame of an item of ``"image"`` or ``"video"``; none of one that comes encoded.
    """

    module: nn.Module
    rows: Callable[[MultimodalDataItem, str], Sequence[Rows]]


def encoder_of(model: Any) -> Encoder | None:
    """The encoder of a model of SGLang's, or ``None`` if it is none that is known."""
    encoder: Any = getattr(model, "visual", None)
    if _sgl.is_a(encoder, *QWEN):
        unit = int(encoder.spatial_merge_size) ** 2
        return Encoder(encoder, lambda item, kind: [(n, n // unit) for n in _patches(item, kind)])
    encoder = getattr(model, "vision_model", None)
    if _sgl.is_a(encoder, INTERN) and hasattr(model, "mlp1"):
        tile = int(encoder.embeddings.num_positions), int(model.num_image_token)
        return Encoder(encoder, lambda item, _: [tile] * _tiles(item.feature))
    if hasattr(model, "rows_of"):  # a model of ours
        return Encoder(model.vision_tower, lambda item, _: model.rows_of(item))
    return None


def _tiles(feature: Any) -> int:
    return len(feature) if feature.ndim == 4 else 0


def _patches(item: MultimodalDataItem, kind: str) -> list[int]:
    return [math.prod(grid) for grid in item.model_specific_data[f"{kind}_grid_thw"].tolist()]
