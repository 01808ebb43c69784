"""The replica router's connections to replicas: requests passed on, and requests of its own."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from vlora_sgl.cluster.replica import Replica

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 2.0
"""Less than any replica has (5 s of uvicorn), so that a request never meets a connection that is being closed."""
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect"}
)
FLEET = "/fleet/"
"""Where the routes lie by which the parts of a fleet speak to each other."""
ADAPTER_ORDERS = tuple(f"/{verb}_lora_adapter" for verb in ("load", "reload", "pin", "unload", "promote", "roll_back"))


@dataclass(frozen=True)
class Keys:
    """The replicas' keys.

    Attributes:
        api: ``--api-key``.
        admin: ``--admin-api-key``.
    """

    api: str | None = None
    admin: str | None = None

    def of(self, path: str) -> str | None:
        """The key that a route takes, as SGLang has it: the admin key does not open what is no administrator's."""
        return (self.admin or self.api) if path in ADAPTER_ORDERS or path.startswith(FLEET) else self.api


class Refused(Exception):
    """A replica's own refusal of an order, to be passed on.

    Args:
        status: of its answer.
        body: of its answer.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(_reason(body))
        self.status, self.body = status, body


class NotSent(Exception):
    """The request did not reach the replica."""


class Lost(Exception):
    """The replica had the request, and ended before a byte of its answer came."""


def new_session() -> aiohttp.ClientSession:
    """A session for any number of requests, which take as long as they take; bodies pass as they are."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        read_bufsize=2**20,
    )


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """One that breaks if the other host is gone, which then cannot say so itself."""
    made = socket.socket(*info[:3])
    made.setblocking(False)
    if sys.platform == "linux":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class Links:
    """Sends to replicas.

    Args:
        session: of ``new_session``.
        keys: of the replicas.
    """

    def __init__(self, session: aiohttp.ClientSession, keys: Keys) -> None:
        self.session, self.keys = session, keys

    @asynccontextmanager
    async def send(
        self, replica: Replica, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A replica's answer, as far as its headers.

        Raises:
            NotSent: no connection.
            Lost: it broke before the headers came.
        """
        try:
            answer = await self.session.request(method, replica.url + path, data=body, headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise NotSent() from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost() from error
        async with answer:
            yield answer

    async def order(
        self,
        replica: Replica,
        method: str,
        path: str,
        body: bytes | Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """Ask something of a replica; by default in the router's own name.

        Args:
            files: that go with the fields of a body that is an object.

        Raises:
            Refused: any status but 200.
            NotSent: no answer; orders may be repeated.
        """
        if headers is None:
            key = self.keys.of(path)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
        data: Any = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**headers, "Content-Type": "application/json"} if data else headers
        if files and isinstance(body, Mapping):
            data, sent = _form(body, files), headers
        try:
            async with self.send(replica, method, path, data, sent) as answer:
                text = await answer.read()
        except (Lost, aiohttp.ClientError, OSError) as error:
            raise NotSent() from error
        if answer.status != 200:
            raise Refused(answer.status, text)
        return text


def _form(fields: Mapping[str, object], files: Mapping[str, bytes]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, str(value).lower() if isinstance(value, bool) else str(value))
    for name, content in files.items():
        form.add_field(name, content, filename=name, content_type="application/octet-stream")
    return form


def _reason(body: bytes) -> str:
    """What a refusal says, in whichever form it says it."""
    text = body.decode(errors="replace")[:500]
    try:
        data = json.loads(body)
    except ValueError:
        return text
    return str(data.get("error_message") or text) if isinstance(data, dict) else text


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that are for the other end, not for the next hop."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
