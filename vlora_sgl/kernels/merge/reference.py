"""What a merge must compute, in float64, and the distance it is measured in."""

from __future__ import annotations

import torch


def merge_reference(
    base_weights: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """``round(g (W0 + s B A))``: the sum in float64, rounded once to the weight's type.

    Args:
        base_weights: ``W0``, ``[N, K]``.
        lora_a: ``[r, K]``.
        lora_b: ``[N, r]``.
        scaling: the adapter's ``s`` (alpha / r, or alpha / sqrt(r) for rsLoRA).
        factors: ``g`` of each row, ``[N]``; 1 by default.

    Returns:
        ``[N, K]`` of the type of ``base_weights``.
    """
    exact = base_weights.double() + scaling * (lora_b.double() @ lora_a.double())
    return (exact if factors is None else exact * factors.double()[:, None]).to(base_weights.dtype)


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between two tensors of one floating type, element by element.

    Zero means bit-equal, except that the two zeros are at distance 0 of each other too. The sign-magnitude bits of
    IEEE numbers become an ordered integer line, on which neighbours differ by one.

    Returns:
        int64 tensor of the common shape.

    Raises:
        ValueError: the types differ or are not floating.
    """
    if left.dtype != right.dtype or not left.dtype.is_floating_point:
        raise ValueError(f"expected two tensors of one floating type, got {left.dtype} and {right.dtype}")
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    lowest = torch.iinfo(as_int).min

    def line(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(as_int).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    return (line(left) - line(right)).abs()
