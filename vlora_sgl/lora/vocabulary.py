"""Adapters on the vocabulary: the input embedding and the LM head, in SGLang's wrappers for ATMM's routing.

Their slots are SGLang's buffers, there only where ``--lora-target-modules``, or an adapter of the start, names
``embed_tokens`` or ``lm_head``; else neither layer is wrapped. They are never merged into the weights.

A prefill's LM head sees few of its rows: the last of each request, and those whose log-probabilities are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ForwardBatch
from vlora_sgl.core import AdapterId
from vlora_sgl.errors import AdapterError
from vlora_sgl.kernels.atmm import Routing
from vlora_sgl.kernels.atmm.row_routing import Run
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.invocation import split_row
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.token_rows import EMBEDDING, HEAD, TokenRows


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


def as_lora(
    given: Mapping[str, TokenRows], adapted: Mapping[str, LoraPair], model: nn.Module, layout: BaseLayout
) -> dict[str, LoraPair]:
    """The LoRA that changes the rows of the base model, as it is served, to these: one rank a token.

    Of the input embedding's, A is 1 at the token, and B holds the change; of the LM head's the other way round.
    Where the base model ties the two layers and one has new rows, so has the other.

    Args:
        adapted: the adapter's own LoRA by module.

    Raises:
        AdapterError: a layer has both.
    """
    embedding, head = _layers(model)
    rows = dict(given)
    if EMBEDDING in rows and (head is None or head.weight.data_ptr() == embedding.weight.data_ptr()):
        rows.setdefault(HEAD, rows[EMBEDDING])
    pairs = {}
    for name, new in rows.items():
        if name in adapted:
            raise AdapterError(f"{name} has both LoRA and new rows of tokens; train one of them")
        layer = head if name == HEAD and head is not None else embedding
        pairs[name] = _pair(name, new, _base_rows(layer, new.ids), layout.shapes[EMBEDDING][1])
    return pairs


def _layers(model: nn.Module) -> tuple[Any, Any]:
    """The input embedding, and the LM head if it is another module."""
    modules = [one for one in model.modules() if isinstance(one, _sgl.VocabParallelEmbedding)]
    heads = [one for one in modules if isinstance(one, _sgl.ParallelLMHead)]
    return next(one for one in modules if one not in heads), heads[0] if heads else None


def _base_rows(layer: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """[n, hidden] float32 on the CPU, from all ranks, which load an adapter together."""
    where = torch.tensor(ids, device=layer.weight.device)
    with torch.no_grad():
        return torch.as_tensor(_sgl.VocabParallelEmbedding.forward(layer, where)).float().cpu()


def _pair(name: str, new: TokenRows, base: torch.Tensor, vocabulary: int) -> LoraPair:
    change = new.rows.float() - base
    at = torch.zeros(len(new.ids), vocabulary)
    at[range(len(new.ids)), list(new.ids)] = 1
    return LoraPair(at, change.T, 1.0) if name == EMBEDDING else LoraPair(change, at.T, 1.0)
