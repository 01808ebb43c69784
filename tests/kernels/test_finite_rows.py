"""Rows of logits that are not finite are named and cleared, and no other row is touched."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.finite_rows import COLUMNS, clear_rows_

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA or not INTERPRETED else [])]
VALUES = [float("nan"), float("inf"), float("-inf")]


def check(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    room = torch.full((rows, vocabulary + 8), float("nan"), device=DEVICE, dtype=dtype)
    logits = room[:, :vocabulary]
    logits.copy_(torch.randn(rows, vocabulary) * 20)
    before = logits.clone()
    assert not clear_rows_(logits).any() and torch.equal(logits, before)
    # Whole rows, as a hidden state that is not finite makes them, of one kind or mixed.
    bad = torch.arange(rows, device=DEVICE) % 3 == 1
    for row in bad.nonzero()[:, 0].tolist():
        logits[row] = torch.tensor([VALUES[(row + i) % 3 if row % 2 else 0] for i in range(vocabulary)])
    flags = torch.full((rows + 5,), 7, dtype=torch.int8, device=DEVICE)
    found = clear_rows_(logits, flags)
    assert torch.equal(found.bool(), bad) and found.data_ptr() == flags.data_ptr()
    assert (flags[rows:] == 7).all()
    assert torch.equal(logits[~bad], before[~bad]) and not logits[bad].any()
    assert room[:, vocabulary:].isnan().all(), "wrote outside"


SHAPES = [(1, 1), (5, 100), (8, 9000), (3, COLUMNS)]


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_torch_path(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check(rows, vocabulary, dtype)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_kernel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check(rows, vocabulary, dtype)


def test_no_rows() -> None:
    assert clear_rows_(torch.empty(0, 9, device=DEVICE)).shape == (0,)


@starter
def test_kernel_interpreted() -> None:
    assert passed_interpreted(__file__) == 2 * len(SHAPES)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [0, 3])
def test_a_sampler_takes_what_is_left(bad: int) -> None:
    """The largest vocabulary served; a replay follows new logits."""
    logits, flags = torch.randn(32, 152_064, device="cuda"), torch.zeros(32, dtype=torch.int8, device="cuda")
    clear_rows_(logits.clone(), flags)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clear_rows_(logits, flags)
    logits[:bad] = float("nan")
    graph.replay()
    assert flags.tolist() == [1] * bad + [0] * (32 - bad)
    ids = torch.multinomial(logits.softmax(-1), 1)
    assert (ids >= 0).all() and (ids < logits.shape[1]).all()
