"""What a linear leaves to the activation behind it."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

Operands = TypeVar("Operands")


class DeferredAdapters(Generic[Operands]):
    """What a gate_up linear leaves to the activation behind it: the operands of one output, taken exactly once.

    Whatever else happens to that output is an error, never an answer without its adapter.
    """

    def __init__(self) -> None:
        self._left: tuple[torch.Tensor, Operands] | None = None

    def check_taken(self) -> None:
        """Refuse to go on where an output lacks its adapters.

        Raises:
            RuntimeError: what was left was never taken.
        """
        if self._left is not None:
            raise RuntimeError(
                f"the adapters' part of a gate_up output {tuple(self._left[0].shape)} was never added: the model did "
                "not call the activation that was to add it"
            )

    def leave(self, y: torch.Tensor, operands: Operands) -> None:
        """Leave the adapters' part of ``y``, given by these operands."""
        self.check_taken()
        self._left = y, operands

    def take(self, y: torch.Tensor) -> Operands | None:
        """The operands left for ``y``, or ``None`` where none were left.

        Raises:
            RuntimeError: some were left for another tensor.
        """
        if self._left is None:
            return None
        output, operands = self._left
        if y.data_ptr() != output.data_ptr() or y.shape != output.shape:
            raise RuntimeError(
                f"the activation was to add the adapters' part of a gate_up output {tuple(output.shape)}, but was "
                f"given another tensor {tuple(y.shape)}"
            )
        self._left = None
        return operands
