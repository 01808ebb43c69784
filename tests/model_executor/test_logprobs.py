"""Log-probabilities of chosen tokens: every row has a tensor, those that ask for none an empty one."""

from __future__ import annotations

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.model_executor.logprobs import token_ids_logprobs

CASES = [[[1, 2], None], [None, [3]], [None, [0], None, [1, 1]], [[1], [2]]]


@pytest.mark.parametrize("asked", CASES)
def test_rows_that_ask_for_none_are_as_empty_as_rows_that_ask_are_full(asked: list[list[int] | None]) -> None:
    original = getattr(_sgl.get_token_ids_logprobs, "__wrapped__", _sgl.get_token_ids_logprobs)
    logprobs = torch.randn(len(asked), 8)
    values, ids = token_ids_logprobs(original, logprobs, asked, no_copy_to_cpu=True)
    wanted = [[float(logprobs[row, one]) for one in some or ()] for row, some in enumerate(asked)]
    assert [value.tolist() for value in values] == wanted and ids == [some or [] for some in asked]
    assert token_ids_logprobs(original, logprobs, asked)[0] == wanted
