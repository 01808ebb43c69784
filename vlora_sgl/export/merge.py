"""Writes a base model with one adapter merged in: same files, same headers, only the targeted rows differ.

A shard is copied as it is and its targeted weights are rewritten in place, a block of rows at a time, so memory does
not grow with the shard: a 70B model merges on a small machine. The sum is computed in float32 and rounded once.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from vlora_sgl.errors import ConfigError
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.layout import BaseLayout, canonical_name

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 16 << 20  # of float32 per block of rows


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file: ``start`` and ``end`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The table of contents of a safetensors file.

    Raises:
        ConfigError: the file is not one, or is shorter than its table says.
    """
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        except (struct.error, ValueError, MemoryError, OverflowError) as error:
            raise ConfigError(f"{path}: not a safetensors file: {error}") from None
    base = 8 + length
    tensors = [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *(base + o for o in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    if max((t.end for t in tensors), default=base) > path.stat().st_size:
        raise ConfigError(f"{path}: truncated")
    return tensors


def shards_of(model_dir: Path) -> list[Path]:
    """The weight files of a base model.

    Raises:
        ConfigError: it has none in safetensors, one is missing, or the model is quantised.
    """
    config = json.loads((model_dir / "config.json").read_text()) if (model_dir / "config.json").is_file() else {}
    text = config.get("text_config") or {}
    quantisation = config.get("quantization_config") or text.get("quantization_config")
    if quantisation:
        raise ConfigError(
            f"{model_dir}: quantised with {quantisation.get('quant_method', quantisation)!r}; an adapter cannot be "
            "merged into quantised weights, give the unquantised base"
        )
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (model_dir / name).is_file():
            raise ConfigError(f"{model_dir}: no {name}; the base must be in safetensors, complete")
    return [model_dir / name for name in names]


def targets_in(
    tensors: list[StoredTensor], modules: Mapping[str, LoraPair], layout: BaseLayout
) -> Iterator[tuple[StoredTensor, int, LoraPair, str]]:
    """``(tensor, first row, update, module)`` of every weight, or part of a stacked one, that ``modules`` update."""
    for tensor in tensors:
        name = canonical_name(tensor.name.removesuffix(".weight")) if tensor.name.endswith(".weight") else None
        if name is None:
            continue
        row = 0
        for part in layout.parts_of(name):
            if part in modules:
                yield tensor, row, modules[part], part
            row += layout.shapes[part][0] if part in layout.shapes else 0


def merge_shard(source: Path, target: Path, modules: Mapping[str, LoraPair], layout: BaseLayout) -> set[str]:
    """Writes ``source`` to ``target`` with the updates of ``modules`` added; ``target`` appears only when complete.

    Returns:
        The modules that were merged.

    Raises:
        ConfigError: a targeted weight is not a plain float matrix of the update's shape, or the sum is not finite.
    """
    partial = target.with_name(target.name + ".part")
    shutil.copyfile(source, partial)
    merged = set()
    with partial.open("r+b") as file:
        for tensor, first, pair, part in targets_in(stored_tensors(source), modules, layout):
            _merge_rows(file, tensor, first, pair)
            merged.add(part)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    return merged


def _merge_rows(file: BinaryIO, tensor: StoredTensor, first: int, pair: LoraPair) -> None:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigError(f"{tensor.name}: stored as {tensor.dtype}; only {', '.join(DTYPES)} weights can be merged")
    rows, inner = pair.b.shape[0], pair.a.shape[1]
    if len(tensor.shape) != 2 or tensor.shape[1] != inner or first + rows > tensor.shape[0]:
        raise ConfigError(f"{tensor.name}: is {list(tensor.shape)}, the update is [{rows}, {inner}]")
    row_bytes = (tensor.end - tensor.start) // tensor.shape[0]
    step = max(1, _BLOCK_BYTES // (4 * inner))
    a, b = pair.a.float(), pair.b.float()
    for row in range(0, rows, step):
        n = min(step, rows - row)
        offset = tensor.start + (first + row) * row_bytes
        file.seek(offset)
        block = torch.frombuffer(bytearray(file.read(n * row_bytes)), dtype=dtype).view(n, inner)
        total = torch.addmm(block.float(), b[row : row + n], a, alpha=pair.scale).to(dtype)
        if not bool(torch.isfinite(total).all()):
            raise ConfigError(f"{tensor.name}: the merged weight is not finite in {tensor.dtype}")
        file.seek(offset)
        file.write(total.view(torch.uint8).numpy().data)
