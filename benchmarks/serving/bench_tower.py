"""What adapters of the vision tower cost an encoder of Qwen2.5-VL-7B's shape: as a server calls it, over none.

    python -m benchmarks.serving.bench_tower --summary FILE    # a GPU, about 90 s
    python -m benchmarks.serving.bench_tower --tiny            # a check on a laptop, records nothing

Three engines live on one card: without LoRA, with eight adapters of the language model alone, and with eight of rank
16 on every linear of the tower and its projector. Their language models have one layer; the encoder is whole, with the
graphs and layers that it is served with. Each scheduler calls its model's encoder with eight images of 256 tokens, on
the stream and after the preparations that a batch makes, and times it from the call to the end of its work on the
device, host included. Engines are asked in turn, round by round; figures are ratios of medians.

- ``tower.encode8_over_off``: an adapter of its own for each image, over the engine without LoRA.
- ``tower.merged_over_off``: all images of one adapter that is merged, over the same.
- ``tower.unused_over_off``: adapters without weights for the tower, over the same.

Beside them, unrecorded, what the encoder takes where no graph is captured (``eager``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.bench_step import ANSWER, Worker, first_port
from benchmarks.serving.shape7b import make_adapters, make_model, make_tower_adapters, plain_adapter_loading
from benchmarks.summary import RESULTS, SUMMARY, package_versions, record

IMAGES, RANK = 8, 16
CASES = {"off": ("each",), "unused": ("each",), "tower": ("each", "merged")}
"""Engine -> the adapters of its images; ``off`` has none."""
FIGURES = {
    "encode8_over_off": ("tower", "each"),
    "merged_over_off": ("tower", "merged"),
    "unused_over_off": ("unused", "each"),
}
RESULT = "VLORA_BENCH_RESULT"
START_S = 300.0


# In the scheduler's process


def encoded(scheduler: Any, case: str, eager: bool, side: int, repeats: int) -> list[float]:
    """Seconds of each of so many calls of the encoder.

    Args:
        case: ``each`` image of an adapter of its own, or all of one that is ``merged``.
        eager: without graphs.
        side: patches across an image.

    Raises:
        RuntimeError: the encoder did not run as it is to be timed.
    """
    import torch

    model, graphs = scheduler.tp_worker.model_runner.model, scheduler.tp_worker.model_runner.vision_graphs
    adapters = prepared(scheduler, case)
    items = [image(adapter, number, side, model.visual) for number, adapter in enumerate(adapters)]
    limit = getattr(graphs, "limit", 0)
    with scheduler._on_forward_stream(), torch.inference_mode():
        if graphs is not None and eager:
            graphs.limit = 0
        capture(model, graphs, items)
        answer = model.get_image_feature(items)
        replays = getattr(graphs, "replays", 0)
        seconds = [timed(model, items) for _ in range(repeats)]
        made = getattr(graphs, "replays", 0) - replays
        plain = model.get_image_feature([image(None, number, side, model.visual) for number in range(IMAGES)])
        settle()  # what follows is read on another stream
        if graphs is not None:
            graphs.limit = limit
    if graphs is not None and made != (0 if eager else repeats):
        raise RuntimeError(f"{made} replays of {repeats} calls, eager: {eager}")
    if not torch.isfinite(plain).all():
        if graphs is not None:
            graphs.limit = 0
        raise RuntimeError(f"images without adapters are not finite from {first_not_finite(model, items)} on")
    off = float((answer - plain).abs().max() / plain.abs().max())
    if not (0 < off < float("inf") if items[0].vlora_adapter is not None else off < 0.02):
        raise RuntimeError(f"adapters {adapters} change the answer by {off} of its largest number")
    return seconds


def prepared(scheduler: Any, case: str) -> list[str | None]:
    """The adapter of each image, once slots and weights are as a batch with them wants it."""
    from vlora_sgl.core import BatchPlan, InferenceMode
    from vlora_sgl.lora.tower import tower_of

    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    if manager is None:
        return [None] * IMAGES
    adapters = sorted(manager.loras, key=lambda uid: manager.lora_refs[uid].lora_name)
    merged = adapters[0] if case == "merged" else None
    mode = InferenceMode.UNMERGED if merged is None else InferenceMode.MERGED
    if reason := manager.refuses(merged, adapters[:1]):
        raise RuntimeError(reason)
    with scheduler._on_forward_stream():
        manager.set_plan(BatchPlan((), mode, merged))
        manager.fetch_new_loras(set(adapters))
        manager._merger.carry_out(merged)
    seen = [uid if tower_of(manager.loras[uid]) is not None else None for uid in adapters]
    return [merged] * IMAGES if merged else seen


def image(adapter: str | None, seed: int, side: int, encoder: Any) -> Any:
    """Pixels on the device, as a batch finds them."""
    import torch

    from vlora_sgl import _sgl

    width = encoder.patch_embed.proj.weight[0].numel()
    pixels = torch.randn(side * side, width, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, side, side]])
    item = _sgl.MultimodalDataItem(
        modality=_sgl.Modality.IMAGE, feature=pixels.to(encoder.device), model_specific_data={"image_grid_thw": grid}
    )
    item.vlora_adapter = adapter
    return item


def first_not_finite(model: Any, items: Sequence[Any]) -> str:
    """The module of the encoder that is the first to put out what is not finite, without graphs."""
    import torch

    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensors = [one for one in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(one)]
            if any(one.is_floating_point() and not torch.isfinite(one).all() for one in tensors):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.visual.named_modules()]
    model.get_image_feature(items)
    for hook in hooks:
        hook.remove()
    return found[0] if found else "its graphs"


def capture(model: Any, graphs: Any, items: Sequence[Any]) -> None:
    """Have the encoder's graphs for these images, as they are captured when nothing runs."""
    from vlora_sgl.multimodal.vision_demand import AFTER

    for _ in range(AFTER):
        model.get_image_feature(items)
    while graphs is not None and graphs.capture_wanted():
        pass


