"""Image encoders in parts: what is known as soon as the size of images is, and what the device then computes.

An encoder's code computes positions, windows and lengths on the host, from the size of its images alone, copies them
to the device and waits for some of them. Its blocks are given them by name. So one eager run that notes what the
blocks are given tells all that a run of other images of that size needs; ``Parts`` computes that with no word from the
host, so it can be captured. What depends on weights is no constant: they may be replaced while a server runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vlora_sgl import seams
from vlora_sgl._sgl_types import MultimodalDataItem, VisionAttention
from vlora_sgl.multimodal.encoders import Rows

Grid = tuple[int, ...]
"""The size of an image: [frames, height, width] in patches where it comes cut into patches (of a video too), else
[channels, height, width] in pixels. A tile counts as an image."""

Given = Sequence[dict[str, Any]]
"""What each block is given beside the hidden states."""


class Structure(ABC):
    """An encoder with the method that is called with images, and how its forward is put together.

    Args:
        owner: the object with that method.
        encoder: SGLang's module, with ``device`` and ``dtype``.
        blocks: of the encoder.

    Attributes:
        method: its name.
        patch_embed: the layer that embeds patches, where images come cut into them.
        attentions: of the blocks.
    """

    method: str
    patch_embed: Any = None
    attentions: Sequence[VisionAttention] = ()

    def __init__(self, owner: Any, encoder: Any, blocks: Sequence[Any]) -> None:
        self.owner, self.encoder, self.blocks = owner, encoder, blocks

    @property
    def device(self) -> torch.device:
        return torch.device(self.encoder.device)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.encoder.dtype
        return found

    @abstractmethod
    def grids(self, x: torch.Tensor, grid_thw: Any = None) -> list[Grid] | None:
        """The images of a call of the method with these arguments; ``None`` if the host does not know."""

    @abstractmethod
    def grids_of(self, item: MultimodalDataItem) -> list[Grid]:
        """The images of an item of images; none if it comes encoded."""

    @abstractmethod
    def shape(self, grid: Grid, count: int) -> tuple[int, ...]:
        """The shape of ``x`` with so many images of this size; images follow each other in the first dimension."""

    @abstractmethod
    def rows(self, grid: Grid) -> Rows:
        """Of an image of this size."""

    @abstractmethod
    def common(self) -> list[Grid]:
        """Sizes that are likely to come."""

    def rest(self, grid: Grid, count: int) -> tuple[Any, ...]:
        """What the method is called with behind ``x``."""
        return ()

    def constants(self, grid: Grid, count: int) -> Any:
        """What so many images of this size need beside what their blocks are given."""
        return None

    @abstractmethod
    def run(self, x: torch.Tensor, given: Given, constants: Any) -> torch.Tensor:
        """As the method, of images on the device in ``dtype``: work of the device alone."""


@dataclass(frozen=True)
class Parts:
    """An encoder's method for so many images of one size.

    Attributes:
        given, constants: on the device. A graph of this holds their addresses, not them.
    """

    structure: Structure
    given: Given
    constants: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.structure.run(x, self.given, self.constants)


def parts_of(
    structure: Structure, method: Callable[..., torch.Tensor], x: torch.Tensor, grid: Grid, count: int
) -> tuple[torch.Tensor, Parts]:
    """The parts of an encoder for so many images of this size, and what ``x`` becomes in an eager run.

    Args:
        method: the encoder's own.
        x: such images.
    """
    given: list[dict[str, Any]] = []

    def noted(block: Callable[..., torch.Tensor], *args: object, **named: object) -> torch.Tensor:
        given.append(named)
        return block(*args, **named)

    with ExitStack() as stack:
        for block in structure.blocks:
            forward = partial(noted, block.forward)
            stack.enter_context(seams.swapped("Qwen2_5_VisionBlock.forward", block, "forward", forward))
        answer = method(x, *structure.rest(grid, count))
    return answer, Parts(structure, given, structure.constants(grid, count))
