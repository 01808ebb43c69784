"""Heads of one forward pass, on hand-made hidden states: rows, chunks, and that a row never decodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.support.head_reference import assert_close
from vlora_sgl.core import RequestParams
from vlora_sgl.heads import ClassifyHead, CountHead, DetectHead, Grid
from vlora_sgl.heads.scheduling import HeadScheduling
from vlora_sgl.heads.worker import HeadRequest, merge_images, run_heads
from vlora_sgl.request import RequestState

HIDDEN = 16


def test_each_row_reads_its_own_tokens() -> None:
    torch.manual_seed(0)
    kind, dots = ClassifyHead("kind", HIDDEN, ["a", "b", "c"]), CountHead("dots", HIDDEN, 2)
    find = DetectHead("find", HIDDEN, ["cat"], threshold=0.01)
    grid = Grid(2, 3, 28)
    requests = [HeadRequest(kind), HeadRequest(find, ((1, 7, grid),)), HeadRequest(dots), HeadRequest(kind)]
    chunks = [(0, 4), (0, 9), (5, 1), (0, 3), (2, 2)]  # the fourth row is a generating one
    rows = [(0, requests[0]), (1, requests[1]), (2, requests[2]), (4, requests[3])]
    hidden = torch.randn(19, HIDDEN)
    run_heads(hidden, chunks, rows, requests).deliver()
    with torch.no_grad():
        assert_close(requests[0].answer, kind.postprocess(kind(hidden[3:4])[0]), 1e-5)
        assert_close(requests[1].answer, merge_images([find.postprocess(find(hidden[5:11]), grid)]), 1e-5)
        assert_close(requests[2].answer, dots.postprocess(dots(hidden[13:14])[0]), 1e-5)
        assert_close(requests[3].answer, kind.postprocess(kind(hidden[18:19])[0]), 1e-5)


def test_a_dense_head_collects_its_image_over_chunks() -> None:
    torch.manual_seed(0)
    find, grids = DetectHead("find", HIDDEN, ["cat"], threshold=0.01), (Grid(2, 2, 28), Grid(1, 3, 28))
    images = ((2, 6, grids[0]), (8, 11, grids[1]))
    hidden = torch.randn(12, HIDDEN)
    whole, parts = HeadRequest(find, images), HeadRequest(find, images)
    other = HeadRequest(find, images)
    run_heads(torch.cat([hidden, hidden]), [(0, 12), (0, 12)], [(0, whole), (1, other)], [whole, other]).deliver()
    for start, end in ((0, 4), (4, 5), (5, 10)):
        run_heads(hidden[start:end], [(start, end - start)], [(0, parts)], []).deliver()
        assert parts.pending
    run_heads(hidden[10:], [(10, 2)], [(0, parts)], [parts]).deliver()
    assert_close([parts.answer, other.answer], [whole.answer] * 2, 1e-5)
    assert whole.answer["image_sizes"] == [[56, 56], [84, 28]]
    assert whole.raw is None and {box["image"] for box in whole.answer["boxes"]} == {0, 1}


class Batch:
    """As much of SGLang's ScheduleBatch as the scheduler's head side touches."""

    forward_mode = SimpleNamespace(is_extend=lambda: True)
    batch_is_full = True

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]


def test_a_row_with_an_answer_under_way_never_joins_the_decoding_ones() -> None:
    heads = HeadScheduling(None)
    request = HeadRequest(ClassifyHead("kind", HIDDEN, ["a", "b"]))
    asks, chunked, generates, finished = (
        SimpleNamespace(vlora=RequestState(RequestParams(), head=head), finished=lambda done=done: done)
        for head, done in ((request, False), (request, False), (None, False), (request, True))
    )
    running, last = Batch([]), Batch([asks, chunked, generates, finished])
    heads.before_decoding(running, last, chunked)
    assert last.reqs == [chunked, generates, finished]  # SGLang itself keeps the chunked one out
    assert heads.under_way == [asks] and running.batch_is_full is False


class Raising(ClassifyHead):
    def postprocess(self, raw: torch.Tensor, grid: Grid | None = None) -> Any:
        raise IndexError("a mistake in a head")


def test_a_head_that_fails_leaves_the_others_their_answers() -> None:
    """Its own code raises, or its weights are not finite."""
    kind, raising, spoiled = (cls("kind", HIDDEN, ["a", "b"]) for cls in (ClassifyHead, Raising, ClassifyHead))
    with torch.no_grad():
        spoiled.linear.weight.fill_(torch.nan)
    heads = [HeadRequest(head) for head in (kind, raising, spoiled, kind)]
    reqs: Any = [SimpleNamespace(vlora=RequestState(RequestParams(), head=head), rid=str(head)) for head in heads]
    results = run_heads(torch.randn(4, HIDDEN), [(0, 1)] * 4, list(enumerate(heads)), heads)
    faulty = HeadScheduling(None).finished(reqs, SimpleNamespace(head_results=results))  # type: ignore[arg-type]
    assert [req for req, _ in faulty] == reqs[1:3]
    assert [str(error) for _, error in faulty] == [
        "a mistake in a head", "head 'kind' computed values that are not finite",
    ]  # fmt: skip
    assert ["head" in req.vlora.answer for req in reqs] == [True, False, False, True]
