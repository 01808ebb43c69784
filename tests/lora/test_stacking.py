"""What a pool slot receives computes the same update as the adapter's own factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.lora_adapters import TEXT, stacked_layout, tiny_adapter, tiny_config, tiny_model
from vlora_sgl.errors import AdapterError
from vlora_sgl.lora.checkpoint import LoraPair, read_adapter
from vlora_sgl.lora.layout import BaseLayout
from vlora_sgl.lora.stacking import stack

LANGUAGE = r".*\blayers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
HIDDEN, KV, INNER = 32, 16, 48
CASES: dict[str, dict[str, Any]] = {
    "everything": {"target_modules": LANGUAGE},
    "q_only": {"target_modules": ["q_proj"]},
    "k_v": {"target_modules": ["k_proj", "v_proj"]},
    "up_only": {"target_modules": ["up_proj"]},
    "mixed": {"target_modules": LANGUAGE, "rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"k_proj": 3}},
}


def serving_layout() -> BaseLayout:
    """The tiny model's."""
    return stacked_layout(TEXT["num_hidden_layers"], HIDDEN, KV, INNER, TEXT["vocab_size"])


@pytest.mark.parametrize("case", CASES)
def test_a_slot_computes_what_the_adapter_does(case: str, tmp_path: Path) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, **CASES[case])
    layout = serving_layout()
    modules = read_adapter(tmp_path, layout).modules
    assert set(modules) == set(read_adapter(tmp_path, BaseLayout.from_config(tiny_config("qwen2"))).modules)
    slot = stack(modules, layout, torch.float64)
    seen = set()
    for key in [k for k in slot.tensors if ".lora_A." in k]:
        name = key.removesuffix(".lora_A.weight")
        a, b = slot.tensors[key], slot.tensors[f"{name}.lora_B.weight"]
        row = 0
        for index, part in enumerate(layout.parts_of(name)):
            out = layout.shapes[part][0]
            delta = slot.scale * b[row : row + out] @ a[index * slot.rank : (index + 1) * slot.rank]
            expected = modules[part].delta() if part in modules else torch.zeros_like(delta)
            torch.testing.assert_close(delta, expected, rtol=1e-6, atol=1e-7)
            row += out
            seen.add(part)
    assert set(modules) <= seen


def test_an_even_adapter_is_not_rounded_again(tmp_path: Path) -> None:
    tiny_adapter(tiny_model("qwen2"), tmp_path, target_modules=LANGUAGE, lora_alpha=5)
    modules = read_adapter(tmp_path, serving_layout()).modules
    slot = stack(modules, serving_layout(), torch.float32)
    assert (slot.rank, slot.scale) == (4, 1.25)
    assert slot.kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    name = "layers.1.self_attn.o_proj"
    assert torch.equal(slot.tensors[f"{name}.lora_B.weight"], modules[name].b)


def pair_of(value: float, dtype: torch.dtype, scale: float = 1.0, side: str = "A") -> LoraPair:
    a, b = torch.ones(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, 4, dtype=dtype)
    (a if side == "A" else b)[1, 2] = value
    return LoraPair(a, b, scale)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(
    ("value", "read", "pool"),
    [
        (1e39, torch.float64, torch.float32),
        (3.4028e38, torch.float32, torch.bfloat16),
        (-70000.0, torch.float32, torch.float16),
        (65536.0, torch.bfloat16, torch.float16),
    ],
)
def test_a_factor_past_the_pools_type_is_refused_by_name(
    side: str, value: float, read: torch.dtype, pool: torch.dtype
) -> None:
    modules = {"layers.0.self_attn.o_proj": pair_of(value, read, side=side)}
    with pytest.raises(AdapterError, match=rf"layers.0.self_attn.o_proj: {side}, in {read}, reaches .* in {pool}"):
        stack(modules, serving_layout(), pool)


def test_a_factor_that_its_scale_takes_past_the_pools_type_is_refused() -> None:
    modules = {f"layers.{i}.self_attn.o_proj": pair_of(1.0, torch.float32) for i in range(2)}
    modules["layers.2.self_attn.o_proj"] = pair_of(1e30, torch.float32, 1e9, side="B")
    with pytest.raises(AdapterError, match=r"layers.2.self_attn.o_proj: B, in .* reaches 1e\+39 with its scale"):
        stack(modules, serving_layout(), torch.bfloat16)


def test_a_scale_of_zero_beside_others_takes_only_its_own_module_out() -> None:
    modules = {f"layers.{i}.self_attn.o_proj": pair_of(2.0, torch.float32, 0.0) for i in range(2)}
    modules["layers.2.self_attn.o_proj"] = pair_of(2.0, torch.float32, 3.0)
    slot = stack(modules, serving_layout(), torch.float32)
    assert slot.scale == 3.0
    assert [bool(slot.tensors[f"layers.{i}.self_attn.o_proj.lora_B.weight"].any()) for i in range(3)] == [0, 0, 1]
    assert stack({"layers.0.self_attn.o_proj": pair_of(2.0, torch.float32, 0.0)}, serving_layout(), torch.float32)
