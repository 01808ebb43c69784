"""Data from folders, Hugging Face data sets and teachers, and what each kind of row becomes."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vlora_sgl.errors import ConfigError, MissingDependencyError
from vlora_sgl.generate.config import DataSet, RunConfig
from vlora_sgl.generate.learner import references
from vlora_sgl.generate.scores import METRICS
from vlora_sgl.generate.sources import load_datasets
from vlora_sgl.generate.tasks import TASKS
from vlora_sgl.generate.teachers import label_images, load_teacher

CLASSIFY, DETECT = TASKS["classification"], TASKS["detection"]


def shades(folder: Path, count: int) -> list[Path]:
    """Bright and dark pictures by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(count):
        paths.append(folder / f"{i:03d}.png")
        Image.new("RGB", (16, 16), (230 - i % 7,) * 3 if i % 2 else (20 + i % 7,) * 3).save(paths[-1])
    return paths


def spec(data: dict[str, Path], task: str = "classification", **more: Any) -> DataSet:
    kind = TASKS[task]
    values = {"floor": 0.5, "metric": kind.metrics[0], "question": None if kind.needs == "target" else "Which?"}
    return DataSet(name="set", task=task, data={k: str(v) for k, v in data.items()}, **(values | more))


def load(tmp_path: Path, one: DataSet) -> Any:
    """By the floor itself, which two or three validation examples can show."""
    return load_datasets(RunConfig(base="tiny", output=tmp_path / "out", datasets=(one,), confidence=0.5))[0]


def test_a_folder_per_label_is_split_label_by_label(tmp_path: Path) -> None:
    for label in ("red_car", "cat"):
        shades(tmp_path / "data" / label, 20)
    loaded = load(tmp_path, spec({"folder": tmp_path / "data"}, split=(0.6, 0.2, 0.2)))
    for split, count in (("train", 12), ("validation", 4), ("test", 4)):
        answers = [e.answer for e in loaded.splits[split]]
        assert answers.count("cat") == answers.count("red car") == count
    assert loaded.labels == ("cat", "red car")


@pytest.mark.parametrize("few", [1, 2, 3, 4])
def test_a_label_with_few_examples_is_in_every_split_or_named(tmp_path: Path, few: int) -> None:
    for label, count in (("many", 40), ("rare", few)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, few, 0)).save(tmp_path / "data" / label / f"{number}.png")
    one = spec({"folder": tmp_path / "data"})
    if few < 3:
        with pytest.raises(ConfigError, match=f"label 'rare' has {few}; train, validation and test need an example"):
            load(tmp_path, one)
        return
    loaded = load(tmp_path, one)
    assert all("rare" in {e.answer for e in examples} for examples in loaded.splits.values())
    assert sum(e.answer == "rare" for examples in loaded.splits.values() for e in examples) == few


def test_a_hugging_face_data_set_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "animal": datasets.ClassLabel(names=["cat", "dog"]),
            "ask": datasets.Value("string"),
        }
    )
    rows = {
        "picture": [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(20)],
        "animal": [i % 2 for i in range(20)],
        "ask": ["Who?"] * 20,
    }
    stored = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    stored.save_to_disk(tmp_path / "hf")
    data = {"huggingface": tmp_path / "hf"}
    one = spec(data | {"image": "picture", "answer": "animal", "question": "ask"}, split=(0.5, 0.25, 0.25))
    loaded = load(tmp_path, one)
    assert {s: len(e) for s, e in loaded.splits.items()} == {"train": 12, "validation": 4, "test": 4}
    first = loaded.splits["train"][0]
    assert first.question == "Who?" and first.answer in ("cat", "dog")
    red = first.load_images()[0].getpixel((0, 0))[0]
    assert first.answer == ("cat", "dog")[red % 2], "answers stay with their pictures"
    with pytest.raises(ConfigError, match=r"train has no column image, label; it has \['picture', 'animal', 'ask'\]"):
        load(tmp_path, spec(data))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is no data set on disk"):
        load(tmp_path, spec({"huggingface": tmp_path / "empty"}))


