"""The definition of ATMM as a loop over rows, in float64, and the same in grouped torch matmuls for a CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from vlora_sgl.kernels.atmm.row_routing import Group, Pairs, Routing, Vectors, mark


def atmm_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Sequence[Group],
    ranks: Sequence[int],
    scalings: Sequence[float],
    offsets: Sequence[int],
    vectors: Vectors | None = None,
    vectored: Collection[int] = (),
) -> torch.Tensor:
    """``y[t, o[c]:o[c+1]] + sum_j w_j s_j (x[t] A_jc^T) B_jc^T`` row by row, and what ``Vectors`` says.

    Args:
        y: [M, N] what is accumulated onto (not changed); x: [M, K]; a: [S, C * R, K]; b: [S, N, R].
        groups: row numbers and (slot, weight) pairs. ranks, scalings: per slot. offsets: C + 1 column bounds.
        vectors: of the slots ``vectored``.

    Returns:
        [M, N] float64.
    """
    out, x, a, b = y.double().clone(), x.double(), a.double(), b.double()
    for numbers, pairs in groups:
        word = mark(pairs, vectored)
        for t in numbers.tolist():
            if word:
                assert vectors is not None
                out[t] = _to_product(out[t], vectors, word)
            for slot, weight in pairs:
                r = ranks[slot]
                for c in range(len(offsets) - 1):
                    low = a[slot, c * r : (c + 1) * r] @ x[t]
                    columns = slice(offsets[c], offsets[c + 1])
                    out[t, columns] += weight * scalings[slot] * (b[slot, columns, :r] @ low)
            if word:
                assert vectors is not None
                out[t] = _to_output(out[t], vectors, word)
    return out


def _to_product(rows: torch.Tensor, vectors: Vectors, word: int) -> torch.Tensor:
    """The base model's product from outputs of rows [n, N] with this mark: no bias, no merged adapter's factor."""
    if vectors.bias is not None:
        rows = rows - vectors.bias.to(rows.dtype)
    return rows / vectors.slots[(word >> 16) - 1, 0].to(rows.dtype) if word >> 16 else rows


def _to_output(rows: torch.Tensor, vectors: Vectors, word: int) -> torch.Tensor:
    """Outputs of rows [n, N] with this mark, from the base model's product and what their pairs added to it."""
    slots = vectors.slots.to(rows.dtype)
    if word & 0xFFFF:
        rows = rows * slots[(word & 0xFFFF) - 1, 0] + slots[(word & 0xFFFF) - 1, 1]
    if word >> 16:
        rows = rows - slots[(word >> 16) - 1, 1]
    return rows if vectors.bias is None else rows + vectors.bias.to(rows.dtype)


def atmm_silu_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Sequence[Group],
    ranks: Sequence[int],
    scalings: Sequence[float],
    offsets: Sequence[int],
    vectors: Vectors | None = None,
    vectored: Collection[int] = (),
) -> torch.Tensor:
    """``silu(gate) * up`` of what ``atmm_reference`` gives for gate and up: [M, I] float64."""
    gate, up = atmm_reference(y, x, a, b, groups, ranks, scalings, offsets, vectors, vectored).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def atmm_torch(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    offsets: Sequence[int],
    vectors: Vectors | None = None,
) -> torch.Tensor:
    """ATMM in place on ``y`` with one pair of matmuls per group, slot and projection, in x's dtype.

    Rows that have vectors are computed in float32, as the kernels compute them.
    """
    for numbers, pairs in routing.groups:
        if not pairs or not len(numbers):
            continue
        rows = slice(None) if len(numbers) == routing.rows else torch.from_numpy(numbers).to(y.device, torch.int64)
        word = mark(pairs, routing.vectored)
        if not word or vectors is None:
            _add_pairs(y, rows, _inputs(x, rows, routing), a, b, routing, pairs, offsets)
            continue
        part = _to_product(y[rows, : offsets[-1]].to(torch.promote_types(y.dtype, torch.float32)), vectors, word)
        _add_pairs(part, slice(None), _inputs(x, rows, routing), a, b, routing, pairs, offsets)
        y[rows, : offsets[-1]] = _to_output(part, vectors, word).to(y.dtype)
    return y


def _inputs(x: torch.Tensor, rows: torch.Tensor | slice, routing: Routing) -> torch.Tensor:
    """The rows of x that belong to rows of y."""
    if routing.share == 1:
        return x[rows]
    return x.repeat_interleave(routing.share, 0) if isinstance(rows, slice) else x[rows // routing.share]


def _add_pairs(
    y: torch.Tensor,
    rows: torch.Tensor | slice,
    picked: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    pairs: Pairs,
    offsets: Sequence[int],
) -> None:
    """Add to these rows of ``y`` what all of their pairs do to the rows ``picked`` of x."""
    for slot, weight in pairs:
        r, place = routing.ranks[slot], routing.places[slot]
        own = a[place, : r * (len(offsets) - 1)].to(picked.dtype), b[place, :, :r].to(picked.dtype)
        low = picked @ own[0].T * (weight * routing.scalings[slot])
        for c in range(len(offsets) - 1):
            delta = low[:, c * r : (c + 1) * r] @ own[1][offsets[c] : offsets[c + 1]].T
            y[rows, offsets[c] : offsets[c + 1]] += delta
