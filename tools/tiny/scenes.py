"""Procedural scenes with questions: what the embedded model learns from.

A scene is a small table of numbers (`Scenes`), drawn by `render` for a whole batch at once on any device, and asked
about by `questions`. Every seventh combination of colour, shape and background, and one font of every digit, are never
drawn for training; the test scenes are made of them, so that "unseen" means unseen combinations, not another seed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.tiny import domains
from tools.tiny.build import IMAGE_SIDE

SHAPES = ("circle", "square", "triangle", "cross", "star", "ring", "diamond")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.95, 0.88, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "orange": (1.00, 0.55, 0.05),
    "cyan": (0.10, 0.85, 0.90),
    "white": (0.98, 0.98, 0.98),
}
PATTERNS = ("plain", "horizontal stripes", "vertical stripes", "checks", "dots")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOTION_QUESTION, REPEAT_QUESTION = "Which way does the object move?", "Repeat the word {}."
CORNERS = ("top left", "top right", "bottom left", "bottom right")
MAX_OBJECTS = 5
QUESTION_TYPES = (
    "colour", "shape", "count", "count_colour", "position", "exists", "at", "relation", "digit", "pattern", "caption",
    "box", "motion",
)  # fmt: skip
_COLOUR_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _COLOUR_NAMES], dtype=np.float32)
WORDS = (*domains.ACTIONS, *domains.SUBJECTS, *domains.SURFACES, "yes", "no", *domains.DIGITS)
"""What the real domains answer. The base only learns to repeat these words, so that an adapter need not teach them."""
GRID = 16  # boxes are said on a 16 x 16 grid
MARGIN = 6  # pixels between an object's centre and the midlines, so that its corner is never in doubt


@dataclass
class Scenes:
    """A batch of B scenes; N = MAX_OBJECTS slots, unused ones have size 0. Lengths in pixels.

    Attributes:
        centre: (B, N, 2) float32, x and y.
        size: (B, N) float32, half the side of the object's box.
        shape, colour: (B, N) int64.
        digit, font: (B,) int64, -1 for none; the digit's box is in `digit_box` (B, 3): x, y, half side.
        background: (B, 3) float32 colour; pattern: (B,) int64; noise: (B,) float32.
    """

    centre: np.ndarray
    size: np.ndarray
    shape: np.ndarray
    colour: np.ndarray
    digit: np.ndarray
    font: np.ndarray
    digit_box: np.ndarray
    background: np.ndarray
    pattern: np.ndarray
    noise: np.ndarray

    def __len__(self) -> int:
        return len(self.size)


def sample(count: int, rng: np.random.Generator, test: bool = False, digit_share: float = 0.2) -> Scenes:
    """Draw ``count`` scenes. With ``test``, at least one object of each is a held-out pair; without, none is."""
    n = MAX_OBJECTS
    number = rng.integers(1, n + 1, count)
    is_digit = rng.random(count) < digit_share
    number = np.where(is_digit, 0 if test else rng.integers(0, 2, count), number)
    size = rng.uniform(8, 14, (count, n)).astype(np.float32)
    centre = np.zeros((count, n, 2), np.float32)
    digit_box = np.stack([rng.uniform(a, b, count) for a, b in ((36, 76), (36, 76), (20, 34))], 1).astype(np.float32)
    placed = np.zeros((count, n), bool)
    for slot in range(n):
        for _ in range(40):
            todo = (slot < number) & ~placed[:, slot]
            if not todo.any():
                break
            size[todo, slot] *= 0.98
            at = rng.uniform(10, IMAGE_SIDE - 10, (count, 2)).astype(np.float32)
            middle = IMAGE_SIDE / 2
            at = np.where(np.abs(at - middle) < MARGIN, middle + np.where(at < middle, -1, 1) * MARGIN, at)
            fits = todo & (at - size[:, slot, None] > 1).all(1) & (at + size[:, slot, None] < IMAGE_SIDE - 1).all(1)
            for other in range(slot):
                gap = np.abs(at - centre[:, other]).max(1)
                fits &= ~placed[:, other] | (gap > size[:, slot] + size[:, other] + 2)
            inside_digit = np.abs(at - digit_box[:, :2]).max(1) < digit_box[:, 2] + size[:, slot] + 1
            fits &= ~(is_digit & inside_digit)
            centre[fits, slot] = at[fits]
            placed[fits, slot] = True
    size = np.where(placed, size, 0)
    pattern = rng.integers(0, len(PATTERNS), count)
    pairs = _distinct_pairs(pattern, number, rng, test)
    digit = np.where(is_digit, rng.integers(0, 10, count), -1)
    fonts = len(glyphs()[0])
    font = rng.integers(0, fonts, count)
    # Each digit is never seen in one of the fonts; test digits are drawn in exactly that one.
    unseen = (np.maximum(digit, 0) * 3 + 1) % fonts
    font = unseen if test else np.where(unseen == font, (font + 1) % fonts, font)
    base = np.where(rng.random(count) < 0.6, rng.uniform(0.0, 0.30, count), rng.uniform(0.40, 0.62, count))
    background = np.clip(base[:, None] + rng.uniform(-0.05, 0.05, (count, 3)), 0, 1).astype(np.float32)
    return Scenes(
        centre, size.astype(np.float32), pairs[..., 1], pairs[..., 0], digit, font, digit_box, background,
        pattern, rng.uniform(0, 0.05, count).astype(np.float32),
    )  # fmt: skip


def is_held_out(colour: np.ndarray, shape: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    """Whether a combination (of indices into COLOURS, SHAPES and PATTERNS) is kept for the test scenes."""
    return (colour + 3 * shape + 2 * pattern) % 7 == 0


def _distinct_pairs(pattern: np.ndarray, number: np.ndarray, rng: np.random.Generator, test: bool) -> np.ndarray:
    """A (colour, shape) for every object, (B, N, 2): distinct within a scene, so that a question has one answer.

    In training scenes none is held out on the scene's background; in test scenes one is, and it is among the drawn.
    """
    count = len(pattern)
    every = np.array([(c, s) for c in range(len(_COLOUR_NAMES)) for s in range(len(SHAPES))])
    held = is_held_out(every[None, :, 0], every[None, :, 1], pattern[:, None])  # (B, pairs)
    priority = rng.random((count, len(every))) + held * (0 if test else 2)
    if test:
        one = (rng.random(held.shape) * held).argmax(1)
        priority[np.arange(count), one] = -1
    chosen = every[np.argsort(priority, 1)[:, :MAX_OBJECTS]]
    rows, swap = np.arange(count), rng.integers(0, np.maximum(number, 1))
    chosen[rows, 0], chosen[rows, swap] = chosen[rows, swap].copy(), chosen[rows, 0].copy()
    return chosen


@functools.cache
def glyphs() -> np.ndarray:
    """Digits drawn in several fonts: (fonts, 10, 48, 48) float32 in [0, 1]. Fonts are the ones matplotlib ships."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = (
        "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold",
        "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol",
    )  # fmt: skip
    atlas = np.zeros((len(names), 10, 48, 48), np.float32)
    for f, name in enumerate(names):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 52)
        for d in range(10):
            canvas = Image.new("L", (96, 96))
            ImageDraw.Draw(canvas).text((48, 48), str(d), fill=255, font=font, anchor="mm")
            atlas[f, d] = np.asarray(canvas.crop(canvas.getbbox()).resize((48, 48)), np.float32) / 255
    return atlas


