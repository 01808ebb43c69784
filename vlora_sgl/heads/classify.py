"""Closed-set questions: one of several labels. Yes/no is two labels; a video's action, a label over its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlora_sgl.core import JsonDict
from vlora_sgl.heads.base import Grid, VisionHead


class ClassifyHead(VisionHead):
    """One label per request, from the last token. Targets are label indices, int64 [rows]."""

    kind = "classify"
    metric_name = "accuracy"

    def loss(self, raw: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of [rows, labels] against label indices [rows]."""
        return torch.nn.functional.cross_entropy(raw, target)

    def metric(self, answers: Sequence[JsonDict], targets: Sequence[Any]) -> float:
        """Share of answers whose label is the target (an index, or a label)."""
        wanted = [t if isinstance(t, str) else self.labels[int(t)] for t in targets]
        return sum(a["label"] == w for a, w in zip(answers, wanted, strict=True)) / len(wanted)

    def postprocess(self, raw: Tensor, grid: Grid | None = None) -> JsonDict:
        """``label``, its ``probability``, and all ``labels`` with their ``probabilities``."""
        probabilities = raw.softmax(-1).tolist()
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return {
            "kind": self.kind,
            "label": self.labels[best],
            "probability": probabilities[best],
            "labels": list(self.labels),
            "probabilities": probabilities,
        }
