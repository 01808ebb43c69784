"""Several adapters as one, each with a scale: ``{"fire": 0.7, "night": 0.3}``.

The sum of the adapters' updates, each times its scale: PEFT's ``add_weighted_adapter(combination_type="cat")``.

A combination travels as one text, its JSON, wherever an adapter's name does on the way in, and an adapter's id inside
the engine. It is neither: no name has a ``:``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from vlora_sgl.errors import RequestError, quoted

MOST = 4
"""Adapters of one combination."""
LARGEST = 100.0
"""Scales lie within this, on both sides of 0."""
MOST_CHARS = 1 << 13
"""Of a combination's text."""
FORM = f"an object of 1 to {MOST} adapters' names, each with a scale from {-LARGEST:g} to {LARGEST:g}"


def is_combined(adapter: str | None) -> bool:
    """Whether this is a combination, rather than an adapter or the base model."""
    return adapter is not None and adapter[:1] == "{" and ":" in adapter


def are_scales(given: object) -> bool:
    """Whether a value is what ``FORM`` says. It does not raise, whatever comes."""
    if not isinstance(given, Mapping) or not 1 <= len(given) <= MOST:
        return False
    scales = [scale for scale in given.values() if isinstance(scale, int | float) and not isinstance(scale, bool)]
    named = all(isinstance(name, str) and name and not is_combined(name) for name in given)
    return named and len(scales) == len(given) and all(-LARGEST <= scale <= LARGEST for scale in scales)


def written(scales: Mapping[str, float]) -> str:
    """The text of a combination; of one adapter at scale 1, its name.

    >>> written({"night": 0.3, "fire": 0.7}), written({"fire": 1})
    ('{"night": 0.3, "fire": 0.7}', 'fire')

    Raises:
        RequestError: says what a combination must be, and what came.
    """
    if not are_scales(scales):
        raise RequestError(f"adapters must be {FORM}; got {quoted(scales)}")
    (name, scale), *others = scales.items()
    return name if scale == 1 and not others else json.dumps(dict(scales))


@lru_cache(maxsize=4096)
def parts(adapter: str) -> tuple[tuple[str, float], ...]:
    """The adapters of a combination with their scales, or the one adapter at scale 1.

    >>> parts('{"night": 0.3, "fire": 0.7}'), parts("fire")
    ((('night', 0.3), ('fire', 0.7)), (('fire', 1.0),))

    Raises:
        RequestError: a text that is no combination, though it looks like one.
    """
    if not is_combined(adapter):
        return ((adapter, 1.0),)
    try:
        scales: Any = json.loads(adapter) if len(adapter) <= MOST_CHARS else None
    except (ValueError, RecursionError):
        scales = None
    if not are_scales(scales):
        raise RequestError(f"adapters must be {FORM}; got {quoted(adapter)}")
    return tuple((name, float(scale)) for name, scale in scales.items())


def members(adapters: Iterable[str | None]) -> Iterable[str | None]:
    """Adapters with each combination's own in its place."""
    for adapter in adapters:
        if is_combined(adapter):
            yield from (member for member, _ in parts(str(adapter)))
        else:
            yield adapter


def canonical(scales: Iterable[tuple[str, float]]) -> str | None:
    """One text for all combinations that are the same sum: the adapters that count for something, in one order.

    >>> canonical([("b", 0.5), ("a", 0.0), ("c", 1.0)]), canonical([("b", 1.0), ("a", 0.0)]), canonical([("a", 0.0)])
    ('{"b": 0.5, "c": 1.0}', 'b', None)
    """
    counted = sorted((adapter, scale) for adapter, scale in scales if scale)
    return written(dict(counted)) if counted else None