def test_rows_with_several_annotators_and_with_boxes(tmp_path: Path) -> None:
    shades(tmp_path, 3)
    lines = [
        {"image": "000.png", "question": "q", "answers": ["two", "2", "two"]},
        {"image": "001.png", "question": "q", "answer": "2", "answers": ["2", "3"]},
        {"image": "002.png", "question": "q", "answer": "4"},
    ]
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "validation", "test")}
    rows = load(tmp_path, spec(files, "vqa")).splits["train"]
    assert [r.answer for r in rows] == ["two", "2", "4"]
    assert references(rows) == [("two", "2", "two"), ("2", "3"), ("4",)]
    box = {"image": "000.png", "target": "cats", "boxes": [{"label": "cat", "box": [0, 0.1, 0.5, 0.2]}]}
    wrong = {"image": "000.png", "target": "cats", "boxes": [{"label": "cat", "box": [0, 0.1, 50, 0.2]}]}
    files["train"].write_text(json.dumps(box))
    for name in ("validation", "test"):
        files[name].write_text(json.dumps(box))
    (row,) = load(tmp_path, spec(files, "detection")).splits["train"]
    assert row.question == "Please box all the objects in the picture that you think are cats."
    assert row.answer == "<ref>cat</ref><box>(0,100),(500,200)</box>"
    assert METRICS["f1"]([row.answer], references([row])) == 1.0
    files["test"].write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=r"test\.jsonl:1: .*a box is x1, y1, x2, y2 in fractions"):
        load(tmp_path, spec(files, "detection"))


TEACHER = """\
def name(images):
    return ["light" if image.getpixel((0, 0))[0] > 128 else "dark" for image in images]

def boxes(images):
    return [[("spot", (0.0, 0.0, 0.5, 0.5))] if image.getpixel((0, 0))[0] > 128 else [] for image in images]

def short(images):
    return ["light"]

def odd(images):
    return [3 for _ in images]

number = 3
"""


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    (tmp_path / "teacher.py").write_text(TEACHER)
    return f"{tmp_path / 'teacher.py'}"


def test_a_teachers_answers_become_the_training_data(tmp_path: Path, teacher: str) -> None:
    shades(tmp_path / "images", 40)
    truth = [{"image": f"images/{i:03d}.png", "answer": "light" if i % 2 else "dark"} for i in range(10)]
    truth[0]["answer"] = "light"  # the teacher will be wrong here
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, truth)))
    one = spec({"images": tmp_path / "images", "test": tmp_path / "test.jsonl"}, teacher={"python": f"{teacher}:name"})
    loaded = load(tmp_path, one)
    for example in (*loaded.splits["train"], *loaded.splits["validation"]):
        assert example.answer == ("light" if int(example.images[0].stem) % 2 else "dark")
    assert [e.answer for e in loaded.splits["test"]] == [row["answer"] for row in truth], "true labels stay"
    assert METRICS["top1"](loaded.teacher, references(loaded.splits["test"])) == 0.9
    # Its answers are kept: another run does not ask it again.
    (tmp_path / "teacher.py").write_text("")
    assert load(tmp_path, one).splits == loaded.splits
    outside = spec({"images": tmp_path / "images"}, teacher={"python": f"{teacher}:name"}, labels=("light", "grey"))
    (tmp_path / "teacher.py").write_text(TEACHER)
    with pytest.raises(ConfigError, match=r"\d+\.png: set: the answer 'dark' is outside the labels light, grey"):
        load(tmp_path, outside)


def test_labelled_validation_images_stay_apart_from_the_teachers(tmp_path: Path, teacher: str) -> None:
    shades(tmp_path / "images", 20)
    shades(tmp_path / "own", 6)
    truth = [{"image": f"own/{i:03d}.png", "answer": "light"} for i in range(6)]  # the teacher would say dark of half
    for name in ("validation", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, truth)))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("validation", "test")}
    loaded = load(tmp_path, spec({"images": tmp_path / "images", **files}, teacher={"python": f"{teacher}:name"}))
    assert {split: len(examples) for split, examples in loaded.splits.items()} == {
        "train": 20,
        "validation": 6,
        "test": 6,
    }
    assert {e.answer for e in loaded.splits["validation"]} == {"light"}


def test_a_floor_that_the_validation_split_cannot_show_is_a_fault(tmp_path: Path, teacher: str) -> None:
    for label in ("cat", "dog"):
        shades(tmp_path / "data" / label, 40)
    images = shades(tmp_path / "images", 24)
    taught = {"images": images[0].parent}
    sets = (
        spec({"folder": tmp_path / "data"}, floor=0.85, where="c.yaml:4"),
        replace(spec({"folder": tmp_path / "data"}, floor=0.8, where="c.yaml:5"), name="lower"),
        replace(spec(taught, floor=0.9, where="c.yaml:6", teacher={"python": f"{teacher}:name"}), name="taught"),
    )
    with pytest.raises(ConfigError) as error:
        load_datasets(RunConfig(base="tiny", output=tmp_path / "out", datasets=sets))
    assert str(error.value).splitlines() == [
        "c.yaml:4: set: no accuracy on 12 validation examples shows the floor 0.85 with confidence 0.95: expected at "
        "least 16 examples, a lower floor or a lower confidence",
        "c.yaml:6: taught: no accuracy on 4 validation examples shows the floor 0.9 with confidence 0.95: expected at "
        "least 25 examples, a lower floor or a lower confidence",
    ]
    assert not (tmp_path / "out").exists(), "the teacher was not asked yet"
    assert len(load_datasets(RunConfig(base="tiny", output=tmp_path / "out", datasets=sets, confidence=0.5))) == 3


