"""What the tests of modes share: adapters of different rank, scaling and targets, PEFT's answers, the comparison.

On a CPU the engines compute in float32, where greedy tokens must be PEFT's; on a GPU in bfloat16, where a token may
differ only where the two best are closer than rounding reaches (``tests.support.rounding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_runs import EngineProcess, Run
from tests.support.rounding import logprob_bounds, logprobs
from tests.support.tiny_random import make_adapter
from vlora_sgl.combined import is_combined, parts
from vlora_sgl.platforms.cpu import is_plain_cpu

TOKENS = 8
CHUNK = 32
TEXT = "<|im_start|>user\n" + "How many objects are there? Describe the image. " * 6 + "<|im_end|>\n"

# Combinations of ``make_adapters``'.
TWO = '{"all": 0.7, "mlp": 0.6}'
THREE = '{"all": 0.5, "attention": 1.5, "mlp": -1.0}'
HALF = '{"all": 0.5}'
MORE = '{"all": 1.0, "attention": 0.8}'


@dataclass(frozen=True)
class Expected:
    """PEFT's greedy tokens, their log-probabilities (unmerged and merged), and how far rounding may move them."""

    ids: list[int]
    logprobs: list[float]
    merged_logprobs: list[float]
    bounds: list[float]


def make_adapters(root: Path, model: Path) -> dict[str, Path]:
    """Rank 16 on all linears, rank 8 on part of attention, rank 4 (rsLoRA) on part of the MLP; rank 8 on the
    vocabulary and part of attention; new rows of tokens."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)("How many objects are there?")["input_ids"]
    rows = {"embed_tokens": sorted({*ids})[:6], "lm_head": [*range(40, 56)]}
    return {
        "all": make_adapter(root / "all", model, 1),
        "attention": make_adapter(root / "attention", model, 5, 8, targets=["q_proj", "v_proj", "o_proj"]),
        "mlp": make_adapter(root / "mlp", model, 6, 4, 3, ["gate_proj", "down_proj"], use_rslora=True),
        "vocabulary": make_adapter(
            root / "vocabulary", model, 7, 8, 24, targets=["embed_tokens", "lm_head", "v_proj"]
        ),
        "tokens": make_adapter(root / "tokens", model, 8, 4, targets=["q_proj"], trainable_token_indices=rows),
    }


def make_forms(root: Path, model: Path) -> dict[str, Path]:
    """What is more than plain LoRA: DoRA on all linears, biases of B, trained biases with DoRA, an activated LoRA."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)("How many objects")["input_ids"]
    qkv = ["q_proj", "k_proj", "v_proj"]
    activated = {"alora_invocation_tokens": tokens, "task_type": "CAUSAL_LM"}
    return {
        "dora": make_adapter(root / "dora", model, 21, 8, use_dora=True),
        "lora_bias": make_adapter(root / "lora_bias", model, 22, 4, targets=qkv, scale=2, lora_bias=True),
        "bias": make_adapter(
            root / "bias", model, 23, 8, targets=[*qkv, "down_proj"], bias="lora_only", use_dora=True
        ),
        "activated": make_adapter(root / "activated", model, 24, 16, **activated),
    }


def engine_options(model: Path, adapters: dict[str, Path]) -> dict[str, Any]:
    """An engine that serves all of them at once and prefills in chunks."""
    options: dict[str, Any] = {
        "model_path": str(model),
        "enable_lora": True,
        "lora_paths": [f"{name}={path}" for name, path in adapters.items()],
        "max_loras_per_batch": len(adapters) + 1,
        "chunked_prefill_size": CHUNK,
    }
    if not is_plain_cpu():
        options |= {
            "dtype": "bfloat16",
            "attention_backend": "triton",
            "mm_attention_backend": "triton_attn",
            "sampling_backend": "pytorch",
            "cuda_graph_bs_decode": [1, 2, 4, 8],
            "mem_fraction_static": 0.3,
            "max_total_tokens": 65536,
        }
    return options


def expected_answers(
    model_path: Path, adapters: dict[str, Path], combined: Sequence[str] | None = None
) -> dict[str | None, Expected]:
    """PEFT's answer to ``TEXT``, of the base and each adapter, or of combinations of them, in float32 on the CPU."""
    from peft import PeftModel
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    prompt = AutoTokenizer.from_pretrained(model_path)(TEXT)["input_ids"]
    assert len(prompt) > 2 * CHUNK
    found: dict[str | None, Expected] = {}
    for name in (None, *adapters) if combined is None else combined:
        base = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32).eval()
        base.generation_config.eos_token_id = None
        model = base
        if name is not None:
            (first, _), *others = parts(name)
            model = PeftModel.from_pretrained(base, adapters[first], adapter_name=first).eval()
            for other, _ in others:
                model.load_adapter(adapters[other], adapter_name=other)
        if name is not None and is_combined(name):
            model.add_weighted_adapter(*zip(*parts(name), strict=True), "sum", combination_type="cat")
            model.set_adapter("sum")
        with torch.no_grad():
            ids = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS)
            answer = ids[0, len(prompt) :].tolist()
            unmerged = logprobs(model, prompt, answer)
            activated = name is not None and model.active_peft_config.alora_invocation_tokens
            if name is not None and not activated:  # PEFT cannot merge what starts within the prompt
                base = model.merge_and_unload()
            merged = unmerged if activated else logprobs(base, prompt, answer)
        bounds = logprob_bounds(base, prompt, answer, torch.float32 if is_plain_cpu() else torch.bfloat16)
        found[name] = Expected(answer, unmerged.tolist(), merged.tolist(), bounds)
    assert len({tuple(e.ids) for e in found.values()}) == len(found), "adapters must change the answer"
    assert all(max(e.bounds) < 0.2 for e in found.values()), "bounds that would let another adapter's answer through"
    return found


def ask(engine: EngineProcess, names: Sequence[str | None]) -> Run:
    """``TEXT`` to every named adapter at once."""
    return engine.generate(
        prompt=[TEXT] * len(names),
        lora_path=list(names),
        sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )


def check(answer: dict[str, Any], wanted: Expected) -> None:
    """The answer is PEFT's, merged and unmerged, but for rounding."""
    ids = answer["output_ids"]
    assert len(ids) == TOKENS
    if is_plain_cpu():
        assert ids == wanted.ids
    meta = answer["meta_info"]
    for i, (score, _, _) in enumerate(meta["output_token_logprobs"]):
        if ids[i] != wanted.ids[i]:
            best, second = (top[0] for top in meta["output_top_logprobs"][i][:2])
            assert best - second <= 2 * wanted.bounds[i], f"token {i} of {ids}, expected {wanted.ids}"
            return
        for reference in (wanted.logprobs[i], wanted.merged_logprobs[i]):
            assert abs(score - reference) <= wanted.bounds[i], f"token {i}: {score} {reference} +- {wanted.bounds[i]}"


def check_all(engine: EngineProcess, names: Sequence[str | None], expected: dict[str | None, Expected]) -> Run:
    """Ask, check every row, and return the run."""
    run = ask(engine, names)
    for name, answer in zip(names, run.answers, strict=True):
        check(answer, expected[name])
    return run
