"""Which tile a launch uses: a hash table from a 128-bit key to a tile (V-LoRA, section 4.3 and appendix B).

Tables are JSON, one per device and Triton version, written by ``python -m vlora_sgl.kernels.tiling_search``. A key
that is not in the table takes the nearest entry of its operation (in log2 distance) and remembers it, so that a
lookup costs the host one hash.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from vlora_sgl.core import JsonDict

logger = logging.getLogger(__name__)

SHARED = 227 << 10  # bytes of shared memory of a multiprocessor, on a Hopper card
TABLES = Path(__file__).parent / "tiling_tables"
OPS = (
    *("linear", "linear_shrink", "expand", "grouped_shrink", "grouped_expand", "grouped_write", "shrink"),
    *("grouped_silu", "scaled", "scaled_shrink"),
)
"""A key holds the index: new ones go to the end. ``linear_shrink`` runs beside the base GEMM of ``linear`` and must
leave it room; ``shrink`` runs alone, before ``expand``, where it must fill the chip. ``scaled`` is ``linear`` on a
weight in e4m3, whose block_k counts numbers."""
BLIND = ("grouped_shrink", "shrink")
"""What does not see the output's columns: how many those are says nothing of its tile."""
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Field -> bits, most significant first: 128 in all.
FIELDS = {"op": 8, "dtype": 8, "pairs": 8, "rank": 16, "rows": 8, "slots": 8, "parts": 8, "n": 32, "k": 32}


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one launch.

    Attributes:
        block_m: rows of a program that the search assumed; a launch takes them from its routing.
        block_n, block_k: columns and reduction steps of a program; block_k is unused by expands.
        split_k: programs that share one output tile's reduction.
        warps, stages: warps per program and depth of the software pipeline.
        run: for grouped expands and activations only: consecutive column tiles a program works through.
    """

    block_m: int
    block_n: int
    block_k: int = 0
    split_k: int = 1
    warps: int = 4
    stages: int = 3
    run: int = 1


def bucket(count: int) -> int:
    """The power of two a count is rounded up to, as its exponent."""
    return max(count - 1, 0).bit_length()


def pack(
    op: str, n: int, k: int, rank: int, rows: int, slots: int, *, parts: int = 1, pairs: int = 1, dtype: torch.dtype
) -> int:
    """The 128-bit key of a launch; ``rows`` and ``slots`` enter by their bucket."""
    values = (OPS.index(op), DTYPES[dtype], pairs, rank, bucket(rows), bucket(slots), parts, n, k)
    key = 0
    for value, bits in zip(values, FIELDS.values(), strict=True):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"tiling key field out of range: {value} needs more than {bits} bits in {values}")
        key = key << bits | value
    return key


def unpack(key: int) -> dict[str, int]:
    """The fields of a key (``op`` and ``dtype`` as numbers, ``rows`` and ``slots`` as exponents)."""
    fields = {}
    for name, bits in reversed(FIELDS.items()):
        fields[name] = key & ((1 << bits) - 1)
        key >>= bits
    return fields


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Of two keys of one operation: sum of log2 ratios; rows weigh most, for they decide the shape of the work."""
    far = (
        2.0 * abs(one["rows"] - other["rows"])
        + abs(one["slots"] - other["slots"])
        + abs(one["pairs"] - other["pairs"])
    )
    far += 8.0 * (one["dtype"] != other["dtype"])
    shape = ("k", "rank", "parts") if OPS[one["op"]] in BLIND else ("n", "k", "rank", "parts")
    return far + sum(abs(math.log2((one[f] or 1) / (other[f] or 1))) for f in shape)


