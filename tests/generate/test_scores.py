"""Metrics against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vlora_sgl.generate.scores import METRICS, cider, f1, iou, precision_at_50, read_boxes, top1, vqa_score
from vlora_sgl.generate.tasks import TASKS, box_text


def test_top1_compares_the_whole_answer() -> None:
    assert top1(["cat", "cat ", "dog"], [("cat",), ("cat",), ("cat",)]) == pytest.approx(2 / 3)


def test_vqa_score_is_the_papers_formula() -> None:
    """Ten annotators, "two" said by 2 of them: leave one out gives min(1/3, 1) twice and min(2/3, 1) eight times."""
    answers = ["2", "two", *["three"] * 8]
    assert vqa_score(["Two."], [answers]) == pytest.approx((2 * (1 / 3) + 8 * (2 / 3)) / 10)
    assert vqa_score(["three"], [answers]) == 1.0
    assert vqa_score(["The cat!"], [["a cat"]]) == 1.0


def test_f1_matches_each_object_once_and_by_label() -> None:
    truth = box_text("cat", (0.0, 0.0, 0.5, 0.5)) + box_text("dog", (0.5, 0.5, 1.0, 1.0))
    twice = box_text("cat", (0.0, 0.0, 0.5, 0.5)) * 2
    assert f1([truth], [(truth,)]) == 1.0
    assert f1([twice], [(truth,)]) == 0.5  # 1 found, 2 said, 2 wanted
    assert f1([box_text("dog", (0.0, 0.0, 0.5, 0.5))], [(truth,)]) == 0.0
    assert f1(["nothing here"], [(truth,)]) == 0.0
    assert f1([""], [("",)]) == 1.0
    shifted = box_text("cat", (0.2, 0.0, 0.7, 0.5))  # overlap 0.3 / 0.7
    assert f1([shifted], [(box_text("cat", (0.0, 0.0, 0.5, 0.5)),)]) == 0.0
    assert f1([shifted], [(box_text("cat", (0.0, 0.0, 0.5, 0.5)),)], overlap=0.42) == 1.0


def test_precision_at_50_reads_the_first_box() -> None:
    truth = box_text("handshake", (0.1, 0.1, 0.3, 0.3))
    assert precision_at_50([truth, "<box>(100,100),(300,290)</box>", "no box"], [(truth,)] * 3) == pytest.approx(2 / 3)


def test_boxes_are_read_as_appendix_c_writes_them() -> None:
    text = "<ref>airplane</ref><box>(767,0),(910,83)</box><box>(601,0),(748,76)</box>"
    assert read_boxes(text) == [("airplane", (767, 0, 910, 83)), ("airplane", (601, 0, 748, 76))]
    assert iou((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0.0


def test_cider_by_hand() -> None:
    """One shared unigram of idf log 2 out of two: cosine 1/2 for n = 1; no longer n-gram is shared."""
    references = [("red car",), ("blue boat",)]
    assert cider(["red car", "blue boat"], references) == pytest.approx(2 / 4)  # n = 3 and 4 do not exist: 0
    assert cider(["red boat", "green tree"], references) == pytest.approx((1 / 2) / 4 / 2)
    longer = cider(["red car on blue boat", "x"], references)
    assert 0 < longer < cider(["red car", "x"], references) * math.exp(-(3**2) / 72) + 1e-9
    four = [("a b c d e".replace("a", "q"),), ("v w x y z",)]
    assert cider([r[0] for r in four], four) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted({m for kind in TASKS.values() for m in kind.metrics}))
def test_every_metric_of_a_task_exists_and_refuses_nothing_to_measure(name: Any) -> None:
    if name == "f1":
        assert METRICS[name]([], []) == 1.0
        return
    with pytest.raises(ValueError, match="no predictions"):
        METRICS[name]([], [])
