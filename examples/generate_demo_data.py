"""Writes the real, small data sets of examples/generate-demo.yaml from pictures that ship with common packages.

    python examples/generate_demo_data.py [DIRECTORY]     # default: runs/demo-data

Splits are of disjoint source pictures or tiles. Digits come as bare images, without labels except in the test split:
a teacher labels them (examples/digit_teacher.py).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
from digit_teacher import OWN_DIGITS, digits
from PIL import Image

from vlora_sgl.generation.datasets import SPLITS, write_jsonl
from vlora_sgl.models.tiny import domains
from vlora_sgl.models.tiny.build import IMAGE_SIDE

TRAIN, VALIDATION, TEST = 500, 90, 200  # examples at most
TEST_DIGITS = 300
NATURE = ("person", "cat", "flower", "tissue", "eye")  # one half of the photographs; the other half is things


def main(directory: Path) -> None:
    for name, make in domains.DOMAINS.items():
        if name in ("actions", "digits"):  # clips take thrice the time; digits are written below
            continue
        train, validation, test = ([row[:3] for row in rows] for rows in make())
        # The domains' validation splits are small: half of the test split joins them.
        random.Random(name).shuffle(test)
        splits = train, validation + test[: len(test) // 2], test[len(test) // 2 :]
        if name == "photos":
            write(directory / "nature", [[row for row in rows if row[2] in NATURE] for rows in splits])
            write(directory / "things", [[row for row in rows if row[2] not in NATURE] for rows in splits])
        else:
            write(directory / name, splits)
    write_digits(directory / "digits")


def write(directory: Path, splits) -> None:
    for split, rows, limit in zip(SPLITS, splits, (TRAIN, VALIDATION, TEST), strict=True):
        rows = random.Random(str(directory.name)).sample(rows, min(limit, len(rows)))
        write_jsonl(directory / f"{split}.jsonl", rows)
        print(f"{directory}: {len(rows)} {split}")


def write_digits(directory: Path) -> None:
    """``images/`` without labels, and ``test.jsonl`` with true ones, of digits new to the teacher."""
    images, shown = (part[OWN_DIGITS:] for part in digits())
    pictures = [
        Image.fromarray((array * 15.9).astype(np.uint8)).convert("RGB").resize((IMAGE_SIDE, IMAGE_SIDE))
        for array in images
    ]
    (directory / "images").mkdir(parents=True, exist_ok=True)
    count = len(pictures) - TEST_DIGITS
    for i, picture in enumerate(pictures[:count]):
        picture.save(directory / "images" / f"{i:04d}.png")
    (directory / "test").mkdir(exist_ok=True)
    with (directory / "test.jsonl").open("w") as file:
        for i, picture in enumerate(pictures[count:]):
            picture.save(directory / "test" / f"{i:04d}.png")
            answer = str(shown[count + i])
            file.write(json.dumps({"image": f"test/{i:04d}.png", "answer": answer}) + "\n")
    print(f"{directory}: {count} images without labels, {TEST_DIGITS} test")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-data"))
