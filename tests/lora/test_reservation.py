"""An adapter that is read to its slot's memory is the one that is read elsewhere and copied, to the bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lora.test_packed import HIDDEN, INNER, KV, VOCABULARY, make_modules, make_pool
from tests.support.lora_adapters import stacked_layout
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.checkpoint import read_adapter
from vlora_sgl.lora.layout import BaseLayout, layer_of
from vlora_sgl.lora.merge_bound import update_sizes
from vlora_sgl.lora.reservation import Reservation
from vlora_sgl.lora.stacking import StackedAdapter, stack

RANK, LAYERS = 8, 2
PARTS = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate": (INNER, HIDDEN),
         "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}  # fmt: skip
# What is left out, what has another rank, another scale; the type; how many of 16 matrices are read to their place.
CASES: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {
    "plain": ({}, torch.bfloat16, 16),
    "another-type": ({}, torch.float32, 0),
    "no-v": ({"without": "v"}, torch.bfloat16, 12),
    "smaller-o": ({"rank": {"o": 4}}, torch.bfloat16, 12),
    "scaled-up": ({"alpha": {"up": 3}}, torch.bfloat16, 16),
}


def write(directory: Path, dtype: torch.dtype, without: str = "", rank: Any = None, alpha: Any = None) -> Path:
    torch.manual_seed(1)
    tensors, ranks = {}, rank or {}
    for layer in range(LAYERS):
        for part, (out, inner) in PARTS.items():
            block = "self_attn" if part in "qkvo" else "mlp"
            stem, r = f"base_model.model.model.layers.{layer}.{block}.{part}_proj", ranks.get(part, RANK)
            if part != without:
                tensors[f"{stem}.lora_A.weight"] = torch.randn(r, inner).to(dtype)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(out, r).to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    patterns = {"rank_pattern": {f"{part}_proj": r for part, r in ranks.items()}}
    patterns["alpha_pattern"] = {f"{part}_proj": value for part, value in (alpha or {}).items()}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": "all-linear", **patterns}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def layout() -> BaseLayout:
    return stacked_layout(LAYERS, HIDDEN, KV, INNER, VOCABULARY)


def loaded(directory: Path, tp: int, reserves: bool) -> tuple[Any, StackedAdapter, torch.Tensor, int]:
    """An adapter, what it was stacked to, what was packed of it, and how many matrices were there already."""
    pool, modules = make_pool(sized=False, tp=tp), make_modules(tp=tp)
    room = Reservation(lambda names, rank: pool.reserve(names, rank, modules), layout(), torch.bfloat16)
    read = read_adapter(directory, layout(), room if reserves else None)
    stacked = stack(read.modules, layout(), torch.bfloat16)
    packed = room.packed
    storage = None if packed is None else packed.buffer.untyped_storage().data_ptr()
    there = sum(one.untyped_storage().data_ptr() == storage for one in stacked.tensors.values())
    layers = [SimpleNamespace(weights={}, pinned_weights={}) for _ in range(LAYERS)]
    for name, tensor in stacked.tensors.items():
        number = layer_of(name)
        assert number is not None
        layers[number].weights[name] = tensor
    adapter = SimpleNamespace(
        uid="a", config=SimpleNamespace(r=stacked.rank), layers=layers, embedding_layers={}, reserved=packed
    )
    held = pool.pack(adapter, modules)
    assert not reserves or held is packed, "nothing is held twice"
    return read, stacked, held.buffer, there


def numbers(stacked: StackedAdapter) -> dict[tuple[str, int, str], float]:
    """The sizes of its updates."""
    return {
        (name, i, what): value
        for name, slices in update_sizes(stacked, layout()).items()
        for i, one in enumerate(slices)
        for what, value in asdict(one).items()
    }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_what_is_packed_is_the_same_wherever_it_was_read_to(case: str, tp: int, tmp_path: Path) -> None:
    options, dtype, count = CASES[case]
    write(tmp_path, dtype, **options)
    (plain, apart, copied, none), (read, together, packed, there) = (
        loaded(tmp_path, tp, way) for way in (False, True)
    )
    assert none == 0 and torch.equal(packed.view(torch.int16), copied.view(torch.int16)) and packed.any()
    assert read.digests == plain.digests and read.report == plain.report
    if tp == 1:
        scaled = 2 if case == "scaled-up" else 0  # B of up is another one, and with it the stack of gate and up
        assert there == count - scaled
        assert numbers(together) == pytest.approx(numbers(apart), rel=1e-5), "modules are measured together"


def test_a_second_tensor_of_a_module_does_not_come_to_the_place_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    key = next(iter(tensors))
    again = key.removeprefix("base_model.model.")
    save_file({**tensors, again: torch.zeros_like(tensors[key])}, tmp_path / "adapter_model.safetensors")
    pool, modules, seen = make_pool(sized=False), make_modules(), {}
    room = Reservation(lambda names, rank: pool.reserve(names, rank, modules), layout(), torch.bfloat16)

    def watched(table: Any) -> Any:
        seen.update(room(table))
        return seen

    with pytest.raises(AdapterError):
        read_adapter(tmp_path, layout(), watched)
    places = [tensor.data_ptr() for tensor in seen.values()]
    assert len({*places}) == len(places) and len({key, again} & seen.keys()) == 1


def test_a_matrix_of_enormous_rank_reserves_no_memory_for_the_others(tmp_path: Path) -> None:
    """Such a file is refused for its rank later; memory for all modules of that rank would have ended the server."""
    write(tmp_path, torch.bfloat16, rank={"down": 64 * RANK})

    def reserve(*_: object) -> Any:
        raise AssertionError("it asked for memory")

    room = Reservation(reserve, layout(), torch.bfloat16)
    assert read_adapter(tmp_path, layout(), room).modules and room.packed is None
