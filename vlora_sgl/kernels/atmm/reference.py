"""The definition of ATMM as a loop over rows, in float64, and the same in grouped torch matmuls for a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora_sgl.kernels.atmm.row_routing import Group, Routing


def atmm_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Sequence[Group],
    ranks: Sequence[int],
    scalings: Sequence[float],
    offsets: Sequence[int],
) -> torch.Tensor:
    """``y[t, o[c]:o[c+1]] + sum_j w_j s_j (x[t] A_jc^T) B_jc^T`` row by row.

    Args:
        y: [M, N] what is accumulated onto (not changed); x: [M, K]; a: [S, C * R, K]; b: [S, N, R].
        groups: row numbers and (slot, weight) pairs. ranks, scalings: per slot. offsets: C + 1 column bounds.

    Returns:
        [M, N] float64.
    """
    out, x, a, b = y.double().clone(), x.double(), a.double(), b.double()
    for numbers, pairs in groups:
        for t in numbers.tolist():
            for slot, weight in pairs:
                r = ranks[slot]
                for c in range(len(offsets) - 1):
                    low = a[slot, c * r : (c + 1) * r] @ x[t]
                    columns = slice(offsets[c], offsets[c + 1])
                    out[t, columns] += weight * scalings[slot] * (b[slot, columns, :r] @ low)
    return out


def atmm_silu_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Sequence[Group],
    ranks: Sequence[int],
    scalings: Sequence[float],
    offsets: Sequence[int],
) -> torch.Tensor:
    """``silu(gate) * up`` of what ``atmm_reference`` gives for gate and up: [M, I] float64."""
    gate, up = atmm_reference(y, x, a, b, groups, ranks, scalings, offsets).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def atmm_torch(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, routing: Routing, offsets: Sequence[int]
) -> torch.Tensor:
    """ATMM in place on ``y`` with one pair of matmuls per group, slot and projection, in the tensors' own dtype."""
    ranks = routing.ranks
    for numbers, pairs in routing.groups:
        if not pairs or not len(numbers):
            continue
        whole = len(numbers) == routing.rows
        rows = slice(None) if whole else torch.from_numpy(numbers).to(y.device, torch.int64)
        picked = x[rows]
        for slot, weight in pairs:
            r, place = ranks[slot], routing.places[slot]
            low = picked @ a[place, : r * (len(offsets) - 1)].T * (weight * routing.scalings[slot])
            for c in range(len(offsets) - 1):
                delta = low[:, c * r : (c + 1) * r] @ b[place, offsets[c] : offsets[c + 1], :r].T
                y[rows, offsets[c] : offsets[c + 1]] += delta
    return y
