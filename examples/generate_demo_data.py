"""Writes the real, small data sets of examples/generate-demo.yaml from pictures that ship with common packages.

    python examples/generate_demo_data.py [DIRECTORY]     # default: runs/demo-data

Splits are of disjoint source pictures or tiles. Validation and test get a quarter of the sources each: validation
examples must show the floors, and a small test split says little. Digits come as bare images, most of them moved and
turned a little, without labels except in the validation and test splits: a teacher labels them
(examples/digit_teacher.py).
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from digit_teacher import digits
from PIL import Image

from tools.tiny import domains
from tools.tiny.build import IMAGE_SIDE
from vlora_sgl.generate.datasets import SPLITS, write_jsonl

TRAIN = 800  # examples at most
SHARES = (0.5, 0.25, 0.25)
FACES = (0.3, 0.35, 0.35)  # of 200 patches; the base tells them by itself
PHOTO_TILE, SURFACE_TILE = 48, 40  # pixels, of pictures of 300 to 800
COUNTING = (800, 300, 300)  # pictures
NATURE = ("person", "cat", "flower", "tissue", "eye")  # one half of the photographs; the other half is things
VALIDATION_DIGITS, TEST_DIGITS = 300, 400
VARIANTS = 3  # of each digit without a label, besides itself
MOST_TURN, MOST_STRETCH, MOST_SHIFT = 6, 0.05, 4  # degrees, share, pixels: what the teacher still reads


def main(directory: Path) -> None:
    for name in ("nature", "things", "surfaces", "faces", "counting", "digits"):
        shutil.rmtree(directory / name, ignore_errors=True)  # pictures of an earlier version may be test pictures now
    photos = domains.photos(PHOTO_TILE, SHARES)
    write(directory / "nature", [[row for row in rows if row[2] in NATURE] for rows in photos])
    write(directory / "things", [[row for row in rows if row[2] not in NATURE] for rows in photos])
    write(directory / "surfaces", domains.surfaces(SURFACE_TILE, SHARES))
    write(directory / "faces", domains.faces(FACES))
    write(directory / "counting", domains.counting(COUNTING, SHARES))
    write_digits(directory / "digits")


def write(directory: Path, splits: Sequence[Sequence[domains.Row]]) -> None:
    for split, rows in zip(SPLITS, splits, strict=True):
        rows = [row[:3] for row in rows]
        if split == "train":
            rows = random.Random(str(directory.name)).sample(rows, min(TRAIN, len(rows)))
        write_jsonl(directory / f"{split}.jsonl", rows)
        print(f"{directory}: {len(rows)} {split}")


def write_digits(directory: Path) -> None:
    """``images/`` without labels; validation and test with true ones, of digits new to teacher and adapter."""
    rng = random.Random(0)
    arrays, shown = digits()
    pictures = [
        Image.fromarray((array * 15.9).astype(np.uint8)).convert("RGB").resize((IMAGE_SIDE, IMAGE_SIDE))
        for array in arrays
    ]
    count = len(pictures) - VALIDATION_DIGITS - TEST_DIGITS
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for i, picture in enumerate(pictures[:count]):
        for k, variant in enumerate([picture, *(moved(picture, rng) for _ in range(VARIANTS))]):
            variant.save(directory / "images" / f"{i:04d}-{k}.png")
    print(f"{directory}: {count * (1 + VARIANTS)} images without labels")
    for split, start, end in (("validation", count, -TEST_DIGITS), ("test", -TEST_DIGITS, None)):
        (directory / split).mkdir(exist_ok=True)
        rows = []
        for i, (picture, digit) in enumerate(zip(pictures[start:end], shown[start:end], strict=True)):
            picture.save(directory / split / f"{i:04d}.png")
            rows.append({"image": f"{split}/{i:04d}.png", "answer": str(digit)})
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{directory}: {len(rows)} {split}")


def moved(picture: Image.Image, rng: random.Random) -> Image.Image:
    """A copy, turned, stretched and shifted at random by a little."""
    angle = math.radians(rng.uniform(-MOST_TURN, MOST_TURN))
    scale = 1 + rng.uniform(-MOST_STRETCH, MOST_STRETCH)
    x, y = (picture.width / 2 + rng.uniform(-MOST_SHIFT, MOST_SHIFT) for _ in range(2))
    c, s, middle = math.cos(angle) / scale, math.sin(angle) / scale, picture.width / 2
    affine = (c, s, middle - c * x - s * y, -s, c, middle + s * x - c * y)
    return picture.transform(picture.size, Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-data"))
