"""The contract of a vision head: a linear layer on hidden states, with its loss, its metric and its answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import HeadError

Features = Literal["last_token", "image_tokens"]
"""Which post-norm hidden states a head reads: the prompt's last token, or every token of an image."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The image tokens of one image: ``rows`` x ``columns`` cells of ``cell`` x ``cell`` pixels, row by row."""

    rows: int
    columns: int
    cell: int

    @property
    def cells(self) -> int:
        """Number of image tokens."""
        return self.rows * self.columns


class VisionHead(nn.Module):
    """One head: ``raw = x W^T + b`` in float32, on post-norm hidden states (the tensor that the LM head reads).

    float32 because a head is thousands of times smaller than the model: its rounding is not worth saving, and answers
    then do not depend on which other heads are in the batch.

    Args:
        name: what requests call it; unique within an adapter.
        hidden_size: width of the hidden states.
        labels: class names, in the order of the outputs.
    Raises:
        HeadError: labels that are missing or repeated.
    """

    kind: ClassVar[str]
    features: ClassVar[Features] = "last_token"
    metric_name: ClassVar[str]

    def __init__(self, name: str, hidden_size: int, labels: Sequence[str]) -> None:
        super().__init__()
        if not labels or len(set(labels)) != len(labels):
            raise HeadError(f"head {name!r}: labels must be distinct and at least one, got {list(labels)}")
        self.name = name
        self.hidden_size = hidden_size
        self.labels = tuple(labels)
        self.linear = nn.Linear(hidden_size, self.outputs, dtype=torch.float32)

    @property
    def outputs(self) -> int:
        """Outputs per row; one per label unless a subclass says otherwise."""
        return len(self.labels)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [rows, hidden], any float dtype. Returns [rows, outputs], float32."""
        return self.linear(x.float())

    @abstractmethod
    def loss(self, raw: Tensor, target: Any) -> Tensor:
        """Mean training loss of raw outputs against targets of the head's own kind."""

    @abstractmethod
    def metric(self, answers: Sequence[JsonDict], targets: Sequence[Any]) -> float:
        """Quality of answers, between 0 and 1, higher is better (``metric_name`` says which)."""

    @abstractmethod
    def postprocess(self, raw: Tensor, grid: Grid | None = None) -> JsonDict:
        """The answer of one request, ready for JSON, from its raw outputs.

        Args:
            raw: [outputs] of a last-token head; [cells, outputs] of one image for a dense head. On the CPU.
            grid: the image's cells, for a dense head.
        """

    def settings(self) -> JsonDict:
        """What ``vlora_adapter.json`` says of this head, beside its weights."""
        return {"name": self.name, "kind": self.kind, "labels": list(self.labels)}


def grouped_linear(x: Tensor, heads: Sequence[VisionHead]) -> list[Tensor]:
    """Row i through its own head, all rows in one matrix product.

    The distinct heads' weights are stacked (they are small) and every row takes its head's columns.

    Args:
        x: [rows, hidden].
        heads: the head of each row.
    Returns:
        one [outputs of heads[i]] per row, float32, views of one tensor.
    """
    distinct = list(dict.fromkeys(heads))
    weight = torch.cat([head.linear.weight for head in distinct])
    bias = torch.cat([head.linear.bias for head in distinct])
    raw = torch.nn.functional.linear(x.float(), weight, bias)
    starts, end = {}, 0
    for head in distinct:
        starts[head], end = end, end + head.outputs
    return [raw[row, starts[head] : starts[head] + head.outputs] for row, head in enumerate(heads)]