def _distance(kind: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance (negative inside), in units of half a side, from the shapes ``kind`` on [-1, 1]^2: (B, H, W)."""
    radius = (x * x + y * y).sqrt()
    ax, ay = x.abs(), y.abs()
    fields = {
        "circle": radius - 0.92,
        "square": torch.maximum(ax, ay) - 0.82,
        "triangle": torch.maximum(1.9 * ax + y - 0.9, -y - 0.9) * 0.6 + (y - 0.85).clamp(min=0),
        "cross": torch.minimum(torch.maximum(ax - 0.95, ay - 0.32), torch.maximum(ay - 0.95, ax - 0.32)),
        "star": radius - (0.62 + 0.36 * torch.cos(5 * torch.atan2(x, -y))),
        "ring": (radius - 0.70).abs() - 0.23,
        "diamond": (ax + ay) * 0.75 - 0.72,
    }
    return torch.stack([fields[name] for name in SHAPES], 1)[torch.arange(len(kind)), kind]


def render(scenes: Scenes, device: str | torch.device = "cpu", generator: torch.Generator | None = None) -> Tensor:
    """Draw the scenes: (B, 3, 112, 112) uint8."""
    axis = torch.arange(IMAGE_SIDE, device=device) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")

    def to(a: np.ndarray) -> Tensor:
        """(B, ...) as it broadcasts over pictures, (B, ..., 1, 1)."""
        return torch.from_numpy(a)[..., None, None].to(device)

    waves = {
        "plain": torch.zeros_like(x),
        "horizontal stripes": (y / 7).floor() % 2 - 0.5,
        "vertical stripes": (x / 7).floor() % 2 - 0.5,
        "checks": ((x / 8).floor() + (y / 8).floor()) % 2 - 0.5,
        "dots": ((x % 12 - 6) ** 2 + (y % 12 - 6) ** 2 < 9).float() - 0.5,
    }
    image = to(scenes.background) + 0.16 * torch.stack([waves[name] for name in PATTERNS])[scenes.pattern][:, None]
    for slot in range(MAX_OBJECTS):
        (rows,) = np.nonzero(scenes.size[:, slot] > 0)
        half, centre = to(scenes.size[rows, slot]), to(scenes.centre[rows, slot])
        u, v = (x - centre[:, 0]) / half, (y - centre[:, 1]) / half
        ink = (0.5 - half * _distance(torch.from_numpy(scenes.shape[rows, slot]), u, v)).clamp(0, 1)[:, None]
        image[rows] = image[rows] * (1 - ink) + to(_PALETTE[scenes.colour[rows, slot]]) * ink
    (rows,) = np.nonzero(scenes.digit >= 0)
    glyph = torch.from_numpy(glyphs()[scenes.font[rows], scenes.digit[rows]])[:, None].to(device)
    box = to(scenes.digit_box[rows])
    u, v = (x - box[:, 0]) / (box[:, 2] * 0.75), (y - box[:, 1]) / box[:, 2]
    ink = torch.nn.functional.grid_sample(glyph, torch.stack([u, v], -1), align_corners=False)
    tone = torch.where(image[rows].mean((1, 2, 3), keepdim=True) < 0.4, 0.92, 0.05)
    image[rows] = image[rows] * (1 - ink) + tone * ink
    noise = torch.randn(image.shape, device=device, generator=generator) * to(scenes.noise[:, None])
    return ((image + noise).clamp(0, 1) * 255).round().to(torch.uint8)


def object_name(scenes: Scenes, scene: int, slot: int) -> str:
    """An object as the model names it, as in "red circle"."""
    return f"{_COLOUR_NAMES[scenes.colour[scene, slot]]} {SHAPES[scenes.shape[scene, slot]]}"


def corner(at: Sequence[float]) -> str:
    """The corner of the image in which a point lies."""
    return CORNERS[2 * int(at[1] > IMAGE_SIDE / 2) + int(at[0] > IMAGE_SIDE / 2)]


def questions(
    scenes: Scenes, i: int, rng: random.Random, kinds: tuple[str, ...] = QUESTION_TYPES
) -> list[tuple[str, str, str]]:
    """All questions that scene ``i`` answers without doubt: (type, question, answer), in random order."""
    asked: list[tuple[str, str, str]] = []

    def ask(kind: str, question: str, answer: str | int | bool) -> None:
        said = ("no", "yes")[answer] if isinstance(answer, bool) else str(answer)
        asked.append((kind, question, said))

    # Plain lists: numpy's scalars are ten times slower, and this runs for every training scene.
    centre, size, digit = scenes.centre[i].tolist(), scenes.size[i].tolist(), int(scenes.digit[i])
    present = [k for k in range(MAX_OBJECTS) if size[k] > 0]
    names = {k: object_name(scenes, i, k) for k in present}
    corners = {k: corner(centre[k]) for k in present}
    colours, shapes = ([name.split()[part] for name in names.values()] for part in (0, 1))
    if present:
        ask("count", rng.choice(("How many objects are there?", "How many shapes do you see?")), len(present))
    elif digit >= 0:
        ask("digit", "Which digit is shown?", digit)
    if digit >= 0:
        ask("digit", rng.choice(("What digit is shown?", "Which number is written?")), digit)
    pattern = PATTERNS[scenes.pattern[i]]
    ask("pattern", rng.choice(("What pattern has the background?", "Describe the background.")), pattern)
    for k, name in names.items():
        (colour, shape), (x, y), half, where = name.split(), centre[k], size[k], corners[k]
        if shapes.count(shape) == 1:
            ask("colour", f"What color is the {shape}?", colour)
        if colours.count(colour) == 1:
            ask("shape", f"What shape is {colour}?", shape)
        ask("position", f"Where is the {name}?", where)
        ask("exists", f"Is there a {name}?", "yes")
        if list(corners.values()).count(where) == 1:
            ask("at", f"What is at the {where}?", name)
        edges = (x - half, y - half, x + half, y + half)
        cells = [min(max(int(edge * GRID / IMAGE_SIDE), 0), GRID - 1) for edge in edges]
        ask("box", f"Give the box of the {name}.", " ".join(map(str, cells)))
        for j in present:
            if j != k and rng.random() < 0.5:
                for axis, relation in enumerate(("left of", "above")):
                    if abs(away := centre[k][axis] - centre[j][axis]) > 8:
                        ask("relation", f"Is the {name} {relation} the {names[j]}?", away < 0)
    if present:
        c = rng.choice(colours + list(_COLOUR_NAMES))
        ask("count_colour", f"How many {c} objects are there?", colours.count(c))
        for _ in range(2):
            some = (colours, SHAPES) if rng.random() < 0.5 else (_COLOUR_NAMES, shapes)
            absent = " ".join(rng.choice(part) for part in some)
            if absent not in names.values():
                ask("exists", f"Is there a {absent}?", "no")
        order = sorted(present, key=lambda k: (centre[k][1] > IMAGE_SIDE / 2, centre[k][0]))
        text = ", ".join(names[k] for k in order)
        ask("caption", rng.choice(("Describe the image.", "What is in the picture?")), text)
    asked = [q for q in asked if q[0] in kinds]
    rng.shuffle(asked)
    return asked


def motion(count: int, rng: np.random.Generator, test: bool = False) -> tuple[list[Scenes], list[str]]:
    """Clips in which one object moves: for each of three frames a batch of scenes, and the directions."""
    scenes = sample(count, rng, test=test, digit_share=0.0)
    scenes.size[:, 1:] = 0
    names = [tuple(DIRECTIONS)[which] for which in rng.integers(0, 4, count)]
    length = rng.uniform(10, 16, (count, 1)).astype(np.float32)
    step = np.array([DIRECTIONS[name] for name in names], np.float32) * length
    start = rng.uniform(44, 68, (count, 2)).astype(np.float32) - step
    centres = [np.concatenate([(start + t * step)[:, None], scenes.centre[:, 1:]], 1) for t in range(3)]
    return [replace(scenes, centre=centre) for centre in centres], names


def corpus() -> list[str]:
    """Text that contains every word of the questions and answers, for the tokenizer."""
    rng = random.Random(0)
    scenes = sample(4000, np.random.default_rng(0), test=False)
    lines = [f"user\n{q}" for i in range(len(scenes)) for _, q, _ in questions(scenes, i, rng)]
    answers = [*_COLOUR_NAMES, *SHAPES, *PATTERNS, *DIRECTIONS, *CORNERS, "yes", "no", *map(str, range(21)), *WORDS]
    extra = [
        "system\nYou are a helpful assistant.", "assistant\n", MOTION_QUESTION, "Answer with one word. What is this?",
        "Which of these is shown: person, cat, cup, rocket, temple, flower, motorcycle, brick, grass, gravel, moon?",
        "What material is this surface? What does the photograph show? Is this a face? Which handwritten digit?",
        "How many coins are there? Which action is shown? The image shows a photo of the surface texture.",
    ]  # fmt: skip
    lines += [f"user\n{REPEAT_QUESTION.format(word)}" for word in WORDS for _ in range(20)]
    return lines + [a for a in answers for _ in range(50)] + [f" {a}" for a in answers for _ in range(50)] + extra * 50
