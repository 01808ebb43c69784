"""What serving adapters together saves: time by batch size and number of adapters, weights, cost of one at a time.

::

    python -m benchmarks.serving.bench_batching                    # 7B shape, random weights; a GPU
    python -m benchmarks.serving.bench_batching --tiny --requests 12   # the same on a laptop: a check

The three tables of "Serving multi-tenant LoRA with SGMV" (section 4) on our runtime: ``--requests`` distinct requests
of ``PROMPT`` tokens in and ``TOKENS`` out,

1. spread evenly over 2 or 4 adapters, with 1, 16 and 32 under way at a time: seconds for all;
2. numbers that have to be held for N adapters: one base model and N adapters, over N models with theirs merged in;
3. all for one adapter, one after the other, on servers that hold 1, 2 and 4: seconds for all.

Figures: ``batching.time32_over_1`` (4 adapters), ``batching.numbers4_over_separate``,
``batching.one_by_one4_over_1``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.serving.client import Client
from benchmarks.serving.shape7b import build_engine, engine_options, make_adapters, make_model
from benchmarks.summary import SUMMARY, record

HELD = (1, 2, 4)
"""Adapters of a server."""
SPREAD = (2, 4)
UNDER_WAY = (1, 16, 32)
PROMPT, TOKENS = 32, 40


def main(argv: list[str] | None = None) -> int:
    """Measure, print rows as they come, record figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters; nothing is recorded")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rows", type=Path, help="file to write all rows to")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in measure(Path(scratch), args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.rows:
                args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in figures(rows).items():
        print(f"{name}: {value:.4g}", flush=True)
        if not args.tiny:
            record(name, value, "ratio", False, summary=args.summary)
    return 0


def measure(scratch: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the three tables; one server for each number of adapters."""
    model = make_model(scratch / "model", args.tiny)
    adapters = make_adapters(scratch / "adapters", model, [f"a{n}" for n in range(max(HELD))], args.rank)
    base, own = numbers_of_model(model), numbers_of_adapter(adapters["a0"])
    for count in HELD:
        yield {"table": "numbers", "adapters": count, "together": base + count * own, "separate": count * base}
    for count in HELD:
        held = dict(itertools.islice(adapters.items(), count))
        engine = build_engine(**engine_options(model, held, args.rank, args.tiny))
        try:
            for row in times(Client(engine), list(held), args.requests):
                yield {**row, "adapters": count}
        finally:
            engine.shutdown()


def times(client: Client, names: list[str], requests: int) -> Iterator[dict[str, Any]]:
    """The rows of one server."""
    tokenizer, draw = client.engine.tokenizer_manager.tokenizer, random.Random(len(names))
    words = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.added_tokens_decoder})  # none marks an image
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}

    def spread(number: int) -> dict[str, Any]:
        ids = draw.choices(words, k=PROMPT)
        return {"input_ids": ids, "lora_path": names[number % len(names)], "sampling_params": parameters}

    def first(number: int) -> dict[str, Any]:
        return {**spread(number), "lora_path": names[0]}

    for under_way in UNDER_WAY:  # loads the adapters, and compiles what each batch size needs
        seconds(client, spread, 2 * under_way, under_way)
    if len(names) in SPREAD:
        for under_way in UNDER_WAY:
            yield {
                "table": "batching",
                "under_way": under_way,
                "seconds": seconds(client, spread, requests, under_way),
            }
    yield {"table": "one_by_one", "seconds": seconds(client, first, requests, 1)}


def seconds(client: Client, make: Callable[[int], dict[str, Any]], requests: int, under_way: int) -> float:
    """Until ``requests`` requests are answered, the n-th being ``make(n)``, with so many under way at any time."""
    bar = tqdm(total=requests, desc=f"{under_way} under way", leave=False, file=sys.stderr)
    start = time.perf_counter()
    client.drain(make, requests, under_way, lambda: bar.update())
    bar.close()
    return time.perf_counter() - start


def numbers_of_model(model: Path) -> int:
    """Weights of a model by its configuration, without its files."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        made = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model))
    return sum(parameter.numel() for parameter in made.parameters())


def numbers_of_adapter(directory: Path) -> int:
    """Weights of an adapter by its file."""
    from safetensors import safe_open

    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios of the rows, by name."""

    def one(table: str, **wanted: int) -> dict[str, Any]:
        return next(row for row in rows if row["table"] == table and wanted.items() <= row.items())

    held, batch = one("numbers", adapters=4), "batching"
    full, alone = (one(batch, adapters=4, under_way=n)["seconds"] for n in (32, 1))
    return {
        "batching.time32_over_1": full / alone,
        "batching.numbers4_over_separate": held["together"] / held["separate"],
        "batching.one_by_one4_over_1": one("one_by_one", adapters=4)["seconds"]
        / one("one_by_one", adapters=1)["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
