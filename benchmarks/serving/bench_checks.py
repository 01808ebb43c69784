"""What it costs the front of a server to check a text request: its body, the names in it, its fields.

    python -m benchmarks.serving.bench_checks --summary FILE      # a few seconds, on any CPU

A body of 2,000 characters is read (``strict_json``), the names in it are resolved (``entrypoints.bodies``)
and its fields checked (``managers.admission``), as in the running server. SGLang's own reading of the body is timed
beside it, and is part of the figure: nothing is subtracted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from benchmarks.summary import record
from vlora_sgl import _sgl
from vlora_sgl.entrypoints.bodies import accept
from vlora_sgl.managers.admission import Limits, RequestGate
from vlora_sgl.strict_json import read_json

ROUNDS, CALLS = 21, 500


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call, the median of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", type=Path, help="file that takes the figure")
    args = parser.parse_args()
    sampling = {"temperature": 0, "max_new_tokens": 64, "stop": ["\n\n"]}
    body = json.dumps({"text": "word " * 400, "sampling_params": sampling, "lora_path": "a", "rid": "r"}).encode()
    names = {f"adapter{i}": SimpleNamespace(lora_name=f"adapter{i}") for i in range(8)}
    settings = SimpleNamespace(model_path="/model", enable_lora=True, admin_api_key=None)
    manager: Any = SimpleNamespace(served_model_name="base", server_args=settings, lora_ref_cache=names)
    gate = RequestGate(Limits(vocabulary=152_064, context=32_768, text_chars=1 << 21))
    request = _sgl.GenerateReqInput(**json.loads(body))

    def check() -> None:
        accept(read_json(body), "/generate", manager)
        gate.check(request)

    print(f"the body, by orjson alone: {seconds_of(lambda: orjson.loads(body)) * 1e6:.1f} us")
    print(f"the body, strictly: {seconds_of(lambda: read_json(body)) * 1e6:.1f} us")
    print(f"the fields: {seconds_of(lambda: gate.check(request)) * 1e6:.1f} us")
    whole = seconds_of(check) * 1e6
    print(f"all: {whole:.1f} us")
    if args.summary is not None:
        record("robust.check_us", whole, "us", False, summary=args.summary)


if __name__ == "__main__":
    main()
