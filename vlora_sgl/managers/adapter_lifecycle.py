"""Adapters' lives as the front of the engine sees them: loaded, pinned, replaced, put out to disk, unloaded.

A name is the user's; an id is one load of one content. A request resolves its names once, on entry, and keeps what it
got until it ends: an adapter that is replaced or unloaded meanwhile stays for as long as such requests run.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from vlora_sgl import _sgl
from vlora_sgl._sgl_types import (
    LoadLoRAAdapterReqInput,
    LoadLoRAAdapterReqOutput,
    LoRARef,
    ServerArgs,
    UnloadLoRAAdapterReqInput,
)
from vlora_sgl.combined import is_combined, members, parts, written
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, RequestError, UnknownAdapterError, quoted
from vlora_sgl.managers.adapter_cache import AdapterCache
from vlora_sgl.managers.adapter_registry import AdapterRegistry, UnknownAdapterResponse
from vlora_sgl.managers.adapter_sources import AdapterSources
from vlora_sgl.managers.folder_watch import FolderWatch
from vlora_sgl.managers.uploads import Uploads
from vlora_sgl.managers.waits import Turns, behind, limit_of, within
from vlora_sgl.names import check_adapter_name, check_path, split_version, versioned
from vlora_sgl.routed.spec import is_routed, member_names
from vlora_sgl.server_args import VLoraArgs
from vlora_sgl.versions import Versions

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"\bdigest ([0-9a-f]+)")  # in a load report


@dataclass(frozen=True)
class LoadReply:
    """SGLang's reply to a load that succeeded, what of the adapter matched, and the number of its version."""

    success: bool
    loaded_adapters: Mapping[str, object] | None
    report: str
    version: int
    error_message: str = ""


Reply = LoadLoRAAdapterReqOutput | LoadReply
T = TypeVar("T")


