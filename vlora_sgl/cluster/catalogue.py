"""Adapters of a cluster: what is known by which name, and how it comes to a replica."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from vlora_sgl.cluster.links import Links, Refused
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.errors import AdapterError, UnknownAdapterError
from vlora_sgl.files import is_there


class Catalogue:
    """What the cluster knows, wherever it is loaded.

    Attributes:
        paths: of the adapters, by name.
        pinned: names of those that keep their device slots.
        bases: names of the base model.

    Args:
        links: to the replicas.
        paths: adapters known from the start, and loaded when asked for.
    """

    def __init__(self, links: Links, paths: Mapping[str, str]) -> None:
        self.links = links
        self.paths = dict(paths)
        self.pinned: set[str] = set()
        self.bases: set[str] = {"default"}
        self._unloaded: set[str] = set()

    def add(self, name: str, path: str, pinned: bool) -> None:
        """A name means this adapter from now on."""
        self.paths[name] = path
        self._unloaded.discard(name)
        if pinned:
            self.pinned.add(name)

    def remove(self, name: str) -> None:
        """A name means nothing from now on."""
        self.paths.pop(name, None)
        self.pinned.discard(name)
        self._unloaded.add(name)

    def path_of(self, name: str) -> str:
        """Where an adapter is.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        if name not in self.paths:
            raise UnknownAdapterError(name, self.paths)
        return self.paths[name]

    async def align(self, replica: Replica) -> dict[str, str]:
        """Bring a replica that has just started in line. Its adapters, path by name.

        Those that it came with are the cluster's from now on, unless they were replaced or unloaded meanwhile.

        Raises:
            Refused: it does not do what it is told.
            NotSent: it does not answer.
        """
        loaded: dict[str, str] = {}
        self.bases.add(json.loads(await self.links.order(replica, "GET", "/model_info"))["model_path"])
        for card in json.loads(await self.links.order(replica, "GET", "/v1/models"))["data"]:
            name, path = card["id"], card.get("root") or card["id"]
            if not card.get("parent"):
                self.bases.add(name)
            elif name in self._unloaded:
                await self.links.order(replica, "POST", "/unload_lora_adapter", {"lora_name": name})
            else:
                loaded[name] = self.paths.setdefault(name, path)
                if loaded[name] != path:
                    body = {"lora_name": name, "lora_path": loaded[name]}
                    await self.links.order(replica, "POST", "/reload_lora_adapter", body)
        return loaded

    async def bring(self, names: Iterable[str], replica: Replica) -> None:
        """Load adapters on a replica, each once, unless they are there.

        Raises:
            AdapterError: the replica refuses one.
            UnknownAdapterError: there is none of that name.
            NotSent: the replica does not answer.
        """
        for name in names:
            if replica.holds(name):
                continue
            async with replica.lock(name):
                if replica.holds(name):
                    continue
                path = self.path_of(name)
                await self.bring(members_of(path, name), replica)
                body = {"lora_name": name, "lora_path": path, "pinned": name in self.pinned}
                try:
                    await self.links.order(replica, "POST", "/load_lora_adapter", body)
                except Refused as refusal:
                    raise AdapterError(f"adapter {name!r} cannot be loaded: {refusal}") from None
                replica.loaded[name] = path
                replica.loads += 1


def members_of(path: str, name: str) -> tuple[str, ...]:
    """A routed adapter's members, which must be loaded before it. None of what is not well-formed: the replica
    says what is wrong with it."""
    if not is_there(Path(path) / "vlora_routed.json"):
        return ()
    from vlora_sgl.routed.spec import member_names  # imports torch, which the router needs for nothing else

    try:
        return member_names(path, name)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
