"""What adapters cost a served model: decode step and prefill of a 7B shape with ATMM, over the same without LoRA.

    python -m benchmarks.kernels.bench_step --summary results/summary.json      # an H100, about 4 minutes
    python -m benchmarks.kernels.bench_step --vllm-python PATH --summary …      # vLLM's engine beside them
    python -m benchmarks.kernels.bench_step --shape 3b --skip stock             # a Qwen2.5-VL-3B, or llava-7b
    python -m benchmarks.kernels.bench_step --forms --before TREE               # more than plain LoRA, about 4 minutes
    python -m benchmarks.kernels.bench_step --tp 2                              # two tensor-parallel ranks
    python -m benchmarks.kernels.bench_step --tiny                              # a check on a laptop, records nothing

Random bfloat16 weights and adapters on all seven projections, batch 32, input 256, 64 decode steps. Each engine (stock
SGLang without LoRA, ours, stock with csgmv, vLLM's with the language model alone) is a process of its own; all are
started first and then asked in turn, so that clocks that move hit every case alike. ``--attention`` names the backend
of all of SGLang's and ours, by default what they choose; ratios are over the faster of LoRA off with it and with
Triton attention (``off_triton``). A decode step is (time for 65 tokens - time for 1) / 64, prefill the time for 1;
medians over the rounds. Nothing is merged: every adapter row goes through the operator. ``decode32_over_bytes`` is
what 32 adapters of rank 16, one a row of 64 slots, add to a step, over the time that reading them takes at the rate of
a device copy.

``e4m3`` is eight adapters of rank 64 in eight bits (``--vlora-adapter-weights fp8``).

``--forms`` times what is more than plain LoRA instead: rows of two and of four of the eight adapters, eight DoRA
adapters, and beside them, with ``--before``, plain adapters, of rank 16 too, and base rows by another checkout of
this repository. ``plain_step_change`` is the largest difference of those from this tree's, over LoRA off; positive is
slower. Set ``--attention``, as trees may choose differently.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.shape7b import (
    MOST,
    SHAPES,
    adapter_numbers,
    build_stock_engine,
    make_adapters,
    make_language_model,
    make_model,
    plain_adapter_loading,
)
from benchmarks.summary import RESULTS, ROOT, package_versions, record

ADAPTERS = 8
ANSWER = "@bench_step "
MIXTURE_FLAG = "VLORA_BENCH_MIXTURE"
APART_FLAG = "VLORA_BENCH_APART"
VLLM_ENGINE = Path(__file__).with_name("vllm_engine.py")
# Engine -> rank of its adapters, 0 for no LoRA. Those of one phase run side by side; the first one stays.
PHASES: tuple[dict[str, int], ...] = (
    {"off": 0, "off_triton": 0, "ours": 64, "apart": 64, "merged": 64, "stock": 64, "vllm": 64},
    {"ours16": 16, "slots64": 64, "each16": 16, "e4m3": 64},
)
FORMS: dict[str, int] = {"off": 0, "forms": 64, "dora": 64, "ours16": 16, "before": 64, "before16": 16}
CASES = {
    "off": ("base",),
    "off_triton": ("base",),
    "ours": ("base", "one", "eight", "mixture"),
    "apart": ("base", "one", "eight"),
    "merged": ("one",),
    "stock": ("base", "one", "eight"),
    "ours16": ("base", "eight"),
    "slots64": ("eight",),
    "each16": ("each",),
    "e4m3": ("eight",),
    "vllm": ("base", "eight"),
    "forms": ("base", "one", "eight", "mixture", "combined2", "combined4"),
    "dora": ("eight",),
    "before": ("base", "one", "eight", "mixture"),
    "before16": ("eight",),
    # Of bench_moe:
    "off_again": ("base",),
    "merged16": ("one",),
    "stock16": ("base", "eight"),
}
SLOTS = {"slots64": 64, "each16": 64}
SLOTS_FIGURE = "slots64_over_slots8"
EIGHT = {"decode8_over_off": "ours", "slots64_over_off": "slots64"}
BYTES_FIGURE = "decode32_over_bytes"
# Figure -> (engine, case, what is timed).
FIGURES = {
    "decode8": ("ours", "eight", "step"),
    "decode1": ("ours", "one", "step"),
    "base": ("ours", "base", "step"),
    "mixture": ("ours", "mixture", "step"),
    "merged": ("merged", "one", "step"),
    "decode8_r16": ("ours16", "eight", "step"),
    "prefill8": ("ours", "eight", "prefill"),
    "prefill8_r16": ("ours16", "eight", "prefill"),
}
# Of adapters in eight bits.
EIGHT_BITS_FIGURES = {"decode8": ("e4m3", "eight", "step"), "prefill8": ("e4m3", "eight", "prefill")}
# Figure over vLLM's engine -> (case of ours and of its, what is timed).
ABSOLUTE = {"decode8_tokens_per_second": ("tokens/s", True), "prefill8_ms": ("ms", False)}
"""Figures that are no ratios: their units, and whether higher is better."""
PEERS = {"ours": "vlora", "stock": "sglang", "vllm": "vllm"}
"""Engines whose times stand in figures of their own: eight adapters of rank 64, SGLang's default attention."""
VLLM_FIGURES = {"decode8_vs_vllm": ("eight", "step"), "prefill_base_vs_vllm": ("base", "prefill")}
# Figure -> (engine, case) of a step over that of another.
FORM_FIGURES = {
    "dora_over_lora": (("dora", "eight"), ("forms", "eight")),
    "combined4_over_2": (("forms", "combined4"), ("forms", "combined2")),
}
CHANGE_FIGURE = "plain_step_change"
NOW = {"before": "forms", "before16": "ours16"}
"""Engine of another checkout -> the one of this that it is compared with."""


