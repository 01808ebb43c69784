"""What is read of safetensors files is what the library reads, to the memory that is given."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlora_sgl.errors import AdapterError
from vlora_sgl.lora import weight_files
from vlora_sgl.lora.bulk import content
from vlora_sgl.lora.weight_files import DTYPES, Saved, read_tensors

SHAPES: dict[str, tuple[int, ...]]
SHAPES = {
    "matrix": (5, 7),
    "row": (3,),
    "number": (),
    "nothing": (0, 4),
    "large": (300, 9),
}


def saved(tmp_path: Path, dtype: torch.dtype = torch.bfloat16, name: str = "w.safetensors") -> Path:
    torch.manual_seed(0)
    save_file({key: torch.randn(shape).to(dtype) for key, shape in SHAPES.items()}, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("at_once", [weight_files.AT_ONCE, 100], ids=["whole", "in_pieces"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_are_those_that_the_library_reads(
    dtype: torch.dtype, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "AT_ONCE", at_once)
    path = saved(tmp_path, dtype)
    theirs, ours = load_file(path), read_tensors([path])
    assert ours.tensors.keys() == theirs.keys() == SHAPES.keys() and not ours.spoiled
    for key, tensor in theirs.items():
        assert ours.tensors[key].dtype == dtype and torch.equal(ours.tensors[key], tensor)
        assert ours.contents[key] == content(tensor)


def test_shards_are_read_together(tmp_path: Path) -> None:
    for number in range(2):
        save_file({str(number): torch.full((2, 2), float(number))}, tmp_path / f"{number}.safetensors")
    found = read_tensors([tmp_path / f"{number}.safetensors" for number in range(2)]).tensors
    assert {key: float(tensor[0, 0]) for key, tensor in found.items()} == {"0": 0.0, "1": 1.0}


def test_a_tensor_comes_to_the_memory_that_is_given_for_it(tmp_path: Path) -> None:
    path, memory = saved(tmp_path), torch.zeros(100, dtype=torch.bfloat16)

    def room(table: Mapping[str, Saved]) -> dict[str, torch.Tensor]:
        assert {key: one.shape for key, one in table.items()} == SHAPES
        return {"matrix": memory[10:45].view(5, 7)}

    found = read_tensors([path], room).tensors
    assert found["matrix"].data_ptr() == memory[10:].data_ptr()
    assert torch.equal(memory[10:45].view(5, 7), load_file(path)["matrix"]) and not memory[:10].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_those_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    save_file({"good": torch.ones(3), "bad": torch.tensor([0.0, value])}, tmp_path / "w.safetensors")
    assert read_tensors([tmp_path / "w.safetensors"]).spoiled == {"bad"}


def test_numbers_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
        save_file({"x": torch.ones(4).to(dtype)}, tmp_path / "w.safetensors")
        with pytest.raises(AdapterError, match=r"^x: dtype .* is not a floating type"):
            read_tensors([tmp_path / "w.safetensors"])


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def shorten(table: Mapping[str, Saved]) -> dict[str, torch.Tensor]:
        os.truncate(path, max(one.begin for one in table.values()) + 1)
        return {}

    with pytest.raises(AdapterError, match="not a complete safetensors file: it has become shorter"):
        read_tensors([path], shorten)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [-8, 62]},
        {"data_offsets": [0, 10]},
        {"shape": [-5, -7]},
        {"shape": "57"},
        {"dtype": []},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_a_table_that_was_exchanged_behind_the_library_is_refused(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    table["matrix"].update(change)
    text = json.dumps(table).encode()
    other = tmp_path / "other.safetensors"
    other.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    opened = weight_files.open_regular
    monkeypatch.setattr(weight_files, "open_regular", lambda _: opened(other))
    with pytest.raises(AdapterError, match=r"not a complete safetensors file|is not a floating type"):
        read_tensors([path])
