"""``vlora bench``: this machine, this server beside stock SGLang: one after the other, the same requests.

It says what it did, how far the rounds spread, and what could not be measured. The published figures come from
``benchmarks/``, with cards and loads of their own (docs/design/benchmarks.md).
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from vlora_sgl.cli.modules import embedded
from vlora_sgl.cli.result import CommandError, Result, table
from vlora_sgl.core import JsonDict
from vlora_sgl.platforms.cpu import has_accelerator

START_S = 600.0
PROMPT_TOKENS = 64
STOCK = ("--lora-backend", "csgmv")
STOCK_ON_A_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mm-attention-backend", "sdpa", "--lora-backend", "torch_native"),
)
"""What stock SGLang needs to be told there; ours finds it out."""


@dataclass(frozen=True)
class Answered:
    """One request: seconds to its first token and to its end, and its tokens."""

    first: float
    whole: float
    tokens: int


def bench(args: Namespace) -> Result:
    """Tokens a second, time to the first token and time a token, of each system in each round.

    Raises:
        CommandError: our server does not start, or does not answer.
    """
    flags = _flags(args)
    given = flags[flags.index("--lora-paths") + 1 :] if "--lora-paths" in flags else []
    names: list[str | None] = [None, *(pair.partition("=")[0] for pair in given)]
    systems: dict[str, tuple[str, tuple[str, ...]]] = {"vlora_sgl": ("vlora_sgl.launch_server", ())}
    if not args.skip_stock:
        systems["sglang"] = ("sglang.launch_server", STOCK if has_accelerator() else STOCK_ON_A_CPU)
    found: JsonDict = {}
    for system, (module, more) in systems.items():
        try:
            with _server(module, [*more, *flags]) as url:
                found[system] = [_round(url, names, args, number) for number in range(args.rounds + 1)][1:]
        except (CommandError, OSError, HTTPException) as error:
            if system == "vlora_sgl":
                raise CommandError(f"{system}: {error}") from None
            found[system] = {"error": f"{system}: {error}"}
    return Result({"rounds": found, "adapters": names[1:]}, _render(found, names, args))


def _flags(args: Namespace) -> list[str]:
    """What both servers are started with; adapters come last."""
    if args.model_path is None:
        return embedded()
    if not args.lora_paths:
        return ["--model-path", str(args.model_path)]
    slots = ["--max-loras-per-batch", str(min(len(args.lora_paths) + 1, 9)), "--enable-lora"]
    return ["--model-path", str(args.model_path), *slots, "--lora-paths", *args.lora_paths]


@contextmanager
def _server(module: str, flags: Sequence[str]) -> Iterator[str]:
    """A server's address, once it answers.

    Raises:
        CommandError: it ends, or takes too long; with the end of what it said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", module, *flags, "--port", port]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    lines = [line.strip() for line in said.read()[-20_000:].splitlines() if line.strip()]
                    last = lines[-1][:300] if lines else "it said nothing"
                    raise CommandError(f"{module} does not start here: {last}")
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _round(url: str, names: Sequence[str | None], args: Namespace, number: int) -> JsonDict:
    """A round of requests, adapters in turn, no two with the same prompt; its figures."""
    draw = random.Random(number)
    prompts = [[draw.randrange(100, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(args.requests)]
    asked = [(ids, names[position % len(names)]) for position, ids in enumerate(prompts)]
    begin = time.monotonic()
    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = list(pool.map(lambda one: _stream(url, one[0], one[1], args.tokens), asked))
    seconds = time.monotonic() - begin
    each = [(one.whole - one.first) / (one.tokens - 1) for one in answers if one.tokens > 1]
    return {
        "tokens_per_second": sum(one.tokens for one in answers) / seconds,
        "ttft_ms": 1000 * statistics.median(one.first for one in answers),
        "tpot_ms": 1000 * statistics.median(each) if each else None,
    }


def _stream(url: str, ids: list[int], adapter: str | None, tokens: int) -> Answered:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "lora_path": adapter, "sampling_params": sampling, "stream": True}
    begin, first, last = time.monotonic(), None, {}
    request = Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=START_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = time.monotonic() - begin if first is None else first
                last = json.loads(line[6:])
    whole = time.monotonic() - begin
    return Answered(whole if first is None else first, whole, last["meta_info"]["completion_tokens"])


def _render(found: JsonDict, names: Sequence[str | None], args: Namespace) -> str:
    rows: list[list[object]] = []
    notes = []
    for system, rounds in found.items():
        if isinstance(rounds, list):
            rows.append([system, *(_spread(rounds, name) for name in ("tokens_per_second", "ttft_ms", "tpot_ms"))])
        else:
            notes.append(f"not measured: {rounds['error']}")
    head = (
        f"{args.requests} requests of {PROMPT_TOKENS} + {args.tokens} tokens, {args.concurrency} at a time, the base "
        f"model and {len(names) - 1} adapters in turn;\nmedian of {args.rounds} rounds (least - most), ms are medians "
        "of requests"
    )
    return "\n".join([head, "", table(rows, ["system", "tokens/s", "first token ms", "token ms"]), *notes])


def _spread(rounds: Sequence[Any], name: str) -> str:
    values = [one[name] for one in rounds if one[name] is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"
