"""Numbered versions of an adapter's name: which one the plain name means, and for whom.

``fire@3`` is version 3 of ``fire``; ``fire`` alone is the current one, or for a share of the conversations another
that is tried out. In the tables of adapters the current version has the plain name, and the others theirs with the
number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vlora_sgl.errors import RequestError
from vlora_sgl.names import versioned


@dataclass
class Versions:
    """Those of one name.

    Attributes:
        name: the plain name.
        current: the number that it means.
        last: the highest number so far; none is used twice.
        others: the numbers that are loaded beside the current one.
        before: the one among them that was current before.
        shares: of the conversations, by number of a version that is tried out; the current one has the rest.
        digests: by number, of the content that it stands for, where that is known.
    """

    name: str
    current: int = 1
    last: int = 1
    others: set[int] = field(default_factory=set)
    before: int | None = None
    shares: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def key(self, number: int) -> str:
        """What a version is called in the tables of adapters."""
        return self.name if number == self.current else versioned(self.name, number)

    def numbers(self) -> list[int]:
        """All that are loaded."""
        return sorted({self.current, *self.others})

    def pick(self, conversation: str | None) -> int:
        """The version that the plain name means for a conversation: the same every time, on every replica, for as long
        as its share does not shrink.

        Args:
            conversation: ``None``, if nothing tells which one it is, is any.
        """
        if not self.shares:
            return self.current
        point = random.random() if conversation is None else _point(self.name, conversation)
        for number, share in self.shares.items():
            if point < share:
                return number
            point -= share
        return self.current

    def add(self, number: int, digest: str, in_place: bool) -> None:
        """A version is loaded: in the place of the current one, or as another one (unless it is the first)."""
        if in_place:
            self.digests.pop(self.current, None)
            self.current = number
        elif number != self.current:
            self.others.add(number)
        self.last = max(self.last, number)
        self.digests[number] = digest

    def try_out(self, number: int, share: float) -> None:
        """Give a version that is not current this share of the conversations.

        Raises:
            RequestError: all shares together would be more than 1.
        """
        shares = {**self.shares, number: share}
        if sum(shares.values()) > 1 + 1e-9:
            raise RequestError(f"shares of {self.name} must be 1 at most together; got {shares}")
        self.shares = {one: part for one, part in shares.items() if part}

    def is_to_lead(self, number: int, share: float) -> bool:
        """Whether an order to promote a version to this share makes it the current one; else it is followed here."""
        if number == self.current:
            self.shares = {}
        elif share < 1:
            self.try_out(number, share)
        else:
            return True
        return False

    def promote(self, number: int) -> dict[str, str]:
        """Let the plain name mean another of the loaded versions, for everybody.

        Returns:
            what the two are called from now on, by what they were called.
        """
        keys = {self.current: self.key(self.current), number: self.key(number)}
        self.others ^= {number, self.current}
        self.before, self.current, self.shares = self.current, number, {}
        return {old: self.key(one) for one, old in keys.items()}

    def forget(self, number: int) -> None:
        """A version that is not current is loaded no longer."""
        self.others.discard(number)
        self.shares.pop(number, None)
        self.digests.pop(number, None)
        if self.before == number:
            self.before = None

    def share_of(self, number: int) -> float:
        """The share of the conversations that a loaded version has."""
        return 1 - sum(self.shares.values()) if number == self.current else self.shares.get(number, 0.0)


def conversations(request: Any, prompts: int) -> Sequence[str | None]:
    """What tells, for each prompt of a request of SGLang's, which conversation it is of; its own id, if nothing else.

    Args:
        request: normalised.
    """
    session = request.session_params if isinstance(getattr(request, "session_params", None), dict) else {}
    named = (session.get("id"), *(getattr(request, name, None) for name in ("session_id", "conversation_id")))
    one = next((name for name in (*named, getattr(request, "routing_key", None)) if name), None)
    if one is not None:
        return [str(one)] * prompts
    return list(request.rid) if isinstance(request.rid, list) else [request.rid] * prompts


def _point(name: str, conversation: str) -> float:
    """Where a conversation lies between 0 and 1."""
    digest = hashlib.blake2b(f"{name}\0{conversation}".encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64
