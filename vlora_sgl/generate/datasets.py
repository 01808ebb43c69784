"""Questions about images, read from the two layouts users have: JSONL beside images, and a folder per label."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError, ImageError
from vlora_sgl.images import image_size, open_image

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
        """The images, decoded, RGB, as a viewer shows them.

        Raises:
            ImageError: one cannot be opened.
        """
        return [open_image(path) for path in self.images]


Located = tuple[str, Example]
"""An example and where it was read, ``file:line``."""


def read_jsonl(path: str | Path) -> list[Example]:
    """Read lines of ``{"image": str | "images": [str], "question": str, "answer": str}``; paths relative to the file.

    For detection a line also has ``"boxes": [{"label": str, "box": [x1, y1, x2, y2]}]``, fractions of the image.

    Raises:
        ConfigError: every fault of the file at once, each with its line.
    """

    def example(row: JsonDict, images: tuple[Path, ...]) -> Example:
        if not str(row["answer"]).strip():
            raise ValueError("the answer is empty")
        return Example(images, str(row["question"]), str(row["answer"]), boxes_of(row))

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    faults: list[str] = []
    located = read_rows(path, example, faults)
    if not located and not faults:
        faults.append(f"{path}: the split is empty")
    if faults:
        raise ConfigError("\n".join(faults))
    return [one for _, one in located]


def read_rows(
    path: Path, example: Callable[[JsonDict, tuple[Path, ...]], Example], faults: list[str]
) -> list[Located]:
    """Rows of a JSONL file as examples; its faults are added to ``faults`` with their lines.

    Args:
        example: makes one of a row and its images; the errors it raises (KeyError, TypeError, ValueError) are faults.
    """
    found: list[Located] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            images = tuple(path.parent / name for name in (row["images"] if "images" in row else [row["image"]]))
            found.append((where, example(row, images)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            faults.append(f"{where}: expected image(s), question and answer: {what}")
            continue
        check_images(where, images, faults)
    return found


def boxes_of(row: JsonDict) -> tuple[tuple[str, Box], ...]:
    """A row's labelled boxes.

    Raises:
        ValueError: one that is no box in fractions of the image.
    """
    return tuple((str(item["label"]), _box(item["box"])) for item in row.get("boxes", ()))


def _box(value: Sequence[float]) -> Box:
    x1, y1, x2, y2 = map(float, value)
    if not (0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1):
        raise ValueError(f"a box is x1, y1, x2, y2 in fractions of the image, got {list(value)}")
    return x1, y1, x2, y2


def check_images(where: str, images: Iterable[Path], faults: list[str]) -> None:
    """Add to ``faults`` the images that are not there, or are none."""
    for path in images:
        try:
            image_size(path)
        except ImageError as error:
            fault = "not an image" if path.exists() else "no such image"
            faults.append(f"{where}: {fault}: {error}")


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
