"""Adapters in host memory: read, checked, described, and laid out for the slots that they are loaded to.

What does not fit is refused before anything of the engine changes: all of an adapter is loaded, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vlora_sgl._sgl_types import LoRAAdapter, LoRAConfig, LoRARef
from vlora_sgl.combined import members, parts
from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.errors import AdapterError, RequestError, quoted
from vlora_sgl.heads.base import VisionHead
from vlora_sgl.heads.store import AdapterDescription, load_heads, read_description
from vlora_sgl.lora.access import allowed_directory
from vlora_sgl.lora.adapter import AdapterBuilder, content_digest
from vlora_sgl.lora.experts import is_expert
from vlora_sgl.lora.laps import Laps
from vlora_sgl.lora.packed import Layers, PackedPool
from vlora_sgl.lora.pool import fits
from vlora_sgl.lora.reservation import Reserve
from vlora_sgl.lora.tower import Tower, TowerWeights, tower_of
from vlora_sgl.lora.vectors import has_vectors
from vlora_sgl.routed.router_tables import VOTE_BYTES, RouterTables
from vlora_sgl.routed.rows import LoadedRouted
from vlora_sgl.routed.spec import is_routed, read_routed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DescribedAdapter:
    """What is known of a loaded adapter beyond its LoRA weights.

    Attributes:
        description: its ``vlora_adapter.json``.
        heads: its heads, on the device, by name.
        digest: of all that decides KV: weights, configuration, invocation. Equal digests mean interchangeable KV.
        tower: digest of its weights for the vision tower; ``None`` if it has none and images are encoded as ever.
    """

    description: AdapterDescription
    heads: Mapping[str, VisionHead]
    digest: str
    tower: str | None = None


class AdapterStore:
    """The adapters of one rank.

    Args:
        adapters, configs, refs: SGLang's tables by adapter id, which the store fills. A routed adapter, which has no
            weights, is in ``refs`` only.
        builder: reads files.
        device: where heads go.
        slots: of the pool, the base model's included.
        slot_ranks: rank of every slot but the base model's, where they differ.
        roots: directories below which clients may have adapters loaded from; none means anywhere.

    Attributes:
        described: by adapter id; present exactly while the adapter is loaded.
        routed: routed adapters by id.
    """

    def __init__(
        self,
        adapters: dict[str, LoRAAdapter],
        configs: dict[str, LoRAConfig],
        refs: dict[str, LoRARef],
        *,
        builder: AdapterBuilder,
        device: torch.device,
        slots: int,
        slot_ranks: Sequence[int],
        roots: Sequence[str],
    ) -> None:
        self._adapters, self._configs, self._refs = adapters, configs, refs
        self._builder, self._device, self._roots = builder, device, roots
        self._slots, self._slot_ranks = slots, slot_ranks
        self._pool: PackedPool | None = None
        self._tower: Tower | None = None
        self._modules: Layers = ()
        self._router_tables: RouterTables | None = None
        self.described: dict[str, DescribedAdapter] = {}
        self.routed: dict[str, LoadedRouted] = {}

    def serve(self, pool: PackedPool, modules: Layers, tower: Tower | None) -> None:
        """Take the slots and the wrapped modules by layer, and lay out for them the adapters that were loaded before.

        Those are of the command line: the operator's own. The roots bound what clients ask for later.
        """
        self._pool, self._modules, self._tower = pool, modules, tower
        self._largest_tower = max([pool.max_lora_rank, *(one.rank for one in self.towers())])
        self._provide_tower()
        for adapter in self._adapters.values():
            self._pack(adapter)

    def accept_routed(self, tables: RouterTables) -> None:
        """From now on routed adapters can be loaded."""
        self._router_tables = tables

    # Loading

    def load(self, ref: LoRARef) -> str:
        """Load an adapter or a routed adapter, or pin or unpin one that is loaded; the report, empty for a pin.

        Raises:
            AdapterError, HeadError: what is wrong with it, or why it does not fit.
        """
        if ref.lora_id in self._adapters:
            if ref.pinned and not self._refs[ref.lora_id].pinned:
                self._check_pins(self._adapters[ref.lora_id].config.r)
            report = ""
        else:
            report = self._load_routed(ref) if is_routed(ref.lora_path) else self._load_files(ref)
        self._refs[ref.lora_id] = ref
        return report

    def _load_files(self, ref: LoRARef) -> str:
        laps = Laps()
        directory = allowed_directory(ref.lora_path, self._roots if self._pool is not None else ())
        adapter = self._builder.read(ref.lora_id, directory, self._reserve(), laps)
        self.check(adapter.config, ref)
        self._check_form(adapter)
        description = read_description(directory)
        self._check_tower(adapter, description)
        heads = load_heads(directory, self._builder.hf_config.hidden_size, self._device, description)
        self._provide_tower(tower_of(adapter))
        self.describe(adapter, description, heads)
        self._configs[ref.lora_id], self._adapters[ref.lora_id] = adapter.config, adapter
        laps.end("packed")
        logger.info("adapter %s was loaded: %s", ref.lora_name, laps)
        return str(adapter.report)

    def _reserve(self) -> Reserve | None:
        """What makes the memory that adapters are read to; ``None`` while nobody packs them."""
        pool = self._pool
        if pool is None or not pool.packs:
            return None
        return lambda names, rank: pool.reserve(names, rank, self._modules)

    def describe(
        self,
        adapter: LoRAAdapter,
        description: AdapterDescription | None = None,
        heads: Mapping[str, VisionHead] | None = None,
    ) -> None:
        """Note what there is to know of an adapter that was read, and lay it out for the slots."""
        description = description or AdapterDescription()
        digest = content_digest(adapter, description)
        tower = tower_of(adapter)
        self._pack(adapter)  # after the digest: it keeps this tensor-parallel rank's part of the weights only
        seen = None if tower is None else tower.digest
        self.described[adapter.uid] = DescribedAdapter(description, heads or {}, digest, seen)

    def _pack(self, adapter: LoRAAdapter) -> None:
        if self._pool is None:
            return
        if self._pool.packs:
            self._pool.pack(adapter, self._modules)
        if self._pool.vectors is not None and has_vectors([adapter]):
            self._pool.vectors.attach(adapter)
        if torch.cuda.is_available():
            adapter.pin_weights_in_cpu()  # of embeddings and experts: what is packed is pinned

    def _check_tower(self, adapter: LoRAAdapter, description: AdapterDescription) -> None:
        tower = tower_of(adapter)
        if tower is None:
            return
        if description.invocation is not None:
            raise AdapterError(
                "it starts after a prefix, up to which images are the base model's, and has weights for the vision "
                "tower, which change them: no image would be right for both"
            )
        if self._pool is not None and tower.rank > self._largest_tower:
            raise AdapterError(
                f"rank {tower.rank} in the vision tower is more than {self._largest_tower} (--max-lora-rank)"
            )

    def towers(self) -> list[TowerWeights]:
        """What the loaded adapters have for the vision tower."""
        return [tower for adapter in self._adapters.values() if (tower := tower_of(adapter)) is not None]

    def _provide_tower(self, more: TowerWeights | None = None) -> None:
        """Have the slots of the vision tower that the loaded adapters need, and these weights, if any."""
        if self._tower is None:
            return
        loaded = self.towers()
        try:
            self._tower.provide(loaded if more is None else [*loaded, more])
        except AdapterError:
            self._tower.provide(loaded)
            raise

    def _load_routed(self, ref: LoRARef) -> str:
        if self._router_tables is None:
            raise AdapterError(
                "no room for routed adapters: they need --lora-backend atmm and --vlora-max-routed above 0, and come "
                "by /load_lora_adapter once the server runs, not by --lora-paths"
            )
        if ref.pinned:
            raise AdapterError("a routed adapter has no slot of its own; pin its members")
        directory, config = allowed_directory(ref.lora_path, self._roots), self._builder.hf_config
        spec = read_routed(directory, ref.lora_name, config.hidden_size, config.vocab_size)
        by_name = {other.lora_name: uid for uid, other in self._refs.items()}
        missing = [name for name in spec.members if name not in by_name]
        if missing:
            raise AdapterError(f"members {missing} are not loaded; loaded are {sorted(by_name)}")
        members = tuple(by_name[name] for name in spec.members)
        for name, uid in zip(spec.members, members, strict=True):
            if uid in self.routed:
                raise AdapterError(f"member {name!r} is a routed adapter itself")
            if self.on_vocabulary([uid]):
                raise AdapterError(f"member {name!r} has weights for the vocabulary, which no router weighs")
            if on_experts(self._adapters[uid]):
                raise AdapterError(f"member {name!r} has weights for experts, which no router of tokens weighs")
            if has_vectors([self._adapters[uid]]):
                raise AdapterError(f"member {name!r} has {self._adapters[uid].form}, which is not applied by parts")
            if self.described[uid].description.invocation is not None:
                raise AdapterError(f"member {name!r} starts after a prefix; the router says where a member applies")
            if self.described[uid].tower is not None:
                raise AdapterError(f"member {name!r} has weights for the vision tower, where no token is routed yet")
        if len(members) + 1 > self._slots:
            raise AdapterError(
                f"{len(members)} members and the base model need {len(members) + 1} slots at once; "
                f"--max-loras-per-batch is {self._slots}"
            )
        ranks = [self._adapters[uid].config.r for uid in members]
        if self._slot_ranks and not fits(ranks, self._slot_ranks):
            raise AdapterError(f"members of ranks {ranks} do not fit slots of ranks {self._slot_ranks} at once")
        if self._router_tables.lacks_votes(spec):
            raise AdapterError(
                "its token router counts the votes of all tokens so far, and those of a KV cache this large would "
                f"take more than {VOTE_BYTES >> 30} GiB; lower --max-total-tokens"
            )
        description = read_description(directory)
        heads = load_heads(directory, config.hidden_size, self._device, description)
        index = self._router_tables.put(spec)
        if index is None:
            raise AdapterError(
                f"--vlora-max-routed is {self._router_tables.capacity}, and as many are loaded; unload one first"
            )
        identity = hashlib.blake2b(spec.canonical(), digest_size=32)
        for uid in members:
            identity.update(self.described[uid].digest.encode())
        self.described[ref.lora_id] = DescribedAdapter(description, heads, identity.hexdigest())
        self.routed[ref.lora_id] = LoadedRouted(spec, members, index)
        how = "by a network" if spec.router else "by token ids"
        return f"a routed adapter of {', '.join(spec.members)}, routed {how}"

    def unload_routed(self, adapter: str) -> bool:
        """Forget a routed adapter; whether it is one."""
        routed = self.routed.pop(adapter, None)
        if routed is None:
            return False
        assert self._router_tables is not None
        self._router_tables.remove(routed.index)
        del self.described[adapter], self._refs[adapter]
        return True

    def forget(self, adapter: str) -> None:
        """Drop the description of an adapter that SGLang has unloaded; the tower's slots, if it was the last there."""
        self.described.pop(adapter, None)
        self._provide_tower()

    def describe_combined(self, adapter: str) -> DescribedAdapter:
        """What is known of several adapters as one, by the text with their ids; their heads are not its.

        Raises:
            RequestError: some of them cannot be in one row, or never be on the device together.
        """
        ids = [uid for uid, _ in parts(adapter)]
        names = ", ".join(quoted(self._refs[uid].lora_name) for uid in ids)
        described = [self.described[uid] for uid in ids]
        if any(uid in self.routed for uid in ids):
            raise RequestError(f"adapters {names}: a routed adapter cannot be combined with others; name its members")
        invocation = described[0].description.invocation
        if any(one.description.invocation != invocation for one in described):
            raise RequestError(f"adapters {names} cannot be combined: they start at different places of a prompt")
        for uid in ids:
            if (form := getattr(self._adapters.get(uid), "form", None)) is not None:
                raise RequestError(f"adapters {names} cannot be combined: {form} have no scale")
        if any(one.tower is not None for one in described):
            raise RequestError(f"adapters {names} cannot be combined: weights in the vision tower have no scale")
        holders: set[AdapterId] = {*ids, *self.pinned}
        if len(holders) + 1 > self._slots or not self.fit_sized_slots(holders):
            raise RequestError(
                f"adapters {names} and the pinned ones need {len(holders)} slots at once; "
                f"--max-loras-per-batch={self._slots} has {self._slots - 1}, and each must hold its adapter's rank"
            )
        content = sorted((self.described[uid].digest, scale) for uid, scale in parts(adapter))
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=32).hexdigest()
        return DescribedAdapter(AdapterDescription(invocation=invocation), {}, digest)

    # What fits

    def check(self, config: LoRAConfig, ref: LoRARef) -> None:
        """Whether the pool can hold an adapter. Names are the front's: a replacement has its predecessor's.

        Raises:
            AdapterError: its rank or its kinds of modules have no room in the pool, or there are too many pins.
        """
        pool = self._pool
        if pool is not None and config.r > pool.max_lora_rank:
            raise AdapterError(
                f"rank {config.r} does not fit the slots of rank {pool.max_lora_rank} (--max-lora-rank)"
            )
        if pool is not None and not pool.can_support(config):
            raise AdapterError(
                f"adapts {', '.join(sorted(config.target_modules))}; the slots hold "
                f"{', '.join(sorted(pool.target_modules))} (--lora-target-modules)"
            )
        if ref.pinned:
            self._check_pins(config.r)

    def _check_form(self, adapter: LoRAAdapter) -> None:
        """Whether slots hold what the adapter has beyond factors; while there is no pool yet, they will.

        Raises:
            AdapterError: they do not; the message names the setting.
        """
        pool = self._pool
        if on_experts(adapter) and self._builder.backend.name != "atmm":
            raise AdapterError("it adapts experts, which needs --lora-backend atmm")
        if adapter.form is None:
            return
        if self._builder.backend.name != "atmm":
            raise AdapterError(f"it has {adapter.form}, which needs --lora-backend atmm")
        if pool is not None and (pool.vectors is None or not pool.packs):
            why = "start the server with --vlora-dora" if pool.packs else "this model's pool cannot hold them"
            raise AdapterError(f"it has {adapter.form}, for which the slots have no room: {why}")

    def rebase(self) -> None:
        """Compute again what depends on the base weights, after those were updated."""
        pool = self._pool
        for adapter in self._adapters.values():
            if pool is not None and pool.vectors is not None and has_vectors([adapter]):
                pool.vectors.attach(adapter)
                if adapter.uid in pool.uid_to_buffer_id:
                    pool.vectors.load(pool.uid_to_buffer_id[adapter.uid], adapter)

    def _check_pins(self, rank: int) -> None:
        """Refuse one pin too many: the base model keeps a slot, and one must stay for everybody else."""
        limit = self._slots - 2
        if len(self.pinned) >= limit:
            raise AdapterError(
                f"{len(self.pinned)} adapters are pinned; --max-loras-per-batch={self._slots} "
                f"allows {limit}, so that a slot stays for the others"
            )
        pins = [self._adapters[uid].config.r for uid in self.pinned]
        if self._slot_ranks and not fits([*pins, rank, max(self._slot_ranks)], self._slot_ranks):
            raise AdapterError(
                f"with rank {rank} pinned beside {pins}, no slot of rank {max(self._slot_ranks)} stays for the others "
                "(--vlora-slot-ranks)"
            )

    @property
    def pinned(self) -> list[str]:
        """Adapters that keep their slots."""
        return [uid for uid, ref in self._refs.items() if ref.pinned]

    def has_routed(self, adapters: Iterable[AdapterId] | None) -> bool:
        """Whether any of these is a routed adapter."""
        return bool(self.routed) and any(adapter in self.routed for adapter in adapters or ())

    def holders(self, adapters: Iterable[AdapterId]) -> set[AdapterId]:
        """Those that need a slot for rows of these adapters: in place of routed and combined ones their members."""
        found: set[AdapterId] = set()
        for adapter in members(adapters):
            routed = self.routed.get(adapter) if adapter is not None else None
            found.update((adapter,) if routed is None else routed.members)
        return found

    def on_vocabulary(self, adapters: Iterable[AdapterId], kind: str = "") -> bool:
        """Whether any of these has weights for ``kind``: ``embed_tokens``, ``lm_head``, or either."""
        return any(
            name.startswith(kind)
            for adapter in self.holders(adapters)
            if adapter is not None
            for name in self._adapters[adapter].embedding_layers
        )

    def fit_sized_slots(self, adapters: set[AdapterId]) -> bool:
        """Whether these adapters and the pinned ones find a slot each, by rank; ``True`` where slots do not differ."""
        ranks = [self._adapters[uid].config.r for uid in {*adapters, *self.pinned} if uid is not None]
        return not self._slot_ranks or fits(ranks, self._slot_ranks)

    def state(self) -> dict[str, JsonDict]:
        """Of every adapter in memory, by id: its slot (``None``: host memory only), rank, bytes, digest, what rounding
        to eight bits has lost, and what it comes with: the kind of each head, and the question it was trained with."""
        assert self._pool is not None
        return {
            uid: {
                "slot": self._pool.uid_to_buffer_id.get(uid),
                "rank": adapter.config.r,
                "host_bytes": adapter.report.nbytes,
                "digest": adapter.report.digest,
                "heads": {name: head.kind for name, head in self.described[uid].heads.items()},
                "prompt": self.described[uid].description.prompt,
                "weights_loss": getattr(adapter, "weights_loss", None),
                "tower_rank": None if (tower := tower_of(adapter)) is None else tower.rank,
            }
            for uid, adapter in self._adapters.items()
        }


def on_experts(adapter: LoRAAdapter) -> bool:
    """Whether an adapter has weights for experts."""
    return any(is_expert(name) for layer in adapter.layers for name in layer.weights)
