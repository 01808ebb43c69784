"""Real, small image domains for the embedded model's adapters, cut from pictures that ship with common packages.

``prepare`` writes each domain as JSONL beside PNG images, the layout of users' own data. Splits are made of disjoint
source images (or disjoint tiles of a source image), with fixed seeds. No picture is redistributed: they are read from
scikit-learn and scikit-image where those are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.tiny.build import IMAGE_SIDE
from vlora_sgl.generate.datasets import SPLITS, write_jsonl
from vlora_sgl.heads.store import AFTER_IMAGE

Boxes = list[tuple[str, tuple[float, float, float, float]]]
Row = tuple[Sequence[Image.Image], str, str] | tuple[Sequence[Image.Image], str, str, Boxes]
Shares = tuple[float, float, float]
SHARES: Shares = (0.66, 0.09, 0.25)  # of each class, per split

QUESTIONS = {
    "digits": "Which handwritten digit is this?",
    "surfaces": "What material is this surface?",
    "photos": "What does the photograph show?",
    "faces": "Is this a face?",
    "actions": "Which action is shown?",
    "counting": "How many handwritten digits are there?",
}
ACTIONS = ("sliding", "growing", "spinning", "resting")
SURFACES = ("brick", "grass", "gravel", "moon")
SUBJECTS = ("person", "cat", "coffee", "rocket", "temple", "flower", "motorcycle", "galaxies", "tissue", "eye")
DIGITS = tuple(map(str, range(10)))
MOST_DIGITS = 5  # in a picture of the counting domain
HEADS: dict[str, tuple[dict[str, Any], ...]] = {
    "actions": ({"name": "action", "kind": "classify", "labels": list(ACTIONS)},),
    "counting": (
        {"name": "digits", "kind": "count", "maximum": MOST_DIGITS},
        {"name": "find", "kind": "detect", "labels": ["digit"], "threshold": 0.5, "overlap": 0.5},
    ),
    "digits": ({"name": "digit", "kind": "classify", "labels": list(DIGITS)},),
    "photos": ({"name": "subject", "kind": "classify", "labels": list(SUBJECTS)},),
    "surfaces": ({"name": "material", "kind": "classify", "labels": list(SURFACES)},),
}
"""The vision heads trained with each domain's adapter, as ``vlora_adapter.json`` describes them."""


def _split(
    items: Sequence[np.ndarray] | np.ndarray, rng: np.random.Generator, shares: Shares = SHARES
) -> list[list[np.ndarray]]:
    order = rng.permutation(len(items))
    ends = [round(shares[0] * len(items)), round((shares[0] + shares[1]) * len(items))]
    return [[items[k] for k in part] for part in np.split(order, ends)]


def _picture(array: np.ndarray) -> Image.Image:
    return Image.fromarray(array).convert("RGB").resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)


def _tiles(array: np.ndarray, side: int) -> list[np.ndarray]:
    rows, columns = array.shape[0] // side, array.shape[1] // side
    return [array[r * side : (r + 1) * side, c * side : (c + 1) * side] for r in range(rows) for c in range(columns)]


