"""What an iteration costs, in seconds, by mode, rows and adapters: the only notion of time a policy has.

A table is a handful of coefficients per phase. ``python -m vlora_sgl.measure_costs`` fits them to measurements; some
are shipped for one card as JSON (with the provenance of each set), others derived from bytes and FLOPs. Every
tensor-parallel rank reads the same file, so every rank computes the same seconds: no clock is involved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vlora_sgl.combined import is_combined
from vlora_sgl.core import AdapterId, JsonDict, row_pairs
from vlora_sgl.errors import ConfigError

TABLES = Path(__file__).parent / "cost_tables"

Groups = Mapping[AdapterId, int]
"""Tokens that an iteration runs through the linear layers, by adapter (``None``: the base model)."""


def lora_work(groups: Groups, merged: AdapterId) -> tuple[int, int, int]:
    """What applying the adapters of an iteration takes while ``merged`` is in the weights.

    Returns:
        The (slot, weight) pairs summed over the tokens, the distinct slots read, and the adapters (the base model
        included) whose rows take the merged one out again.
    """
    pairs = slots = undone = 0
    shared: set[str] = set()
    for adapter, tokens in groups.items():
        if adapter == merged or not tokens:
            continue
        if is_combined(adapter):
            applied = [one for one, _ in row_pairs(adapter, merged)]
            pairs += tokens * len(applied)
            undone += merged in applied
            shared.update(one for one in applied if one != merged and not groups.get(one))
            continue
        if merged is not None:
            pairs += tokens
            undone += 1
        if adapter is not None:
            pairs += tokens
            slots += 1
    return pairs, slots + len(shared) + (undone > 0), undone


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """Coefficients of one phase, prefill or decode; all in seconds.

    ``seconds = fixed + per_token * tokens + per_context * context
    + lora_enabled + lora_enabled_per_token * tokens           (paid in every iteration once adapters can be served)
    + lora_fixed + lora_per_slot * slots + lora_per_pair * pairs + lora_per_undo * undone   (only if pairs > 0)``

    with pairs, slots and undone as ``lora_work`` counts them.

    Attributes:
        fixed: the iteration itself: launches, weights read once.
        per_token: per token through the linear layers (in decode: per row).
        per_context: per cached token read by attention in decode; per attended (query, key) pair in prefill.
        lora_enabled: what an engine with adapters pays even when no row of the batch uses one.
        lora_enabled_per_token: the same, per token.
        lora_fixed: the operator's launches.
        lora_per_slot: per distinct adapter whose weights are read.
        lora_per_pair: per token and adapter applied to it.
        lora_per_undo: per adapter of which the rows subtract the merged one.
    """

    fixed: float
    per_token: float
    per_context: float = 0.0
    lora_enabled: float = 0.0
    lora_enabled_per_token: float = 0.0
    lora_fixed: float = 0.0
    lora_per_slot: float = 0.0
    lora_per_pair: float = 0.0
    lora_per_undo: float = 0.0

    def __post_init__(self) -> None:
        bad = {f.name: v for f in fields(self) if not (v := getattr(self, f.name)) >= 0}
        if bad:
            raise ConfigError(f"cost coefficients must be seconds >= 0, got {bad}")

    def lora_seconds(self, groups: Groups, merged: AdapterId) -> float:
        """What applying the adapters adds to one iteration while ``merged`` is in the weights."""
        pairs, slots, undone = lora_work(groups, merged)
        if not pairs:
            return 0.0
        return self.lora_fixed + self.lora_per_slot * slots + self.lora_per_pair * pairs + self.lora_per_undo * undone

    def seconds(self, groups: Groups, context: float, merged: AdapterId) -> float:
        """One iteration over ``groups`` while ``merged`` is in the weights."""
        tokens = sum(groups.values())
        return (
            self.fixed
            + self.lora_enabled
            + (self.per_token + self.lora_enabled_per_token) * tokens
            + self.per_context * context
            + self.lora_seconds(groups, merged)
        )


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of one operator on one device for one model shape.

    Attributes:
        device: the card the numbers are for.
        model: the shape they are for.
        operator: the LoRA operator: ``atmm``, ``csgmv``, …
        prefill: iterations that prefill.
        decode: iterations that decode.
        merge: seconds to merge an adapter, from base weights or over another one (one pass either way).
        unmerge: seconds to restore the base weights.
        load_host: seconds to copy one adapter from host memory to a device slot.
        load_disk: seconds to bring one adapter from disk to host memory.
        provenance: where the numbers come from.
    """

    device: str
    model: str
    operator: str
    prefill: PhaseCosts
    decode: PhaseCosts
    merge: float
    unmerge: float
    load_host: float
    load_disk: float
    provenance: str

    def __post_init__(self) -> None:
        for name in ("merge", "unmerge", "load_host", "load_disk"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be seconds >= 0, got {getattr(self, name)!r}")

    def switch_seconds(self, merged: AdapterId, target: AdapterId) -> float:
        """Seconds to go from ``merged`` in the weights to ``target`` in them (``None``: the base weights)."""
        if merged == target:
            return 0.0
        return self.unmerge if target is None else self.merge

    @classmethod
    def from_json(cls, row: JsonDict) -> CostTable:
        """Build a table from one JSON object.

        Raises:
            ConfigError: a field is missing, unknown or not a cost.
        """
        try:
            known = dict(row)
            return cls(prefill=PhaseCosts(**known.pop("prefill")), decode=PhaseCosts(**known.pop("decode")), **known)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a cost table: {error}") from None

    def to_json(self) -> JsonDict:
        """The JSON object that ``from_json`` reads."""
        return asdict(self)


def load_tables(path: Path) -> dict[str, CostTable]:
    """Tables of one file, by operator.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read cost tables from {path}: {error}") from None
    return {table.operator: table for table in map(CostTable.from_json, rows)}


def save_tables(path: Path, tables: Mapping[str, CostTable]) -> None:
    """Write tables so that ``load_tables`` returns them."""
    path.write_text(json.dumps([t.to_json() for t in tables.values()], indent=1) + "\n")


def shipped(name: str = "h100-7b") -> dict[str, CostTable]:
    """The tables that come with the package; ``h200-7b``, ``h100-7b`` or ``a100-paper``."""
    return load_tables(TABLES / f"{name}.json")


SPEEDS = {"H200": (4.2e12, 6.5e14), "H100": (3.0e12, 6.5e14), "A100": (1.7e12, 2.5e14), "cpu": (1e10, 1e11)}
"""Copy bandwidth (bytes/s) and dense bfloat16 operations/s by a part of the device's name, for the analytic table."""


MEASURED = "measured-"
"""How the names of files begin that ``vlora_sgl.measure_costs`` writes beside the shipped ones."""


def table_for(device: str, shape: ModelShape, path: str | None = None) -> CostTable:
    """The costs of our operator: from ``path``, else measured for this device and shape, else analytic.

    Only ratios matter to a policy, so a card without an entry in ``SPEEDS`` is taken for an H100.

    Raises:
        ConfigError: ``path`` holds no table of operator ``atmm``.
    """
    if path is not None:
        tables = load_tables(Path(path))
        if "atmm" not in tables:
            raise ConfigError(f"{path} holds tables of {', '.join(tables)}; expected one of operator atmm")
        return tables["atmm"]
    # Measured ones (``vlora_sgl.measure_costs``) before shipped ones.
    for file in sorted(TABLES.glob("*.json"), key=lambda file: (not file.name.startswith(MEASURED), file.name)):
        table = load_tables(file).get("atmm")
        if table is not None and (table.device, table.model) == (device, shape.name):
            return table
    speeds = next((s for part, s in SPEEDS.items() if part in device), SPEEDS["H100"])
    return analytic(shape, device, *speeds)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the analytic table needs to know of a decoder with SwiGLU and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rank: int
    bytes_per_value: int = 2

    @property
    def name(self) -> str:
        """What a table calls this shape."""
        return f"hidden {self.hidden}, {self.layers} layers, rank {self.rank}"

    @property
    def linear_parameters(self) -> int:
        """Parameters of the seven projections of all layers."""
        kv = self.hidden * self.kv_heads // self.heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    @property
    def adapter_parameters(self) -> int:
        """Parameters of one adapter of ``rank`` on the seven projections."""
        kv = self.hidden * self.kv_heads // self.heads
        ends = 4 * self.hidden + 2 * (self.hidden + kv) + 3 * (self.hidden + self.intermediate)
        return self.layers * self.rank * ends

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        return 2 * self.layers * (self.hidden * self.kv_heads // self.heads) * self.bytes_per_value


def analytic(shape: ModelShape, device: str, bandwidth: float, flops: float, launch: float = 3e-6) -> CostTable:
    """A roofline table: bytes over ``bandwidth`` in decode, FLOPs over ``flops`` in prefill.

    A first guess where nothing was measured: it knows neither the scheduler's overhead nor a kernel's efficiency.

    Args:
        shape: the model and the adapters' rank.
        device: what to call the device.
        bandwidth: bytes per second of a device copy (read plus write).
        flops: dense operations per second in the model's precision.
        launch: seconds per dependent kernel; the operator launches two per stacked projection and layer.
    """
    size = shape.bytes_per_value
    weights = (shape.linear_parameters + shape.hidden * shape.vocabulary) * size
    adapter = shape.adapter_parameters * size
    shared = {
        "per_token": 2 * shape.linear_parameters / flops,
        "lora_fixed": 2 * 4 * shape.layers * launch,
        "lora_per_slot": adapter / bandwidth,
        "lora_per_pair": 2 * shape.adapter_parameters / flops,
    }
    attended = 4 * shape.layers * shape.hidden / flops
    return CostTable(
        device=device,
        model=shape.name,
        operator="atmm",
        prefill=PhaseCosts(fixed=weights / bandwidth, per_context=attended, **shared),
        decode=PhaseCosts(
            fixed=weights / bandwidth + 8 * shape.layers * launch,
            per_context=shape.kv_bytes / bandwidth,
            **shared,
        ),
        merge=2 * shape.linear_parameters * size / bandwidth,
        unmerge=2 * shape.linear_parameters * size / bandwidth,
        load_host=adapter / 25e9,
        load_disk=adapter / 2e9,
        provenance=f"analytic: {bandwidth:.3g} B/s, {flops:.3g} FLOP/s, {launch:.2g} s per launch; "
        "host link 25 GB/s, disk 2 GB/s assumed",
    )
