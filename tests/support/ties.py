"""Greedy answers of the tests' server, compared: equal, on a GPU up to the first near tie of the random model.

A GPU serves in 16 bits, by other kernels for other numbers of rows, what the reference computes in float32 on a CPU.
Where the two best tokens are closer than that, either may come, and everything behind it differs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vlora_sgl.platforms.cpu import is_plain_cpu

COARSE = "--dtype bfloat16" in os.environ.get("VLORA_TEST_SERVER_ARGS", "")
"""Whether the session's server has bfloat16, whose rounding is eight times that of float16."""
MARGIN = 0.2 if COARSE else 0.05
"""Between the log-probabilities of two tokens that rounding may swap."""

LOGPROBS: dict[str, Any] = {} if is_plain_cpu() else {"return_logprob": True, "top_logprobs_num": 4}
"""What a request asks besides, so that its answer can be compared."""


def assert_same_tokens(found: Any, wanted: Any) -> None:
    """An answer asked with ``LOGPROBS``, and another one or its tokens."""
    ids: Sequence[int] = wanted if isinstance(wanted, list) else wanted["output_ids"]
    assert len(found["output_ids"]) == len(ids)
    for i, (one, other) in enumerate(zip(found["output_ids"], ids, strict=True)):
        if one == other:
            continue
        assert LOGPROBS, f"token {i} is {one}, not {other}"
        best = {token: score for score, token, _ in found["meta_info"]["output_top_logprobs"][i]}
        assert other in best, f"token {i} is {one}, and {other} not among the best: {best}"
        assert best[one] - best[other] <= MARGIN, f"token {i} is {one}, {other} comes {best[one] - best[other]} behind"
        return
