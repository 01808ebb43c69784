"""Sends requests to a server, beside one stream whose tokens must stay the same, and counts what becomes of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import requests

from tests.support.fuzz.calls import Call

HANG_S = 60.0
"""A request that takes longer hangs."""
ALLOWED = (501, 503)
"""Statuses of 500 and more that are an answer: not supported, not now."""
BATCH = 24
REFERENCE: dict[str, Any] = {
    "text": "What is this?",
    "lora_path": "A",
    "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
}
"""What is asked beside, again and again."""


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        statuses: count by HTTP status; ``left`` where the client hung up, ``cut`` where the server did.
        ended: the requests in flight when the server was found to have ended.
        hangs, wrong_5xx: requests, with what came.
        reference: answers of the reference stream.
        wrong: those of them that were not as before.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong_5xx: list[str] = field(default_factory=list)
    reference: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())

    def __str__(self) -> str:
        return f"{self.requests} requests {dict(sorted(self.statuses.items()))}, {self.reference} beside"

    @property
    def faults(self) -> list[str]:
        """All there are, in words."""
        kinds = {"ended": self.ended, "hung": self.hangs, "wrong 5xx": self.wrong_5xx, "wrong answer": self.wrong}
        return [f"{kind}: {one}" for kind, found in kinds.items() for one in found]


class Fuzzer:
    """One run against one server.

    Args:
        url: its root.
        lives: whether its processes are there.
        clients: how many requests are under way at a time.
        reference: body of the request to ``/generate`` that is repeated all the time.
        headers: of every request (an admin's key).
    """

    def __init__(
        self,
        url: str,
        lives: Callable[[], bool],
        clients: int,
        reference: dict[str, Any],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.url, self.lives, self.clients, self.headers = url, lives, clients, headers or {}
        self.tally, self._reference = Tally(), {**reference, "stream": True}
        self._lock, self._stop = threading.Lock(), threading.Event()

    def run(self, make: Callable[[int], Call], numbers: Iterable[int], seconds: float = float("inf")) -> Tally:
        """Send them, in batches, until they or the time are over or the server is."""
        deadline, numbers = time.monotonic() + seconds, iter(numbers)
        expected = self._answer()
        beside = threading.Thread(target=self._repeat, args=(expected,))
        beside.start()
        try:
            with ThreadPoolExecutor(self.clients) as pool:
                while time.monotonic() < deadline and (batch := list(islice(numbers, BATCH))):
                    calls = [make(number) for number in batch]
                    list(pool.map(self._send, calls))
                    if not self._healthy():
                        self.tally.ended += [_shown(call) for call in calls]
                        break
        finally:
            self._stop.set()
            beside.join()
        if not self.tally.ended and (after := self._answer()) != expected:
            self.tally.wrong.append(f"afterwards {after} instead of {expected}")
        return self.tally

    def _send(self, call: Call) -> None:
        began = time.monotonic()
        try:
            status, error = self._ask(call, began) if call.wire is None else self._write(call.wire)
        except (requests.RequestException, OSError) as error_:
            late = time.monotonic() - began >= HANG_S - 1
            status, error = ("hung" if late else "left" if call.leaves_after is not None else "cut"), repr(error_)
        with self._lock:
            self.tally.statuses[status] += 1
            if status == "hung":
                self.tally.hangs.append(_shown(call))
            elif error is not None and status.startswith("5") and int(status) not in ALLOWED:
                self.tally.wrong_5xx.append(f"{status} {error[:300]!r} for {_shown(call)}")

    def _ask(self, call: Call, began: float) -> tuple[str, str | None]:
        """The status that came, and the body if it is one of 500 and more; an event of a stream counts as well."""
        patience = min(call.leaves_after or HANG_S, HANG_S)
        headers = {**self.headers, **call.headers}
        with requests.request(
            call.method, self.url + call.path, data=call.body, headers=headers, stream=True, timeout=(HANG_S, patience)
        ) as reply:
            text, taken = b"", 0
            for part in reply.iter_content(None):
                text, taken = text + part, taken + 1
                if call.chunks is not None and taken > call.chunks:
                    return "left", None
                if time.monotonic() - began > patience:
                    return ("left" if call.leaves_after is not None else "hung"), None
            found = reply.status_code if reply.status_code != 200 else _status_of_events(text)
            return str(found), text.decode(errors="replace") if found >= 500 else None

    def _write(self, data: bytes) -> tuple[str, str | None]:
        """The status of what came back within a moment, if any."""
        address = urlsplit(self.url)
        with socket.create_connection((str(address.hostname), int(address.port or 80)), HANG_S) as connection:
            connection.sendall(data)
            connection.settimeout(0.5)
            try:
                found = connection.recv(1 << 16)
            except TimeoutError:
                return "left", None
        status = found[9:12].decode(errors="replace") if found.startswith(b"HTTP/") else "cut"
        return status, found.decode(errors="replace") if status.startswith("5") else None

    def _answer(self) -> list[int]:
        """The tokens of the reference stream, from its first to its last event."""
        url, ids = f"{self.url}/generate", []
        with requests.post(url, json=self._reference, headers=self.headers, stream=True, timeout=HANG_S) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    ids = json.loads(line[6:])["output_ids"]
        return list(ids)

    def _repeat(self, expected: list[int]) -> None:
        while not self._stop.is_set():
            try:
                found: Any = self._answer()
            except (requests.RequestException, ValueError, KeyError) as error:
                found = repr(error)
            self.tally.reference += 1
            if found != expected:
                self.tally.wrong.append(f"{found} instead of {expected}"[:600])
                if len(self.tally.wrong) > 20:
                    return

    def _healthy(self) -> bool:
        try:
            return self.lives() and requests.get(f"{self.url}/health", timeout=HANG_S).status_code == 200
        except requests.RequestException:
            return False


def _status_of_events(text: bytes) -> int:
    """The worst status that an event of a stream tells; 200 without one."""
    worst = 200
    for line in text.split(b"\n"):
        if line.startswith(b"data: {") and b'"error"' in line:
            try:
                error = json.loads(line[6:]).get("error")
                worst = max(worst, int(error["code"])) if isinstance(error, dict) else worst
            except (ValueError, KeyError, TypeError):
                continue
    return worst


def _shown(call: Call) -> str:
    body = (call.body or call.wire or b"").decode(errors="replace")
    return (
        f"#{call.number} {call.method} {call.path[:200]} {body if len(body) < 700 else body[:350] + '…' + body[-350:]}"
    )