# In the engine's process


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process of our engine, with two slots a row while the flag file exists.

    Latency depends on the routing alone, so adapter 0 is taken out of every other row without having been merged.
    """
    from vlora_sgl.kernels.atmm import launch
    from vlora_sgl.lora.row_routing import RowRouting
    from vlora_sgl.startup import processes

    plain_adapter_loading()
    if os.environ.get(APART_FLAG):
        launch.can_rotate = lambda *_: False
    flag, own = Path(os.environ[MIXTURE_FLAG]), RowRouting.pairs_of

    def pairs_of(self: RowRouting, adapter: Any, merged: Any) -> tuple[tuple[int, float], ...]:
        pairs = own(self, adapter, merged)
        first = self.slot_of(min(a for a in self._pool.uid_to_buffer_id if a is not None)) if pairs else 0
        return (*pairs, (first, -1.0)) if pairs and pairs[0][0] != first and flag.exists() else pairs

    RowRouting.pairs_of = pairs_of  # type: ignore[method-assign]
    processes.run_scheduler(*args, **kwargs)


def build(name: str, adapters: list[Path], args: argparse.Namespace) -> Any:
    """The engine ``name`` of ``PHASES``."""
    model, rank, port, tiny = args.directory / "model", args.rank, args.port, args.tiny
    options: dict[str, Any] = {"model_path": str(model), "disable_radix_cache": True, "port": port}
    if rank:
        options |= {
            "enable_lora": True,
            "lora_paths": [f"{path.name}={path}" for path in adapters],
            "max_loras_per_batch": SLOTS.get(name, ADAPTERS) + 1,
            "max_lora_rank": rank,
        }
    if args.quantization:
        options |= {"quantization": args.quantization}
    if args.tp > 1:
        options |= {"tp_size": args.tp}
    # Several engines share the card; each takes what its weights need and this many tokens.
    options |= {"max_total_tokens": args.batch * (args.input + args.steps + 64)}
    if not tiny:
        options |= {
            "load_format": "dummy",
            "sampling_backend": "pytorch",
            "cuda_graph_bs_decode": [32],
            "mem_fraction_static": 0.98,
            "chunked_prefill_size": 8192,
        }
        attention = "triton" if name == "off_triton" else args.attention
        if attention is not None:
            options |= {"attention_backend": attention}
        if attention == "triton":
            options |= {"mm_attention_backend": "triton_attn"}
    if not name.startswith(("off", "stock")):
        from vlora_sgl.engine import Engine
        from vlora_sgl.server_args import VLoraArgs
        from vlora_sgl.startup import processes
        from vlora_sgl.startup.measured import PREFILL_GRAPHS

        if not tiny and min(args.batch * args.input, 8192) > max(PREFILL_GRAPHS):
            options |= {"cuda_graph_bs_prefill": [64]}  # no prefill here is small enough for one

        class Ours(Engine):
            run_scheduler_process_func = processes.WithEnvironment(run_scheduler)

        mode = "merged" if name.startswith("merged") else "unmerged"
        weights = "fp8" if name == "e4m3" else "auto"
        # These adapters are random, and so is what folding them into quantised weights loses.
        loose = VLoraArgs(mode=mode, fast_paths=args.fast_paths, merge_tolerance=1.0, adapter_weights=weights)
        return Ours(vlora=loose, **options)
    stock: dict[str, Any] = {"lora_backend": "csgmv"} if rank and not tiny else {}
    stock |= {"lora_use_virtual_experts": True} if name == "stock16" and not tiny else {}
    return build_stock_engine(**stock, **options)


def adapters_of(case: str, batch: int) -> list[str | None] | None:
    """The adapter of every row."""
    if case == "base":
        return None
    if case.startswith("combined"):
        return [combined(i * ADAPTERS // batch, int(case.removeprefix("combined"))) for i in range(batch)]
    number = {"one": lambda _: 0, "each": lambda i: i}.get(case, lambda i: i * ADAPTERS // batch)
    return [f"adapter{number(i)}" for i in range(batch)]


def combined(first: int, count: int) -> str:
    """So many adapters as one, from this one on."""
    from vlora_sgl.combined import written

    return written({f"adapter{(first + i) % ADAPTERS}": 1 / count for i in range(count)})


def adapters_for(engine: str, batch: int) -> int:
    """How many adapters an engine serves."""
    return batch if "each" in CASES[engine] else ADAPTERS


def first_port() -> int:
    """Where the engines' ports begin: apart from those of a run on another card of this machine."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return 31000 + 100 * (int(card) if card.isdecimal() else 0)


