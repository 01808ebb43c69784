"""What a program's variables hold: labels, counts and boxes, each still the plain text, number or tuple it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlora_sgl.lang.media import ImageSource

_REF_BOXES = re.compile(r"(?:<ref>(?P<ref>.*?)</ref>)?(?P<boxes>(?:<box>\(\d+,\d+\),\(\d+,\d+\)</box>)+)", re.DOTALL)
_BOX = re.compile(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>")
_PALETTE = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


class Label(str):
    """A class label that knows how sure the model was.

    Attributes:
        probabilities: probability per label; they sum to one over the labels that were possible.
    """

    probabilities: dict[str, float]

    def __new__(cls, label: str, probabilities: Mapping[str, float] | None = None) -> Label:
        value = super().__new__(cls, label)
        value.probabilities = dict(probabilities or {})
        return value

    @property
    def probability(self) -> float | None:
        """Probability of this label, or None when the answer carried none."""
        return self.probabilities.get(str(self))


class Count(int):
    """A counted number; ``probability`` is the head's, or None for a number that was generated as text."""

    probability: float | None

    def __new__(cls, count: int, probability: float | None = None) -> Count:
        value = super().__new__(cls, count)
        value.probability = probability
        return value


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box in fractions of the image: x to the right, y down, all within [0, 1].

    Attributes:
        x0, y0, x1, y1: left, top, right and bottom edge.
        label: what is in it.
        score: confidence in [0, 1], or None when the model gave none.
    """

    x0: float
    y0: float
    x1: float
    y1: float
    label: str = ""
    score: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.x0 <= self.x1 <= 1 and 0 <= self.y0 <= self.y1 <= 1):
            raise ValueError(f"a box needs 0 <= x0 <= x1 <= 1 and the same for y, got {self}")

    def pixels(self, width: int, height: int) -> tuple[float, float, float, float]:
        """``(x0, y0, x1, y1)`` in the pixels of an image of this size."""
        return self.x0 * width, self.y0 * height, self.x1 * width, self.y1 * height

    def iou(self, other: Box) -> float:
        """Intersection over union with another box, in [0, 1]; two empty boxes have 0."""
        wide = max(0.0, min(self.x1, other.x1) - max(self.x0, other.x0))
        high = max(0.0, min(self.y1, other.y1) - max(self.y0, other.y0))
        both = wide * high
        either = (self.x1 - self.x0) * (self.y1 - self.y0) + (other.x1 - other.x0) * (other.y1 - other.y0) - both
        return both / either if either > 0 else 0.0


class Boxes(tuple[Box, ...]):
    """Boxes found in one image, the surest first where they carry scores."""

    __slots__ = ()

    def __new__(cls, boxes: Iterable[Box] = ()) -> Boxes:
        return super().__new__(cls, sorted(boxes, key=lambda box: -(box.score if box.score is not None else 0.0)))

    @classmethod
    def parse(cls, text: str, scale: int = 1000) -> Boxes:
        """Read ``<ref>cup</ref><box>(x0,y0),(x1,y1)</box>…`` (V-LoRA, appendix C); numbers are in 1/``scale``.

        >>> Boxes.parse("<ref>cup</ref><box>(100,200),(300,600)</box>")[0].label
        'cup'
        """
        found = []
        for group in _REF_BOXES.finditer(text):
            for match in _BOX.finditer(group["boxes"]):
                x0, y0, x1, y1 = (min(int(number) / scale, 1.0) for number in match.groups())
                found.append(Box(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1), (group["ref"] or "").strip()))
        return cls(found)

    def __str__(self) -> str:
        """The boxes in the same notation, in 1/1000 of the image."""
        return "".join(
            f"<ref>{box.label}</ref><box>({box.x0 * 1000:.0f},{box.y0 * 1000:.0f}),"
            f"({box.x1 * 1000:.0f},{box.y1 * 1000:.0f})</box>"
            for box in self
        )

    def draw(self, image: ImageSource, width: int | None = None) -> Image:
        """A copy of ``image`` (anything ``vlora.image`` takes) with the boxes and their labels drawn on it.

        Args:
            width: line width in pixels; by default it follows the size of the image.
        """
        from PIL import ImageDraw, ImageFont

        from vlora_sgl.lang.media import load_image

        picture = load_image(image).convert("RGB")
        pen = ImageDraw.Draw(picture)
        line = width or max(1, round(min(picture.size) / 160))
        font = ImageFont.load_default(size=max(10, min(picture.size) / 28))
        colours = {label: _PALETTE[i % len(_PALETTE)] for i, label in enumerate(sorted({box.label for box in self}))}
        for box in self:
            left, top, right, bottom = box.pixels(picture.width - 1, picture.height - 1)
            colour = colours[box.label]
            pen.rectangle((left, top, right, bottom), outline=colour, width=line)
            caption = box.label if box.score is None else f"{box.label} {box.score:.2f}".strip()
            if caption:
                wide, high = pen.textbbox((0, 0), caption, font=font)[2:]
                # Above the box where there is room, else inside it; never over the right edge.
                at = (max(0, min(left, picture.width - wide - 3)), top - high - 2 if top > high + 2 else top)
                pen.rectangle((*at, at[0] + wide + 2, at[1] + high + 2), fill=colour)
                pen.text((at[0] + 1, at[1]), caption, fill="white", font=font)
        return picture
