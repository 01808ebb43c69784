"""A vision head against the LM head on the same question (V-LoRA, figure 16), and the streams one GPU can follow.

::

    python -m benchmarks.serving.bench_heads --summary results/summary.json      # 7B shape, random weights, a GPU
    python -m benchmarks.serving.bench_heads --tiny --summary /tmp/summary.json  # the same on a laptop: a check
    python -m benchmarks.serving.bench_heads --reference --summary results/summary.json  # answers, not seconds

Two questions, as in the paper (section 6.2): one image of 256 tokens, and a video chunk, 6 frames of 256 tokens (of
the 30 that a stream brings each second). A head answers either with its prefill; the LM head generates 5 tokens.

- ``heads.latency_cut_vs_lm5``: 1 - latency of the head / latency of 5 tokens, one image, from the call to the answer.
- ``heads.latency_over_prefill``: latency of the head / latency of 1 token, the same.
- ``heads.video_latency_cut_vs_lm5``: the first, for the video chunk.
- ``heads.throughput_over_lm5``: answers per second, 32 under way, 8 adapters, one image each: head / 5 tokens.
- ``heads.video_cut_short_of_floor``: how far that is from what the four steps leave to save, 4 d / (P + 4 d), with P
  the latency of one token and d a quarter of what four more take, of the same run.
- ``heads.streams``, ``heads.lm5_streams``: most streams, one chunk a second each, whose chunks are all answered within
  a second; trials go up until one breaks. ``heads.streams_over_lm`` is their quotient.
- ``heads.served_vs_reference_mismatches`` (``--reference``): answers of heads of a tiny random model that differ from
  transformers + PEFT + head: each asked alone, again from the cache, and among generating requests, by engines that
  choose modes, that force each one, with chunked prefill and with overlap scheduling.

No image is asked about twice, so no cache helps. Cases are interleaved; medians are reported, all values are in the
rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.serving.client import Client, images, request
from benchmarks.serving.shape7b import build_engine, engine_options, make_adapters, make_model
from benchmarks.summary import record
from vlora_sgl.core import InferenceMode
from vlora_sgl.heads import ClassifyHead, CountHead, DetectHead, save_heads

HEAD = "head"
CASES = {"head": (1, HEAD), "one token": (1, None), "five tokens": (5, None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred thousand parameters and 16-token images")
    parser.add_argument("--reference", action="store_true", help="count wrong answers instead of seconds, on the CPU")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9, help="of each latency, one more to warm up")
    parser.add_argument("--seconds", type=int, default=4, help="of each throughput, and of each trial of streams")
    parser.add_argument("--summary", type=Path, required=True, help="file to append the figures to")
    parser.add_argument("--rows", type=Path, help="file to write all measured values to")
    parser.add_argument("--plot", type=Path, help="file to draw them to")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in (reference if args.reference else serve)(Path(scratch), args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if "figure" in row:
                record(row["figure"], row["value"], row["unit"], row["higher_is_better"], summary=args.summary)
    if args.rows:
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.plot:
        plot(rows, args.plot)


def serve(root: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start an engine and measure everything; rows come as they are measured."""
    model = make_model(root / "model", args.tiny)
    adapters = make_adapters(root / "adapters", model, [f"adapter{number}" for number in range(8)], args.rank)
    for path in adapters.values():
        give_head(path, model)
    engine = build_engine(**engine_options(model, adapters, args.rank, args.tiny))
    try:
        yield from measure(Client(engine), list(adapters), args)
    finally:
        engine.shutdown()


def give_head(adapter: Path, model: Path) -> None:
    """Add a head of 101 classes (a video's action, in the paper) to an adapter's directory."""
    config = json.loads((model / "config.json").read_text())
    hidden = config.get("text_config", config)["hidden_size"]
    save_heads(adapter, [ClassifyHead(HEAD, hidden, [f"class {number}" for number in range(101)])])


