"""JSON of clients, read strictly: what two readers could understand differently, or cannot survive, is refused.

Images come as long strings, which a strict reader takes milliseconds for. So the strings of a large body are read by
orjson, which is as strict about them, and only what is around them by Python's.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import orjson

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import RequestError, quoted

LARGE = 1 << 16
"""Bytes of a body whose long strings are left out of the strict reading."""
LONG = 256
"""Bytes of such a string."""
MOST_STRINGS = 1 << 14
"""In such a body; with more it is read in one piece."""
DEEP = 64
"""Levels of nesting that a body may have; deeper ones end recursive readers, which SGLang and pydantic have."""

MANY = 1 << 10
"""Values, from which on numbers are checked together, not one by one as they are read."""


def read_json(body: bytes) -> Any:
    """What a body says.

    Raises:
        RequestError: it is not UTF-8, is no JSON (``NaN`` and ``Infinity`` are none), has a number that 64 bits do not
            hold, half a surrogate pair, or a key twice in one object, or is nested more than ``DEEP`` levels.
    """
    try:
        around = _without_long_strings(body) if len(body) >= LARGE else body
        large = around.count(b",") > MANY
        value = (_decoder if large else _exact_decoder).decode(around.decode())
        if b"\\u" in around:
            json.dumps(value, ensure_ascii=False).encode()
        if large or around.count(b"[") + around.count(b"{") > DEEP:
            _check(value)
        return value if around is body else orjson.loads(body)
    except UnicodeEncodeError:
        raise RequestError("the body must be Unicode text; it has half a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body must be UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise RequestError(f"the body must be nested {DEEP} levels at most") from None
    except ValueError as error:
        raise error if isinstance(error, RequestError) else RequestError(f"the body must be JSON: {error}") from None


def _without_long_strings(body: bytes) -> bytes:
    """A body with empty strings for its long ones, but for keys; as it is, if it has very many strings."""
    if body.count(b'"') > 2 * MOST_STRINGS:
        return body
    parts, kept, start = [], 0, body.find(b'"')
    while start >= 0:
        end = _end_of_string(body, start)
        if end < 0:
            return body  # which the reader refuses
        if end - start > LONG and not body[end + 1 : end + 32].lstrip().startswith(b":"):
            parts += [body[kept:start], b'""']
            kept = end + 1
        start = body.find(b'"', end + 1)
    return b"".join([*parts, body[kept:]])


def _end_of_string(body: bytes, start: int) -> int:
    """Where the quote is that ends the string that begins at ``start``; -1 if none does."""
    last, end = start + 1, body.find(b'"', start + 1)
    while end >= 0 and (end - last - len(body[last:end].rstrip(b"\\"))) % 2:  # escaped
        last, end = end + 1, body.find(b'"', end + 1)
    return end


def _object(pairs: list[tuple[str, Any]]) -> JsonDict:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RequestError(f"the body must have each key of an object once; it has {quoted(twice)} twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"the body must be JSON, which has no {name}")


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) < LONG else 2**64  # which is refused, and not worked out
    if not -(2**63) <= number < 2**64:
        raise RequestError("the body must have integers of 64 bits at most")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise RequestError("the body must have finite numbers")
    return number


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_exact_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_integer, parse_float=_finite
)


def _check(value: Any) -> None:
    """Refuse what is nested too deep, and numbers of more than 64 bits, level by level."""
    level = [[value]]
    for _ in range(DEEP + 1):
        level = [inner for one in level for inner in _containers(one)]
        if not level:
            return
    raise RequestError(f"the body must be nested {DEEP} levels at most")


def _containers(items: Any) -> list[Any]:
    """The values of objects, and the lists, among some values, whose numbers this checks."""
    kinds = set(map(type, items))
    if int in kinds:
        whole = [one for one in items if type(one) is int]
        if min(whole) < -(2**63) or max(whole) >= 2**64:
            raise RequestError("the body must have integers of 64 bits at most")
    if float in kinds and any(type(one) is float and math.isinf(one) for one in items):
        raise RequestError("the body must have finite numbers")
    inner = kinds.intersection((dict, list))
    return [one.values() if type(one) is dict else one for one in items if type(one) in inner] if inner else []
