"""Small checks of what a client sent: each knows a value that fits, and the words for what was expected.

>>> integer(0, 10).fits(3), integer(0, 10).fits(True), integer(0, 10).fits(11), integer(0, 10).expects
(True, False, False, 'an integer from 0 to 10')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

from vlora_sgl.errors import RequestError, quoted

DEEP = 32
"""Levels of nesting that a JSON value may have; deeper ones end recursive readers, which others here are."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a value must be.

    Attributes:
        expects: the words for it, as in "… must be a boolean".
        fits: whether a value is that. It must not raise, whatever comes.
    """

    expects: str
    fits: Callable[[object], bool]

    def __or__(self, other: Check) -> Check:
        return Check(f"{self.expects} or {other.expects}", lambda value: self.fits(value) or other.fits(value))

    def require(self, field: str, value: object) -> None:
        """Refuse a value that does not fit.

        Raises:
            RequestError: names the field, what was expected and what came.
        """
        if not self.fits(value):
            raise RequestError(f"{field} must be {self.expects}; got {shown(value)}")


def shown(value: object) -> str:
    """A value as an error quotes it, its type beside it."""
    return f"{quoted(value)} ({type(value).__name__})"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int) -> Check:
    """A whole number within bounds; ``True`` is none."""
    return Check(f"an integer from {low} to {high}", lambda v: _is_integer(v) and low <= cast(int, v) <= high)


def number(low: float, high: float) -> Check:
    """A finite number within bounds."""

    def fits(value: object) -> bool:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        return real and low <= cast(float, value) <= high  # NaN is not

    return Check(f"a number from {low:g} to {high:g}", fits)


def string(most: int, least: int = 0) -> Check:
    """Text of a bounded length that has a UTF-8 form; lone surrogates have none."""

    def fits(value: object) -> bool:
        if not isinstance(value, str) or not least <= len(value) <= most:
            return False
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True

    return Check(f"text of {f'{least} to' if least else 'at most'} {most} characters", fits)


def one_of(values: Collection[str]) -> Check:
    """One of several words."""
    return Check(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def list_of(item: Check, most: int, least: int = 0) -> Check:
    """A list whose every item fits."""

    def fits(value: object) -> bool:
        return isinstance(value, list) and least <= len(value) <= most and all(map(item.fits, value))

    return Check(f"a list of {least} to {most} of: {item.expects}", fits)


def token_ids(vocabulary: int, most: int) -> Check:
    """A list of token ids, looked at without a loop in Python."""

    def fits(value: object) -> bool:
        if not isinstance(value, list) or not 0 < len(value) <= most or set(map(type, value)) != {int}:
            return False
        return min(value) >= 0 and max(value) < vocabulary

    return Check(f"a list of 1 to {most} token ids from 0 to {vocabulary - 1}", fits)


def json_value(most: int) -> Check:
    """What JSON can say, of bounded size and depth; numbers are finite."""

    def fits(value: object) -> bool:
        waiting, seen = [(value, 0)], 0
        while waiting:
            one, depth = waiting.pop()
            seen += 1
            if depth > DEEP or seen > most:
                return False
            if isinstance(one, dict):
                if not all(isinstance(key, str) for key in one):
                    return False
                waiting += [(inner, depth + 1) for inner in one.values()]
            elif isinstance(one, list):
                waiting += [(inner, depth + 1) for inner in one]
            elif isinstance(one, float):
                if not math.isfinite(one):
                    return False
            elif not isinstance(one, str | int | None):
                return False
        return True

    return Check(f"JSON of at most {most} values, {DEEP} levels deep, with finite numbers", fits)


def table_of(item: Check, most: int) -> Check:
    """An object with text keys whose every value fits."""

    def fits(value: object) -> bool:
        if not isinstance(value, dict) or len(value) > most:
            return False
        return all(isinstance(key, str) and item.fits(inner) for key, inner in value.items())

    return Check(f"an object of at most {most} entries, each {item.expects}", fits)


BOOLEAN = Check("true or false", lambda value: isinstance(value, bool))
NOTHING = Check("left out: it is not for clients", lambda value: value is None)
ANYTHING = Check("anything", lambda value: True)
