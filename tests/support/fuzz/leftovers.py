"""What a server that was fuzzed has left behind: users, adapters, requests in its gauges, tracebacks, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import requests

from tests.conftest import Server
from tests.soak import phases

GROWTH_MB = 600
"""Resident memory that a run may add to all the server's processes: caches fill up, and large bodies were read."""
GAUGES = ("vlora:adapter_requests{", "vlora:unloaded_requests{", "vlora:starving_requests{")


@dataclass(frozen=True)
class Before:
    """A server as it was.

    Attributes:
        names: of its adapters.
        logged: bytes of its log.
        memory: resident, MB.
    """

    server: Server
    names: frozenset[str]
    logged: int
    memory: float

    @classmethod
    def of(cls, server: Server) -> Before:
        return cls(
            server,
            frozenset(phases.adapters(server)),
            server.log.stat().st_size,
            phases.memory_mb(server.process.pid),
        )

    @property
    def growth(self) -> float:
        """Memory that came since, in MB."""
        return phases.memory_mb(self.server.process.pid) - self.memory

    def faults(self) -> Iterator[str]:
        """What is not as it was, once the adapters that came are unloaded."""
        for name in set(phases.adapters(self.server)) - self.names:
            if (status := phases.unload(self.server, name).status_code) != 200:
                yield f"adapter {name!r} cannot be unloaded: {status}"
        if (names := frozenset(phases.adapters(self.server))) != self.names:
            yield f"adapters {sorted(names)} instead of {sorted(self.names)}"
        if users := phases.users_left(self.server):
            yield f"adapters still have users: {users}"
        for line in requests.get(f"{self.server.url}/metrics", timeout=phases.TIMEOUT_S).text.splitlines():
            if line.startswith(GAUGES) and not line.endswith(" 0.0"):
                yield f"idle, and yet {line}"
        said = self.server.log.read_bytes()[self.logged :].decode(errors="replace")
        for number, part in enumerate(said.split("Traceback (most recent call last)")):
            if number:
                yield f"a traceback in the log: {part[:3000]}"
        if self.growth > GROWTH_MB:
            yield f"{self.growth:.0f} MB of memory more"