class AdapterLifecycle:
    """The tokenizer manager's part that knows which adapters there are.

    Members of a routed adapter stay as they are as long as it is loaded.

    Args:
        server_args: SGLang's.
        base_name: tells the base model's name, which no adapter can have.
        known: every name that is loaded (SGLang's ``lora_ref_cache``, which this changes), also those that
            ``--max-loaded-loras`` put out to disk and that come back when a request names them.
        lock: held while adapters are loaded or lose their name.
        ask_ranks: sends a message to the engine, and gives the replies of its ranks.

    Attributes:
        registry: what is in memory.
        versions: of every adapter, by its plain name.
        uploads: adapters that came in requests.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        base_name: Callable[[], str],
        known: dict[str, LoRARef],
        lock: asyncio.Lock,
        ask_ranks: Callable[[object], Awaitable[list[LoadLoRAAdapterReqOutput]]],
    ) -> None:
        self.known, self.registry = known, AdapterRegistry(server_args.lora_paths)
        self._server_args, self._base_name, self._lock, self._ask_ranks = server_args, base_name, lock, ask_ranks
        self._routed_members: dict[str, tuple[str, ...]] = {}
        self._turns = Turns(lock)
        self.versions = {name: Versions(name) for name in known}
        self.uploads = Uploads()
        args = VLoraArgs.from_environment()
        cache = AdapterCache(Path(args.source_cache).expanduser(), args.source_cache_bytes, self._directories)
        self.sources = AdapterSources(args.sources, cache, self._load_come)
        self._watch = FolderWatch(self)
        for name, ref in known.items():
            self._note_routed(ref)
            self.registry.served[ref.lora_id] = name, 1

    # Names

    def key(self, name: str) -> str:
        """What an adapter is called in the tables, which have the current version by its plain name."""
        plain, number = split_version(name)
        versions = self.versions.get(plain)
        return name if number is None or versions is None else versions.key(number)

    def knows(self, name: str) -> bool:
        """Whether an adapter, or a version of one, is loaded."""
        return self.key(name) in self.known

    def may_serve(self, name: str) -> bool:
        """Whether one is loaded, or may come from a source."""
        return self.knows(name) or self.sources.may_have(name)

    def meant(self, name: str | None, conversation: str | None) -> str | None:
        """The version that a conversation gets of an adapter, or of several as one, as the tables call it."""

        def picked(one: str) -> str:
            versions = self.versions.get(one)
            return self.key(one) if versions is None else versions.key(versions.pick(conversation))

        return _mapped(name, picked)

    def called(self, name: str | None) -> str | None:
        """The same version of an adapter, or of several as one, as the tables call it now."""
        return _mapped(name, self.key)

    def directory_of(self, name: str) -> str:
        """Where the files of an adapter are.

        Raises:
            UnknownAdapterResponse: it is not loaded.
        """
        self.check_names(name)
        return self.known[self.key(name)].lora_path

    def check_names(self, names: str | Sequence[str | None] | None) -> None:
        """Whether every adapter that a request names is loaded.

        Raises:
            UnknownAdapterResponse: one is not.
        """
        self._check(names, self.knows)

    def check_may_serve(self, names: str | Sequence[str | None] | None) -> None:
        """Whether every adapter that a request names is loaded, or may come from a source.

        Raises:
            UnknownAdapterResponse: one is not, and may not.
        """
        self._check(names, self.may_serve)

    def _check(self, names: str | Sequence[str | None] | None, holds: Callable[[str], bool]) -> None:
        for name in _named(names):
            if not holds(name):
                raise UnknownAdapterResponse(str(name), self.known)

    async def fetch(self, names: str | Sequence[str | None] | None, now: bool = False) -> None:
        """Have the adapters that a request names loaded, where their sources have them.

        Args:
            now: even those that have just failed to come.

        Raises:
            SourceResponse: one does not come.
        """
        if not self.sources.sources:
            return
        for name in _named(names):
            key = self.key(name)
            ref = self.known.get(key)
            if ref is None and self.sources.may_have(name):
                await self.sources.want(name, now)
            elif ref is not None and self.registry.get(key) is None and self.sources.came(ref.lora_path):
                async with self.sources.at(ref.lora_path) as directory:  # it may have left the cache
                    self.known[key] = _changed(ref, key, bool(ref.pinned), directory)

    async def bring_in(self, names: str | Sequence[str | None] | None) -> None:
        """Bring the adapters that a request names back to memory, where they are only on disk.

        Raises:
            UnknownAdapterResponse: a name that is not loaded.
            RequestError: one prompt combines more than are ever in memory.
        """
        self.check_names(names)
        most = self._server_args.max_loaded_loras
        for name in _each(names):
            if most is not None and is_combined(name) and len(parts(str(name))) > most:
                raise RequestError(
                    f"adapters: {len(parts(str(name)))} cannot be combined; --max-loaded-loras is {most}"
                )
        wanted = list(dict.fromkeys(map(self.key, _named(names))))
        self.registry.touch(wanted)
        for name in wanted:
            if self.registry.get(name) is None:
                await self._revive(name)

    async def _revive(self, name: str) -> None:
        result = await self._in_turn(f"the return of adapter {name!r} from disk", lambda: self._load_known(name))
        if not result.success:
            raise AdapterError(
                f"adapter {name!r} was put out to disk and cannot be read again: {result.error_message}"
            )

    # Lives

    async def load(self, obj: LoadLoRAAdapterReqInput) -> Reply:
        """Load an adapter; the reply of a success says what matched (see ``vlora_sgl.lora.load_report``).

        Raises:
            WaitResponse: the engine takes longer than a request waits. The adapter is loaded when it is done. So for
                all that follow.
        """
        refusal = self._why_not_load(obj.lora_name, obj.lora_path)
        if refusal is not None:
            return self._refused(refusal, obj.lora_name)
        name, path, pinned = obj.lora_name, obj.lora_path, bool(obj.pinned)
        if not self.sources.covers(path):
            return self._why_not_fetch(path) or await self._load_here(name, path, pinned)
        async with self.sources.at(path) as directory:
            return await self._load_here(name, directory, pinned)

    async def _load_here(self, name: str, path: str, pinned: bool) -> Reply:
        doing = f"the load of adapter {name!r}"
        return self._reply(name, await self._in_turn(doing, lambda: self._load_new(name, path, pinned)))

    async def _load_come(self, name: str, directory: str) -> None:
        """Load an adapter that has come from its source.

        Raises:
            AdapterError: it is refused.
        """
        refusal = self._why_not_load(name, directory)
        reply = None if refusal else await self._load_here(name, directory, False)
        if name not in self.known:
            raise AdapterError(refusal or str(reply and reply.error_message))
        self._watch.begin()

    def _directories(self) -> set[str]:
        """Of the adapters in memory."""
        return {ref.lora_path for ref in self.registry.get_all_adapters().values()}

    def refuse_tensors(self) -> Reply:
        """The reply to a load of an adapter that arrives as pickled tensors."""
        return self._refused("adapters are loaded from safetensors only, never from serialized tensors")

    async def reload(self, name: str, path: str | None = None) -> Reply:
        """Put another content (or another directory) behind a name, at once for all requests to come.

        Requests that run keep the adapter they began with; it leaves memory when the last of them ends. If the new
        content is refused, the old one stays. The new one is the next version, or the one that the name gives.

        Raises:
            UnknownAdapterResponse: nothing of that name is loaded.
        """
        if path is not None and (refusal := _why_no_path(path)) is not None:
            return self._refused(refusal, name)
        known = self.known.get(split_version(name)[0])
        where = path or (known.lora_path if known is not None else "")
        if not self.sources.came(where) and not self.sources.covers(where):
            return self._why_not_fetch(where) or await self._reload_here(name, path)
        async with self.sources.at(where, anew=True) as directory:
            return await self._reload_here(name, directory)

    async def _reload_here(self, name: str, path: str | None) -> Reply:
        doing = f"the reload of adapter {name!r}"
        return self._reply(name, await self._in_turn(doing, lambda: self._replace(name, path)))

    async def promote(self, name: str, share: float = 1.0, drop: bool = False) -> Reply:
        """Let a plain name mean another of its versions from now on.

        Args:
            name: with the version's number.
            share: of the conversations; the current version keeps the rest. 0 ends a trial.
            drop: unload the version that was current, once its requests have ended.

        Raises:
            UnknownAdapterResponse: no such version is loaded.
        """
        return self._reply(
            name, await self._in_turn(f"the promotion of {name!r}", lambda: self._promote(name, share, drop))
        )

    async def roll_back(self, name: str) -> Reply:
        """End trials of other versions; if there are none, the one that was current before is so again.

        Raises:
            UnknownAdapterResponse: nothing of that name is loaded.
        """
        return self._reply(name, await self._in_turn(f"the roll-back of {name!r}", lambda: self._roll_back(name)))

    async def unload(self, obj: UnloadLoRAAdapterReqInput) -> Reply:
        """Unload an adapter for good: its name is unknown at once, its memory free when its last request has ended."""
        name = obj.lora_name
        taken = await self._in_turn(f"the unload of adapter {name!r}", lambda: self._take_name(name))
        if isinstance(taken, _sgl.LoadLoRAAdapterReqOutput):
            return cast(LoadLoRAAdapterReqOutput, taken)
        refs = cast(list[LoRARef], taken)

        def why() -> str:
            users = sum(self.registry.users(ref.lora_id) for ref in refs)
            waits_for = f"{users} requests that use it have not ended" if users else "the engine has not answered"
            return f"adapter {name!r} has lost its name, and {waits_for}; then its memory is free"

        return await within(limit_of(), why, behind(self._leave(refs)))

    async def pin(self, name: str, pinned: bool) -> LoadLoRAAdapterReqOutput:
        """Let an adapter keep its device slot, or no longer.

        Raises:
            UnknownAdapterResponse: nothing of that name is loaded.
        """
        await self.fetch(name, now=True)
        self.check_names(name)
        name = self.key(name)
        if name in self._routed_members:
            return self._refused("a routed adapter has no slot of its own; pin its members")
        return await self._in_turn(f"the pin of adapter {name!r}", lambda: self._pin_known(name, pinned))

    def listed(self, held: Mapping[str, JsonDict]) -> list[JsonDict]:
        """Every loaded adapter: where its nearest copy is, what it is, who uses it.

        Args:
            held: what the engine says of those in its memory, by id.
        """
        rows = []
        for name, ref in self.known.items():
            here = self.registry.get(name)
            known = held.get(here.lora_id, {}) if here is not None else {}
            tier = "disk" if here is None else "host" if known.get("slot") is None else "device"
            plain, number = split_version(name)
            versions = self.versions[plain]
            number = versions.current if number is None else number
            rows.append(
                {
                    "name": name,
                    "adapter": plain,
                    "version": number,
                    "share": versions.share_of(number),
                    "path": ref.lora_path,
                    "pinned": bool(ref.pinned),
                    "residency": tier,
                    "users": 0 if here is None else self.registry.users(here.lora_id),
                    **known,
                }
            )
        return rows

    def forget_files(self, path: str) -> None:
        """Remove the files of an adapter that came in a request, unless a version needs them."""
        if all(ref.lora_path != path for ref in self.known.values()):
            self.uploads.drop(path)

    # Steps of them; each but the last under the lock

    async def _in_turn(self, doing: str, work: Callable[[], Awaitable[T]]) -> T:
        return await self._turns.take(doing, work, limit_of())

    async def _load_new(self, name: str, path: str, pinned: bool) -> LoadLoRAAdapterReqOutput:
        plain, number = split_version(name)
        versions = self.versions.get(plain)
        if versions is None:
            versions = Versions(plain, current=number or 1)
        elif number is None:
            return self._refused(f"adapter {name!r} is loaded already; /reload_lora_adapter puts another in its place")
        elif refusal := self._why_not_next(versions, number):
            return refusal
        return await self._load(versions, number or versions.current, path, pinned)

    async def _load_known(self, name: str) -> LoadLoRAAdapterReqOutput:
        if self.registry.get(name) is not None:  # another request was first
            return self._done()
        self.check_names(name)
        ref, (plain, number) = self.known[name], split_version(name)
        versions = self.versions[plain]
        return await self._load(versions, number or versions.current, ref.lora_path, bool(ref.pinned))

    async def _replace(self, name: str, path: str | None) -> LoadLoRAAdapterReqOutput:
        plain, number = split_version(name)
        self.check_names(plain)
        if refusal := self._why_fixed(plain):
            return refusal
        versions, known, old = self.versions[plain], self.known[plain], self.registry.get(plain)
        if number is not None and (refusal := self._why_not_next(versions, number)):
            return refusal
        pinned = bool(known.pinned)
        # The old one holds the pin until it is gone.
        now = number or versions.last + 1
        result = await self._load(versions, now, path or known.lora_path, pinned and old is None, in_place=True)
        if result.success and old is not None:
            behind(self._leave([old], repin=plain if pinned else None))
        elif result.success:
            self.forget_files(known.lora_path)
        return result

    async def _promote(self, name: str, share: float, drop: bool) -> LoadLoRAAdapterReqOutput:
        plain, number = split_version(name)
        if number is None:
            return self._refused(f"which version of {name!r} is to be promoted? Name it {versioned(name, 2)}, say")
        self.check_names(name)
        if refusal := self._why_fixed(plain):
            return refusal
        versions = self.versions[plain]
        if versions.is_to_lead(number, share):
            await self._swap(versions, number)
            if drop:
                behind(self._leave(self._taken(versions, versions.others & {versions.before})))
        return self._done()

    async def _swap(self, versions: Versions, number: int) -> None:
        """Make a version the current one: for requests at once, then in what the engine calls the two, which has the
        pin of the name on the one that leaves it first."""
        pinned = bool(self.known[versions.name].pinned or self.known[versions.key(number)].pinned)
        names = versions.promote(number)
        refs = {key: self.known.pop(key) for key in names}
        held = {key for key in names if self.registry.get(key) is not None}
        for key in held:
            self.registry.take(key)
        for key, name in names.items():
            self.known[name] = _changed(refs[key], name, False)
            if key in held:
                self.registry.change(self.known[name])
        self._routed_members = {names.get(name, name): of for name, of in self._routed_members.items()}
        for key, name in names.items():
            if key in held:
                await self._tell_engine(_load_of(self.known[name]))
        if pinned and self.registry.get(versions.name) is not None:
            await self._pin(versions.name, True)

    async def _roll_back(self, name: str) -> LoadLoRAAdapterReqOutput:
        plain = split_version(name)[0]
        self.check_names(plain)
        versions = self.versions[plain]
        if versions.shares:
            versions.shares = {}
            return self._done()
        if versions.before is None:
            return self._refused(f"no version of {plain!r} that was current before is loaded")
        return await self._promote(versioned(plain, versions.before), 1.0, drop=False)

    async def _take_name(self, name: str) -> list[LoRARef] | LoadLoRAAdapterReqOutput:
        """The adapters that have lost their name, or the refusal."""
        if not self.knows(name):
            return self._refused(str(UnknownAdapterError(str(name), self.known)))
        plain, number = split_version(name)
        versions = self.versions[plain]
        if refusal := self._why_fixed(self.key(name)):
            return refusal
        if number == versions.current and versions.others:
            return self._refused(f"{name!r} is the current version; promote another, or unload {plain!r}")
        if self.key(name) != plain:
            return self._taken(versions, {int(number or 0)})
        del self.versions[plain]
        return self._taken(versions, versions.numbers())

    def _taken(self, versions: Versions, numbers: Iterable[int | None]) -> list[LoRARef]:
        """Take their names from versions; those that are in memory."""
        refs = []
        for number in [one for one in numbers if one is not None]:
            key = versions.key(number)
            known, here = self.known.pop(key), self.registry.get(key)
            self._routed_members.pop(key, None)
            versions.forget(number)
            if here is None:
                self.forget_files(known.lora_path)
            else:
                self.registry.take(key)
                refs.append(here)
        return refs

    async def _load(
        self, versions: Versions, number: int, path: str, pinned: bool, in_place: bool = False
    ) -> LoadLoRAAdapterReqOutput:
        """Load a version, in the place of the current one or not."""
        name = versions.name if in_place else versions.key(number)
        ref = _sgl.LoRARef(lora_name=name, lora_path=path, pinned=pinned)
        result = await self._tell_engine(_load_of(ref))
        if result.success:
            digest = "".join(_DIGEST.findall(result.error_message or "")[:1])
            if versions.digests.get(number, digest) != digest:  # files that have changed while it was on disk only
                if name != versions.name:
                    behind(self._retire(ref))
                    return self._refused(f"{name!r} is gone: the files of this version have changed")
                number, in_place = versions.last + 1, True
            versions.add(number, digest, in_place)
            self.versions[versions.name] = versions
            self.registry.put(ref, number)
            self.known[name] = ref
            self._note_routed(ref)
            await self._make_room(name)
        else:
            self.forget_files(path)
        result.loaded_adapters = self._loaded()
        return result

    async def _make_room(self, newcomer: str) -> None:
        limit = self._server_args.max_loaded_loras
        keep = {newcomer, *(one for some in self._routed_members.values() for one in some)}
        while limit is not None and self.registry.num_registered_loras > limit:
            ref = self.registry.least_needed(keep)
            if ref is None:
                return
            self.registry.take(ref.lora_name)
            retired = behind(self._leave([ref]))
            if not self.registry.users(ref.lora_id):  # else the load need not wait for somebody's request
                await retired

    async def _pin_known(self, name: str, pinned: bool) -> LoadLoRAAdapterReqOutput:
        loaded = await self._load_known(name)
        return await self._pin(name, pinned) if loaded.success else loaded

    async def _pin(self, name: str, pinned: bool) -> LoadLoRAAdapterReqOutput:
        old = self.registry.get(name)
        assert old is not None
        # To the engine, a load of an id that it has is a change of its name and its pin.
        new = _changed(old, name, pinned)
        result = await self._tell_engine(_load_of(new))
        if result.success:
            self.registry.change(new)
            self.known[name] = new
        return result

    async def _leave(self, refs: Sequence[LoRARef], repin: str | None = None) -> LoadLoRAAdapterReqOutput:
        """Wait until nobody uses adapters that have lost their names, and have the engine forget them."""
        results = await asyncio.gather(*(self._retire(ref) for ref in refs))
        if repin is not None and self.registry.get(repin) is not None:
            async with self._lock:
                await self._pin(repin, True)
        for ref in refs:
            self.forget_files(ref.lora_path)
        result = next((result for result in results if not result.success), self._done())
        result.loaded_adapters = self._loaded()
        return result

    async def _retire(self, ref: LoRARef) -> LoadLoRAAdapterReqOutput:
        await self.registry.wait_for_unload(ref.lora_id)
        return await self._tell_engine(_sgl.UnloadLoRAAdapterReqInput(lora_name=ref.lora_name, lora_id=ref.lora_id))

    async def _tell_engine(self, message: object) -> LoadLoRAAdapterReqOutput:
        """What the engine's ranks reply; a failure if any failed."""
        results = await self._ask_ranks(message)
        return next((result for result in results if not result.success), results[0])

    def _why_not_load(self, name: object, path: object) -> str | None:
        args = self._server_args
        if not args.enable_lora:
            return "adapters are off; start the server with --enable-lora"
        if args.dp_size != 1:
            return f"adapters cannot be loaded at run time with --dp-size={args.dp_size}"
        try:
            plain = split_version(name)[0] if isinstance(name, str) else name
            check_adapter_name(plain, (self._base_name(), str(args.model_path)))
            check_path(path)
        except AdapterError as error:
            return str(error)
        return None

    def _why_not_next(self, versions: Versions, number: int) -> LoadLoRAAdapterReqOutput | None:
        """The refusal of a version whose number was used, or passed over."""
        if number > versions.last:
            return None
        return self._refused(
            f"a new version of {versions.name!r} must have a number above {versions.last}, its last; got {number}"
        )

    def _why_not_fetch(self, path: str) -> LoadLoRAAdapterReqOutput | None:
        """The refusal of a URL that is of no source."""
        if "://" not in path:
            return None
        return self._refused(f"{quoted(path)} does not lie below an allowed source (--vlora-adapter-source)")

    def _why_fixed(self, name: str) -> LoadLoRAAdapterReqOutput | None:
        """The refusal to change a member of a routed adapter."""
        routed = ", ".join(sorted(routed for routed, members in self._routed_members.items() if name in members))
        return self._refused(f"adapter {name!r} is a member of {routed}; unload that first") if routed else None

    def _note_routed(self, ref: LoRARef) -> None:
        self._routed_members.pop(ref.lora_name, None)
        if is_routed(ref.lora_path):
            self._routed_members[ref.lora_name] = member_names(ref.lora_path, ref.lora_name)

    def _loaded(self) -> dict[str, str]:
        return {name: ref.lora_path for name, ref in self.known.items()}

    def _done(self) -> LoadLoRAAdapterReqOutput:
        return _sgl.LoadLoRAAdapterReqOutput(success=True, loaded_adapters=self._loaded())

    def _reply(self, name: str, result: LoadLoRAAdapterReqOutput) -> Reply:
        if not result.success:
            return result
        plain, number = split_version(name)
        versions = self.versions.get(plain)
        now = 0 if versions is None else versions.current
        return LoadReply(True, result.loaded_adapters, result.error_message or "", number or now)

    def _refused(self, reason: str, name: object = None) -> LoadLoRAAdapterReqOutput:
        logger.warning("%s: %s", "adapters" if name is None else f"adapter {quoted(name)} was refused", reason)
        return _sgl.LoadLoRAAdapterReqOutput(success=False, error_message=reason, loaded_adapters=self._loaded())


