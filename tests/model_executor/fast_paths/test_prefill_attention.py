"""Tables of captured attentions: which prefills they serve, what their kernels read. Graphs: tests/e2e, on a GPU."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl.model_executor.fast_paths.prefill_attention import (
    MAX_CACHED,
    MAX_REQUESTS,
    MAX_TOKENS,
    CapturedAttention,
)


@dataclass
class Metadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    max_extend_len: int


class Backend:
    def __init__(self, new: Any, cached: Any) -> None:
        bounds = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int() for lengths in (new, cached)]
        self.forward_metadata = Metadata(*bounds, torch.arange(100, 100 + sum(cached)), max(new))

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
        batch._attn_output[: int(self.forward_metadata.qo_indptr[-1])] = q
        return batch._attn_output


def tables(backend: Any) -> Any:
    return CapturedAttention(backend, backend, "cpu")


@pytest.mark.parametrize(
    ("tokens", "cached", "served"),
    [
        (64, [0], True),
        (64, [0] * 16, True),
        (64, [0] * 17, False),
        (MAX_TOKENS, [0] * MAX_REQUESTS, True),
        (MAX_TOKENS, [0] * (MAX_REQUESTS + 1), False),
        (MAX_TOKENS + 64, [0], False),
        (4, [MAX_CACHED], True),
        (8, [MAX_CACHED, 1], False),
    ],
)
def test_what_a_graph_serves(tokens: Any, cached: Any, served: bool) -> None:
    assert CapturedAttention.serves(tokens, cached) is served


def test_requests_that_are_not_there_have_no_tokens() -> None:
    attention = tables(Backend([3, 5], [2, 7]))
    attention.capture(16, lambda: None)
    seen = attention.backend.forward_metadata
    attention.backend.forward_metadata = Backend([3, 5], [2, 7]).forward_metadata
    attention.refresh(8, 9)
    assert seen.qo_indptr.tolist() == [0, 3, 8, 8, 8]
    assert seen.kv_indptr.tolist() == [0, 2, 9, 9, 9]
    assert seen.kv_indices[:9].tolist() == list(range(100, 109))
    assert seen.max_extend_len == 16


def test_a_smaller_batch_leaves_nothing_of_the_one_before() -> None:
    attention = tables(Backend([4] * 8, [1] * 8))
    attention.capture(32, lambda: None)
    seen = attention.backend.forward_metadata
    for new, cached in (([4] * 8, [1] * 8), ([2], [0])):
        attention.backend.forward_metadata = Backend(new, cached).forward_metadata
        attention.refresh(sum(new), sum(cached))
    assert seen.qo_indptr.tolist() == [0] + [2] * 8
    assert seen.kv_indptr.tolist() == [0] * 9


def test_rows_past_the_batch_come_out_as_zeros_and_the_backend_is_left_as_it_was() -> None:
    backend = Backend([2], [0])
    batch = SimpleNamespace(_attn_output=torch.full((4, 3), float("nan")))

    def forward() -> Any:
        return backend.forward(torch.ones(2, 3), None, None, None, batch)

    attention = tables(backend)
    metadata = backend.forward_metadata
    whole = attention.capture(4, forward)
    backend.forward_metadata = metadata
    assert whole().tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert "forward" not in vars(backend)


def test_another_backends_place_is_taken_in_the_graph_alone() -> None:
    triton, served = Backend([2], [0]), SimpleNamespace(forward=lambda *args: "the other's")
    prepared: list[Any] = []
    triton.init_forward_metadata = prepared.append  # type: ignore[attr-defined]
    batch = SimpleNamespace(_attn_output=torch.full((4, 3), float("nan")))
    attention = CapturedAttention(triton, served, "cpu")  # type: ignore[arg-type]
    attention.prepare(batch)  # type: ignore[arg-type]
    assert prepared == [batch]
    metadata = triton.forward_metadata
    whole = attention.capture(4, lambda: served.forward(torch.ones(2, 3), None, None, None, batch))
    triton.forward_metadata = metadata
    answer: Any = whole()
    assert answer.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert served.forward() == "the other's"
