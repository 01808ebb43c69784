"""A server's OpenAPI description: its routes, and values that fit a schema."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.fuzz.values import hostile

Schema = dict[str, Any]
METHODS = ("get", "put", "post", "delete", "head", "patch")
DEPTH = 4
"""Levels below which a value is left out."""


@dataclass(frozen=True)
class Route:
    """One method of one path.

    Attributes:
        body: the schema of its body, if it has one in JSON.
        query: the schemas of its query's parameters by name.
    """

    method: str
    path: str
    body: Schema | None
    query: dict[str, Schema]


class Schemas:
    """What ``/openapi.json`` says.

    Args:
        description: the parsed document.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self._paths = description["paths"]
        self._named = description.get("components", {}).get("schemas", {})

    def routes(self) -> Iterator[Route]:
        """All there are."""
        for path, operations in self._paths.items():
            for method in METHODS:
                if (operation := operations.get(method)) is not None:
                    content = operation.get("requestBody", {}).get("content", {})
                    parameters = operation.get("parameters", ())
                    query = {one["name"]: one.get("schema", {}) for one in parameters if one["in"] == "query"}
                    yield Route(method.upper(), path, content.get("application/json", {}).get("schema"), query)

    def properties(self, schema: Schema | None) -> dict[str, Schema]:
        """The properties of an object, of all that a schema allows."""
        schema = self._resolved(schema or {})
        found: dict[str, Schema] = dict(schema.get("properties", {}))
        for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            found.update(self.properties(one))
        return found

    def fitting(self, schema: Schema, pick: random.Random, depth: int = 0) -> Any:
        """A value of the right type; anything where the schema says nothing."""
        schema = self._resolved(schema)
        for alternatives in ("anyOf", "oneOf", "allOf"):
            if alternatives in schema:
                return self.fitting(pick.choice(schema[alternatives]), pick, depth)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else pick.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, pick, depth)
        if kind == "array":
            items = schema.get("items", {})
            return [self.fitting(items, pick, depth + 1) for _ in range(pick.randrange(3) if depth < DEPTH else 0)]
        simple = {
            "boolean": (True, False),
            "null": (None,),
            "string": ("x", "A", "", "red cat"),
            "number": (0.5, 1, 0),
        }
        if kind == "integer":
            return pick.choice((0, 1, 2, 5))
        return pick.choice(simple[kind]) if kind in simple else hostile(pick, 2)

    def _object(self, schema: Schema, pick: random.Random, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not properties:
            return {"x": self.fitting(schema["additionalProperties"], pick, depth + 1)} if _typed(schema) else {}
        some = [name for name in properties if name in required or (depth < DEPTH and pick.random() < 0.15)]
        return {name: self.fitting(properties[name], pick, depth + 1) for name in some}

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._named[schema["$ref"].rpartition("/")[2]]
        return schema


def _typed(schema: Schema) -> bool:
    return isinstance(schema.get("additionalProperties"), dict)
