"""What the replica router reads in a request's body: which adapters it names, and which image it is about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from vlora_sgl.combined import members
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import UnknownAdapterError
from vlora_sgl.names import split_version
from vlora_sgl.strict_json import read_json


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs of a replica.

    Attributes:
        adapters: that it names, the most frequent first; none for the base model alone.
        content: digest of its first image, or None.
    """

    adapters: tuple[str, ...] = ()
    content: bytes | None = None


def read(body: bytes, adapters: Collection[str], bases: Collection[str]) -> Wanted:
    """Look into a body of ``/generate``, of an OpenAI route or of a vision route.

    A body that is no object wants nothing: the replica says what is wrong with it.

    Args:
        body: as the client sent it.
        adapters: names that the cluster knows.
        bases: names of the base model.

    Raises:
        RequestError: it is not JSON as a server takes it.
        UnknownAdapterError: it names an adapter that the cluster does not know.
    """
    data = read_json(body) if body else None
    if not isinstance(data, dict):
        return Wanted()
    named = data.get("lora_path")
    names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    combined = data.get("adapters")
    for scales in combined if isinstance(combined, list) else [combined]:
        names += scales if isinstance(scales, dict) else ()
    names = [str(name) for name in members(names)]
    model = data.get("model")
    if isinstance(model, str) and model not in bases:
        base, separator, adapter = (part.strip() for part in model.partition(":"))
        name = adapter if separator and base in bases and model not in adapters else model
        names = [name]
    for name in names:
        if name not in adapters:
            raise UnknownAdapterError(name, adapters)
    names = [split_version(name)[0] for name in names]  # all versions of a name are wherever it is
    ordered = tuple(sorted(set(names), key=lambda name: (-names.count(name), names.index(name))))
    return Wanted(ordered, _digest(_first_image(data)))


def _first_image(data: JsonDict) -> object:
    """The first image in a body of any of our routes, in whatever form, or None."""
    images = data.get("image_data")
    while isinstance(images, list):
        images = images[0] if images else None
    if images:
        return images
    messages = data.get("messages")
    turns = [turn.get("content") for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    for parts in (data.get("input"), *turns):
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("image_url"):
                return part["image_url"]
    return None


def _digest(image: object) -> bytes | None:
    if image is None:
        return None
    text = image if isinstance(image, str) else json.dumps(image, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
