"""Questions to a running server or cluster, over HTTP, with nothing but Python's own library: it imports fast."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from vlora_sgl.cli.commands import ADMIN_KEY, KEY, default_url
from vlora_sgl.cli.result import CommandError

TIMEOUT_S = 600.0
NO_SERVER = 3


class Client:
    """A server's address and keys.

    Args:
        args: a command's, with ``url``, ``api_key`` and, for an operator's, ``admin_key``.
    """

    def __init__(self, args: Namespace) -> None:
        self.url = default_url(args.url)
        self._key = args.api_key or os.environ.get(KEY)
        self._admin = getattr(args, "admin_key", None) or os.environ.get(ADMIN_KEY) or self._key

    def get(self, path: str) -> Any:
        """The parsed answer.

        Raises:
            CommandError: no server answers, or it refuses.
        """
        return self._send(path, None, self._key)

    def post(self, path: str, body: object, admin: bool = False) -> Any:
        """The parsed answer.

        Raises:
            CommandError: no server answers, or it refuses.
        """
        return self._send(path, json.dumps(body).encode(), self._admin if admin else self._key)

    def has(self, path: str) -> bool:
        """Whether a route is served."""
        try:
            self.get(path)
        except CommandError as error:
            if error.status == NO_SERVER:
                raise
            return False
        return True

    def _send(self, path: str, body: bytes | None, key: str | None) -> Any:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            with urlopen(Request(self.url + path, body, headers), timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            raise CommandError(_reason(error)) from None
        except (URLError, OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise CommandError(
                f"no server answers at {self.url} ({why}); start one with: vlora serve", NO_SERVER
            ) from None


def _reason(error: HTTPError) -> str:
    """What a refusal says, in whichever of the forms that servers have."""
    text = error.read().decode(errors="replace")
    try:
        body: Any = json.loads(text)
    except ValueError:
        return f"{error.code}: {text[:500] or error.reason}"
    for name in ("error", "error_message", "detail", "message"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    if error.code == 401:
        return f"the server wants a key (--api-key or ${KEY}; to change adapters --admin-key or ${ADMIN_KEY})"
    return str(body.get("message", body) if isinstance(body, dict) else body)
