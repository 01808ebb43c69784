"""Bodies that are no JSON, or JSON that no writer writes; and bytes that are no HTTP."""

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


def wire(pick: random.Random) -> bytes:
    """What a client writes that speaks no HTTP, stops in the middle, or lies about lengths; then it leaves."""
    socket = b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    socket += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    post = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return pick.choice(
        (
            *(
                b"",
                b"\x00" * 100,
                b"\x16\x03\x01\x02\x00",
                b"GET",
                b"GET / HTTP/1.1\r\n",
                b"\r\n" * 50,
                b"PRI * HTTP/2.0\r\n\r\n",
            ),
            *(
                b"GET / HTTP/9.9\r\n\r\n",
                b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"FOO /generate HTTP/1.1\r\nHost: x\r\n\r\n",
            ),
            *(b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /%00%ff HTTP/1.1\r\nHost: x\r\n\r\n"),
            b"GET /" + b"a" * pick.choice((9_000, 200_000)) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * pick.choice((9_000, 200_000)) + b"\r\n\r\n",
            *(post + b"Content-Length: 1000\r\n\r\n{", post + b"Content-Length: 0\r\n\r\n", post + b"\r\n"),
            *(post + b"Content-Length: -1\r\n\r\n", post + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}"),
            *(post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", post + b"Content-Length: x\r\n\r\n"),
            post
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + pick.choice((b"zz\r\n", b"5\r\n{", b"0\r\n\r\n", b"-1\r\n")),
            post + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
            post + b"Content-Length: 2\r\n\r\n{}" * pick.choice((2, 30)),
            socket + pick.choice((b"", b"\xff" * 30)),
        )
    )
