"""vLLM's engine behind ``bench_step``'s questions: a file that vLLM's own Python runs, which has no package of ours.

It is given a language model and its adapters, and answers lines of (case, tokens) with the seconds of one batch, as
``bench_step.serve`` does. What its users set is set: LoRA's sizes, and as many tokens a step as SGLang is given. The
rest (attention, compilation, graphs) is vLLM's choice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ANSWER = "@bench_step "
MEMORY = 32 << 30
"""Bytes of the card that it may take: other engines live beside it."""


def share() -> float:
    """``MEMORY`` as a share of the card."""
    import torch

    return min(0.9, MEMORY / torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0.9


def build(args: argparse.Namespace, adapters: list[Path]) -> Any:
    """The engine."""
    from vllm import LLM

    return LLM(
        model=str(args.directory / "language"),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=args.input + args.steps + 64,
        max_num_seqs=args.batch,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=share(),
        enable_lora=True,
        max_loras=len(adapters),
        max_cpu_loras=len(adapters),
        max_lora_rank=args.rank,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--rank", "--adapters", "--batch", "--input", "--steps"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    paths = [args.directory / f"language{args.rank}" / f"adapter{i}" for i in range(args.adapters)]
    engine = build(args, paths)
    named = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    prompts = [
        {"prompt_token_ids": [100 + (31 * row + i) % 200 for i in range(args.input)]} for row in range(args.batch)
    ]
    rows = {
        "base": [None] * args.batch,
        "one": [named[0]] * args.batch,
        "eight": [named[i * len(named) // args.batch] for i in range(args.batch)],
    }
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case, tokens = json.loads(line)
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = {"lora_request": rows[case]} if case != "base" else {}
        start = time.perf_counter()
        engine.generate(prompts, parameters, use_tqdm=False, **given)
        print(ANSWER + json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
