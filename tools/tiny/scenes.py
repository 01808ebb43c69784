"""Procedural scenes with questions: what the embedded model learns from.

A scene is a small table of numbers (`Scenes`), drawn by `render` for a whole batch at once on any device, and asked
about by `questions`. Every seventh combination of colour, shape and background, and one font of every digit, are never
drawn for training; the test scenes are made of them, so that "unseen" means unseen combinations, not another seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
CORNERS = ("top left", "top right", "bottom left", "bottom right")
MAX_OBJECTS = 5
QUESTION_TYPES = (
    "colour", "shape", "count", "count_colour", "position", "exists", "at", "relation", "digit", "pattern", "caption",
    "box", "motion",
)  # fmt: skip
_COLOUR_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _COLOUR_NAMES], dtype=np.float32)
WORDS = (
    "sliding", "growing", "spinning", "resting", "person", "cat", "coffee", "rocket", "temple", "flower", "motorcycle",
    "galaxies", "tissue", "eye", "brick", "grass", "gravel", "moon", "yes", "no", *map(str, range(10)),
)  # fmt: skip
"""What the real domains answer. The base only learns to repeat these words, so that an adapter need not teach them."""
GRID = 16  # boxes are said on a 16 x 16 grid
WINDOW = 32  # pixels, the side of the square that an object is drawn in
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
    digit_box = np.stack(
        [rng.uniform(36, 76, count), rng.uniform(36, 76, count), rng.uniform(20, 34, count)], 1
    ).astype(np.float32)
    placed = np.zeros((count, n), bool)
    for slot in range(n):
        want = slot < number
        for _ in range(40):
            todo = want & ~placed[:, slot]
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
    font = np.where(unseen == font, (font + 1) % fonts, font)
    if test:
        font = unseen
    dark = rng.random(count) < 0.6
    base = np.where(dark, rng.uniform(0.0, 0.30, count), rng.uniform(0.40, 0.62, count))
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


_glyph_cache: list[np.ndarray] = []


def glyphs() -> np.ndarray:
    """Digits drawn in several fonts: (fonts, 10, 48, 48) float32 in [0, 1]. Fonts are the ones matplotlib ships."""
    if not _glyph_cache:
        from pathlib import Path

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
        _glyph_cache.append(atlas)
    return _glyph_cache[0]


def _distance(kind: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance (negative inside), in units of half a side, of each shape on [-1, 1]^2."""
    radius = (x * x + y * y).sqrt()
    ax, ay = x.abs(), y.abs()
    angle = torch.atan2(x, -y)
    star = radius - (0.62 + 0.36 * torch.cos(5 * angle))
    bars = torch.minimum(torch.maximum(ax - 0.95, ay - 0.32), torch.maximum(ay - 0.95, ax - 0.32))
    fields = torch.stack(
        [
            radius - 0.92,
            torch.maximum(ax, ay) - 0.82,
            torch.maximum(1.9 * ax + y - 0.9, -y - 0.9) * 0.6 + (y - 0.85).clamp(min=0),
            bars,
            star,
            (radius - 0.70).abs() - 0.23,
            (ax + ay) * 0.75 - 0.72,
        ]
    )
    return fields.gather(0, kind.expand(fields.shape[1:])[None])[0]


