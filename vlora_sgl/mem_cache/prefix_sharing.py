"""One prefill for a new prefix and the requests that share it: they read, in every layer, what it has just written.

A leader computes the prefix, its followers only what is behind it. The tree promises the prefix as soon as the leader
is admitted, before its KV has slots, so SGLang matches, locks and accounts for followers as for any hit in the cache;
once the batch has its slots, the promise is fulfilled, before anything reads them.

This is right where a layer's attention writes the new KV of the whole batch to the pool and only then reads prefixes
from it (``WRITES_FIRST``). A prefix's KV depends on nothing behind it, so what a follower reads there is what it would
read in a batch of its own that runs later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import ModelRunner, Req, TreeNode
from vlora_sgl.mem_cache.radix_cache import VLoraRadixCache

WRITES_FIRST = ("FlashAttentionBackend", "TorchNativeAttnBackend", "TritonAttnBackend")
"""SGLang's attention backends whose ``forward_extend`` calls ``set_kv_buffer`` on all new tokens before its kernels.
FlashInfer's may not: it can attend to prefixes first. Nor may one that wraps others, or runs half batches by turns."""

NO_SLOT = -1


def can_share(runner: ModelRunner, tree: object) -> bool:
    """Whether prefills of this model runner may read what they write.

    Pages of several tokens would have to be shared in part; context parallelism and MLA have paths of their own.
    """
    return (
        isinstance(tree, VLoraRadixCache)
        and _sgl.is_a(runner.attn_backend, *WRITES_FIRST)
        and tree.page_size == tree.token_to_kv_pool_allocator.page_size == 1
        and runner.server_args.attn_cp_size == 1
        and not runner.use_mla_backend
    )


class PrefixSharing:
    """The prefixes that the batch being formed will compute and read.

    Args:
        tree: the prefix cache.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._promised: list[tuple[Req, int]] = []

    def can_promise(self, leader: Req, length: int) -> bool:
        """Whether the batch being formed computes all that the tree lacks of a request's first ``length`` tokens.

        Args:
            leader: SGLang's ``Req``, admitted to the batch.
            length: the prefix that followers share.
        """
        start = leader.cache_protected_len
        # More in the tree than the leader took (it wants logprobs, or another leader's promise begins with the same
        # words): it computes those tokens for itself alone.
        return start < length <= leader.extend_range.end and start == self._tree.matched_length(
            leader.origin_input_ids[:length], leader.vlora.identity
        )

    def promise(self, leader: Req, length: int) -> None:
        """Put a prefix that can be promised in the tree.

        The leader holds the node from now on, as if its prefix had been cached already.
        """
        tree, tokens = self._tree, leader.origin_input_ids[:length]
        value = torch.full((length,), NO_SLOT, dtype=torch.int64, device=tree.device)
        with tree.keys_of(leader.vlora.identity):
            node = tree.insert(_sgl.InsertParams(key=_sgl.RadixKey(tokens), value=value)).last_device_node
        tree.inc_lock_ref(node)
        tree.dec_lock_ref(leader.last_node)
        self._promised.append((leader, leader.cache_protected_len))
        leader.last_node, leader.cache_protected_len = node, length

    def fulfil(self, reqs: Sequence[Req]) -> None:
        """Give promised nodes the slots that the batch got, and tell the requests that took them.

        Args:
            reqs: the batch's, with its slots in the request table.
        """
        table, filled = self._tree.req_to_token_pool, set()
        for leader, start in self._promised:
            node, end = leader.last_node, leader.cache_protected_len
            while end > start:  # one node, or the parts of one that a shorter match has split
                begin = end - len(node.key)
                node.value = table.req_to_token[leader.req_pool_idx, begin:end].to(torch.int64, copy=True)
                filled.add(node)
                node, end = node.parent, begin
        for req in reqs if filled else ():
            path = self._path(req.last_node)
            if not filled.isdisjoint(path):
                req.prefix_indices = torch.cat([node.value for node in path])[: len(req.prefix_indices)]
                table.write((req.req_pool_idx, slice(0, len(req.prefix_indices))), req.prefix_indices)
        self._promised.clear()

    def _path(self, node: TreeNode) -> list[TreeNode]:
        path = []
        while node is not self._tree.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]
