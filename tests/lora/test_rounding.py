"""A bfloat16 merge moves log-probabilities no further than error analysis allows, far less than an adapter does."""

from __future__ import annotations

import copy

import torch
from peft import PeftModel
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.conftest import TinyModel
from tests.support.rounding import logprob_bounds, logprobs
from vlora_sgl.kernels.merge import MergeTable, MergeTarget

PROMPT, ANSWER = list(range(20, 60)), [30, 41, 52, 23]


def test_merging_in_bfloat16_stays_within_the_bound_of_one_rounding_a_weight(tiny_model: TinyModel) -> None:
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_model.path, dtype=torch.float32).eval()
    original = copy.deepcopy(base).to(torch.bfloat16).float()
    base.load_state_dict(original.state_dict())
    peft = PeftModel.from_pretrained(base, tiny_model.adapters["A"]).eval()
    scaling = next(iter(peft.peft_config.values()))
    targets: dict[str, MergeTarget] = {}
    for name, module in peft.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            for part in (module.lora_A, module.lora_B):
                part["default"].weight.data = part["default"].weight.data.bfloat16().float()
            weight = module.base_layer.weight.data.bfloat16()
            a, b = (part["default"].weight.data.bfloat16()[None] for part in (module.lora_A, module.lora_B))
            targets[name] = MergeTarget(name, "all", weight, weight.clone(), a, b)
    MergeTable(list(targets.values())).merge(["all"], slot=0, rank=scaling.r, scaling=scaling.lora_alpha / scaling.r)
    exact = peft.merge_and_unload()
    merged = copy.deepcopy(exact)
    for name, target in targets.items():
        merged.get_submodule(name).weight.data = target.weight.float()

    bounds = torch.tensor(logprob_bounds(exact, PROMPT, ANSWER, torch.bfloat16, activations=False))
    with torch.no_grad():
        wanted = logprobs(exact, PROMPT, ANSWER)
        moved = (logprobs(merged, PROMPT, ANSWER) - wanted).abs()
        without = (logprobs(original, PROMPT, ANSWER) - wanted).abs()
    assert (moved <= bounds).all() and (moved > bounds / 1e3).any(), (moved, bounds)
    # Not of every token: an adapter may leave one where it was.
    assert (without > 5 * bounds).any(), "the bound would not tell a merge from none"