def folder(engine: str, rank: int) -> str:
    """Where an engine's adapters lie, below the directory of all files."""
    return f"{'dora' if engine == 'dora' else 'rank'}{rank}"


def serve(args: argparse.Namespace) -> None:
    """Build one engine and time what standard input asks for: lines of (case, tokens)."""
    count = adapters_for(args.engine, args.batch) if args.rank else 0
    adapters = [args.directory / folder(args.engine, args.rank) / f"adapter{i}" for i in range(count)]
    flag = Path(os.environ[MIXTURE_FLAG])
    engine = build(args.engine, adapters, args)
    held, needed = engine.get_server_info()["max_total_num_tokens"], args.batch * (args.input + args.steps + 1)
    if held < needed:  # it would run its rows in turns, and a step would seem long
        raise RuntimeError(f"the device has room for {held} tokens of {needed}; start fewer engines together (--skip)")
    prompts = [[100 + (31 * row + i) % 200 for i in range(args.input)] for row in range(args.batch)]
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case, tokens = json.loads(line)
        flag.touch() if case == "mixture" else flag.unlink(missing_ok=True)
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
        names = {"lora_path": adapters_of(case, args.batch)} if args.rank else {}
        start = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=parameters, **names)
        print(ANSWER + json.dumps(time.perf_counter() - start), flush=True)
    engine.shutdown()


# In the controlling process


