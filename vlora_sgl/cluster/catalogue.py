"""Adapters of a cluster: what is known by which name, in which versions, and how it comes to a replica.

The cluster gives every version its number, so that a number means the same on every replica. All versions of a name
are wherever the name is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from vlora_sgl.cluster.links import Links, Refused
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, UnknownAdapterError
from vlora_sgl.files import is_there
from vlora_sgl.names import split_version, versioned
from vlora_sgl.sources import Source
from vlora_sgl.versions import Versions

Files = Mapping[str, bytes]
"""An adapter that came in a request: its files by name."""


class Upload(dict[str, bytes]):
    """Files that are kept.

    Attributes:
        tag: tells them from others of the same adapter.
    """

    def __init__(self, files: Files, tag: str = "") -> None:
        super().__init__(files)
        self.tag = tag or secrets.token_hex(8)


class Catalogue:
    """What the cluster knows, wherever it is loaded.

    Attributes:
        paths: of the adapters, by name; of versions that are not current, by name and number.
        files: of those that came in requests, likewise.
        versions: by name.
        pinned: names of those that keep their device slots.
        bases: names of the base model.

    Args:
        links: to the replicas.
        paths: adapters known from the start, and loaded when asked for.
        sources: where replicas have others from.
    """

    def __init__(self, links: Links, paths: Mapping[str, str], sources: Sequence[Source] = ()) -> None:
        self.links, self.sources = links, sources
        self.paths = dict(paths)
        self.files: dict[str, Upload] = {}
        self.versions = {name: Versions(name) for name in paths}
        self.pinned: set[str] = set()
        self.bases: set[str] = {"default"}
        self._unloaded: set[str] = set()

    # Names

    def __contains__(self, name: object) -> bool:
        """Whether a replica can serve an adapter of that name."""
        return isinstance(name, str) and (self.key(name) in self.paths or self.may_come(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def may_come(self, name: str) -> bool:
        """Whether replicas might have it from a source."""
        plain = split_version(name)[0]
        return plain not in self.bases and any(source.may_have(plain) for source in self.sources)

    def key(self, name: str) -> str:
        """What a version is called in the tables."""
        plain, number = split_version(name)
        versions = self.versions.get(plain)
        return name if number is None or versions is None else versions.key(number)

    def path_of(self, name: str) -> str:
        """Where an adapter is.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        if self.key(name) not in self.paths:
            raise UnknownAdapterError(name, self.paths)
        return self.paths[self.key(name)]

    # What changes

    def add(self, name: str, number: int, path: str, files: Files) -> None:
        """A version is loaded: the first of its name, or beside the current one."""
        versions = self.versions.setdefault(name, Versions(name, current=number))
        versions.add(number, "", in_place=False)
        self.paths[versions.key(number)] = path
        if files:
            self.files[versions.key(number)] = Upload(files)
        self._unloaded.discard(name)

    def promote(self, name: str, number: int, share: float, drop: bool) -> None:
        """As ``AdapterLifecycle.promote``."""
        versions = self.versions[name]
        if versions.is_to_lead(number, share):
            names = versions.promote(number)
            self.paths |= {names[key]: self.paths.pop(key) for key in names}
            self.files |= {names[key]: self.files.pop(key) for key in names if key in self.files}
            if drop and versions.before is not None:
                self.remove(versioned(name, versions.before))

    def remove(self, name: str) -> None:
        """A name, with all its versions, or one of them, means nothing from now on."""
        plain = split_version(name)[0]
        versions, key = self.versions[plain], self.key(name)
        if key == plain:
            self.versions.pop(plain)
            self.pinned.discard(plain)
            self._unloaded.add(plain)
        for number in versions.numbers() if key == plain else [int(split_version(key)[1] or 0)]:
            self.paths.pop(versions.key(number), None)
            self.files.pop(versions.key(number), None)
            versions.forget(number)

    def learn(self, rows: Iterable[JsonDict]) -> None:
        """What a replica's ``/lora_adapters`` says of names that are not known."""
        for row in sorted(rows, key=lambda row: row["version"]):
            name, number = row["adapter"], row["version"]
            if row["name"] == name:  # it is current
                versions = self.versions.setdefault(name, Versions(name, current=number, last=number))
                versions.current = number
            else:
                versions = self.versions.setdefault(name, Versions(name, current=0))
                versions.others.add(number)
                if row["share"]:
                    versions.shares[number] = row["share"]
            versions.last = max(versions.last, number)
            self.paths[row["name"]] = row["path"]

    # The whole, as JSON

    def state(self) -> JsonDict:
        """All but the files."""
        return {
            "paths": self.paths,
            "versions": [{**asdict(one), "others": sorted(one.others)} for one in self.versions.values()],
            "pinned": sorted(self.pinned),
            "bases": sorted(self.bases),
            "unloaded": sorted(self._unloaded),
            "files": {key: upload.tag for key, upload in self.files.items()},
        }

    def take(self, state: JsonDict) -> None:
        """Be as another was. Files that it has are to be given in ``files``."""
        self.paths = dict(state["paths"])
        self.versions = {one["name"]: _versions(one) for one in state["versions"]}
        self.pinned, self.bases, self._unloaded = (set(state[name]) for name in ("pinned", "bases", "unloaded"))
        self.files = {key: files for key, files in self.files.items() if key in state["files"]}

    # Replicas

    async def align(self, replica: Replica) -> dict[str, str]:
        """Bring a replica that has just started in line. Its adapters, path by name.

        Those that it came with are the cluster's from now on, unless they were replaced or unloaded meanwhile.

        Raises:
            AdapterError: it refuses an adapter that others have.
            Refused: it does not do what it is told.
            NotSent: it does not answer.
        """
        self.bases.add(json.loads(await self.links.order(replica, "GET", "/model_info"))["model_path"])
        for card in json.loads(await self.links.order(replica, "GET", "/v1/models"))["data"]:
            if not card.get("parent"):
                self.bases.add(card["id"])
        rows = await self.adapters_of(replica)
        loaded: dict[str, str] = {}
        for name in {row["adapter"]: None for row in rows}:
            here = [row for row in rows if row["adapter"] == name]
            if name not in self.versions and name not in self._unloaded:
                self.learn(here)
            if name in self.versions and self._agrees(name, here):
                loaded[name] = self.paths[name]
                continue
            await self.links.order(replica, "POST", "/unload_lora_adapter", {"lora_name": name})
            if name in self.versions:
                await self.bring([name], replica)
                loaded[name] = self.paths[name]
        return loaded

    async def adapters_of(self, replica: Replica) -> list[JsonDict]:
        """What a replica's ``/lora_adapters`` says."""
        rows: list[JsonDict] = json.loads(await self.links.order(replica, "GET", "/lora_adapters"))["adapters"]
        return rows

    def _agrees(self, name: str, rows: Sequence[JsonDict]) -> bool:
        """Whether a replica has the versions that the cluster has."""
        versions = self.versions[name]
        known = {self._called(name, number): self.paths[versions.key(number)] for number in versions.numbers()}
        there = {self._called(name, row["version"]): row["path"] for row in rows}
        current = {row["version"] for row in rows if row["name"] == name}
        sent = any(versions.key(number) in self.files for number in versions.numbers())
        return known == there and current == {versions.current} and not versions.shares and not sent

    async def bring(self, names: Iterable[str], replica: Replica) -> None:
        """Load adapters on a replica, each once and in all its versions, unless they are there.

        Raises:
            AdapterError: the replica refuses one.
            UnknownAdapterError: there is none of that name.
            NotSent: the replica does not answer.
        """
        for name in {split_version(one)[0]: None for one in names}:
            if replica.holds(name) or (name not in self.versions and self.may_come(name)):
                continue
            async with replica.lock(name):
                if replica.holds(name):
                    continue
                path = self.path_of(name)
                await self.bring(members_of(path, name), replica)
                try:
                    await self._load(name, replica)
                except Refused as refusal:
                    raise AdapterError(f"adapter {name!r} cannot be loaded: {refusal}") from None
                replica.loaded[name] = path
                replica.loads += 1

    async def _load(self, name: str, replica: Replica) -> None:
        """Load all versions of a name: upwards, as their numbers are, and then which of them is current."""
        versions = self.versions[name]
        first, *_ = numbers = versions.numbers()
        for number in numbers:
            key, pinned = versions.key(number), number == versions.current and name in self.pinned
            fields = {"lora_name": self._called(name, number), "lora_path": self.paths[key], "pinned": pinned}
            await self.load_on(replica, fields, self.files.get(key, {}))
        promoted = {versions.current: 1.0} if versions.current != first else {}
        for number, share in {**promoted, **versions.shares}.items():
            order = {"lora_name": versioned(name, number), "share": share}
            await self.links.order(replica, "POST", "/promote_lora_adapter", order)

    async def load_on(self, replica: Replica, fields: JsonDict, files: Files) -> bytes:
        """Load an adapter on a replica, from where it is or by its files; the answer.

        Raises:
            Refused: the replica does.
            NotSent: it does not answer.
        """
        if files:
            fields = {name: value for name, value in fields.items() if name != "lora_path"}
        return await self.links.order(replica, "POST", "/load_lora_adapter", fields, files=files)

    @staticmethod
    def _called(name: str, number: int) -> str:
        """What a version is called when it is loaded; the first is what a name is without any number."""
        return name if number == 1 else versioned(name, number)


def _versions(one: JsonDict) -> Versions:
    """Of JSON, whose keys are strings."""
    shares, digests = ({int(number): value for number, value in one[name].items()} for name in ("shares", "digests"))
    return Versions(**{**one, "others": set(one["others"]), "shares": shares, "digests": digests})


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
