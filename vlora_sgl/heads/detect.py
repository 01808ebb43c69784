"""What is where: class, objectness and box from every image token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_iou

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.base import Grid, VisionHead

_LARGEST_LOG_SIZE = 4.0
"""Sizes are decoded as e^min(t, 4) cells, about 55, so that an untrained head cannot overflow."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """The objects of one image: ``boxes`` [n, 4] as x1, y1, x2, y2 in pixels, ``labels`` [n] as label indices."""

    boxes: Tensor
    labels: Tensor


class DetectHead(VisionHead):
    """A dense head: each image token predicts at most one object.

    Raw outputs per cell: objectness, then the labels' logits, then (tx, ty, tw, th). The centre is
    ``cell centre + t cells``, the size ``exp(t)`` cells.

    Args:
        name: what requests call it.
        hidden_size: width of the hidden states.
        labels: classes of objects.
        threshold: least score (objectness times class probability) of an answer.
        overlap: of two boxes of one class that overlap more than this (intersection over union), the weaker goes.
    Raises:
        HeadError: a threshold or an overlap outside (0, 1).
    """

    kind = "detect"
    features = "image_tokens"
    metric_name = "f1 at IoU 0.5"

    def __init__(
        self, name: str, hidden_size: int, labels: Sequence[str], threshold: float = 0.5, overlap: float = 0.5
    ) -> None:
        for what, value in (("threshold", threshold), ("overlap", overlap)):
            if not 0 < value < 1:
                raise HeadError(f"head {name!r}: {what} must lie between 0 and 1, got {value}")
        super().__init__(name, hidden_size, labels)
        self.threshold, self.overlap = threshold, overlap

    @property
    def outputs(self) -> int:
        """Objectness, labels, four box numbers."""
        return 1 + len(self.labels) + 4

    def decode(self, raw: Tensor, grid: Grid) -> Tensor:
        """Boxes in pixels of the model's input image, [cells, 4] as x1, y1, x2, y2, from raw [cells, outputs]."""
        centre = _centres(grid, raw.device) + grid.cell * raw[:, -4:-2]
        half = grid.cell * raw[:, -2:].clamp(max=_LARGEST_LOG_SIZE).exp() / 2
        return torch.cat([centre - half, centre + half], dim=-1)

    def loss(self, raw: Tensor, target: tuple[Boxes, Grid]) -> Tensor:
        """Objectness, class and box loss of one image's [cells, outputs].

        An object belongs to the cell that holds its centre; of two in one cell, the first.
        """
        objects, grid = target
        objectness = torch.zeros(grid.cells, device=raw.device)
        box_loss = class_loss = raw.sum() * 0.0
        if len(objects.boxes):
            centre = (objects.boxes[:, :2] + objects.boxes[:, 2:]) / 2
            column = (centre[:, 0] / grid.cell).long().clamp(0, grid.columns - 1)
            row = (centre[:, 1] / grid.cell).long().clamp(0, grid.rows - 1)
            cell = (row * grid.columns + column).tolist()
            first = sorted({c: i for i, c in reversed(list(enumerate(cell)))}.values())
            chosen = torch.tensor([cell[i] for i in first], device=raw.device)
            objectness[chosen] = 1.0
            class_loss = torch.nn.functional.cross_entropy(raw[chosen, 1:-4], objects.labels[first])
            # On the numbers before decoding: a linear head then has a convex problem, and no size can vanish.
            size = (objects.boxes[:, 2:] - objects.boxes[:, :2]).clamp(min=1) / grid.cell
            offset = (centre - _centres(grid, raw.device)[cell]) / grid.cell
            box_loss = torch.nn.functional.smooth_l1_loss(
                raw[chosen, -4:], torch.cat([offset, size.log()], dim=-1)[first]
            )
        # Most cells are empty: weight the few that are not so that neither side drowns the other.
        weight = (grid.cells - objectness.sum()).clamp(min=1) / objectness.sum().clamp(min=1)
        presence = torch.nn.functional.binary_cross_entropy_with_logits(
            raw[:, 0], objectness, pos_weight=weight.sqrt()
        )
        return presence + class_loss + box_loss

    def postprocess(self, raw: Tensor, grid: Grid | None = None) -> JsonDict:
        """``boxes``, best first, each with ``label``, ``score``, ``box`` and ``pixels``; and ``image_size``.

        ``pixels`` are x1, y1, x2, y2 in the model's input image, whose width and height are ``image_size``; ``box`` is
        the same as fractions of it.

        Raises:
            HeadError: no grid, or one of another number of cells.
        """
        if grid is None or raw.shape[0] != grid.cells:
            raise HeadError(f"head {self.name!r} got {raw.shape[0]} cells for the grid {grid}")
        class_probability, label = raw[:, 1:-4].softmax(-1).max(-1)
        score = raw[:, 0].sigmoid() * class_probability
        size = (grid.columns * grid.cell, grid.rows * grid.cell)
        boxes = self.decode(raw, grid).clamp(min=0)
        boxes = torch.minimum(boxes, boxes.new_tensor([*size, *size]))
        likely = (score >= self.threshold).nonzero().flatten()
        kept = likely[batched_nms(boxes[likely], score[likely], label[likely], self.overlap)]
        return {
            "kind": self.kind,
            "image_size": list(size),
            "boxes": [
                {
                    "label": self.labels[label[i]],
                    "score": score[i].item(),
                    "box": (boxes[i] / boxes.new_tensor([*size, *size])).tolist(),
                    "pixels": boxes[i].tolist(),
                }
                for i in kept.tolist()
            ],
        }

    def metric(self, answers: Sequence[JsonDict], targets: Sequence[Any]) -> float:
        """F1 of objects over all images: found means the same label and an overlap of at least 0.5."""
        found = predicted = wanted = 0
        for answer, target in zip(answers, targets, strict=True):
            predicted, wanted = predicted + len(answer["boxes"]), wanted + len(target.boxes)
            free = set(range(len(target.boxes)))
            for item in answer["boxes"]:
                overlaps = box_iou(torch.tensor([item["pixels"]]), target.boxes)[0] if len(target.boxes) else []
                match = [i for i in free if overlaps[i] >= 0.5 and self.labels[target.labels[i]] == item["label"]]
                if match:
                    free.discard(max(match, key=lambda i: overlaps[i].item()))
                    found += 1
        return 2 * found / (predicted + wanted) if predicted + wanted else 1.0

    def settings(self) -> JsonDict:
        """Name, kind, labels, threshold, overlap."""
        return {**super().settings(), "threshold": self.threshold, "overlap": self.overlap}


def _centres(grid: Grid, device: torch.device) -> Tensor:
    rows, columns = torch.meshgrid(
        torch.arange(grid.rows, device=device), torch.arange(grid.columns, device=device), indexing="ij"
    )
    return (torch.stack([columns, rows], dim=-1).reshape(-1, 2) + 0.5) * grid.cell