def timed(model: Any, items: Sequence[Any]) -> float:
    """Seconds from the call to the end of its work."""
    settle()
    begin = time.perf_counter()
    model.get_image_feature(items)
    settle()
    return time.perf_counter() - begin


def settle() -> None:
    """Wait for the device, on every stream."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of our engine, which also times its encoder."""
    from vlora_sgl import _sgl, plugin
    from vlora_sgl.startup import processes

    def time_encoder(self: Any, **asked: Any) -> None:
        Path(os.environ[RESULT]).write_text(json.dumps(encoded(self, **asked)))

    plugin.install()
    plain_adapter_loading()
    _sgl.Scheduler.time_encoder = time_encoder
    processes.run_scheduler(*args, **kwargs)


# In the engine's process


def build(args: argparse.Namespace) -> Any:
    """One of our engines."""
    from vlora_sgl.engine import Engine
    from vlora_sgl.startup import processes

    class Timed(Engine):
        run_scheduler_process_func = processes.WithEnvironment(run_scheduler)

    options: dict[str, Any] = {"model_path": str(args.directory / "model"), "port": args.port}
    if not args.tiny:
        options |= {"load_format": "dummy", "mem_fraction_static": 0.5, "cuda_graph_bs_decode": [1]}
        # Of the language model, which idles.
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch", "cuda_graph_bs_prefill": [64]}
    if args.engine != "off":
        adapters = sorted((args.directory / args.engine).iterdir())
        options |= {"enable_lora": True, "lora_paths": [f"{path.name}={path}" for path in adapters]}
        options |= {"max_loras_per_batch": IMAGES + 1, "max_lora_rank": RANK}
    return Timed(max_total_tokens=4096, chunked_prefill_size=64, **options)