def _named(names: str | Sequence[str | None] | None) -> Iterable[str]:
    """Every adapter that a request names, those that it combines one by one."""
    return (name for name in members(_each(names)) if name is not None)


def _each(names: str | Sequence[str | None] | None) -> Sequence[str | None]:
    """What each prompt of a request names; one for all of them, where it is no list."""
    return [names] if names is None or isinstance(names, str) else names


def _mapped(name: str | None, of: Callable[[str], str]) -> str | None:
    """An adapter's name, or those in a combination, in another form; those that are the same then are added up."""
    if name is None or not is_combined(name):
        return name and of(name)
    scales: dict[str, float] = {}
    for one, scale in parts(name):
        key = of(one)
        scales[key] = scales.get(key, 0.0) + scale
    return written(scales)


def _why_no_path(path: object) -> str | None:
    """Why a directory cannot even be asked for; the message to the engine could not carry some of them."""
    try:
        check_path(path)
    except AdapterError as error:
        return str(error)
    return None


def _changed(ref: LoRARef, name: str, pinned: bool, path: str | None = None) -> LoRARef:
    """The same load of an adapter under another name, with another pin, or its files elsewhere."""
    where = path or ref.lora_path
    new: LoRARef = _sgl.LoRARef(lora_id=ref.lora_id, lora_name=name, lora_path=where, pinned=pinned)
    return new


def _load_of(ref: LoRARef) -> LoadLoRAAdapterReqInput:
    """The message to the engine."""
    message: LoadLoRAAdapterReqInput = _sgl.LoadLoRAAdapterReqInput(
        lora_name=ref.lora_name, lora_path=ref.lora_path, pinned=bool(ref.pinned), lora_id=ref.lora_id
    )
    return message
