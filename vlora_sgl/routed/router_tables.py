"""The routers of all loaded routed adapters at fixed addresses, and the routing of a batch's rows by them.

Three ways to one result. ``weights_of`` is plain torch, for a CPU. ``route_prefill`` says the same on a GPU, in a few
launches. ``route_decode`` is one kernel over a batch of decode rows which a CUDA graph can hold: it reads what
``refresh`` wrote and adds to the gates of ATMM's dense tables. Vote totals lie beside the KV cache, one per token
slot, so a prefix found there brings its total along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
import triton

from vlora_sgl.routed import prefill
from vlora_sgl.routed.decode import route_decode_kernel
from vlora_sgl.routed.spec import MODALITIES, RoutedSpec
from vlora_sgl.routed.token_router import MAX_MEMBERS, WIDTH, prefix_totals, quantised, top_weights

BASE = -1  # "member" of a token that runs on the base model


@dataclass(frozen=True)
class RoutedRows:
    """The rows of one routed adapter in a batch; n of them, on the device.

    Attributes:
        index: the routed adapter's place in the tables.
        rows: [n] int64, their numbers in the batch, ascending.
        modality: [n] int64, into ``MODALITIES``.
        first: [n] int64, the position among these rows of their sequence's first.
        request: [n] int64, row of ``req_to_token``.
        prefix: [n] int64, tokens of the sequence before its first row.
    """

    index: int
    rows: torch.Tensor
    modality: torch.Tensor
    first: torch.Tensor
    request: torch.Tensor
    prefix: torch.Tensor


class RouterTables:
    """Room for ``capacity`` routed adapters.

    Args:
        capacity: routed adapters that can be loaded at once.
        hidden, vocabulary: of the base model.
        max_rows: decode rows that a captured graph can route; 0 where ATMM's dense kernels do not run.
    """

    def __init__(self, capacity: int, hidden: int, vocabulary: int, max_rows: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.capacity, self.hidden, self.vocabulary, self.device = capacity, hidden, vocabulary, device
        # W1 transposed: threads of a multiprocessor then read neighbouring words of its shared memory, not one bank's.
        self.w1, self.b1 = zeros(capacity, hidden, WIDTH), zeros(capacity, WIDTH)
        self.w2, self.b2 = zeros(capacity, MAX_MEMBERS, WIDTH), zeros(capacity, MAX_MEMBERS)
        # [X, V] member of every text token, [X, modalities] of every other one; BASE for none.
        self.by_token = zeros(capacity, vocabulary, dtype=torch.int8)
        self.by_modality = zeros(capacity, len(MODALITIES), dtype=torch.int8)
        # [X, 4] int32: members of a learned router (0: routed by table), top_k, whether by prefix, unused.
        self.settings = zeros(capacity, 4, dtype=torch.int32)
        self.specs: dict[int, RoutedSpec] = {}
        self.totals = zeros(0, MAX_MEMBERS, dtype=torch.int64)
        self.req_to_token = zeros(0, 0, dtype=torch.int32)
        # What one decode step changes, in one buffer: the routed adapter of every row; slots and scalings of every
        # routed adapter's members.
        self.max_rows = max_rows
        words = max_rows + 2 * capacity * MAX_MEMBERS
        # In turn: the copy from one may be under way while the scheduler, a step ahead, writes the next.
        pinned = device.type == "cuda"
        self._hosts = cycle([torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(3)])
        self._words = zeros(words, dtype=torch.int32)
        self._words[:max_rows] = BASE

    def bind(self, req_to_token: torch.Tensor, token_slots: int) -> None:
        """Lay the vote totals beside the KV cache of ``token_slots`` slots, found through ``req_to_token``."""
        self.req_to_token = req_to_token
        self.totals = torch.zeros(token_slots, MAX_MEMBERS, dtype=torch.int64, device=self.device)

    def put(self, spec: RoutedSpec) -> int | None:
        """Take a routed adapter in; its place, or ``None`` where there is no room."""
        index = next((i for i in range(self.capacity) if i not in self.specs), None)
        if index is None:
            return None
        self.specs[index] = spec
        table = torch.full((self.vocabulary,), spec.modalities.get("text", BASE), dtype=torch.int8)
        for first, end, member in spec.ranges:
            table[first:end] = member
        self.by_token[index] = table.to(self.device)
        others = torch.tensor([spec.modalities.get(m, BASE) for m in MODALITIES], dtype=torch.int8)
        self.by_modality[index] = others.to(self.device)
        members, router = len(spec.members), spec.router
        learned = (members if router else 0, spec.top_k, int(router is not None and router.context == "prefix"), 0)
        self.settings[index] = torch.tensor(learned, dtype=torch.int32).to(self.device)
        if router is not None:
            self.w1[index], self.b1[index] = router.w1.T.to(self.device), router.b1.to(self.device)
            self.w2[index, :members], self.b2[index, :members] = router.w2.to(self.device), router.b2.to(self.device)
        return index

    def remove(self, index: int) -> None:
        """Forget a routed adapter."""
        del self.specs[index]

    def weights_of(
        self, part: RoutedRows, x: torch.Tensor, ids: torch.Tensor, out_slots: torch.Tensor
    ) -> torch.Tensor:
        """The weight of every member at every row of a routed adapter, [n, members] float32; writes the vote totals.

        Args:
            x: [M, hidden] input embeddings of the batch.
            ids: [M] token ids; of image tokens any number.
            out_slots: [M] KV slots of the batch's tokens.
        """
        spec = self.specs[part.index]
        members = len(spec.members)
        if spec.router is None:
            named = self.by_token[part.index][ids[part.rows].long().clamp(0, self.vocabulary - 1)]
            named = torch.where(part.modality == 0, named, self.by_modality[part.index][part.modality])
            return (named[:, None] == torch.arange(members, device=named.device)).float()
        votes = quantised(spec.router.to(x.device)(x[part.rows]))
        if spec.router.context == "token":
            return top_weights(votes, torch.ones_like(part.rows), spec.top_k)
        last = self.req_to_token[part.request, (part.prefix - 1).clamp(min=0)].long()
        before = self.totals[last, :members] * (part.prefix > 0)[:, None]
        totals = prefix_totals(votes, part.first, before)
        self.totals[out_slots[part.rows], :members] = totals
        place = torch.arange(len(part.rows), device=x.device) - part.first
        return top_weights(totals, part.prefix + place + 1, spec.top_k)

    def route_prefill(
        self, part: RoutedRows, x: torch.Tensor, ids: torch.Tensor, out_slots: torch.Tensor
    ) -> torch.Tensor:
        """What ``weights_of`` does, as kernels."""
        spec, routed, n = self.specs[part.index], part.index, len(part.rows)
        members = len(spec.members)
        weights = torch.empty(n, members, dtype=torch.float32, device=x.device)
        blocks = (triton.cdiv(n, prefill.ROWS),)
        if spec.router is None:
            prefill.table_kernel[blocks](
                weights, part.rows, part.modality, ids, self.by_token, self.by_modality,
                n, routed, members, self.vocabulary,
                MODALITIES=len(MODALITIES), MEMBERS=MAX_MEMBERS, ROWS=prefill.ROWS,
            )  # fmt: skip
            return weights
        splits = min(prefill.SPLITS, triton.cdiv(self.hidden, prefill.PROJECT_BLOCK))
        size = triton.cdiv(self.hidden, splits * prefill.PROJECT_BLOCK) * prefill.PROJECT_BLOCK
        low = torch.empty(splits, n, WIDTH, dtype=torch.float32, device=x.device)
        squares = torch.empty(splits, n, dtype=torch.float32, device=x.device)
        prefill.project_kernel[(triton.cdiv(n, prefill.PROJECT_ROWS), splits)](
            low, squares, x, part.rows, self.w1, n, routed, x.stride(0),
            HIDDEN=self.hidden, WIDTH=WIDTH, ROWS=prefill.PROJECT_ROWS, BLOCK=prefill.PROJECT_BLOCK, PART=size,
        )  # fmt: skip
        by_prefix = spec.router.context == "prefix"
        votes = torch.empty(n, MAX_MEMBERS, dtype=torch.int32, device=x.device) if by_prefix else weights
        prefill.vote_kernel[blocks](
            votes, low, squares, self.b1, self.w2, self.b2, self.settings, n, routed,
            HIDDEN=self.hidden, WIDTH=WIDTH, MEMBERS=MAX_MEMBERS, ROWS=prefill.ROWS, SPLITS=splits,
            BY_PREFIX=by_prefix,
        )  # fmt: skip
        if by_prefix:
            prefill.prefix_kernel[blocks](
                weights, votes, part.rows, part.first, part.request, part.prefix, out_slots, self.settings,
                self.totals, self.req_to_token, n, routed, self.req_to_token.stride(0),
                MEMBERS=MAX_MEMBERS, ROWS=prefill.ROWS, CHUNK=prefill.CHUNK,
            )  # fmt: skip
        return weights

    def refresh(self, routed: Sequence[int], members: Mapping[int, Sequence[tuple[int, float]]]) -> None:
        """What the next decode step is: each row's routed adapter, and the (slot, scaling) of the members of each.

        One copy from a pinned buffer, on the current stream.
        """
        source = next(self._hosts)
        host = source.numpy()
        host[: self.max_rows] = BASE
        host[: len(routed)] = routed
        slots, scales = self._members(host)
        slots[:] = BASE
        for index, pairs in members.items():
            for k, (slot, scaling) in enumerate(pairs):
                slots[index, k], scales[index, k] = slot, scaling
        self._words.copy_(source, non_blocking=True)

    def _members(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size, shape = self.capacity * MAX_MEMBERS, (self.capacity, MAX_MEMBERS)
        at = self.max_rows
        slots, scales = words[at : at + size], words[at + size : at + 2 * size]
        return slots.reshape(shape), scales.view(np.float32).reshape(shape)

    def route_decode(
        self,
        gates: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        out_slots: torch.Tensor,
    ) -> None:
        """Add the members' gates of every row that belongs to a routed adapter; one launch, nothing allocated.

        Args:
            gates: [M, S] float32, ATMM's dense gates, in place.
            x: [M, hidden]; ids, requests (rows of ``req_to_token``), seq_lens (this token included), out_slots: [M].
        """
        rows, at, size = x.shape[0], self.max_rows, self.capacity * MAX_MEMBERS
        words = self._words
        block = min(256, triton.next_power_of_2(self.hidden))
        route_decode_kernel[(rows,)](
            gates, x, ids, requests, seq_lens, out_slots,
            words, words[at : at + size], words[at + size :].view(torch.float32),
            self.w1, self.b1, self.w2, self.b2, self.by_token, self.settings, self.totals, self.req_to_token,
            self.vocabulary, gates.stride(0), x.stride(0), self.req_to_token.stride(0),
            HIDDEN=self.hidden, WIDTH=WIDTH, MEMBERS=MAX_MEMBERS, BLOCK=block, num_warps=4,
        )  # fmt: skip
