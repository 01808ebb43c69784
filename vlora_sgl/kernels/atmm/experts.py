"""The operator on experts: a token's choices are rows of their own, and every slot holds adapters of all experts.

A token that chose TOPK experts is TOPK rows of what the experts put out, one behind the other. Seen by the operator an
expert of a slot is a slot: those of slot s begin at ``place[s] * E``. So the grouped kernels are those of linears;
only who applies what is told anew in every layer, once its router has chosen. On a GPU the host does not know the
choice and does not wait for it: rows with the same slots and the same expert are gathered there (``expert_tiles``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vlora_sgl.kernels.atmm.expert_tiles import gather
from vlora_sgl.kernels.atmm.row_routing import TILE_ROWS, Group, Routing


def host_experts(routing: Routing, ids: torch.Tensor, experts: int, share: int) -> Routing:
    """The routing of tokens' choices, for a CPU.

    Args:
        routing: of the tokens.
        ids: [M, TOPK] int, the experts that each token chose; -1 for none.
        experts: how many there are.
        share: of the result: TOPK where the input's rows are tokens, 1 where they are choices.
    """
    chosen = ids.cpu().numpy().reshape(-1)
    groups: list[Group] = []
    for tokens, pairs in routing.groups:
        if not pairs:
            continue
        rows = (tokens[:, None] * ids.shape[1] + np.arange(ids.shape[1])).reshape(-1)
        for expert in np.unique(chosen[rows]):
            if expert >= 0:
                own = rows[chosen[rows] == expert].astype(np.int32)
                groups.append((own, tuple((slot * experts + int(expert), weight) for slot, weight in pairs)))
    return Routing(
        len(chosen),
        routing.slots * experts,
        groups,
        np.repeat(routing.ranks, experts).tolist(),
        (np.asarray(routing.places)[:, None] * experts + np.arange(experts)).reshape(-1).tolist(),
        np.repeat(routing.scalings, experts).tolist(),
        share=share,
    )


def device_experts(
    routing: Routing,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    block: int | None = None,
    *,
    base: bool = False,
) -> tuple[Routing, Routing]:
    """The routing of tokens' choices, for the grouped kernels; no wait for the host.

    Args:
        routing: of the tokens; it has ``tuples``.
        ids: [M, TOPK] int32, the experts that each token chose; -1 for none.
        weights: [M, TOPK] float32, of the choices.
        experts: how many there are.
        block: rows per tile; by default what the choices ask for.
        base: whether choices that apply nothing lie in tiles too, as an activation of all rows needs it.

    Returns:
        Of inputs that are tokens; and of inputs that are choices, with their weights in the gates.
    """
    assert routing.tuples is not None
    top_k, rows = ids.shape[1], ids.numel()
    block = block or TILE_ROWS[rows >= 32 * (len(routing.tuples.words) - 1) * experts]
    tiles = gather(routing.tuples, ids, weights, experts, block, base)
    tokens = Routing(
        rows, routing.slots * experts, [], tile_rows=tiles.rows, tile_slots=tiles.slots, tile_gates=tiles.gates_in,
        n_tiles=tiles.used, share=top_k,
    )  # fmt: skip
    return tokens, replace(tokens, tile_gates=tiles.gates_out, share=1)