def serve(args: argparse.Namespace) -> None:
    """Build one engine and time what standard input asks for: lines of (case, calls), without graphs if negative."""
    result = args.directory / f"{args.engine}.result"
    os.environ[RESULT] = str(result)
    engine = build(args)
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case, calls = json.loads(line)
        side = 8 if args.tiny else 32
        engine.collective_rpc("time_encoder", case=case, eager=calls < 0, side=side, repeats=abs(calls))
        print(ANSWER + json.dumps(statistics.median(json.loads(result.read_text()))), flush=True)
    engine.shutdown()


# In the controlling process


def write_models(directory: Path, tiny: bool) -> None:
    """The model and the adapters of all engines."""
    model = make_model(directory / "model", tiny)
    if not tiny:
        config = json.loads((model / "config.json").read_text())
        config.get("text_config", config)["num_hidden_layers"] = 1
        (model / "config.json").write_text(json.dumps(config, indent=1))
    names = [f"adapter{i}" for i in range(IMAGES)]
    make_adapters(directory / "unused", model, names, RANK)
    make_tower_adapters(directory / "tower", model, names, RANK)


def started(directory: Path, tiny: bool) -> dict[str, Worker]:
    """The engines, all of which serve.

    Raises:
        RuntimeError: one did not start.
    """
    workers = {}
    for number, name in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.serving.bench_tower", "--engine", name]
        command += ["--directory", str(directory), "--port", str(first_port() + 1000 * number), *["--tiny"] * tiny]
        workers[name] = Worker.run(command, directory / f"{name}.log", os.environ)
    for name, worker in workers.items():
        if worker.wait(START_S) != "ready":
            for one in workers.values():
                one.stop()
            raise RuntimeError(f"{name} did not start\n{(directory / f'{name}.log').read_text()[-3000:]}")
    print(f"{', '.join(workers)} ready", flush=True)
    return workers


def measure(workers: dict[str, Worker], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Median milliseconds of every engine and case, with graphs and without; the first round warms up."""
    times: dict[tuple[str, str, bool], list[float]] = {}
    for number in range(rounds + 1):
        for eager in (False, True):
            for name, cases in CASES.items():
                for case in cases:
                    found = workers[name].ask(case, -calls if eager else calls, START_S)
                    if number:
                        times.setdefault((name, case, eager), []).append(found)
    rows = []
    for (name, case, eager), values in times.items():
        spread = [round(1e3 * one, 4) for one in (min(values), max(values))]
        row = {"engine": name, "case": case, "eager": eager, "ms": round(1e3 * statistics.median(values), 4)}
        rows.append({**row, "range_ms": spread, "rounds": len(values)})
        print(rows[-1], flush=True)
    return rows


def ratios(rows: list[dict[str, Any]], eager: bool) -> dict[str, float]:
    """The figures."""
    ms = {(row["engine"], row["case"]): row["ms"] for row in rows if row["eager"] is eager}
    return {name: ms[which] / ms["off", "each"] for name, which in FIGURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10, help="of the encoder, each time that an engine is asked")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; nothing is recorded")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="where the figures go")
    parser.add_argument("--rows", type=Path, default=RESULTS / "serving" / "tower.json")
    for flag, kind in (("--engine", str), ("--directory", Path), ("--port", int)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch), args.tiny)
        workers = started(Path(scratch), args.tiny)
        try:
            rows = measure(workers, args.rounds, args.calls)
        except RuntimeError as error:
            logs = "\n".join((Path(scratch) / f"{name}.log").read_text()[-2000:] for name in workers)
            raise SystemExit(f"{error}\n{logs}") from None
        finally:
            for worker in workers.values():
                worker.stop()
    report(rows, args)


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the figures, and record those of a whole model."""
    for eager in (False, True):
        for name, value in ratios(rows, eager).items():
            print(f"tower.{name}{' eager' if eager else ''}: {value:.4f}")
            if not (eager or args.tiny):
                record(f"tower.{name}", value, "ratio", False, summary=args.summary)
    if not args.tiny:
        args.rows.parent.mkdir(parents=True, exist_ok=True)
        args.rows.write_text(json.dumps({"versions": package_versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