def test_objects_count_as_evidence_by_the_image(tmp_path: Path) -> None:
    shades(tmp_path, 4)
    boxes = [{"label": "cat", "box": [0.1 * i, 0, 0.1 * i + 0.1, 0.5]} for i in range(9)]
    rows = [{"image": f"00{i}.png", "target": "cats", "boxes": boxes[:count]} for i, count in enumerate((2, 2, 2, 2))]
    crowd = [{**row, "boxes": boxes[:count]} for row, count in zip(rows, (1, 1, 1, 9), strict=True)]
    for name, split in (("train", rows), ("validation", crowd), ("test", rows), ("even", rows)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, split)))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "validation", "test")}
    even = load(tmp_path, spec(files | {"validation": tmp_path / "even.jsonl"}, "detection"))
    assert even.evidence == 4
    assert load(tmp_path, spec(files, "detection")).evidence == pytest.approx(144 / 84)


def test_a_teacher_of_boxes(tmp_path: Path, teacher: str) -> None:
    paths = shades(tmp_path / "images", 2)
    said = label_images(load_teacher({"python": f"{teacher}:boxes"}, DETECT, ""), paths, DETECT)
    assert said == ["no detection", "<ref>spot</ref><box>(0,0),(500,500)</box>"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", "gave 1 answers for 2"), ("odd", "no text and no boxes: 3"), ("number", "is a int"), ("gone", "gone")],
)
def test_a_teacher_that_is_none_is_refused(tmp_path: Path, teacher: str, name: str, message: str) -> None:
    paths = shades(tmp_path / "images", 2)
    with pytest.raises(ConfigError, match=message):
        label_images(load_teacher({"python": f"{teacher}:{name}"}, CLASSIFY, ""), paths, CLASSIFY)


def test_a_torchvision_model_as_teacher(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.get_model("squeezenet1_1", weights=None, num_classes=3).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    settings = {
        "torchvision": "squeezenet1_1",
        "weights": str(tmp_path / "weights.pth"),
        "labels": list("abc"),
        "size": 32,
    }
    rng = random.Random(0)
    images = [Image.frombytes("RGB", (32, 32), rng.randbytes(3072)) for _ in range(4)]
    said = load_teacher(settings, CLASSIFY, "")(images)
    prepare = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    with torch.no_grad():
        expected = model(torch.stack([prepare(image) for image in images])).argmax(1)
    assert said == ["abc"[i] for i in expected]
    with pytest.raises(ConfigError, match="size mismatch"):
        load_teacher(settings | {"labels": ["a"]}, CLASSIFY, "")
    with pytest.raises(ConfigError, match="needs labels"):
        load_teacher(settings | {"labels": None}, CLASSIFY, "")


def test_a_pipeline_as_teacher(tmp_path: Path) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        id2label={0: "light", 1: "dark"},
        label2id={"light": 0, "dark": 1},
    )
    torch.manual_seed(0)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    settings = {"pipeline": "image-classification", "model": str(tmp_path / "vit")}
    images = [Image.open(path).convert("RGB") for path in shades(tmp_path / "images", 3)]
    said = load_teacher(settings, CLASSIFY, "")(images)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "vit").eval()
    inputs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")(images, return_tensors="pt")
    assert said == [config.id2label[i] for i in model(**inputs).logits.argmax(1).tolist()]
    with pytest.raises(ConfigError, match="finds no objects"):
        load_teacher(settings, DETECT, "")
    with pytest.raises(ConfigError, match="pipeline"):
        load_teacher({"pipeline": "mind-reading", "model": str(tmp_path / "vit")}, CLASSIFY, "")


def test_an_onnx_teacher_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="pip install onnxruntime"):
        load_teacher({"onnx": "model.onnx", "labels": ["a"]}, CLASSIFY, "")
