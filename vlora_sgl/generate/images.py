"""Image features of a frozen vision tower, computed once per example instead of once per training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PATCHES = 4096
"""Patches that go through the tower at once: about two large pictures, or many small ones."""


class RememberedImages:
    """The features of every example's images, for models whose ``get_image_features`` gives one tensor per image.

    Args:
        model: a transformers image-text-to-text model, without an adapter on its vision tower.
        rows: processed examples; their ``pixel_values`` are read.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[dict[str, Tensor]]) -> None:
        self._inner = model.model
        self._features: list[tuple[Tensor, ...]] = []
        device = next(model.parameters()).device
        for part in _in_parts(rows):
            inputs = {k: torch.cat([row[k] for row in part]).to(device) for k in ("pixel_values", "image_grid_thw")}
            with torch.no_grad():
                found = iter(self._inner.get_image_features(**inputs, return_dict=True).pooler_output)
            self._features += [tuple(next(found).detach() for _ in row["image_grid_thw"]) for row in part]

    @classmethod
    def join(cls, parts: Sequence[tuple[RememberedImages, Sequence[int]]]) -> RememberedImages:
        """The features of the chosen examples of several, one after another."""
        joined = cls.__new__(cls)
        joined._inner = parts[0][0]._inner
        joined._features = [part._features[i] for part, chosen in parts for i in chosen]
        return joined

    @staticmethod
    def possible(model: PreTrainedModel, rows: Sequence[dict[str, Tensor]]) -> bool:
        """Whether the model's features are understood: the Qwen2-VL family, every example with an image."""
        return hasattr(getattr(model, "model", None), "get_image_features") and all(
            "image_grid_thw" in row and "pixel_values" in row for row in rows
        )

    @contextmanager
    def of(self, indices: Sequence[int]) -> Iterator[None]:
        """Within it, the model takes its image features from the examples ``indices`` instead of its vision tower."""
        images = tuple(feature for i in indices for feature in self._features[i])
        self._inner.get_image_features = lambda *args, **kwargs: SimpleNamespace(pooler_output=images)
        try:
            yield
        finally:
            del self._inner.get_image_features  # the class's own is back


def _in_parts(rows: Sequence[dict[str, Tensor]]) -> Iterator[list[dict[str, Tensor]]]:
    """Rows in order, together while they have no more than ``_PATCHES`` patches."""
    part: list[dict[str, Tensor]] = []
    patches = 0
    for row in rows:
        if part and patches + len(row["pixel_values"]) > _PATCHES:
            yield part
            part, patches = [], 0
        part.append(row)
        patches += len(row["pixel_values"])
    if part:
        yield part
