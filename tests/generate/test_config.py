"""Configurations: what is read, and that all that is wrong is named at once, by file and line, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.__main__ import main
from vlora_sgl.generate.config import read_config
from vlora_sgl.generate.sources import load_datasets

ROOT = Path(__file__).parents[2]


def picture(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (len(path.name) * 7 % 255, 0, 0)).save(path)
    return path.name


def rows(path: Path, *answers: str, question: str | None = "What?") -> Path:
    lines = []
    for number, answer in enumerate(answers):
        row = {"image": picture(path.parent / f"{path.stem}{number}.png"), "answer": answer}
        lines.append(json.dumps(row | ({"question": question} if question else {})))
    path.write_text("\n".join(lines) + "\n")
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


GOOD = """\
base: tiny
output: out
lora: {rank: 4, learning_rate: 0.01}
datasets:
- {name: pets, task: classification, floor: 0.5, data: {train: pets.jsonl}, split: [0.5, 0.25, 0.25]}
- {name: cars, task: counting, floor: 1, target: cars, data: {train: cars.jsonl}, labels: [0, 1]}
"""


def test_a_good_configuration(tmp_path: Path) -> None:
    rows(tmp_path / "pets.jsonl", *["cat", "dog"] * 8)
    rows(tmp_path / "cars.jsonl", *["0", "1"] * 10, question=None)
    config = read_config(write(tmp_path / "c.yaml", GOOD))
    assert (config.lora.rank, config.lora.learning_rate, config.order) == (4, 0.01, "search")
    assert config.output == tmp_path / "out" and config.datasets[1].labels == ("0", "1")
    pets, cars = load_datasets(config)
    assert {split: len(examples) for split, examples in pets.splits.items()} == {
        "train": 8,
        "validation": 4,
        "test": 4,
    }
    assert pets.labels == ("cat", "dog")
    assert cars.splits["train"][0].question == "How many cars are there in the image?"
    seen = [e.images for split in pets.splits.values() for e in split]
    assert len(set(seen)) == 16, "splits are disjoint"
    assert [e.images for e in load_datasets(config)[0].splits["test"]] == [e.images for e in pets.splits["test"]]


def test_every_fault_of_the_file_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    rows(tmp_path / "pets.jsonl", "cat")
    text = """\
base: tiny
output: out
order: fastest
tempo: 3
confidence: 1
lora: {rank: 0, colour: red}
datasets:
- {name: a b, task: classification, floor: 1.2, data: {train: pets.jsonl}}
- name: pets
  task: painting
  floor: 0.5
  data: {train: gone.jsonl}
- name: pets
  task: captioning
  metric: top1
  data: {folder: gone, images: gone}
  split: [0.5, 0.5]
