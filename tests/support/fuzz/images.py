"""Images of every format that are damaged, and ways to send them."""

from __future__ import annotations

import base64
import random
from functools import lru_cache

from tests.support.image_files import KINDS, bombs


@lru_cache(maxsize=1)
def whole_files() -> tuple[bytes, ...]:
    """A file of every kind."""
    return tuple(file.data for files in KINDS.values() for file in files())


@lru_cache(maxsize=1)
def bomb_files() -> tuple[bytes, ...]:
    """Small files of very large images."""
    return tuple(data for _, data in bombs())


def damaged(pick: random.Random) -> bytes:
    """A file that was an image: cut, overwritten, joined with another, or whole once in ten times."""
    if pick.random() < 0.05:
        return pick.choice(bomb_files())
    data = bytearray(pick.choice(whole_files()))
    kind = pick.randrange(10)
    if kind < 3:
        return bytes(data[: pick.randrange(len(data))])
    if kind < 6:  # headers are where it hurts
        reach = min(len(data), pick.choice((32, 200, len(data))))
        for _ in range(pick.choice((1, 2, 8, 40))):
            data[pick.randrange(reach)] = pick.choice((0, 1, 127, 128, 255, pick.randrange(256)))
    elif kind == 6:
        other = pick.choice(whole_files())
        data[pick.randrange(len(data)) :] = other[pick.randrange(len(other)) :]
    elif kind == 7:
        start = pick.randrange(len(data))
        data[start:start] = pick.choice((b"\x00", b"\xff")) * pick.choice((1, 4, 5_000))
    elif kind == 8:
        start, end = sorted(pick.randrange(len(data)) for _ in range(2))
        del data[start:end]
    return bytes(data)


def sent(pick: random.Random) -> str:
    """A damaged image as a request has it, the address around it damaged too at times."""
    text = base64.b64encode(damaged(pick)).decode()
    kind = pick.randrange(12)
    if kind == 0:
        return text
    if kind == 1:
        return f"data:image/png;base64,{text[: pick.randrange(len(text) + 1)]}"
    if kind == 2:
        return (
            pick.choice(("data:image/png,", "data:text/html;base64,", "data:;base64,", "DATA:IMAGE/PNG;BASE64,"))
            + text
        )
    return f"data:image/{pick.choice(('png', 'jpeg', 'webp', 'gif', 'x-what'))};base64,{text}"