def render(
    scenes: Scenes, device: str | torch.device = "cpu", generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw the scenes: (B, 3, 112, 112) uint8."""
    side = IMAGE_SIDE
    axis = torch.arange(side, device=device, dtype=torch.float32) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")

    def to(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a)).to(device)

    pattern = to(scenes.pattern)[:, None, None]
    wave = torch.stack(
        [
            torch.zeros_like(x),
            ((y / 7).floor() % 2) - 0.5,
            ((x / 7).floor() % 2) - 0.5,
            (((x / 8).floor() + (y / 8).floor()) % 2) - 0.5,
            ((((x % 12) - 6) ** 2 + ((y % 12) - 6) ** 2) < 9).float() - 0.5,
        ]
    )
    image = to(scenes.background)[:, :, None, None] + 0.16 * wave[pattern[:, 0, 0]][:, None]
    _draw_objects(image, to(scenes.centre), to(scenes.size), to(scenes.shape), to(scenes.colour))
    digits = np.nonzero(scenes.digit >= 0)[0]
    if len(digits):
        atlas = torch.from_numpy(glyphs()).to(device)
        box, rows = to(scenes.digit_box[digits])[:, :, None, None], to(digits)
        glyph = atlas[to(scenes.font[digits]), to(scenes.digit[digits])][:, None]
        u, v = (x - box[:, 0]) / (box[:, 2] * 0.75), (y - box[:, 1]) / box[:, 2]
        ink = torch.nn.functional.grid_sample(glyph, torch.stack([u, v], -1), align_corners=False)
        below = image[rows]
        tone = torch.where(below.mean((1, 2, 3), keepdim=True) < 0.4, 0.92, 0.05)
        image[rows] = below * (1 - ink) + tone * ink
    noise = torch.randn(image.shape, device=device, generator=generator) * to(scenes.noise)[:, None, None, None]
    return ((image + noise).clamp(0, 1) * 255).round().to(torch.uint8)


def _draw_objects(
    image: torch.Tensor, centre: torch.Tensor, size: torch.Tensor, shape: torch.Tensor, colour: torch.Tensor
) -> None:
    """Draw every object of `Scenes` over ``image`` (B, 3, 112, 112), in place; each in a window of its own."""
    count, side = image.shape[0], image.shape[-1]
    axis = torch.arange(WINDOW, device=image.device)
    palette = torch.from_numpy(_PALETTE).to(image.device)
    corner_of_window = (centre - WINDOW / 2).round().long().clamp(0, side - WINDOW)  # (B, N, 2)
    columns = corner_of_window[..., 0, None, None] + axis  # (B, N, 1, W)
    rows = corner_of_window[..., 1, None, None] + axis[:, None]  # (B, N, W, 1)
    half = size[..., None, None]
    u = (columns + 0.5 - centre[..., 0, None, None]) / half.clamp(min=1e-3)
    v = (rows + 0.5 - centre[..., 1, None, None]) / half.clamp(min=1e-3)
    u, v = torch.broadcast_tensors(u, v)
    ink = (0.5 - _distance(shape[..., None, None], u, v) * half).clamp(0, 1) * (half > 0)  # (B, N, W, W)
    scene = torch.arange(count, device=image.device)[:, None, None]
    for slot in range(size.shape[1]):  # one after the other, because windows overlap
        at = (scene, slice(None), rows[:, slot], columns[:, slot])  # image[at] is (B, W, W, 3)
        covered = ink[:, slot, :, :, None]
        image[at] = image[at] * (1 - covered) + palette[colour[:, slot]][:, None, None] * covered


def corner(at: Sequence[float]) -> str:
    """The corner of the image in which a point lies."""
    return CORNERS[2 * int(at[1] > IMAGE_SIDE / 2) + int(at[0] > IMAGE_SIDE / 2)]


def questions(
    scenes: Scenes, i: int, rng: random.Random, kinds: tuple[str, ...] = QUESTION_TYPES
) -> list[tuple[str, str, str]]:
    """All questions that scene ``i`` answers without doubt: (type, question, answer), in random order."""
    # Plain lists: numpy's scalars are ten times slower, and this runs for every training scene.
    centre, size = scenes.centre[i].tolist(), scenes.size[i].tolist()
    present = [k for k in range(MAX_OBJECTS) if size[k] > 0]
    drawn = zip(scenes.colour[i].tolist(), scenes.shape[i].tolist(), strict=True)
    names = {k: (_COLOUR_NAMES[c], SHAPES[s]) for k, (c, s) in enumerate(drawn) if size[k] > 0}
    corners = {k: corner(centre[k]) for k in present}
    colours = [names[k][0] for k in present]
    shapes = [names[k][1] for k in present]
    asked: list[tuple[str, str, str]] = []
    if present:
        asked.append(
            ("count", rng.choice(("How many objects are there?", "How many shapes do you see?")), str(len(present)))
        )
    elif scenes.digit[i] >= 0:
        asked.append(("digit", "Which digit is shown?", str(scenes.digit[i])))
    if scenes.digit[i] >= 0:
        asked.append(("digit", rng.choice(("What digit is shown?", "Which number is written?")), str(scenes.digit[i])))
    asked.append(
        (
            "pattern",
            rng.choice(("What pattern has the background?", "Describe the background.")),
            PATTERNS[scenes.pattern[i]],
        )
    )
    for k in present:
        colour, shape = names[k]
        at, half = centre[k], size[k]
        if shapes.count(shape) == 1:
            asked.append(("colour", f"What color is the {shape}?", colour))
        if colours.count(colour) == 1:
            asked.append(("shape", f"What shape is {colour}?", shape))
        where = corners[k]
        asked.append(("position", f"Where is the {colour} {shape}?", where))
        asked.append(("exists", f"Is there a {colour} {shape}?", "yes"))
        if sum(corners[j] == where for j in present) == 1:
            asked.append(("at", f"What is at the {where}?", f"{colour} {shape}"))
        edges = (at[0] - half, at[1] - half, at[0] + half, at[1] + half)
        cells = [min(max(int(edge * GRID / IMAGE_SIDE), 0), GRID - 1) for edge in edges]
        asked.append(("box", f"Give the box of the {colour} {shape}.", " ".join(map(str, cells))))
        for j in present:
            if j != k and rng.random() < 0.5:
                dx, dy = at[0] - centre[j][0], at[1] - centre[j][1]
                other = " ".join(names[j])
                if abs(dx) > 8:
                    asked.append(
                        ("relation", f"Is the {colour} {shape} left of the {other}?", "yes" if dx < 0 else "no")
                    )
                if abs(dy) > 8:
                    asked.append(
                        ("relation", f"Is the {colour} {shape} above the {other}?", "yes" if dy < 0 else "no")
                    )
    if present:
        c = rng.choice(colours + list(_COLOUR_NAMES))
        asked.append(("count_colour", f"How many {c} objects are there?", str(colours.count(c))))
        for _ in range(2):
            absent = (
                (rng.choice(colours), rng.choice(SHAPES))
                if rng.random() < 0.5
                else (rng.choice(_COLOUR_NAMES), rng.choice(shapes))
            )
            if absent not in names.values():
                asked.append(("exists", f"Is there a {absent[0]} {absent[1]}?", "no"))
        order = sorted(present, key=lambda k: (centre[k][1] > IMAGE_SIDE / 2, centre[k][0]))
        text = ", ".join(" ".join(names[k]) for k in order)
        asked.append(("caption", rng.choice(("Describe the image.", "What is in the picture?")), text))
    asked = [q for q in asked if q[0] in kinds]
    rng.shuffle(asked)
    return asked


def motion(
    count: int, rng: np.random.Generator, frames: int = 3, test: bool = False
) -> tuple[list[Scenes], list[str]]:
    """Sequences in which one object moves: per frame a batch of scenes, and the directions."""
    scenes = sample(count, rng, test=test, digit_share=0.0)
    scenes.size[:, 1:] = 0
    names = tuple(DIRECTIONS)
    which = rng.integers(0, 4, count)
    step = np.array([DIRECTIONS[names[w]] for w in which], np.float32) * rng.uniform(10, 16, (count, 1)).astype(
        np.float32
    )
    start = rng.uniform(44, 68, (count, 2)).astype(np.float32) - step * (frames - 1) / 2
    out = []
    for t in range(frames):
        centre = scenes.centre.copy()
        centre[:, 0] = start + t * step
        out.append(Scenes(**{**scenes.__dict__, "centre": centre}))
    return out, [names[w] for w in which]


MOTION_QUESTION = "Which way does the object move?"


def repeat_question(word: str) -> str:
    """A question whose answer is ``word``, whatever the image shows."""
    return f"Repeat the word {word}."


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
    lines += [f"user\n{repeat_question(word)}" for word in WORDS for _ in range(20)]
    return lines + [a for a in answers for _ in range(50)] + [f" {a}" for a in answers for _ in range(50)] + extra * 50
