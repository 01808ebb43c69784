"""Values of every type, in the wrong place more often than not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 255, 256, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63, -(2**63) - 1, 2**64),
    *(10**30, 10**400, 0.0, -0.0, 0.5, 2.5, 1e-320, 1e10, 1e38, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS: tuple[str, ...] = (
    *("", " ", "\n", "\x00", "a\x00b", "x", "0", "-1", "1e3", "NaN", "null", "true", "None", "{}", "[]", '"', "\\"),
    *("\ud800", "a\udfffb", "\u202etxet\u202c", "\u200b\ufeff", "\U0001f600", "e\u0301" * 40, "\uffff", "ﷺ" * 50),
    *(
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>",
        "<|im_start|>",
    ),
    *("<|video_pad|>", "<|endoftext|>", "<image>", "{{7*7}}", "%s%n", "{0.__class__}", "$(id)", "' OR 1=1 --"),
    *("/etc/passwd", "file:///etc/passwd", "/dev/zero", "../" * 20 + "etc/passwd", "http://127.0.0.1:1/x", "ftp://x"),
    *("data:", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:,x", "A", "B", "A:B", ":", "default:A"),
    *("(", "(a+)+$", "[", "a{1,99999}", "\\", "(?P<", "(?!)", "\\d{3}", "root ::= ", 'root ::= "a" root'),
    *('{"type": "object"}', '{"type": 5}', '{"$ref": "#"}', "x" * 300, "x " * 2000, "\u4e2d" * 5000),
)


def hostile(pick: random.Random, depth: int = 0) -> Any:
    """Any value: a number at an edge, odd text, ``null``, or a collection of the same."""
    kinds: list[tuple[int, Callable[[], Any]]] = [
        (6, lambda: pick.choice(NUMBERS)),
        (6, lambda: pick.choice(TEXTS)),
        (3, lambda: pick.choice((None, True, False))),
        (2, lambda: pick.choice(([], {}, [[]], [{}], [None], [[None]], ["A"], ["A", "B"], [1, 2], [[1], [2]]))),
    ]
    if depth < 3:
        kinds += [
            (2, lambda: [hostile(pick, depth + 1) for _ in range(pick.choice((1, 2, 3, 17)))]),
            (2, lambda: {key(pick): hostile(pick, depth + 1) for _ in range(pick.choice((1, 2, 5)))}),
        ]
    if depth == 0:
        kinds.append((1, lambda: large(pick)))
    (chosen,) = pick.choices([make for _, make in kinds], [weight for weight, _ in kinds])
    return chosen()


def key(pick: random.Random) -> str:
    """An object's key: a word of some schema, or none at all."""
    return pick.choice(
        (*TEXTS[:24], "type", "text", "url", "name", "image_url", "role", "content", "__class__", "rid")
    )


def large(pick: random.Random) -> Any:
    """A value that is long, wide or deep."""
    kind = pick.randrange(5)
    if kind == 0:
        return pick.choice("x\u00e9\U0001f600") * pick.choice((5_000, 70_000, 1_100_000))
    if kind == 1:
        return [pick.choice((1, "x", None, 1.5, [1]))] * pick.choice((300, 5_000))
    if kind == 2:
        return {str(number): number for number in range(pick.choice((100, 3_000)))}
    if kind == 3:
        return nested(pick.choice((20, 40, 400)), list)
    return nested(pick.choice((20, 40, 400)), dict)


def nested(depth: int, kind: type) -> Any:
    """Lists in lists, or objects in objects."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value
