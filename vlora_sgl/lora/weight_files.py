"""The tensors in safetensors files, read once: to where they are wanted, checked and digested while they are at hand.

Files are read, and never mapped: who shortens a mapped file ends the process that looks at it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vlora_sgl.errors import AdapterError
from vlora_sgl.files import open_regular
from vlora_sgl.lora.bulk import each, is_finite

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
"""Types that are told by torch's name, and refused like all the rest."""
MOST_TABLE = 100_000_000
"""Bytes of a file's table, as the format has it."""
AT_ONCE = 1 << 20
"""Bytes that are read, and then digested where they still are in a core's cache."""


@dataclass(frozen=True)
class Saved:
    """A tensor as a file has it.

    Attributes:
        begin: of its bytes in the file.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Room = Callable[[Mapping[str, Saved]], Mapping[str, torch.Tensor]]
"""Gives memory to read some of the tensors to, contiguous and of their types and shapes."""


class SavedTensors(NamedTuple):
    """What was read.

    Attributes:
        tensors: by key.
        contents: SHA-256 of the bytes of each.
        spoiled: keys of those that hold NaNs or infinities.
    """

    tensors: dict[str, torch.Tensor]
    contents: dict[str, str]
    spoiled: Collection[str]


def read_tensors(paths: Sequence[Path], room: Room | None = None) -> SavedTensors:
    """Every tensor in some files; nothing stays open, so that these may be replaced.

    Raises:
        AdapterError: a file is not what it should be, or holds numbers of another type than adapters do.
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_regular(path)) for path in paths}
        table = {key: saved for path, file in files.items() for key, saved in _table(path, file)}
        given = {} if room is None else room(table)
        memory = {
            key: given[key] if key in given else torch.empty(saved.shape, dtype=saved.dtype)
            for key, saved in table.items()
        }
        # The largest first: whoever takes the last one is then done soon.
        order = sorted(table, key=lambda key: table[key].nbytes, reverse=True)
        read = each(lambda key: _read(files[table[key].path], table[key], memory[key]), order)
    contents = {key: content for key, (content, _) in zip(order, read, strict=True)}
    return SavedTensors(memory, contents, {key for key, (_, finite) in zip(order, read, strict=True) if not finite})


def _table(path: Path, file: BinaryIO) -> Iterator[tuple[str, Saved]]:
    """The tensors of a file, as its own table has them."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as checked:
            keys = list(checked.keys())  # the table is one, and the file whole
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(min(length, MOST_TABLE)))
        for key in keys:
            # Each is looked at again: the file may be another one by now.
            kind, shape, (begin, end) = (table[key][name] for name in ("dtype", "shape", "data_offsets"))
            if kind not in DTYPES:
                raise AdapterError(f"{key}: dtype {OTHERS.get(kind, kind)} is not a floating type adapters come in")
            saved = Saved(path, 8 + length + begin, DTYPES[kind], tuple(shape))
            if begin < 0 or any(size < 0 for size in shape) or saved.nbytes != end - begin:
                raise ValueError(f"its table has {key} of {shape} at {begin} to {end}")
            yield key, saved
    except AdapterError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        raise _broken(path, error) from None


def _read(file: BinaryIO, saved: Saved, tensor: torch.Tensor) -> tuple[str, bool]:
    """Read a tensor's bytes into it; their SHA-256, and whether all its numbers are finite."""
    memory, at, content = tensor.view(-1).view(torch.uint8).numpy().data, 0, hashlib.sha256()
    while at < saved.nbytes:
        try:
            count = os.preadv(file.fileno(), [memory[at : at + AT_ONCE]], saved.begin + at)
        except OSError as error:
            raise _broken(saved.path, error) from None
        if not count:
            raise _broken(saved.path, "it has become shorter")
        content.update(memory[at : at + count])
        at += count
    return content.hexdigest(), is_finite(tensor)


def _broken(path: Path, why: object) -> AdapterError:
    return AdapterError(f"{path}: not a complete safetensors file: {why}")
