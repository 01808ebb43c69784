"""The rules and token routers of all loaded routed adapters, and the routing of a batch's rows by them.

Three ways to one result. ``weights_of`` is plain torch, for a CPU. ``route_prefill`` says the same on a GPU, in a few
launches for all routed adapters of a batch. ``route_decode`` is one kernel over a batch of decode rows which a CUDA
graph can hold: it reads what ``refresh`` wrote. Vote totals lie beside the KV cache, one per token slot, so a prefix
found there brings its total along.

A routed adapter has a few words at a fixed address. Its network, and its members by token id, lie where a pointer
beside them says, once for all routed adapters that have the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
import triton

from vlora_sgl.routed import prefill
from vlora_sgl.routed.decode import SETTINGS, route_decode_kernel
from vlora_sgl.routed.regroup import FixedTables
from vlora_sgl.routed.spec import MAX_POSITIONS, MODALITIES, RoutedSpec
from vlora_sgl.routed.token_router import MAX_MEMBERS, WIDTH, Router, prefix_totals, quantised, top_weights

BASE = -1  # "member" of a token that runs on the base model
VOTE_BYTES = 1 << 31
"""Vote totals that would take more are left out: they lie outside the memory that SGLang divides. A token of the KV
cache has 128 bytes of them, and at least ten thousand bytes of its own with any real model."""


@dataclass(frozen=True)
class RoutedRows:
    """A batch's rows as token routers see them; M of them, on the device, int32.

    Attributes:
        routed: [M] the place in the tables of each row's routed adapter, ``BASE`` for none.
        modality: [M] into ``MODALITIES``.
        first: [M] the row of its sequence's first token in the batch.
        request: [M] row of ``req_to_token``.
        prefix: [M] tokens of the sequence before its first row.
        learned: [L] the routed adapters of the batch that have a network, on the device.
        indices: all routed adapters of the batch, on the host.
    """

    routed: torch.Tensor
    modality: torch.Tensor
    first: torch.Tensor
    request: torch.Tensor
    prefix: torch.Tensor
    learned: torch.Tensor
    indices: tuple[int, ...]


class RouterTables:
    """Room for ``capacity`` routed adapters.

    Args:
        capacity: routed adapters that can be loaded at once.
        hidden, vocabulary: of the base model.
        max_rows: rows of the largest decode graph.
    """

    def __init__(self, capacity: int, hidden: int, vocabulary: int, max_rows: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.capacity, self.hidden, self.vocabulary, self.device = capacity, hidden, vocabulary, device
        self.pointers = zeros(capacity, 2, dtype=torch.int64)  # to the members of token ids, and to the network
        self.settings = zeros(capacity, SETTINGS.value, dtype=torch.int32)
        self.positions = zeros(capacity, MAX_POSITIONS, 3, dtype=torch.int32)
        self.specs: dict[int, RoutedSpec] = {}
        self._held: dict[int, list[torch.Tensor]] = {}
        self._shared: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()
        self.totals = zeros(0, MAX_MEMBERS, dtype=torch.int64)
        self.req_to_token = zeros(0, 0, dtype=torch.int32)
        self.reserve(max_rows)

    def reserve(self, max_rows: int) -> None:
        """Have room for the rows of decode graphs; before they are captured."""
        self.max_rows = max_rows
        # What one decode step changes: the routed adapter of every row; slots and scalings of every one's members.
        shape = (self.capacity, MAX_MEMBERS)
        first = [np.full(max_rows, BASE, np.int32), np.full(shape, BASE, np.int32), np.zeros(shape, np.float32)]
        self._step = FixedTables(first, self.device)
        self.weights = torch.zeros(max_rows, MAX_MEMBERS, dtype=torch.float32, device=self.device)

    @property
    def shared_bytes(self) -> int:
        """Device memory of the networks and the members of token ids, of all routed adapters."""
        return sum(tensor.nbytes for tensor in self._shared.values())

    def bind(self, req_to_token: torch.Tensor, token_slots: int) -> None:
        """Lay the vote totals beside the KV cache of ``token_slots`` slots, found through ``req_to_token``."""
        self.req_to_token = req_to_token
        fit = token_slots * MAX_MEMBERS * self.totals.element_size() <= VOTE_BYTES
        self.totals = torch.zeros(token_slots if fit else 0, MAX_MEMBERS, dtype=torch.int64, device=self.device)

    def lacks_votes(self, spec: RoutedSpec) -> bool:
        """Whether it counts the votes of all tokens so far, for which there is no room here."""
        return not len(self.totals) and spec.router is not None and spec.router.context == "prefix"

    def put(self, spec: RoutedSpec) -> int | None:
        """Take a routed adapter in; its place, or ``None`` where there is no room."""
        index = next((i for i in range(self.capacity) if i not in self.specs), None)
        if index is None:
            return None
        self.specs[index] = spec
        router, modalities = spec.router, [spec.modalities.get(one, BASE) for one in MODALITIES]
        by_prefix = int(router is not None and router.context == "prefix")
        words = [len(spec.members) if router else 0, spec.top_k, by_prefix, len(spec.positions), *modalities]
        table = self._share(self._by_token(spec)) if spec.ranges else None
        network = self._share(_network(router)) if router else None
        self._held[index] = [one for one in (table, network) if one is not None]
        addresses = [0 if one is None else one.data_ptr() for one in (table, network)]
        self.settings[index] = torch.tensor([*words, len(spec.ranges)], dtype=torch.int32).to(self.device)
        self.pointers[index] = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        rules = torch.tensor(spec.positions, dtype=torch.int32).view(-1, 3)
        self.positions[index, : len(rules)] = rules.to(self.device)
        return index

    def _by_token(self, spec: RoutedSpec) -> torch.Tensor:
        """[vocabulary] int8, the member of every text token."""
        table = torch.full((self.vocabulary,), spec.modalities.get("text", BASE), dtype=torch.int8)
        for first, end, member in spec.ranges:
            table[first:end] = member
        return table

    def _share(self, content: torch.Tensor) -> torch.Tensor:
        """The content on the device, where it may lie already."""
        key = str(content.dtype).encode() + content.numpy().tobytes()
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = content.to(self.device).clone()
        return found

    def remove(self, index: int) -> None:
        """Forget a routed adapter, and what it alone had."""
        del self.specs[index], self._held[index]

    def weights_of(
        self, batch: RoutedRows, x: torch.Tensor, ids: torch.Tensor, out_slots: torch.Tensor
    ) -> torch.Tensor:
        """The weight of every member at every row, [M, MAX_MEMBERS] float32; writes the vote totals.

        Args:
            x: [M, hidden] input embeddings of the batch.
            ids: [M] token ids; of image tokens any number.
            out_slots: [M] KV slots of the batch's tokens.
        """
        weights = torch.zeros(len(batch.routed), MAX_MEMBERS, device=x.device)
        for index in batch.indices:
            rows = torch.nonzero(batch.routed == index)[:, 0]
            spec = self.specs[index]
            own = self._by_rules(spec, batch, rows, ids) if spec.router is None else None
            if own is None:
                own = self._by_votes(spec, batch, rows, x, out_slots)
            weights[rows, : len(spec.members)] = own
        return weights

    def _by_rules(self, spec: RoutedSpec, batch: RoutedRows, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kinds = batch.modality[rows].long()
        by_kind = torch.tensor([spec.modalities.get(one, BASE) for one in MODALITIES], device=rows.device)
        named = by_kind[kinds]
        if spec.ranges:
            by_token = self._by_token(spec).to(rows.device).long()
            named = torch.where(kinds == 0, by_token[ids[rows].long().clamp(0, self.vocabulary - 1)], named)
        place = batch.prefix[rows] + rows - batch.first[rows]
        for first, end, member in spec.positions:
            named = torch.where((place >= first) & (place < end), member, named)
        return (named[:, None] == torch.arange(len(spec.members), device=rows.device)).float()

    def _by_votes(
        self, spec: RoutedSpec, batch: RoutedRows, rows: torch.Tensor, x: torch.Tensor, out_slots: torch.Tensor
    ) -> torch.Tensor:
        assert spec.router is not None
        members = len(spec.members)
        votes = quantised(spec.router.to(x.device)(x[rows]))
        if spec.router.context == "token":
            return top_weights(votes, torch.ones_like(rows), spec.top_k)
        prefix, first = batch.prefix[rows].long(), torch.searchsorted(rows, batch.first[rows].long())
        last = self.req_to_token[batch.request[rows].long(), (prefix - 1).clamp(min=0)].long()
        before = self.totals[last, :members] * (prefix > 0)[:, None]
        totals = prefix_totals(votes, first, before)
        self.totals[out_slots[rows], :members] = totals
        place = torch.arange(len(rows), device=x.device) - first
        return top_weights(totals, prefix + place + 1, spec.top_k)

    def route_prefill(
        self, batch: RoutedRows, x: torch.Tensor, ids: torch.Tensor, out_slots: torch.Tensor
    ) -> torch.Tensor:
        """What ``weights_of`` does, as kernels."""
        n, learned = len(batch.routed), len(batch.learned)
        weights = torch.empty(n, MAX_MEMBERS, dtype=torch.float32, device=x.device)
        votes = self._votes(batch, x) if learned else batch.routed
        prefill.weights_kernel[(triton.cdiv(n, prefill.ROWS),)](
            weights, votes, ids, batch.routed, batch.modality, batch.first, batch.request, batch.prefix, out_slots,
            self.pointers, self.settings, self.positions, self.totals, self.req_to_token,
            n, self.vocabulary, self.req_to_token.stride(0),
            MEMBERS=MAX_MEMBERS, ROWS=prefill.ROWS, CHUNK=prefill.CHUNK, SETTINGS=SETTINGS, POSITIONS=MAX_POSITIONS,
        )  # fmt: skip
        return weights

    def _votes(self, batch: RoutedRows, x: torch.Tensor) -> torch.Tensor:
        n, learned = len(batch.routed), len(batch.learned)
        splits = min(prefill.SPLITS, triton.cdiv(self.hidden, prefill.PROJECT_BLOCK))
        size = triton.cdiv(self.hidden, splits * prefill.PROJECT_BLOCK) * prefill.PROJECT_BLOCK
        low = torch.empty(splits, n, WIDTH, dtype=torch.float32, device=x.device)
        squares = torch.empty(splits, n, dtype=torch.float32, device=x.device)
        votes = torch.empty(n, MAX_MEMBERS, dtype=torch.int32, device=x.device)
        prefill.project_kernel[(triton.cdiv(n, prefill.PROJECT_ROWS), splits, learned)](
            low, squares, x, batch.routed, batch.learned, self.pointers, n, x.stride(0),
            HIDDEN=self.hidden, WIDTH=WIDTH, ROWS=prefill.PROJECT_ROWS, BLOCK=prefill.PROJECT_BLOCK, PART=size,
        )  # fmt: skip
        prefill.vote_kernel[(triton.cdiv(n, prefill.ROWS), learned)](
            votes, low, squares, batch.routed, batch.learned, self.pointers, n,
            HIDDEN=self.hidden, WIDTH=WIDTH, MEMBERS=MAX_MEMBERS, ROWS=prefill.ROWS, SPLITS=splits,
        )  # fmt: skip
        return votes

    def refresh(self, routed: Sequence[int], members: Mapping[int, Sequence[tuple[int, float]]]) -> None:
        """What the next decode step is: each row's routed adapter, and the (slot, scaling) of the members of each.

        One copy from a pinned buffer, on the current stream.
        """
        rows = np.full(self.max_rows, BASE, dtype=np.int32)
        rows[: len(routed)] = routed
        slots = np.full((self.capacity, MAX_MEMBERS), BASE, dtype=np.int32)
        scales = np.zeros(slots.shape, dtype=np.float32)
        for index, pairs in members.items():
            slots[index, : len(pairs)], scales[index, : len(pairs)] = zip(*pairs, strict=True)
        self._step.write([rows, slots, scales])

    def route_decode(
        self,
        gates: torch.Tensor | None,
        x: torch.Tensor,
        ids: torch.Tensor,
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        out_slots: torch.Tensor,
    ) -> None:
        """Route the rows of routed adapters; one launch, nothing allocated.

        Args:
            gates: [M, S] float32, ATMM's dense gates, to which the members' are added in place. ``None``: the members'
                weights go to ``weights`` [max_rows, MAX_MEMBERS] float32.
            x: [M, hidden]; ids, requests (rows of ``req_to_token``), seq_lens (this token included), out_slots: [M].
        """
        block = min(256, triton.next_power_of_2(self.hidden))
        route_decode_kernel[(x.shape[0],)](
            gates, self.weights, x, ids, requests, seq_lens, out_slots, *self._step.tensors,
            self.pointers, self.settings, self.positions, self.totals, self.req_to_token,
            self.vocabulary, 0 if gates is None else gates.stride(0), x.stride(0), self.req_to_token.stride(0),
            HIDDEN=self.hidden, WIDTH=WIDTH, MEMBERS=MAX_MEMBERS, BLOCK=block, SETTINGS=SETTINGS,
            POSITIONS=MAX_POSITIONS, num_warps=4,
        )  # fmt: skip

    @property
    def row_routed(self) -> torch.Tensor:
        """[max_rows] int32, the routed adapter of every row of the decode step that ``refresh`` told of."""
        return self._step.tensors[0]


def _network(router: Router) -> torch.Tensor:
    """A router's weights as the kernels read them: W1 transposed, for threads of a multiprocessor then read
    neighbouring words of its shared memory, not one bank's; W2 and its bias with zeros for members that it lacks."""
    second, last = torch.zeros(MAX_MEMBERS, WIDTH), torch.zeros(MAX_MEMBERS)
    second[: len(router.w2)], last[: len(router.b2)] = router.w2.detach().cpu(), router.b2.detach().cpu()
    parts = (router.w1.detach().cpu().T, router.b1.detach().cpu(), second, last)
    return torch.cat([part.float().reshape(-1) for part in parts])