@dataclass
class Worker:
    """One engine's process and its answers."""

    process: subprocess.Popen[str]
    answers: queue.Queue[Any]

    @classmethod
    def start(cls, name: str, rank: int, number: int, args: argparse.Namespace, directory: Path) -> Worker:
        """Start an engine; ``wait`` for its first answer."""
        shared = ["--rank", str(rank), "--directory", str(directory), "--batch", str(args.batch)]
        shared += ["--input", str(args.input), "--steps", str(args.steps)]
        environment, tree = {**os.environ, MIXTURE_FLAG: str(directory / f"{name}.mixture")}, None
        environment |= {APART_FLAG: "1"} if name == "apart" else {}
        if name == "vllm":
            command = [args.vllm_python, str(VLLM_ENGINE), "--adapters", str(ADAPTERS)]
            environment["PYTHONPATH"] = ""  # it has packages of its own
        else:
            own, source = name, Path(__file__)
            if name in NOW:  # which knows no such name
                own, tree = name.replace("before", "ours"), args.before.resolve()
                environment["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
                source = tree / Path(__file__).relative_to(ROOT)
            known = source.read_text()
            command = [sys.executable, "-m", "benchmarks.kernels.bench_step", "--engine", own]
            command += ["--port", str(first_port() + 1000 * number)]
            for flag, value in (
                ("--fast-paths", args.fast_paths),
                ("--tp", str(args.tp) if args.tp > 1 else None),
                ("--attention", args.attention),
                ("--quantization", args.quantization),
            ):
                command += [flag, value] if value and f'"{flag}"' in known else []
            command += ["--tiny"] if args.tiny else []
        return cls.run([*command, *shared], directory / f"{name}.log", environment, tree)

    @classmethod
    def run(
        cls, command: Sequence[str], log: Path, environment: Mapping[str, str], tree: Path | None = None
    ) -> Worker:
        """Start a process that answers, in the folder ``tree`` if that is not this one."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
            cwd=tree,
            start_new_session=True,
        )
        worker = cls(process, queue.Queue())
        threading.Thread(target=worker._read, daemon=True).start()
        return worker

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self.answers.put(json.loads(line.removeprefix(ANSWER)))
        self.answers.put(None)

    def wait(self, seconds: float) -> Any:
        """The next answer; ``None`` if the process ended or did not answer in time."""
        try:
            return self.answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            return None

    def ask(self, case: str, tokens: int, seconds: float) -> float:
        """Seconds of one batch.

        Raises:
            RuntimeError: it did not answer.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([case, tokens]) + "\n")
        self.process.stdin.flush()
        answer = self.wait(seconds)
        if answer is None:
            raise RuntimeError(f"no answer to {case}, {tokens} tokens, in {seconds:.0f} s")
        return float(answer)

    def stop(self) -> None:
        """Kill the process and all it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


def measure(workers: dict[str, Worker], args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """All cases of these engines in turn, round by round; the first round warms up."""
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(args.repeats + 1):
        for name in list(workers):
            for case in CASES[name]:
                try:
                    first = workers[name].ask(case, 1, min(60.0, deadline - time.monotonic()))
                    whole = workers[name].ask(case, 1 + args.steps, min(60.0, deadline - time.monotonic()))
                except (RuntimeError, OSError) as error:
                    print(f"{name}: {error}", flush=True)
                    workers.pop(name).stop()
                    break
                if round_:
                    times.setdefault((name, case), []).append((first, (whole - first) / args.steps))
    rows = []
    for (name, case), values in times.items():
        row: dict[str, Any] = {"engine": name, "case": case, "rows": args.batch, "rounds": len(values)}
        for what, own in zip(("prefill", "step"), zip(*values, strict=True), strict=True):
            row[f"{what}_ms"] = round(1e3 * statistics.median(own), 4)
            row[f"{what}_range_ms"] = [round(1e3 * min(own), 4), round(1e3 * max(own), 4)]
        rows.append(row)
        print(row, flush=True)
    return rows


def ratios(rows: list[dict[str, Any]], phase: int) -> dict[str, float]:
    """Times over the faster LoRA off of the same phase, by figure, and stock's beside them."""
    found = {(row["engine"], row["case"]): row for row in rows if row["phase"] == phase}
    offs = [found[name, "base"] for name in ("off", "off_triton") if (name, "base") in found]
    off = {what: min(row[what] for row in offs) for what in ("prefill_ms", "step_ms")} if offs else None
    wanted = dict(FIGURES) | {f"e4m3_{name}": case for name, case in EIGHT_BITS_FIGURES.items()}
    wanted |= {f"stock_{case}": ("stock", case, "step") for case in CASES["stock"]}
    wanted |= {"stock_prefill8": ("stock", "eight", "prefill"), "slots64": ("slots64", "eight", "step")}
    over = {
        f"{name}_over_off": found[engine, case][f"{what}_ms"] / off[f"{what}_ms"]
        for name, (engine, case, what) in wanted.items()
        if off is not None and (engine, case) in found
    }
    for name, (case, what) in VLLM_FIGURES.items():
        own, other = (found.get((engine, case)) for engine in ("ours", "vllm"))
        if own and other:
            over[name] = own[f"{what}_ms"] / other[f"{what}_ms"]
    return over


def all_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """``ratios`` of all phases, and what many slots cost: of two phases, each is taken over its own LoRA off."""
    phases = sorted({row["phase"] for row in rows})
    over = {name: value for phase in phases for name, value in ratios(rows, phase).items()}
    if len(phases) == 1:  # and where LoRA off was not asked
        steps = {row["engine"]: row["step_ms"] for row in rows if row["case"] == "eight"}
    else:
        steps = {engine: over[name] for name, engine in EIGHT.items() if name in over}
    few, many = (steps.get(name) for name in ("ours", "slots64"))
    return over if few is None or many is None else {**over, SLOTS_FIGURE: many / few}


