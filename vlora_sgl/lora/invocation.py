"""Rows before an adapter's invocation start run on the base model: a batch as its LoRA backend should see it.

A row of a prefill batch whose invocation start lies inside it becomes two: one of the base model and one of the
adapter. Every backend reads the batch by rows and their lengths, so none has to know.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from vlora_sgl._sgl_types import ForwardBatch
from vlora_sgl.core import AdapterId


def split_row(adapter: AdapterId, start: int, length: int, invocation_start: int) -> list[tuple[AdapterId, int]]:
    """``(adapter, tokens)`` of a row that holds positions ``[start, start + length)`` of a prompt.

    >>> split_row("x", 10, 5, 0), split_row("x", 10, 5, 12), split_row("x", 10, 5, 15)
    ([('x', 5)], [(None, 2), ('x', 3)], [(None, 5)])
    """
    before = min(max(invocation_start - start, 0), length)
    return [part for part in ((None, before), (adapter, length - before)) if part[1]]


def split_batch(forward_batch: ForwardBatch, invocation_starts: Sequence[int]) -> ForwardBatch:
    """The batch with every row split at its invocation start; the batch itself where no row has anything to split.

    Args:
        forward_batch: SGLang's ``ForwardBatch`` of a prefill; not changed.
        invocation_starts: first position with the adapter, per row; empty for a batch behind all of them.
    """
    adapters = forward_batch.lora_ids
    if not any(invocation_starts) or not any(
        invocation_start and adapter is not None
        for adapter, invocation_start in zip(adapters, invocation_starts, strict=True)
    ):
        return forward_batch
    view = copy.copy(forward_batch)
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    parts = [
        part
        for adapter, start, length, invocation_start in zip(adapters, starts, lengths, invocation_starts, strict=True)
        for part in split_row(adapter, int(start), int(length), invocation_start)
    ]
    view.lora_ids = [adapter for adapter, _ in parts]
    view.batch_size = len(parts)
    view.extend_seq_lens_cpu = [length for _, length in parts]
    old = forward_batch.extend_seq_lens
    view.extend_seq_lens = torch.tensor(view.extend_seq_lens_cpu, dtype=old.dtype).to(old.device, non_blocking=True)
    return view
