"""Adapters from a trainer's memory: versions pushed while clients stream, what a push costs, and a policy that learns.

::

    python -m benchmarks.serving.bench_sources versions --summary results/summary.json   # five minutes of two cores
    python -m benchmarks.serving.bench_sources rl --summary results/summary.json         # ten minutes of two cores
    python -m benchmarks.serving.bench_sources push --summary results/summary.json       # a GPU; 7B shape, rank 64

``sources.versions_wrong``: of the answers that four streams get while 1,000 versions are pushed over HTTP, those that
are not the answer of the version that they say, and pushes that failed. Memory must be flat.

``rl.reward_gain_points``: of ``examples/rl_counting.py``, points of accuracy on the test set over the base model, in
the worst of three seeds. ``rl.max_logprob_difference``: the largest difference of a rollout's log-probability, as
served, from the trainer's, in all steps of all seeds. In the end each difference of 16 answers must be within the
bound of docs/design/modes.md for its token.

``sources.push_over_copy``: a push of rank 64 for a Qwen2.5-VL-7B (323 MB, all linears, 16 bits) through shared memory,
from the call of ``/reload_lora_adapter`` to the first token of a request that was sent when it answered, less what
such a token takes without a push; over one copy of the bytes in host memory and one from pinned memory to the device,
in the same run. The median of ten pushes. The same over HTTP is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file

from benchmarks.summary import record

ROOT = Path(__file__).resolve().parents[2]
VERSIONS, STREAMS, SEEDS, PICTURES = 1000, 4, (0, 1, 2), 16
STORED = 3
"""Numbers whose rounding moves a log-probability by a unit roundoff each: the sum of exponentials in the server and in
the trainer, and the server's probability."""
MOST_GROWTH_MB = 64.0
"""Of the server over the second half of the pushes; a copy of each version's weights would be 240 MB."""


def versions(args: argparse.Namespace) -> None:
    """``sources.versions_wrong``."""
    from tests.conftest import TinyModel, serve
    from tests.soak import pushes
    from tests.support.tiny_random import make_adapter, make_model

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_model(root / "model")
        contents = [make_adapter(root / str(seed), model, 40 + seed, rank=4 + 4 * seed) for seed in range(4)]
        tiny = TinyModel(model, {"A": contents[0]})
        with serve(tiny, root / "log.txt", "--max-loras-per-batch", "7", "--max-lora-rank", "64") as server:
            begin = time.monotonic()
            found = pushes.run(server, contents, args.versions, STREAMS)
            seconds = time.monotonic() - begin
    print(f"{found.versions} pushes in {seconds:.0f} s, {sum(found.answers.values())} answers of {len(found.answers)}")
    print("resident MB:", ", ".join(f"{one:.0f}" for one in found.memory), flush=True)
    for fault in found.wrong[:10]:
        print(fault)
    growth = found.memory[-1] - found.memory[len(found.memory) // 2]
    if growth > MOST_GROWTH_MB:
        raise SystemExit(f"the server has grown by {growth:.0f} MB over the second half of the pushes")
    record("sources.versions_wrong", len(found.wrong), "answers", False, summary=args.summary)


def rl(args: argparse.Namespace) -> None:
    """``rl.*``."""
    sys.path.insert(0, str(ROOT / "examples"))
    import rl_counting as example
    from serving import Model, server

    from vlora_sgl.models import tiny

    results, shares = [], []
    model = Model(tiny.path(), {}, trained=True)
    with tempfile.TemporaryDirectory() as scratch, server(model, Path(scratch) / "log", *example.FLAGS) as url:
        for seed in SEEDS:
            policy = example.Policy(url, seed)
            results.append(example.learn(policy, seed, args.steps))
            shares.append(share_of_bound(policy, example.counting()[2][:PICTURES]))
            policy.drop()
    gains = [100 * (one["after"] - one["before"]) for one in results]
    apart = max(one["apart"] for one in results)
    points = ", ".join(f"{one:.1f}" for one in gains)
    print(f"points gained: {points}; {apart:.2e} apart at most; in the end {max(shares):.2f} of the bound", flush=True)
    if max(shares) > 1:
        raise SystemExit("a log-probability is farther from the trainer's than rounding may move it")
    record("rl.reward_gain_points", min(gains), "points", True, summary=args.summary)
    record("rl.max_logprob_difference", apart, "nats", False, summary=args.summary)


def share_of_bound(policy: Any, rows: list[Any]) -> float:
    """The largest difference of a served log-probability from the trainer's, over that token's bound
    (docs/design/modes.md), of answers about some pictures."""
    replies = policy.ask(rows, n=1)
    answers = [reply["output_ids"] for reply in replies]
    with torch.no_grad():
        scores = policy.logprobs(rows, answers)
    model, found = policy.model.merge_and_unload(), 0.0
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(True)  # so that what the tower rounds counts, too
    for row, answer, reply, score in zip(rows, answers, replies, scores, strict=True):
        served = [value for value, *_ in reply["meta_info"]["output_token_logprobs"]]
        bounds = logprob_bounds_of(policy, model, row, answer)
        found = max(found, *(abs(a - b) / c for a, b, c in zip(served, score.tolist(), bounds, strict=True)))
    return found


def logprob_bounds_of(policy: Any, model: Any, row: Any, answer: list[int]) -> list[float]:
    """How far rounding may move each log-probability of an answer about a picture.

    That is its bound (docs/design/modes.md), and what is stored behind the logits (``STORED``), which alone is left
    where a probability is nearly 1."""
    from tests.support.rounding import UNIT, logprob_bounds

    given = dict(policy.processor(text=[policy.prompt(row[1])], images=[row[0]], return_tensors="pt"))
    prompt, image = given["input_ids"][0].tolist(), model.config.image_token_id
    pixels = {name: given[name] for name in ("pixel_values", "image_grid_thw")}

    def forward(input_ids: torch.Tensor) -> Any:
        kinds = {"mm_token_type_ids": (input_ids == image).int()} if "mm_token_type_ids" in given else {}
        return type(model).forward(model, input_ids=input_ids, **pixels, **kinds)

    model.forward = forward
    stored = STORED * UNIT[torch.float32]
    return [bound + stored for bound in logprob_bounds(model, prompt, answer, torch.float32)]


# A push on a GPU


def push(args: argparse.Namespace) -> None:
    """``sources.push_over_copy``."""
    from benchmarks.serving.shape7b import make_adapters, make_model
    from tests.conftest import TinyModel, serve

    shared = Path("/dev/shm")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.scratch)))
        trainer = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared)))
        model = make_model(root / "model", args.tiny)
        contents = [*make_adapters(root, model, ("one", "two"), 64).values()]
        size = sum(file.stat().st_size for file in contents[0].glob("*.safetensors"))
        copies = copy_seconds(size)
        print(f"{size / 1e6:.0f} MB: host copy and pinned copy to the device {1e3 * copies:.1f} ms", flush=True)
        flags = ["--vlora-adapter-root", str(trainer), "--max-loras-per-batch", "3", "--max-lora-rank", "64"]
        flags += ["--log-level", "info"]  # what a load's parts took is said there
        flags += ["--cuda-graph-bs-prefill", "64", "--cuda-graph-bs-decode", "1"] if torch.cuda.is_available() else []
        flags += [] if args.tiny else ["--load-format", "dummy"]
        server = stack.enter_context(serve(TinyModel(model, {"policy": contents[0]}), root / "log.txt", *flags))
        places = [_written(load_file(next(content.glob("*.safetensors"))), content, trainer) for content in contents]
        ways: dict[str, Callable[[Path], Any]] = {
            "shared memory": lambda place: {"json": {"lora_name": "policy", "lora_path": str(place)}},
            "HTTP": lambda place: {"data": {"lora_name": "policy"}, "files": _files(place)},
        }
        for way, order in ways.items():
            quiet = statistics.median(token_seconds(server.url) for _ in range(10))
            taken = []
            for number in range(args.pushes):
                body = order(places[(number + 1) % 2])
                begin = time.perf_counter()
                requests.post(f"{server.url}/reload_lora_adapter", timeout=120, **body).raise_for_status()
                answered = time.perf_counter() - begin
                token_seconds(server.url)
                taken.append(time.perf_counter() - begin - quiet)
                print(
                    f"{way}: answered after {1e3 * answered:.1f} ms, used after {1e3 * taken[-1]:.1f} ms", flush=True
                )
            ratio = statistics.median(taken) / copies
            print(f"{way}: {ratio:.2f} times the copies; the server's log of the last push:", flush=True)
            print_last_load(root / "log.txt")
            if way == "shared memory" and not args.tiny:
                record("sources.push_over_copy", ratio, "ratio", False, summary=args.summary)