def form_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of ``--forms``, of the engines that were measured."""
    steps = {(row["engine"], row["case"]): row["step_ms"] for row in rows}
    found = {
        name: steps[one] / steps[other]
        for name, (one, other) in FORM_FIGURES.items()
        if one in steps and other in steps
    }
    changes = plain_changes(rows, "step_ms")
    if changes:
        found[CHANGE_FIGURE] = max(changes.values(), key=abs)
    return found


def plain_changes(rows: list[dict[str, Any]], what: str) -> dict[tuple[str, str], float]:
    """(engine of another checkout, case) -> how much longer it takes now, over LoRA off."""
    found = {(row["engine"], row["case"]): row[what] for row in rows}
    return {
        (engine, case): (found[NOW[engine], case] - value) / found["off", "base"]
        for (engine, case), value in found.items()
        if engine in NOW and {("off", "base"), (NOW[engine], case)} <= found.keys()
    }


def absolute(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What each of ``PEERS`` does with eight adapters: tokens a second, and milliseconds of a whole prefill."""
    found = {}
    for row in (row for row in rows if row["case"] == "eight" and row["engine"] in PEERS):
        peer = PEERS[row["engine"]]
        found[f"decode8_tokens_per_second.{peer}"] = 1e3 * row["rows"] / row["step_ms"]
        found[f"prefill8_ms.{peer}"] = row["prefill_ms"]
    return found


