"""What a pool slot receives computes the same update as the adapter's own factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.lora_adapters import TEXT, tiny_adapter, tiny_config, tiny_model
from vlora_sgl.lora.checkpoint import read_adapter
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
    """The tiny model as an engine serves it: q, k, v and gate, up stacked."""
    linears: list[tuple[str, tuple[int, int], tuple[int, ...]]] = []
    for layer in range(TEXT["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        linears += [
            (f"{at}.self_attn.qkv_proj", (HIDDEN + 2 * KV, HIDDEN), (HIDDEN, KV, KV)),
            (f"{at}.self_attn.o_proj", (HIDDEN, HIDDEN), ()),
            (f"{at}.mlp.gate_up_proj", (2 * INNER, HIDDEN), (INNER, INNER)),
            (f"{at}.mlp.down_proj", (HIDDEN, INNER), ()),
        ]
    return BaseLayout.from_modules(linears, {"model.embed_tokens": (HIDDEN, TEXT["vocab_size"])})


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
