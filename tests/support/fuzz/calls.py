"""Request number n of a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.fuzz import adapters, raw
from tests.support.fuzz.bodies import spoil
from tests.support.fuzz.routes import BESIDE, FAVOURED, SKIPPED
from tests.support.fuzz.schemas import Route, Schemas
from tests.support.fuzz.seeds import SEEDS
from tests.support.fuzz.values import TEXTS, hostile

LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
GENERATE = ("/generate", "/v1/chat/completions", "/invocations", "/v1/completions", "/v1/responses", "/v1/messages")
GENERATE += ("/api/chat", "/api/generate", "/vertex_generate")
ENOUGH = 64
"""Tokens beyond which a client does not wait for the end of an answer."""
PATIENCE_S = 4.0
TYPES = ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=x")


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        leaves_after: seconds after which the client hangs up, or ``None``.
        chunks: how many pieces of a stream it takes before it hangs up, or ``None``.
        wire: bytes that are written instead, all else being nothing.
    """

    number: int
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_after: float | None = None
    chunks: int | None = None
    wire: bytes | None = None


class Calls:
    """Makes requests; the same number of the same seed gives the same one.

    Args:
        description: the server's ``/openapi.json``.
        seed: of all of them.
        good: an adapter's directory.
        root: where to write spoiled ones.
        kept: names of adapters that must stay as they are.
    """

    def __init__(
        self, description: dict[str, Any], seed: int, good: Path, root: Path, kept: Sequence[str] = ("A", "B")
    ) -> None:
        self._schemas, self._seed = Schemas(description), seed
        self._good, self._root, self._kept = good, root, frozenset(kept)
        self.routes = [route for route in self._schemas.routes() if route.path not in SKIPPED]
        self._weights = [FAVOURED.get(route.path, 1) / (1 + (route.method == "PUT")) for route in self.routes]

    def call(self, number: int) -> Call:
        """Request ``number``."""
        pick = random.Random(f"{self._seed} {number}")
        if pick.random() < 0.02:
            return Call(number, pick.choice(("GET", "POST", "HEAD")), pick.choice(BESIDE), b"{}")
        if pick.random() < 0.02:
            return Call(number, "WIRE", "", wire=raw.wire(pick))
        if number < len(self.routes):  # each once
            return self._call(number, self.routes[number], pick)
        (route,) = pick.choices(self.routes, self._weights)
        return self._call(number, route, pick)

    def _call(self, number: int, route: Route, pick: random.Random) -> Call:
        path = self._path(route, pick)
        if route.body is None:
            body = pick.choice((None, None, b"{}", raw.broken(pick)))
            return Call(number, route.method, path, body, {"Content-Type": "application/json"})
        if pick.random() < 0.05:
            return Call(number, route.method, path, raw.broken(pick), {"Content-Type": "application/json"})
        fields = self._body(route, pick)
        if "stream" in self._schemas.properties(route.body) and pick.random() < 0.3:
            fields["stream"] = True
        body = json.dumps(fields).encode()
        kind = pick.random()
        headers = {"Content-Type": pick.choice(TYPES) if kind < 0.03 else "application/json"}
        if kind > 0.97:
            body = raw.spoiled(body, pick)
        endless = route.path in GENERATE and not _is_short(fields)
        leaves, chunks = (PATIENCE_S if endless else None), None
        if pick.random() < 0.06:
            leaves, chunks = pick.choice((0.01, 0.1, 0.5)), pick.choice((0, 1, 3))
        return Call(number, route.method, path, body, headers, leaves, chunks)

    def _path(self, route: Route, pick: random.Random) -> str:
        path = route.path
        while "{" in path:
            before, _, rest = path.partition("{")
            value = pick.choice(("A", "resp_x", *TEXTS)).encode(errors="replace")
            path = before + quote(value or b"x", safe="") + rest.partition("}")[2]
        query = [
            f"{name}={quote(str(hostile(pick, 2)).encode(errors='replace')[:200], safe='')}"
            for name in route.query
            if pick.random() < 0.6
        ]
        return path + ("?" + "&".join(query) if query else "")

    def _body(self, route: Route, pick: random.Random) -> dict[str, Any]:
        assert route.body is not None
        if "lora_adapter" in route.path:
            return self._adapter_body(route, pick)
        make = SEEDS.get(route.path)
        fitting = self._schemas.fitting(route.body, pick) if make is None or pick.random() < 0.1 else make(pick)
        fields = spoil(fitting if isinstance(fitting, dict) else {}, self._schemas, route.body, pick)
        if route.path == "/abort_request":  # whom these would end are others
            fields["abort_all"] = False
            if not fields.get("rid"):
                fields["rid"] = "nobody's"
        return fields

    def _adapter_body(self, route: Route, pick: random.Random) -> dict[str, Any]:
        name = pick.choice(("F0", "F1", "F2", "F3", *TEXTS))
        fields: dict[str, Any] = {"lora_name": name}
        if "load" in route.path and "unload" not in route.path:
            path = adapters.directory(pick, self._root, self._good) if pick.random() < 0.8 else pick.choice(TEXTS)
            fields["lora_path"] = str(path)
        if pick.random() < 0.3:
            fields = spoil(fields, self._schemas, route.body, pick)
        if route.path != "/load_lora_adapter" and fields.get("lora_name") in list(self._kept):
            fields["lora_name"] = "F0"
        fields.pop("pinned", None) if pick.random() < 0.5 else None
        return fields


def _is_short(fields: Mapping[str, Any]) -> bool:
    """Whether a request bounds its answer, as far as it can be told."""
    inner = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    said = [one[name] for one in inner for name in LIMITS if name in one]
    return bool(said) and all(isinstance(value, int) and value <= ENOUGH for value in said)
