"""Typed values."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlora_sgl.lang.values import Box, Boxes, Count, Label


def test_boxes_round_trip_through_the_papers_notation() -> None:
    text = "<ref>airplane</ref><box>(767,0),(910,83)</box><box>(601,0),(748,76)</box><box>(455,0),(587,64)</box>"
    boxes = Boxes.parse("The answer: " + text)
    assert [box.label for box in boxes] == ["airplane"] * 3
    assert boxes[0] == Box(0.767, 0.0, 0.910, 0.083, "airplane")
    assert Boxes.parse(str(boxes)) == boxes
    assert Boxes.parse("nothing here") == ()


def test_boxes_are_sorted_by_score_and_mended() -> None:
    assert [box.score for box in Boxes([Box(0, 0, 1, 1, score=0.1), Box(0, 0, 1, 1, score=0.9)])] == [0.9, 0.1]
    assert Boxes.parse("<box>(900,900),(100,2000)</box>") == (Box(0.1, 0.9, 0.9, 1.0),)


def test_box_checks_and_measures() -> None:
    with pytest.raises(ValueError, match="x0 <= x1"):
        Box(0.5, 0, 0.4, 1)
    half, all_of_it = Box(0, 0, 0.5, 1), Box(0, 0, 1, 1)
    assert half.iou(all_of_it) == 0.5 and half.iou(half) == 1.0
    assert Box(0, 0, 0, 0).iou(Box(0, 0, 0, 0)) == 0.0
    assert half.pixels(200, 100) == (0, 0, 100, 100)


def test_draw_marks_the_box_and_leaves_the_image_alone() -> None:
    image = Image.new("RGB", (100, 80), "white")
    drawn = np.asarray(Boxes([Box(0.2, 0.5, 0.8, 0.9, "cup", 0.75)]).draw(image, width=1))
    assert (np.asarray(image) == 255).all()
    changed = np.argwhere((drawn != 255).any(axis=-1))  # [pixels, (y, x)]
    assert changed[:, 0].max() == round(0.9 * 79) and changed[:, 1].max() >= round(0.8 * 99)
    assert changed[:, 1].min() == int(0.2 * 99)
    assert (drawn[50, 40] == 255).all(), "the inside of the box stays visible"
    assert drawn.shape == (80, 100, 3)


def test_a_long_caption_stays_inside_the_picture() -> None:
    image = Image.new("RGB", (100, 80), "white")
    drawn = np.asarray(Boxes([Box(0.9, 0.5, 0.98, 0.9, "a long name")]).draw(image, width=1))
    caption = (drawn[:39] != 255).any(axis=-1)  # what is above the box
    assert caption[:, :50].any(), "it begins left of its box, which begins at 89"


def test_label_and_count_are_what_they_look_like() -> None:
    label = Label("cat", {"cat": 0.75, "dog": 0.25})
    assert label == "cat" and f"a {label}" == "a cat" and label.probability == 0.75
    assert Label("cat").probability is None
    assert Count(3, 0.5) + 1 == 4 and Count(3).probability is None