def over_bytes(rows: list[dict[str, Any]], shape: str, rate: float) -> dict[str, float]:
    """What an adapter of its own adds to every row of a step, over the time that its bytes take.

    Args:
        rate: bytes a second that a device copy reads and writes.
    """
    found = {}
    for each in (row for row in rows if row["case"] == "each"):
        beside = [row for row in rows if row["phase"] == each["phase"] and row["engine"].startswith("off")]
        if off := min((row["step_ms"] for row in beside), default=None):
            moved = 2 * each["rows"] * adapter_numbers(16, shape)
            found[BYTES_FIGURE] = (each["step_ms"] - off) / (1e3 * moved / rate)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, of the benchmark or of one of its engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which everything is killed")
    parser.add_argument("--together", action="store_true", help="all engines side by side: a card of 140 GB")
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python that has vLLM: its engine is timed, too")
    parser.add_argument("--attention", help="--attention-backend of all but off_triton; by default SGLang's choice")
    parser.add_argument("--quantization", choices=("fp8",), help="quantise the base, and time merged rows too")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of every engine")
    parser.add_argument("--fast-paths", default="auto", choices=("auto", "off"), help="--vlora-fast-paths of ours")
    parser.add_argument("--apart", action="store_true", help="ours with the rotation in a launch of its own, too")
    parser.add_argument("--skip", nargs="*", default=[], choices=sorted(CASES), help="engines to leave out")
    parser.add_argument("--forms", action="store_true", help="what is more than plain LoRA instead")
    parser.add_argument("--before", type=Path, metavar="TREE", help="with --forms: another checkout to compare with")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; nothing is recorded")
    parser.add_argument("--summary", type=Path, help="where the figures go")
    parser.add_argument("--rows", type=Path, default=RESULTS / "kernels" / "step.json")
    parser.add_argument("--recorded", type=Path, help="measure nothing: the figures of these rows")
    for flag, kind in (("--engine", str), ("--rank", int), ("--directory", Path), ("--port", int)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.engine:
        serve(args)
        return
    if args.recorded:
        about = json.loads(args.recorded.read_text())
        write_figures(all_ratios(about["rows"]) | absolute(about["rows"]), args, about["card"])
        return
    wanted = {"vllm": args.vllm_python, "apart": args.apart, "merged": args.quantization}
    wanted |= dict.fromkeys(NOW, args.before)
    args.skip += [name for name, given in wanted.items() if not given]
    began = time.monotonic()
    rows, figures = run_phases(args, began + args.limit)
    if not args.tiny:
        figures |= over_bytes(rows, args.shape, copy_rate()) if not args.forms else {}
    for what in ("step_ms", "prefill_ms") if args.forms else ():
        for (engine, case), change in plain_changes(rows, what).items():
            print(f"{engine} {case}: {what} {change:+.4f} of LoRA off since then")
    for name, value in figures.items():
        print(f"{name} {value:.3f}")
    print(f"{time.monotonic() - began:.0f} s")
    if args.tiny:
        return
    import torch

    about = {
        "shape": args.shape,
        "input": args.input,
        "card": torch.cuda.get_device_name(0),
        "versions": package_versions(),
        "figures": figures,
    }
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if args.summary:
        write_figures(figures, args)


def write_figures(figures: dict[str, float], args: argparse.Namespace, card: str | None = None) -> None:
    """To the summary: ``default.…`` with the attention that SGLang chooses, ``atmm.model.…`` with Triton's; ``fp8.…``
    of a quantised base, ``scale.tp2.…`` of two ranks."""
    prefix, suffix = "atmm.model" if args.attention == "triton" else "default", ".long" if args.input > 1024 else ""
    prefix = args.quantization or prefix
    prefix = f"scale.tp{args.tp}" if args.tp > 1 else prefix
    known = {*(f"{name}_over_off" for name in FIGURES), SLOTS_FIGURE, BYTES_FIGURE, *VLLM_FIGURES}
    for name in sorted(figures.keys() & {*FORM_FIGURES, CHANGE_FIGURE}):
        record(f"formats.{name}", figures[name], "ratio", False, card=card, summary=args.summary)
    on = ".fp8_base" if args.quantization else ""
    for name in EIGHT_BITS_FIGURES if args.tp == 1 else ():
        if (over := figures.get(f"e4m3_{name}_over_off")) is not None:
            full = f"fp8.adapters.{SHAPES[args.shape].figure}{name}_over_off{on}{suffix}"
            record(full, over, "ratio", False, card=card, summary=args.summary)
    if (prefix, args.shape, suffix) == ("default", "7b", ""):
        for name in sorted(name for name in figures if name.partition(".")[0] in ABSOLUTE):
            unit, higher = ABSOLUTE[name.partition(".")[0]]
            record(f"default.{name}", figures[name], unit, higher, card=card, summary=args.summary)
    for name in sorted(figures.keys() & known):
        full = f"{prefix}.{SHAPES[args.shape].figure}{name}{suffix}"
        record(full, figures[name], "ratio", False, card=card, summary=args.summary)


def copy_rate() -> float:
    """Bytes a second that a device copy reads and writes."""
    import torch

    from benchmarks.kernels.bench_switch import copy_bandwidth

    return copy_bandwidth(torch.device("cuda"), 1 << 32)


def write_models(directory: Path, engines: dict[str, int], args: argparse.Namespace) -> None:
    """The model and the adapters of these engines; for vLLM's the language model alone."""
    make = make_model if SHAPES[args.shape].family == MOST else make_language_model
    model = make(directory / "model", args.tiny, args.shape)
    ours = {name: rank for name, rank in engines.items() if rank and name != "vllm"}
    for where in sorted({folder(*one) for one in ours.items()}):
        beside = {name: rank for name, rank in ours.items() if folder(name, rank) == where}
        count = max(adapters_for(name, args.batch) for name in beside)
        names, dora = [f"adapter{i}" for i in range(count)], "dora" in beside
        make_adapters(directory / where, model, names, max(beside.values()), dora=dora)
    if "vllm" in engines:
        rank = engines["vllm"]
        language = make_language_model(directory / "language", args.tiny, args.shape)
        make_adapters(directory / f"language{rank}", language, [f"adapter{i}" for i in range(ADAPTERS)], rank)


def run_phases(args: argparse.Namespace, deadline: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, ratios) of all phases; engines that fail are left out with a message and the end of their log."""
    rows: list[dict[str, Any]] = []
    workers: dict[str, Worker] = {}
    phases: Sequence[dict[str, int]] = (FORMS,) if args.forms else PHASES
    phases = [{name: rank for name, rank in phase.items() if name not in args.skip} for phase in phases]
    if args.together:
        phases = [{name: rank for phase in phases for name, rank in phase.items()}]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_models(directory, {name: rank for phase in phases for name, rank in phase.items()}, args)
        try:
            for phase, engines in enumerate(phases):
                for name in [name for name in workers if not name.startswith("off")]:
                    workers.pop(name).stop()
                for name, rank in engines.items():
                    workers[name] = Worker.start(name, rank, 2 * phase + len(workers), args, directory)
                for name in engines:
                    if workers[name].wait(deadline - time.monotonic()) != "ready":
                        print(f"{name} did not start\n{(directory / f'{name}.log').read_text()[-3000:]}", flush=True)
                        workers.pop(name).stop()
                print(f"phase {phase}: {', '.join(workers)} ready", flush=True)
                rows += [{**row, "phase": phase} for row in measure(workers, args, deadline)]
            figures = form_figures(rows) if args.forms else all_ratios(rows) | absolute(rows)
        finally:
            for worker in workers.values():
                worker.stop()
    return rows, figures


if __name__ == "__main__":
    main()
