"""How fronts and replicas of a fleet speak to its directory, wherever that is now."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping

from vlora_sgl.cluster.links import FLEET, Links, NotSent
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.core import JsonDict

SYNC_S = 0.2
"""Between two reports of a front: how old what it knows may be."""
BEAT_S = 0.5
"""Between two signs of life of a replica."""
QUICK_S, PATIENCE_S = 3.0, 60.0
"""How long an answer may take that is at hand, and one that waits for an adapter."""
AGAIN_S = 0.2


class DirectoryLink:
    """A link that follows the directory when it is started elsewhere.

    Attributes:
        where: the directory, as something that orders are sent to; None while it is to be looked for.

    Args:
        links: sends.
        find: tells the directory's address.
    """

    def __init__(self, links: Links, find: Callable[[], Awaitable[str]]) -> None:
        self.links, self.find = links, find
        self.where: Replica | None = None

    async def found(self) -> Replica:
        """The directory.

        Raises:
            NotSent: nobody knows where it is.
        """
        if self.where is None:
            self.where = Replica(-1, await self.find(), 0)
        return self.where

    async def ask(self, what: str, body: Mapping[str, object], patience: float = QUICK_S) -> JsonDict:
        """Its answer to one of its own routes.

        Raises:
            Refused: it refuses.
            NotSent: it does not answer, and did not for so long.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                async with asyncio.timeout(patience):
                    return json.loads(await self.links.order(await self.found(), "POST", FLEET + what, body))
            except (NotSent, TimeoutError):
                self.where = None
                if time.monotonic() > deadline - AGAIN_S:
                    raise NotSent() from None
            await asyncio.sleep(AGAIN_S)
