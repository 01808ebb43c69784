"""Where a run computes: its device, and its place among the processes that train together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import PartialState

    from vlora_sgl.generate.config import RunConfig


def device_of(config: RunConfig) -> torch.device:
    """The device that a run asks for."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def processes_of(config: RunConfig) -> PartialState:
    """Accelerate's view of the processes of this run: one alone, or those that a launcher started."""
    from accelerate import PartialState

    return PartialState(cpu=device_of(config).type == "cpu")
