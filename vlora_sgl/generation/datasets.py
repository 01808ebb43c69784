"""Questions about images, read from the two layouts users have: JSONL beside images, and a folder per label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vlora_sgl.errors import ConfigError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one or more images (several are the frames of a clip), and its answer."""

    images: tuple[Path, ...]
    question: str
    answer: str

    def load_images(self) -> list[Image.Image]:
        """The images, decoded, RGB."""
        return [Image.open(path).convert("RGB") for path in self.images]


def read_jsonl(path: str | Path) -> list[Example]:
    """Read lines of ``{"image": str | "images": [str], "question": str, "answer": str}``; paths relative to the file.

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
            examples.append(Example(images, str(row["question"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            faults.append(f"{path}:{number}: expected image(s), question and answer: {type(error).__name__}: {error}")
    if not examples and not faults:
        faults.append(f"{path}: the split is empty")
    if faults:
        raise ConfigError("\n".join(faults))
    return examples


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


def write_jsonl(path: Path, rows: Iterable[tuple[Sequence[Image.Image], str, str]]) -> None:
    """Write (images, question, answer) rows as ``path`` with the images as PNG in ``images/`` beside it."""
    folder = path.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, (images, question, answer) in enumerate(rows):
            names = []
            for frame, image in enumerate(images):
                name = f"images/{path.stem}-{number:05d}-{frame}.png"
                image.save(path.parent / name)
                names.append(name)
            file.write(json.dumps({"images": names, "question": question, "answer": answer}) + "\n")
