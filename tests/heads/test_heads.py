"""Heads as modules: what they compute, what they answer, that each can learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vlora_sgl.errors import HeadError
from vlora_sgl.heads import Boxes, ClassifyHead, CountHead, DetectHead, Grid, VisionHead, grouped_linear

HIDDEN = 32


def fit(head: VisionHead, x: torch.Tensor, target: Any, steps: int = 200) -> None:
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(head(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_linear_equals_each_head_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads: list[VisionHead] = [ClassifyHead("a", HIDDEN, ["x", "y"]), CountHead("b", HIDDEN, 5)]
    heads.append(ClassifyHead("c", HIDDEN, list("pqr")))
    rows = [heads[i] for i in (2, 0, 1, 0, 2, 2)]
    x = torch.randn(len(rows), HIDDEN).to(dtype)
    for row, (head, raw) in enumerate(zip(rows, grouped_linear(x, rows), strict=True)):
        exact = x[row].double() @ head.linear.weight.double().T + head.linear.bias.double()
        assert raw.dtype == torch.float32 and raw.shape == (head.outputs,)
        torch.testing.assert_close(raw.double(), exact, rtol=1e-5, atol=1e-5)


def test_classify_learns_and_answers() -> None:
    torch.manual_seed(0)
    head = ClassifyHead("kind", HIDDEN, ["cat", "dog", "owl"])
    x, target = torch.randn(30, HIDDEN), torch.arange(30) % 3
    untrained = [head.postprocess(raw) for raw in head(x)]
    fit(head, x, target)
    answers = [head.postprocess(raw) for raw in head(x)]
    assert head.metric(answers, target.tolist()) == 1.0 > head.metric(untrained, target.tolist())
    assert head.metric(answers, [head.labels[t] for t in target]) == 1.0
    answer = answers[1]
    assert answer["label"] == "dog" and answer["probability"] == answer["probabilities"][1] > 0.5
    assert math.isclose(sum(answer["probabilities"]), 1.0, rel_tol=1e-5)


def test_count_answers_mode_and_expectation() -> None:
    head = CountHead("dots", HIDDEN, 3)
    assert head.labels == ("0", "1", "2", "3 or more")
    answer = head.postprocess(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    assert (answer["count"], answer["or_more"]) == (3, True)
    assert math.isclose(answer["expectation"], 0.2 + 0.6 + 1.2, rel_tol=1e-5)
    assert not head.postprocess(torch.tensor([0.1, 0.6, 0.2, 0.1]).log())["or_more"]
    raw = torch.zeros(2, 4)
    assert torch.equal(head.loss(raw, torch.tensor([3, 9])), head.loss(raw, torch.tensor([3, 3])))
    assert head.metric([answer, answer], [9, 1]) == 0.5


GRID = Grid(rows=4, columns=6, cell=28)


def test_detect_learns_boxes_and_suppresses_duplicates() -> None:
    torch.manual_seed(0)
    head = DetectHead("find", HIDDEN, ["cat", "dog"])
    objects = Boxes(torch.tensor([[10.0, 20.0, 60.0, 70.0], [100.0, 30.0, 150.0, 100.0]]), torch.tensor([1, 0]))
    x = torch.randn(GRID.cells, HIDDEN)
    before = head.metric([head.postprocess(head(x), GRID)], [objects])
    fit(head, x, (objects, GRID), steps=400)
    answer = head.postprocess(head(x), GRID)
    assert head.metric([answer], [objects]) == 1.0 > before
    assert answer["image_size"] == [168, 112] and {o["label"] for o in answer["boxes"]} == {"cat", "dog"}
    assert answer["boxes"] == sorted(answer["boxes"], key=lambda o: -o["score"])


def test_detect_decodes_what_the_formula_says() -> None:
    head = DetectHead("find", HIDDEN, ["cat"])
    raw = torch.full((GRID.cells, head.outputs), -9.0)
    raw[7] = torch.tensor([9.0, 0.0, 0.0, 0.0, math.log(2), 0.0])  # row 1, column 1: 2 cells wide, 1 high
    # The same box, seen from its neighbour.
    raw[8] = torch.tensor([8.0, 0.0, -1.0, 0.0, math.log(2), 0.0])
    (found,) = head.postprocess(raw, GRID)["boxes"]
    assert found["pixels"] == pytest.approx([14.0, 28.0, 70.0, 56.0], abs=1e-3)
    assert found["box"] == pytest.approx([14 / 168, 0.25, 70 / 168, 0.5], abs=1e-4)
    assert DetectHead("f", HIDDEN, ["cat"]).metric([{"boxes": []}], [Boxes(torch.zeros(0, 4), torch.zeros(0))]) == 1.0


def test_detect_without_objects_only_learns_emptiness() -> None:
    head = DetectHead("find", HIDDEN, ["cat"])
    raw = torch.zeros(GRID.cells, head.outputs, requires_grad=True)
    loss = head.loss(raw, (Boxes(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), GRID))
    (gradient,) = torch.autograd.grad(loss, raw)
    assert torch.isfinite(loss) and (gradient[:, 0] > 0).all() and not gradient[:, 1:].any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClassifyHead("h", HIDDEN, []), "labels"),
        (lambda: ClassifyHead("h", HIDDEN, ["a", "a"]), "distinct"),
        (lambda: CountHead("h", HIDDEN, 0), "maximum"),
        (lambda: DetectHead("h", HIDDEN, ["a"], threshold=1.5), "threshold"),
        (lambda: DetectHead("h", HIDDEN, ["a"]).postprocess(torch.zeros(3, 6), GRID), "3 cells"),
        (lambda: DetectHead("h", HIDDEN, ["a"]).postprocess(torch.zeros(24, 6)), "grid None"),
    ],
)
def test_impossible_settings_are_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        build()