def measure(client: Client, adapters: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All of it, on an engine that has these adapters, with heads."""
    tokens = 16 if args.tiny else 256
    yield from latencies(client, adapters[0], args.repeats, tokens)
    yield from throughputs(client, adapters, args.seconds, tokens, 4 if args.tiny else 32)


def figure(name: str, values: list[float], unit: str, higher_is_better: bool) -> dict[str, Any]:
    """A row that goes into the summary: the median of ``values``."""
    value = statistics.median(values)
    return {
        "figure": name,
        "value": value,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "values": [round(v, 5) for v in values],
    }


def latencies(client: Client, adapter: str, repeats: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Head, one token and five tokens, one request at a time, from the call and from the engine's queue."""
    fresh = images(tokens)
    for question, frames in (("image", 1), ("video chunk", 6)):
        seconds: dict[str, list[float]] = {}
        for _, (case, (count, head)) in itertools.product(range(repeats + 1), CASES.items()):
            for start, hold in (("call", False), ("queue", True)):
                one = request(list(itertools.islice(fresh, frames)), adapter, count, head)
                seconds.setdefault(f"{case} from the {start}", []).append(client.ask(one, hold=hold)[0].seconds)
        seconds = {name: values[1:] for name, values in seconds.items()}  # the first round compiled and warmed up
        for name, values in seconds.items():
            yield {"question": question, "case": name, "seconds": [round(v, 5) for v in values]}
        heads, five = seconds["head from the call"], seconds["five tokens from the call"]
        cut = [1 - h / f for h, f in zip(heads, five, strict=True)]
        yield figure(f"heads.{'video_' * (frames > 1)}latency_cut_vs_lm5", cut, "ratio", True)
        single = seconds["one token from the call"]
        floor = [1 - first / f for first, f in zip(single, five, strict=True)]  # 4 d / (P + 4 d)
        if frames > 1:
            short = [statistics.median(floor) - statistics.median(cut)]
            yield figure("heads.video_cut_short_of_floor", short, "ratio", False)
        if frames == 1:
            over = [h / o for h, o in zip(heads, single, strict=True)]
            yield figure("heads.latency_over_prefill", over, "ratio", False)


def throughputs(
    client: Client, adapters: list[str], seconds: int, tokens: int, workers: int
) -> Iterator[dict[str, Any]]:
    """Answers per second with so many requests under way at any time; and streams of video chunks."""
    fresh = images(tokens)

    def asker(frames: int, case: str) -> Callable[[int], dict[str, Any]]:
        count, head = CASES[case]
        return lambda n: request(list(itertools.islice(fresh, frames)), adapters[n % len(adapters)], count, head)

    rates: dict[tuple[int, str], float] = {}
    for frames in (1, 6):
        cases = {case: asker(frames, case) for case in ("head", "five tokens")}
        for make in cases.values():
            warm_up(client, make, workers)
        for case, make in cases.items():
            rates[frames, case] = client.saturate(make, workers, seconds)
            yield {"frames": frames, "case": case, "answers_per_second": round(rates[frames, case], 3)}
    yield figure("heads.throughput_over_lm5", [rates[1, "head"] / rates[1, "five tokens"]], "ratio", True)
    most: dict[str, int] = {}
    for name, case in (("heads.streams", "head"), ("heads.lm5_streams", "five tokens")):
        trials = list(stream_trials(client, asker(6, case), rates[6, case], seconds))
        yield from ({"case": case, **trial} for trial in trials)
        most[case] = max((trial["streams"] for trial in trials if trial["worst_seconds"] <= 1), default=0)
        yield figure(name, [most[case]], "streams", True)
    if most["five tokens"]:
        yield figure("heads.streams_over_lm", [most["head"] / most["five tokens"]], "ratio", True)


def warm_up(client: Client, make: Callable[[int], dict[str, Any]], workers: int) -> None:
    """Batches of all sizes that so many workers may fill, before any is timed.

    Which sizes traffic fills depends on the machine, and a size's first batch may wait for its kernels to be compiled:
    so the scheduler is held until it has 1, 2, 4 and so on requests; then traffic as it comes.
    """
    for count in (*(1 << power for power in range((workers - 1).bit_length())), workers):
        client.ask(*map(make, range(count)), hold=True)
    client.saturate(make, workers, 1)


def stream_trials(
    client: Client, make: Callable[[int], dict[str, Any]], rate: float, seconds: int
) -> Iterator[dict[str, Any]]:
    """Trials around the saturated rate: upwards while all chunks are answered within a second, else downwards.

    A second of the first one runs before it, untimed.
    """
    streams = max(1, int(rate))
    client.stream(make, streams, 1)
    tried: dict[int, bool] = {}
    while streams >= 1 and streams not in tried:
        found = client.stream(make, streams, seconds)
        tried[streams] = max(found) <= 1
        yield {
            "streams": streams,
            "worst_seconds": round(max(found), 4),
            "median_seconds": round(statistics.median(found), 4),
        }
        streams += 1 if tried[streams] else -1


SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "overlap, chunks of 16 tokens": {"disable_overlap_schedule": False, "chunked_prefill_size": 16},
    **{str(mode): {"mode": str(mode)} for mode in InferenceMode},
}


