"""Takes a request that makes sense and spoils it in one to three places."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from tests.support.fuzz.schemas import Schema, Schemas
from tests.support.fuzz.values import hostile, key

Place = tuple[Any, Any]
"""A list or an object, and an index or a key of it."""


def spoil(body: dict[str, Any], schemas: Schemas, schema: Schema | None, pick: random.Random) -> dict[str, Any]:
    """The body with wrong types, extremes, lists of the wrong length, fields that are missing, new or out of place."""
    body = copy.deepcopy(body)
    properties = schemas.properties(schema)
    for _ in range(pick.choice((0, 1, 1, 1, 2, 3))):
        if properties and pick.random() < 0.35:
            _add(body, properties, schemas, pick)
        elif places := _places(body):
            _change(*pick.choice(places), places, pick)
    return body


def _add(body: dict[str, Any], properties: Mapping[str, Schema], schemas: Schemas, pick: random.Random) -> None:
    name = pick.choice(sorted(properties))
    if pick.random() < 0.05:
        name = key(pick)
    fits = name in properties and pick.random() < 0.4
    body[name] = schemas.fitting(properties[name], pick) if fits else hostile(pick)


def _change(owner: Any, at: Any, places: list[Place], pick: random.Random) -> None:
    kind = pick.randrange(10)
    if kind < 5:
        owner[at] = hostile(pick)
    elif kind == 5:
        del owner[at]
    elif kind == 6:
        owner[at] = [copy.deepcopy(owner[at]) for _ in range(pick.choice((1, 2, 3)))]
    elif kind == 7:
        other, there = pick.choice(places)
        owner[at] = copy.deepcopy(other[there])
    elif kind == 8 and isinstance(owner, dict):
        owner[key(pick)] = hostile(pick)
    elif isinstance(owner[at], list) and owner[at]:
        owner[at] = owner[at][0]
    else:
        owner[at] = {"x": owner[at]}


def _places(value: Any) -> list[Place]:
    """Every place in a value that holds another."""
    found: list[Place] = []
    waiting = [value]
    while waiting and len(found) < 500:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for at in keys:
            found.append((one, at))
            waiting.append(one[at])
    return found
