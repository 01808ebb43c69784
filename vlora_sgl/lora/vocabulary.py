"""Adapters on the vocabulary: the input embedding and the LM head, in SGLang's wrappers for ATMM's routing.

Their slots are SGLang's buffers, there only where ``--lora-target-modules``, or an adapter of the start, names
``embed_tokens`` or ``lm_head``; else neither layer is wrapped. They are never merged into the weights.

A prefill's LM head sees few of its rows: the last of each request, and those whose log-probabilities are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ForwardBatch
from vlora_sgl.core import AdapterId
from vlora_sgl.kernels.atmm import Routing
from vlora_sgl.kernels.atmm.row_routing import Run
from vlora_sgl.lora.invocation import split_row


class AtmmEmbedding(_sgl.VocabParallelEmbeddingWithLoRA):
    """The input embedding of tokens, and of each row's adapters: ``E[t] + s B A[:, t]``.

    Under tensor parallelism every rank holds the adapters' part whole, and the base layer has been reduced before.
    """

    base_layer: Any
    lora_backend: Any
    lora_active: bool
    embedding_A_buffer: torch.Tensor
    embedding_B_buffer: torch.Tensor

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        ids = input_.clamp(max=self.vocab_size - 1)  # what an image stands for; its embeddings replace these rows
        y: torch.Tensor = self.base_layer.forward(ids)
        if self.lora_active:
            self.lora_backend.embed(y, ids, self.embedding_A_buffer, self.embedding_B_buffer)
        return y


class AtmmLMHead(_sgl.ParallelLMHeadWithLoRA):
    """The logits, of this rank's part of the vocabulary."""

    lora_backend: Any
    lm_head_A_buffer: torch.Tensor
    lm_head_B_buffer: torch.Tensor

    def apply_lora(self, base_output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the adapters' part to the base layer's logits."""
        b = self.lm_head_B_buffer
        offsets = 0, b.shape[1]
        self.lora_backend.add_to_logits(base_output, hidden_states, self.lm_head_A_buffer, b, offsets)
        return base_output


def embed(y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> None:
    """Add the adapters' part to input embeddings in place, by the host's view of the rows.

    Args:
        y: [M, N]; ids: [M]; a: [S, R, vocabulary]; b: [S, N, R].
    """
    for numbers, pairs in routing.groups:
        if not pairs or not len(numbers):
            continue
        rows = torch.from_numpy(numbers).to(y.device, torch.int64)
        for slot, weight in pairs:
            rank = routing.ranks[slot]
            low = a[slot, :rank, ids[rows]] * (weight * routing.scalings[slot])
            y.index_add_(0, rows, (low.T @ b[slot, :, :rank].T).to(y.dtype))


def embed_in_graph(y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: torch.Tensor) -> None:
    """The same by gates [M, S], for a decode graph: every slot for every row, few as they are.

    What lies in a slot past its adapter's rank must be zero.
    """
    low = a[:, :, ids] * gates.T[:, None, :].to(a.dtype)  # [S, R, M]
    y += torch.bmm(b, low).sum(0).T


def seen_by_head(forward_batch: ForwardBatch, starts: Sequence[int]) -> Iterator[tuple[AdapterId, int]] | None:
    """``(adapter, rows)`` of the rows that a prefill's LM head sees, in order; ``None``: those of the batch.

    Args:
        forward_batch: SGLang's, not split at invocation starts.
        starts: first position with the adapter, per request; empty where it is 0.
    """
    lengths = _sgl.get_lm_head_pruned_lens(forward_batch)
    return None if lengths is None else _parts(forward_batch, lengths, starts or [0] * len(lengths))


def _parts(
    forward_batch: ForwardBatch, lengths: Iterable[int], starts: Iterable[int]
) -> Iterator[tuple[AdapterId, int]]:
    ends = map(sum, zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True))
    for adapter, end, length, start in zip(forward_batch.lora_ids, ends, lengths, starts, strict=True):
        yield from split_row(adapter, int(end) - length, length, start)


def cut(runs: Iterable[Run], first: int, count: int) -> list[Run]:
    """The runs of ``count`` rows from the ``first`` on.

    >>> cut([((), 2), (((1, 1.0),), 3)], 1, 3)
    [((), 1), (((1, 1.0),), 2)]
    """
    found, at = [], 0
    for pairs, rows in runs:
        inside = min(at + rows, first + count) - max(at, first)
        if inside > 0:
            found.append((pairs, inside))
        at += rows
    return found