def reference(root: Path, args: argparse.Namespace, pictures: int = 4) -> Iterator[dict[str, Any]]:
    """Served answers of random heads that are not those of transformers + PEFT + head, by setting and in all."""
    from tests.support.head_reference import Reference
    from tests.support.tiny_random import make_adapter

    model = make_model(root / "model", tiny=True)
    adapters = {}
    for number in range(2):
        name = f"headed{number}"
        adapters[name] = make_adapter(root / name, model, seed=number + 1)
        labels = [f"class {index}" for index in range(10)]
        heads = [ClassifyHead("classify", 128, labels), CountHead("count", 128, 9)]
        save_heads(adapters[name], [*heads, DetectHead("detect", 128, ["cat", "dog"], threshold=0.01)])
    noise = np.random.default_rng(0).integers(0, 256, (pictures, 84, 112, 3), dtype=np.uint8)
    cases = list(itertools.product(adapters, ("classify", "count", "detect"), map(Image.fromarray, noise)))
    truth = Reference(model)
    asked = [request([picture], name, 1, head) for name, head, picture in cases]
    wanted = [
        truth.answer(adapters[name], head, one["prompt"], picture)
        for (name, head, picture), one in zip(cases, asked, strict=True)
    ]
    total = 0
    for setting, options in SETTINGS.items():
        wrong, answers = mismatches(model, adapters, options, asked, wanted)
        total += wrong
        yield {"setting": setting, "answers": answers, "mismatches": wrong}
    yield figure("heads.served_vs_reference_mismatches", [total], "answers", False)


def mismatches(
    model: Path, adapters: dict[str, Path], options: dict[str, Any], asked: list[dict[str, Any]], wanted: list[Any]
) -> tuple[int, int]:
    """Wrong answers of one engine, and how many it gave."""
    from tests.support.head_reference import assert_close
    from vlora_sgl import Engine
    from vlora_sgl.server_args import VLoraArgs

    options = dict(options)
    engine = Engine(
        vlora=VLoraArgs(mode=options.pop("mode", "auto")),
        model_path=str(model),
        enable_lora=True,
        lora_paths=[f"{name}={path}" for name, path in adapters.items()],
        max_loras_per_batch=3,
        max_lora_rank=16,
        **options,
    )
    try:
        client = Client(engine)
        answers = [client.ask(one)[0] for one in asked]
        answers += [client.ask(one)[0] for one in asked]
        engine.flush_cache()
        generating = [request(one["image_data"], one["lora_path"], 8) for one in asked]
        answers += client.ask(*(one for pair in zip(asked, generating, strict=True) for one in pair))[::2]
    finally:
        engine.shutdown()
    wrong = 0
    for answer, expected in zip(answers, wanted * 3, strict=True):
        try:
            assert_close(answer.meta_info["vlora"]["head"], expected)
        except AssertionError:
            wrong += 1
    return wrong, len(answers)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Latencies from the call, by question, and answers per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, key, label in ((left, "seconds", "seconds to the answer"), (right, "answers_per_second", "answers/s")):
        shown = [row for row in rows if key in row and "queue" not in row["case"]]
        names = [f"{row.get('question') or row['frames']}\n{row['case'].split(' from')[0]}" for row in shown]
        values = [statistics.median(row[key]) if isinstance(row[key], list) else row[key] for row in shown]
        axis.bar(range(len(shown)), values)
        axis.set_xticks(range(len(shown)), names, rotation=60, fontsize=7)
        axis.set_ylabel(label)
    drawing.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
