"""Bodies that are no JSON, or JSON that no writer writes."""

from __future__ import annotations

import random


def spoiled(body: bytes, pick: random.Random) -> bytes:
    """A body that was fine, cut or overwritten."""
    data = bytearray(body)
    kind = pick.randrange(4)
    if kind == 0 or not data:
        return bytes(data[: pick.randrange(len(data) + 1)])
    for _ in range(pick.choice((1, 3))):
        data[pick.randrange(len(data))] = pick.choice((0, 10, 34, 44, 58, 91, 92, 93, 123, 125, 128, 192, 255))
    return bytes(data) + pick.choice((b"", b"}", b"\x00", b" {}"))


def broken(pick: random.Random) -> bytes:
    """What breaks a parser that trusts."""
    depth = pick.choice((600, 20_000, 200_000))
    return pick.choice(
        (
            *(b"", b" ", b"null", b"true", b"5", b'"x"', b"[]", b"{}", b"[{}]", b"{", b"}", b'{"text"', b'{"text": }'),
            *(b'{"text": "x",}', b"{'text': 'x'}", b'{"text": NaN}', b'{"text": "\\ud800"}', b'{"text": "\\u00"}'),
            *(b'{"text": "a", "text": ["b"]}', b'\xef\xbb\xbf{"text": "x"}', b'{"text": "\xff\xfe"}', b"\x00" * 100),
            *("{}".encode("utf-16"), b'{"text": 1e999999}', b'{"rid": ' + b"9" * 6_000 + b"}"),
            *(b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth, b'{"a":' * depth + b"1" + b"}" * depth),
            b'{"text": "x", "sampling_params": ' + b"[" * depth + b"]" * depth + b"}",
            b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n--x--\r\n",
            b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
        )
    )
