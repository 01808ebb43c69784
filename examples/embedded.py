"""Pictures, clips and questions to judge the embedded model on: it has seen none of them, and the truth is known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import vlora_sgl as vlora
from tools.tiny import scenes
from tools.tiny.domains import DOMAINS, QUESTIONS
from vlora_sgl.heads.store import read_description
from vlora_sgl.models import tiny

BOX_REGEX = r"[0-9]{1,2}( [0-9]{1,2}){3}"
"""How the model says a box: the cells of a 16 x 16 grid it begins and ends in."""


@dataclass(frozen=True)
class Picture:
    """An image file and what is known of it: all names that are right for it."""

    path: Path
    shows: frozenset[str]


@dataclass(frozen=True)
class Clip:
    """Thirty frames, and the action in them."""

    frames: list[Image.Image]
    action: str


def grid_box(text: str, label: str) -> vlora.Boxes:
    """The box that the model's four numbers mean; none where they are no box."""
    x0, y0, x1, y1 = (int(number) for number in text.split())
    if not (x0 <= x1 < scenes.GRID and y0 <= y1 < scenes.GRID):
        return vlora.Boxes()
    edges = (edge / scenes.GRID for edge in (x0, y0, x1 + 1, y1 + 1))
    return vlora.Boxes([vlora.Box(*edges, label)])


def drawn(folder: Path, count: int = 16) -> tuple[list[Picture], str]:
    """Drawn scenes of unseen combinations, and the object that the most of them show."""
    batch = scenes.sample(count, np.random.default_rng(3), test=True, digit_share=0.0)
    images = scenes.render(batch).permute(0, 2, 3, 1).numpy()
    pictures = []
    for number, image in enumerate(images):
        path = folder / f"scene-{number:02}.png"
        Image.fromarray(image).save(path)
        here = np.nonzero(batch.size[number] > 0)[0]
        pictures.append(Picture(path, frozenset(scenes.object_name(batch, number, k) for k in here)))
    names = sorted({name for picture in pictures for name in picture.shows})
    return pictures, max(names, key=lambda name: sum(name in picture.shows for picture in pictures))


def held_out(domain: str, folder: Path, each: int) -> list[Picture]:
    """Real images of an adapter's domain that it was not trained on, so many of each class."""
    rows = random.Random(domain).sample(test := DOMAINS[domain]()[2], len(test))
    pictures = []
    for label in sorted({row[2] for row in rows}):
        for number, row in enumerate([row for row in rows if row[2] == label][:each]):
            path = folder / f"{domain}-{label}-{number}.png"
            row[0][0].save(path)
            pictures.append(Picture(path, frozenset([label])))
    return pictures


def question(domain: str) -> str:
    """What the adapter of a domain was trained to be asked."""
    return QUESTIONS[domain]


def head_of(adapter: str, kind: str) -> str | None:
    """The adapter's only head of a kind, if it has one."""
    heads = read_description(tiny.adapters()[adapter]).heads
    names = [name for name, settings in heads.items() if settings["kind"] == kind]
    return names[0] if len(names) == 1 else None


def handwritten(count: int, seed: int, length: int = 30) -> list[Clip]:
    """Clips of real handwritten digits that slide, grow, spin or rest, from the adapter's test images."""
    draw, rows = random.Random(seed), DOMAINS["actions"]()[2]
    actions = sorted({row[2] for row in rows})
    clips = []
    for number in range(count):
        action = actions[number % len(actions)]
        images = draw.choice([row[0] for row in rows if row[2] == action])
        clips.append(Clip([image for image in images for _ in range(length // 3)], action))
    return clips
