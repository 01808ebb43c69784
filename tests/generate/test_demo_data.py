"""The demonstration's data: splits share no picture, and the teacher can read what it is to label."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("generate_demo_data")


def pixels(paths: list[Path]) -> set[bytes]:
    return {np.asarray(Image.open(path)).tobytes() for path in paths}


def test_no_digit_of_validation_or_test_is_among_the_images_to_label(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from digit_teacher import OWN_DIGITS, digits

    monkeypatch.setattr(maker, "VARIANTS", 1)
    maker.write_digits(tmp_path)
    splits = {"images": pixels(sorted((tmp_path / "images").glob("*-0.png")))}
    for split in ("validation", "test"):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        splits[split] = pixels([tmp_path / row["image"] for row in rows])
        assert len(splits[split]) == len(rows)
    assert (
        not splits["images"] & splits["validation"] and not (splits["images"] | splits["validation"]) & splits["test"]
    )
    assert sum(map(len, splits.values())) == len(digits()[0])
    assert len(splits["images"]) > OWN_DIGITS, "the teacher learnt from the first ones, and from no other"


def test_the_teacher_reads_pictures_that_are_moved_a_little(maker: ModuleType) -> None:
    from digit_teacher import OWN_DIGITS, digits, read_digits

    arrays, shown = (part[OWN_DIGITS : OWN_DIGITS + 400] for part in digits())
    side = maker.IMAGE_SIDE
    pictures = [Image.fromarray((a * 15.9).astype(np.uint8)).convert("RGB").resize((side, side)) for a in arrays]
    moved = [maker.moved(picture, random.Random(i)) for i, picture in enumerate(pictures)]
    right = [
        np.mean([a == str(b) for a, b in zip(read_digits(each), shown, strict=True)]) for each in (pictures, moved)
    ]
    assert right[0] > 0.94 and right[1] > 0.92
    assert not pixels_of(pictures) & pixels_of(moved)


def pixels_of(pictures: list[Image.Image]) -> set[bytes]:
    return {picture.tobytes() for picture in pictures}


def test_tiles_of_a_split_are_in_no_other(maker: ModuleType) -> None:
    pytest.importorskip("skimage")
    from tools.tiny import domains

    for splits in (domains.photos(80, maker.SHARES), domains.faces(maker.FACES)):
        train, validation, test = ({row[0][0].tobytes() for row in rows} for rows in splits)
        assert not train & validation and not train & test and not validation & test
