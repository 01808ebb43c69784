"""Users' data: what is read, and that every fault is named with its line at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.datasets import read_image_folder, read_jsonl, write_jsonl


def test_jsonl_round_trip(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    write_jsonl(tmp_path / "train.jsonl", [([image], "What?", "red"), ([image, image], "Which?", "both")])
    first, second = read_jsonl(tmp_path / "train.jsonl")
    assert (first.question, first.answer, len(first.images), len(second.images)) == ("What?", "red", 1, 2)
    assert first.load_images()[0].getpixel((0, 0)) == (255, 0, 0)


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [{"image": "a.png", "question": "q", "answer": " "}, {"image": "b.png", "question": "q", "answer": "x"}]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\nnot json\n{}\n")
    with pytest.raises(ConfigError) as error:
        read_jsonl(tmp_path / "x.jsonl")
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["1", "2", "3", "4"]


def test_boxes_are_fractions_of_the_image(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    write_jsonl(tmp_path / "x.jsonl", [([image], "Where?", "1", [("cat", (0.0, 0.25, 0.5, 1.0))])])
    assert read_jsonl(tmp_path / "x.jsonl")[0].boxes == (("cat", (0.0, 0.25, 0.5, 1.0)),)
    row = {"image": "images/x-00000-0.png", "question": "q", "answer": "a"}
    wrong = [[0, 0, 8, 8], [0.5, 0, 0.5, 1], [0, 0, 1], ["a", 0, 1, 1]]
    lines = [json.dumps({**row, "boxes": [{"label": "cat", "box": box}]}) for box in wrong]
    (tmp_path / "y.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        read_jsonl(tmp_path / "y.jsonl")
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_split_is_a_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="empty"):
        read_jsonl(tmp_path / "x.jsonl")


def test_image_folder_labels_by_folder(tmp_path: Path) -> None:
    for label in ("red_car", "cat"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / label / "1.png")
    assert [e.answer for e in read_image_folder(tmp_path, "What?")] == ["cat", "red car"]
    with pytest.raises(ConfigError, match="folders of images"):
        read_image_folder(tmp_path / "cat", "What?")