class TilingTable:
    """Tiles by key, with the nearest entry for keys that are missing.

    Args:
        entries: key to tile.
        name: what log lines call the table.
    """

    def __init__(self, entries: Mapping[int, Tile], name: str = "table") -> None:
        self.name = name
        self.exact = dict(entries)
        self._seen: dict[int, Tile] = dict(entries)
        self._by_op: dict[int, list[tuple[dict[str, int], Tile]]] = {}
        for key, tile in self.exact.items():
            fields = unpack(key)
            self._by_op.setdefault(fields["op"], []).append((fields, tile))

    def lookup(self, key: int) -> Tile:
        """The tile for a key: its own, or the nearest entry's of the same operation (logged once per key)."""
        tile = self._seen.get(key)
        if tile is None:
            fields = unpack(key)
            near = self._by_op.get(fields["op"])
            if near:
                best, tile = min(near, key=lambda item: _distance(fields, item[0]))
                logger.info("%s has no tile for %s; using that of %s", self.name, fields, best)
                if OPS[fields["op"]] == "grouped_shrink" and fields["rows"] >= best["rows"] + 2:
                    tile = shallower(tile)
            else:
                tile = default_tile(fields)
            self._seen[key] = tile
        return tile

    def has(self, op: str) -> bool:
        """Whether an operation was searched."""
        return OPS.index(op) in self._by_op

    @classmethod
    def load(cls, path: Path) -> TilingTable:
        """Read a table written by the search.

        Raises:
            ValueError: the file is not a table.
        """
        try:
            rows = json.loads(path.read_text())["entries"]
            return cls({int(row["key"], 16): Tile(**row["tile"]) for row in rows}, path.stem)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a tiling table: {error!r}") from error

    @staticmethod
    def save(path: Path, rows: Iterable[tuple[int, Tile, JsonDict]], **header: object) -> None:
        """Write a table: rows of (key, tile, what was measured)."""
        entries = [{"key": f"{key:032x}", "tile": asdict(tile), **about} for key, tile, about in rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n  ".join(json.dumps(entry) for entry in entries)
        path.write_text(f'{json.dumps(header)[:-1]}, "entries": [\n  {text}\n]}}\n')


def shallower(tile: Tile) -> Tile:
    """A shrink's tile, with a pipeline of which three fit a multiprocessor side by side.

    One that was searched for a quarter of the rows or fewer had a multiprocessor to itself, and is deep. Experts have
    row tiles by the thousand, and their K may be few steps: a program alone would fill and drain its pipeline most of
    the time.
    """
    stage = 2 * (tile.block_m + tile.block_n) * tile.block_k
    return replace(tile, stages=min(tile.stages, max(2, (SHARED // 3) // stage)))


def default_tile(fields: Mapping[str, int]) -> Tile:
    """The tile where no table has an entry of the operation: what a search on an H100 chose most often."""
    rows, wide, deep = 1 << fields["rows"], fields["n"] >= 16384, fields["k"] >= 8192
    low = max(16, fields["parts"] * fields["rank"])
    block_m = min(max(16, rows), 64)
    return {
        "linear": Tile(block_m, 64, 128, 2, 4, 4),
        "linear_shrink": Tile(block_m, 32, 256, 4, 4, 3),
        "scaled": Tile(block_m, 64, 256, 2, 4, 4),
        "scaled_shrink": Tile(block_m, 32, 256, 4, 4, 3),
        "shrink": Tile(block_m, min(64 if deep else 32, 1 << bucket(low)), 256, 16 if deep else 7, 4, 3),
        "expand": Tile(block_m, 128 if wide else 32, 0, 1, 4, 4),
        "grouped_shrink": Tile(64, 64 * min(2, fields["pairs"]), 64, 1 if rows >= 4096 else 4, 4, 4),
        "grouped_expand": Tile(64, 128, 0, 1, 4, 2, run=4 if wide else 1),
        "grouped_write": Tile(64, 128, 0, 1, 4, 2, run=4 if wide else 1),
        "grouped_silu": Tile(64, 64, 0, 1, 8, 2, run=8 if wide else 2),  # not measured: 3 programs per multiprocessor
    }[OPS[fields["op"]]]


def table_name(device: str, triton_version: str) -> str:
    """File name (without suffix) of the table of a device and a Triton version."""
    return f"{device.replace(' ', '_')},triton={'.'.join(triton_version.split('.')[:2])}"


@lru_cache
def table_for(index: int | None = None) -> TilingTable:
    """The shipped table of a CUDA device; of an unknown device the table of its architecture's first; else none."""
    if not torch.cuda.is_available():
        return TilingTable({}, "no device")
    import triton

    name = table_name(torch.cuda.get_device_name(index), triton.__version__)
    path = TABLES / f"{name}.json"
    if path.exists():
        return TilingTable.load(path)
    others = sorted(TABLES.glob("*.json"))
    if not others:
        logger.warning("no tiling table at %s; using built-in tiles", TABLES)
        return TilingTable({}, "built-in")
    logger.warning(
        "no tiling table for %s; using %s. Run python -m vlora_sgl.kernels.tiling_search", name, others[0].stem
    )
    return TilingTable.load(others[0])
