"""Log-probabilities of chosen tokens in a batch where some rows ask for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def token_ids_logprobs(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: torch.Tensor,
    token_ids_logprobs: list[list[int] | None],
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Wraps SGLang's ``get_token_ids_logprobs``, whose caller wants a tensor of every row and gets a list of some.

    Args:
        logprobs: [rows, vocabulary].
        token_ids_logprobs: of each row the tokens it asks for, or ``None``.
        no_copy_to_cpu: whether the values stay tensors.
    """
    values, ids = original(logprobs, token_ids_logprobs, no_copy_to_cpu=no_copy_to_cpu)
    if no_copy_to_cpu:
        values = [one if isinstance(one, torch.Tensor) else logprobs.new_empty(0) for one in values]
    return values, ids
