"""How many: a class for each count up to N, the last one meaning N or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.base import Grid, VisionHead


class CountHead(VisionHead):
    """A count from the last token. Targets are counts, int64 [rows]; those above the maximum count as it.

    Args:
        name: what requests call it.
        hidden_size: width of the hidden states.
        maximum: N, at least 1; the head has N + 1 outputs.
    Raises:
        HeadError: a maximum below 1.
    """

    kind = "count"
    metric_name = "accuracy"

    def __init__(self, name: str, hidden_size: int, maximum: int) -> None:
        if maximum < 1:
            raise HeadError(f"head {name!r}: the maximum count must be at least 1, got {maximum}")
        self.maximum = maximum
        super().__init__(name, hidden_size, [str(n) for n in range(maximum)] + [f"{maximum} or more"])

    def loss(self, raw: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of [rows, N + 1] against counts [rows]."""
        return torch.nn.functional.cross_entropy(raw, target.clamp(max=self.maximum))

    def metric(self, answers: Sequence[JsonDict], targets: Sequence[Any]) -> float:
        """Share of answers whose count is the target, both capped at N."""
        return sum(a["count"] == min(int(t), self.maximum) for a, t in zip(answers, targets, strict=True)) / len(
            targets
        )

    def postprocess(self, raw: Tensor, grid: Grid | None = None) -> JsonDict:
        """``count`` (the mode), its ``probability``, ``or_more`` (it is N), ``expectation`` (N or more taken as N)."""
        probabilities = raw.softmax(-1).tolist()
        mode = max(range(len(probabilities)), key=probabilities.__getitem__)
        return {
            "kind": self.kind,
            "count": mode,
            "probability": probabilities[mode],
            "or_more": mode == self.maximum,
            "expectation": sum(n * p for n, p in enumerate(probabilities)),
            "labels": list(self.labels),
            "probabilities": probabilities,
        }

    def settings(self) -> JsonDict:
        """Name, kind and maximum; the labels follow from it."""
        return {"name": self.name, "kind": self.kind, "maximum": self.maximum}