def _turned(tile: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A flipped and slightly cropped copy, for training only."""
    side = tile.shape[0]
    cut = rng.integers(0, side // 6 + 1, 2)
    tile = tile[cut[0] : side - side // 6 + cut[0], cut[1] : side - side // 6 + cut[1]]
    return tile[:, ::-1] if rng.random() < 0.5 else tile


def _from_classes(
    name: str, classes: dict[str, list[np.ndarray]], copies: int, seed: int, shares: Shares = SHARES
) -> list[list[Row]]:
    rng = np.random.default_rng(seed)
    splits: list[list[Row]] = [[], [], []]
    for label, items in classes.items():
        for number, part in enumerate(_split(items, rng, shares)):
            for item in part:
                splits[number].append(([_picture(item)], QUESTIONS[name], label))
                if number == 0:
                    splits[0] += [([_picture(_turned(item, rng))], QUESTIONS[name], label) for _ in range(copies)]
    return splits


def _handwritten() -> tuple[np.ndarray, np.ndarray]:
    """1,797 handwritten digits, (N, 8, 8) uint8 (scikit-learn, UCI optical recognition), and which they are, (N,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * 15.9).astype(np.uint8), data.target


def digits() -> list[list[Row]]:
    """The handwritten digits."""
    images, shown = _handwritten()
    return _from_classes("digits", {d: list(images[shown == int(d)]) for d in DIGITS}, copies=0, seed=1)


def surfaces(side: int = 48, shares: Shares = SHARES) -> list[list[Row]]:
    """Tiles of photographed brick, grass and gravel, and of the moon (scikit-image); ``side`` in pixels."""
    from skimage import data

    classes = {name: _tiles(getattr(data, name)(), side) for name in SURFACES}
    return _from_classes("surfaces", classes, copies=2, seed=2, shares=shares)


def photos(side: int = 80, shares: Shares = SHARES) -> list[list[Row]]:
    """Tiles of ten photographs (scikit-image, scikit-learn), named by what is shown; ``side`` in pixels."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    pictures = (
        data.astronaut(),
        data.chelsea(),
        data.coffee(),
        data.rocket(),
        load_sample_image("china.jpg"),
        load_sample_image("flower.jpg"),
        data.stereo_motorcycle()[0],
        data.hubble_deep_field()[:640, :640],
        data.immunohistochemistry(),
        data.retina()[300:1100, 300:1100],
    )
    classes = {name: _tiles(picture, side) for name, picture in zip(SUBJECTS, pictures, strict=True)}
    return _from_classes("photos", classes, copies=2, seed=3, shares=shares)


def faces(shares: Shares = SHARES) -> list[list[Row]]:
    """200 grey 25 x 25 patches, half of them faces (scikit-image, a subset of LFW)."""
    from skimage import data

    patches = (np.asarray(data.lfw_subset()) * 255).astype(np.uint8)
    classes = {"yes": list(patches[:100]), "no": list(patches[100:])}
    return _from_classes("faces", classes, copies=3, seed=4, shares=shares)


def actions() -> list[list[Row]]:
    """Three-frame clips of a handwritten digit that slides, grows, spins or rests; clips of a split use its digits."""
    rng = np.random.default_rng(5)
    return [
        [(_clip(digit, action := ACTIONS[rng.integers(0, 4)], rng), QUESTIONS["actions"], action) for digit in part]
        for part in _split(_handwritten()[0][:900], rng)
    ]


def _clip(digit: np.ndarray, action: str, rng: np.random.Generator) -> list[Image.Image]:
    side = int(rng.integers(36, 48))
    at = rng.integers(30, IMAGE_SIDE - 30 - side + 1, 2)
    step = rng.integers(12, 17, 2) * rng.choice([-1, 1], 2)
    turn = int(rng.choice([-1, 1])) * int(rng.integers(35, 55))
    frames = []
    for t in range(3):
        glyph = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC)
        spot = at
        if action == "sliding":
            spot = at + (t - 1) * step
        elif action == "growing":
            grown = side + t * 16 - 8
            glyph, spot = glyph.resize((grown, grown)), at - (grown - side) // 2
        elif action == "spinning":
            glyph = glyph.rotate(t * turn, resample=Image.Resampling.BICUBIC)
        frame = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE))
        frame.paste(glyph, (int(spot[0]), int(spot[1])))
        frames.append(frame.convert("RGB"))
    return frames


def counting(pictures: tuple[int, int, int] = (1200, 120, 300), shares: Shares = SHARES) -> list[list[Row]]:
    """Pictures with none to five handwritten digits, and where they are; pictures of a split use its digits."""
    rng = np.random.default_rng(6)
    splits: list[list[Row]] = []
    for part, number in zip(_split(_handwritten()[0], rng, shares), pictures, strict=True):
        rows: list[Row] = []
        for _ in range(number):
            count = int(rng.integers(0, MOST_DIGITS + 1))
            picture, boxes = _spread([part[k] for k in rng.choice(len(part), count, replace=False)], rng)
            rows.append(([picture], QUESTIONS["counting"], str(count), boxes))
        splits.append(rows)
    return splits


def _spread(digits: Sequence[np.ndarray], rng: np.random.Generator) -> tuple[Image.Image, Boxes]:
    """Each digit near the middle of a cell of its own, in a grid of 4 x 4."""
    cell = IMAGE_SIDE // 4
    frame, boxes = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE), int(rng.integers(0, 40))), []
    for digit, place in zip(digits, rng.choice(16, len(digits), replace=False), strict=True):
        side = int(rng.integers(20, cell))
        slack = (cell - side) // 2
        x, y = (int(k) * cell + slack + int(rng.integers(-slack, slack + 1)) for k in (place % 4, place // 4))
        frame.paste(Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC), (x, y))
        box = (x / IMAGE_SIDE, y / IMAGE_SIDE, (x + side) / IMAGE_SIDE, (y + side) / IMAGE_SIDE)
        boxes.append(("digit", box))
    return frame.convert("RGB"), boxes


DOMAINS: dict[str, Callable[[], list[list[Row]]]] = {
    make.__name__: make for make in (actions, counting, digits, faces, photos, surfaces)
}

ADAPTERS: dict[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in DOMAINS if name != "faces"},  # the base tells faces by itself: 0.90 on the test
    "digits-late": ("digits", AFTER_IMAGE),
    "surfaces-late": ("surfaces", AFTER_IMAGE),
}
"""Every adapter's domain, and where it starts."""

TOWERS: dict[str, tuple[str, str | None]] = {"photos-tower": ("photos", None)}
"""Likewise, those with weights for the vision tower too; the others leave images as they are."""

EVERY = {**ADAPTERS, **TOWERS}


def prepare(directory: Path, names: Sequence[str] = tuple(DOMAINS)) -> None:
    """Write ``directory/<domain>/{train,validation,test}.jsonl`` with their images."""
    for name in names:
        for split, rows in zip(SPLITS, DOMAINS[name](), strict=True):
            write_jsonl(directory / name / f"{split}.jsonl", rows)