- {name: t, task: classification, floor: 0.5, question: q, data: {images: .}, teacher: {python: gone.py:f}}
- {name: u, task: classification, floor: 0.5, question: q, data: {images: .}}
"""
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path / "c.yaml", text))
    faults = str(error.value).splitlines()
    expected = {
        3: "order must be one of given, random, search, got 'fastest'",
        4: "no setting 'tempo'",
        5: "confidence must lie in [0.5, 1), got 1",
        6: "rank must be above 0",
        8: "floor must lie in (0, 1], got 1.2",
        10: "task must be one of",
        12: "no such file",
        13: "floor is missing",
        15: "metric 'top1' does not measure captioning; cider would",
        16: "data needs exactly one of",
        17: "split must be three shares",
        18: "no such file",
        19: "a teacher labels data.images",
    }
    for line, message in expected.items():
        assert any(f"c.yaml:{line}: " in fault and message in fault for fault in faults), (line, message, faults)
    assert any("c.yaml:6: lora has no setting 'colour'" in fault for fault in faults)
    assert any("c.yaml:13: the name 'pets' is taken at" in fault for fault in faults)


def test_text_that_is_no_yaml_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml:3: not YAML"):
        read_config(write(tmp_path / "c.yaml", "base: tiny\noutput: [\n- : :"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "gone.yaml")


def test_every_fault_of_file_and_data_is_named_at_once_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing image, labels outside the set, empty splits, broken rows and a floor above 1, in one message."""
    path = rows(tmp_path / "pets.jsonl", "cat", "dog", "bird", "cat")
    path.write_text(path.read_text() + '{"image": "gone.png", "question": "q", "answer": "cat"}\nnot json\n{}\n')
    rows(tmp_path / "cars.jsonl", "1", "2")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "bad.jsonl").write_text('{"image": "text.png", "question": "q", "answer": "fish"}\n')
    rows(tmp_path / "odd.jsonl", *["left", "right"] * 8, "up", "up")
    rows(tmp_path / "odd-test.jsonl", "left", "down")
    text = """\
base: tiny
output: out
datasets:
- {name: pets, task: classification, floor: 1.5, labels: [cat, dog], data: {train: pets.jsonl, test: bad.jsonl}}
- {name: cars, task: counting, floor: 0.5, target: cars, data: {train: cars.jsonl, validation: empty.jsonl}}
- {name: few, task: classification, floor: 0.5, question: q, data: {train: cars.jsonl}}
- {name: odd, task: classification, floor: 0.5, question: q, data: {train: odd.jsonl, test: odd-test.jsonl}}
"""
    assert main([str(write(tmp_path / "c.yaml", text))]) == 2
    faults = capsys.readouterr().err.strip().splitlines()
    for expected in (
        "c.yaml:4: floor must lie in (0, 1], got 1.5",
        "pets.jsonl:3: pets: the answer 'bird' is outside the labels cat, dog",
        "pets.jsonl:5: no such image",
        "pets.jsonl:6: expected image(s), question and answer",
        "pets.jsonl:7: expected image(s), question and answer: 'image' is missing",
        "bad.jsonl:1: not an image",
        "bad.jsonl:1: pets: the answer 'fish' is outside the labels cat, dog",
        "empty.jsonl:1: cars: the split is empty",
        "c.yaml:6: few: label '1' has 1; train, validation and test need an example each",
        "odd-test.jsonl:2: odd: the answer 'down' is outside the labels left, right, up",
    ):
        assert sum(expected in fault for fault in faults) == 1, (expected, faults)
    assert not (tmp_path / "out").exists(), "nothing was started"


def test_heads_are_refused_where_none_can_answer(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", *["1", "two"] * 10)
    text = """\
base: tiny
output: out
heads: true
datasets:
- {name: a, task: counting, floor: 0.5, data: {train: a.jsonl}}
"""
    config = read_config(write(tmp_path / "c.yaml", text))
    with pytest.raises(ConfigError, match="a counting head needs numbers, got 'two'"):
        load_datasets(config)
    with pytest.raises(ConfigError, match="no head answers captioning"):
        read_config(write(tmp_path / "c.yaml", text.replace("counting", "captioning")))


def test_an_ordinary_run_of_the_command_checks_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "pets.jsonl", *["cat", "dog"] * 8)
    rows(tmp_path / "cars.jsonl", *["0", "1"] * 10, question=None)
    assert main([str(write(tmp_path / "c.yaml", GOOD)), "--check"]) == 0
    assert "2 data sets, no faults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("0.5", None),
        ("0.999", None),
        ("0.49", "confidence must lie in [0.5, 1), got 0.49"),
        ("1.0", "confidence must lie in [0.5, 1), got 1"),
        ("high", "confidence must be a float, got 'high'"),
    ],
)
def test_confidence_is_checked(tmp_path: Path, value: str, fault: str | None) -> None:
    rows(tmp_path / "pets.jsonl", "cat")
    rows(tmp_path / "cars.jsonl", "0")
    path = write(tmp_path / "c.yaml", f"confidence: {value}\n{GOOD}")
    if fault is None:
        assert read_config(path).confidence == float(value)
        return
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert str(error.value) == f"{path}:1: {fault}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/generate-*.yaml")), ids=lambda path: path.stem)
def test_the_examples_lack_nothing_but_their_data(path: Any) -> None:
    try:
        read_config(path)
    except ConfigError as error:
        assert all("no such" in fault for fault in str(error).splitlines()), error


def test_floors_confidence_and_orders_do_not_change_what_a_training_gives(tmp_path: Path) -> None:
    rows(tmp_path / "pets.jsonl", *["cat", "dog"] * 8)
    rows(tmp_path / "cars.jsonl", *["0", "1"] * 10, question=None)
    digest = read_config(write(tmp_path / "c.yaml", GOOD)).digest
    assert read_config(write(tmp_path / "c.yaml", GOOD.replace("0.5, data", "0.6, data"))).digest == digest
    assert read_config(write(tmp_path / "c.yaml", "confidence: 0.9\norder: given\n" + GOOD)).digest == digest
    assert read_config(write(tmp_path / "c.yaml", GOOD.replace("rank: 4", "rank: 8"))).digest != digest
