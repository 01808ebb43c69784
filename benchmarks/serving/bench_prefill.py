"""Two claims about requests that are all prefill: heads need no decoding, and activated adapters share a prefix.

::

    python -m benchmarks.serving.bench_prefill --summary results/summary.json      # 7B shape, random weights, a GPU
    python -m benchmarks.serving.bench_prefill --tiny --summary /tmp/summary.json  # a check on a laptop

- ``heads.latency_cut_vs_lm5``: 1 - head latency / latency of a 5-token answer, same prompt, adapter and cold cache.
- ``heads.latency_over_prefill``: head latency / latency of a 1-token answer (one prefill) - 1.
- ``reuse.shared8_ttft_ratio``: mean time to first token of 8 requests that arrive together, one adapter each, with one
  1,024-token prefix: adapters that fork at the first token, over adapters that activate behind it.

The prefix is token ids of text: an image's encoder and preprocessing cost the same on both sides, and are left out.
Cases are interleaved, the cache is flushed before each, medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serving.shape7b import build_engine, engine_options, make_adapter, make_model
from benchmarks.summary import record
from vlora_sgl.heads import ClassifyHead, save_heads

ACTIVATION = [11, 12, 13]
ADAPTERS = 8


async def first_token_seconds(engine: Any, requests: list[dict[str, Any]]) -> list[float]:
    """Seconds to the first token of each request, all sent at once."""

    async def one(request: dict[str, Any]) -> float:
        start = time.perf_counter()
        async for _ in await engine.async_generate(**request, stream=True):
            return time.perf_counter() - start
        raise AssertionError("no token came")

    return await asyncio.gather(*(one(request) for request in requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters instead of 7B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens all requests share")
    parser.add_argument("--suffix", type=int, default=24, help="tokens of each question behind it")
    parser.add_argument("--summary", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make_model(root / "model", args.tiny)
        text = json.loads((model / "config.json").read_text())
        hidden = text.get("text_config", text)["hidden_size"]
        adapters: dict[str, Path] = {}
        for number in range(ADAPTERS):
            for kind, activation in (("forked", None), ("activated", tuple(ACTIVATION))):
                path = make_adapter(root / f"{kind}{number}", model, number, args.rank)
                save_heads(path, [ClassifyHead("head", hidden, list("abcdefghij"))], activation=activation)
                adapters[path.name] = path
        engine = build_engine(**engine_options(model, adapters, args.rank, args.tiny))
        try:
            results = measure(engine, args)
        finally:
            engine.shutdown()
    for name, (values, unit, higher) in results.items():
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        if not name.startswith("_"):
            record(name, statistics.median(values), unit, higher, summary=args.summary)


def measure(engine: Any, args: argparse.Namespace) -> dict[str, tuple[list[float], str, bool]]:
    """All cases, interleaved; the first round warms up."""
    prefix = [100 + i % 200 for i in range(args.prefix)]
    prompts = [prefix + ACTIVATION + [20 + number] * args.suffix for number in range(ADAPTERS)]
    loop = asyncio.get_event_loop()

    def seconds(parameters: dict[str, Any]) -> float:
        engine.flush_cache()
        parameters = {"temperature": 0, "ignore_eos": True, **parameters}
        start = time.perf_counter()
        engine.generate(input_ids=prompts[0], lora_path="forked0", sampling_params=parameters)
        return time.perf_counter() - start

    def first_tokens(kind: str) -> float:
        engine.flush_cache()
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 2}
        requests = [
            {"input_ids": prompt, "lora_path": f"{kind}{number}", "sampling_params": parameters}
            for number, prompt in enumerate(prompts)
        ]
        return statistics.mean(loop.run_until_complete(first_token_seconds(engine, requests)))

    rounds = []
    for _ in range(args.repeats + 1):
        rounds.append(
            {
                "head": seconds({"max_new_tokens": 1, "custom_params": {"vlora_head": "head"}}),
                "one": seconds({"max_new_tokens": 1}),
                "five": seconds({"max_new_tokens": 5}),
                "forked": first_tokens("forked"),
                "activated": first_tokens("activated"),
            }
        )
    rounds = rounds[1:]
    return {
        "heads.latency_cut_vs_lm5": ([1 - r["head"] / r["five"] for r in rounds], "ratio", True),
        "heads.latency_over_prefill": ([r["head"] / r["one"] - 1 for r in rounds], "ratio", False),
        "reuse.shared8_ttft_ratio": ([r["forked"] / r["activated"] for r in rounds], "ratio", True),
        **{f"_{case} (s)": ([r[case] for r in rounds], "s", False) for case in rounds[0]},
    }


if __name__ == "__main__":
    main()