def print_last_load(log: Path) -> None:
    """Where the time of the last push went, as far as the server says."""
    lines = log.read_text(errors="replace").splitlines()
    for said in ("an adapter's files came in", "was loaded: "):
        found = [line[line.index(said) :] for line in lines if said in line]
        print("   ", found[-1] if found else f"nothing of {said!r}", flush=True)


def copy_seconds(size: int) -> float:
    """One copy of so many bytes in host memory, and one from pinned memory to the device: medians of ten."""
    gpu = torch.cuda.is_available()
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
    device = torch.empty(size, dtype=torch.uint8, device="cuda" if gpu else "cpu")

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    host = statistics.median(timed(source.clone) for _ in range(10))
    return host + statistics.median(timed(partial(device.copy_, pinned, non_blocking=True)) for _ in range(10))


def token_seconds(url: str) -> float:
    """Seconds of a request of one token by the policy, with a prompt of its own."""
    begin = time.perf_counter()
    body = {"text": f"{begin} x", "lora_path": "policy", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    requests.post(f"{url}/generate", json=body, timeout=120).raise_for_status()
    return time.perf_counter() - begin


def _written(tensors: dict[str, torch.Tensor], content: Path, trainer: Path) -> Path:
    """The adapter in shared memory, as a trainer leaves it."""
    place = trainer / content.name
    place.mkdir()
    (place / "adapter_config.json").write_bytes((content / "adapter_config.json").read_bytes())
    save_file(tensors, place / "adapter_model.safetensors")
    return place


def _files(place: Path) -> dict[str, tuple[str, bytes]]:
    return {file.name: (file.name, file.read_bytes()) for file in place.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("versions", "rl", "push"))
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--steps", type=int, default=10, help="of each seed's training")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="push: a tiny shape, on any machine; nothing is recorded")
    parser.add_argument("--scratch", type=Path, help="where the 7B shape's weights are written")
    parser.add_argument("--summary", type=Path, required=True)
    args = parser.parse_args()
    {"versions": versions, "rl": rl, "push": push}[args.what](args)


if __name__ == "__main__":
    main()
