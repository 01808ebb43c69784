"""Questions about images, read from the two layouts users have: JSONL beside images, and a folder per label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
SPLITS = ("train", "validation", "test")

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one or more images (several are the frames of a clip), and its answer.

    Attributes:
        boxes: for detection, each object's label and its x1, y1, x2, y2 as fractions of the image's width and height.
        references: the acceptable answers where there are several; ``answer`` is the one to learn.
    """

    images: tuple[Path, ...]
    question: str
    answer: str
    boxes: tuple[tuple[str, Box], ...] = ()
    references: tuple[str, ...] = ()

    def load_images(self) -> list[Image.Image]:
        """The images, decoded, RGB."""
        return [Image.open(path).convert("RGB") for path in self.images]


def read_jsonl(path: str | Path) -> list[Example]:
    """Read lines of ``{"image": str | "images": [str], "question": str, "answer": str}``; paths relative to the file.

    For detection a line also has ``"boxes": [{"label": str, "box": [x1, y1, x2, y2]}]``, fractions of the image.

    Raises:
        ConfigError: every fault of the file at once, each with its line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    examples: list[Example] = []
    faults: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            names = row["images"] if "images" in row else [row["image"]]
            images = tuple(path.parent / name for name in names)
            missing = [str(image) for image in images if not image.is_file()]
            if missing:
                faults.append(f"{path}:{number}: no such image: {', '.join(missing)}")
            if not str(row["answer"]).strip():
                faults.append(f"{path}:{number}: the answer is empty")
            boxes = tuple((str(item["label"]), _box(item["box"])) for item in row.get("boxes", ()))
            examples.append(Example(images, str(row["question"]), str(row["answer"]), boxes))
        except (KeyError, TypeError, ValueError) as error:
            faults.append(f"{path}:{number}: expected image(s), question and answer: {type(error).__name__}: {error}")
    if not examples and not faults:
        faults.append(f"{path}: the split is empty")
    if faults:
        raise ConfigError("\n".join(faults))
    return examples


def _box(value: Sequence[float]) -> Box:
    x1, y1, x2, y2 = map(float, value)
    if not (0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1):
        raise ValueError(f"a box is x1, y1, x2, y2 in fractions of the image, got {list(value)}")
    return x1, y1, x2, y2


def read_image_folder(path: str | Path, question: str) -> list[Example]:
    """Read ``path/<label>/<image>``: the folder's name answers ``question``.

    Raises:
        ConfigError: there is no labelled image.
    """
    path = Path(path)
    examples = [
        Example((image,), question, folder.name.replace("_", " "))
        for folder in sorted(p for p in path.glob("*") if p.is_dir())
        for image in sorted(folder.iterdir())
        if image.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not examples:
        raise ConfigError(f"{path}: expected folders of images named by label, found none")
    return examples


def write_jsonl(
    path: Path,
    rows: Iterable[
        tuple[Sequence[Image.Image], str, str]
        | tuple[Sequence[Image.Image], str, str, Sequence[tuple[str, Sequence[float]]]]
    ],
) -> None:
    """Write (images, question, answer[, boxes]) rows as ``path`` with the images as PNG in ``images/`` beside it."""
    folder = path.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, (images, question, answer, *boxes) in enumerate(rows):
            names = []
            for frame, image in enumerate(images):
                name = f"images/{path.stem}-{number:05d}-{frame}.png"
                image.save(path.parent / name)
                names.append(name)
            row: JsonDict = {"images": names, "question": question, "answer": answer}
            if boxes:
                row["boxes"] = [{"label": label, "box": list(box)} for label, box in boxes[0]]
            file.write(json.dumps(row) + "\n")
