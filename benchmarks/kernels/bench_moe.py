"""What adapters on experts cost: decode and prefill of a Qwen3-30B-A3B's shape over LoRA off, and its switches.

    python -m benchmarks.kernels.bench_moe --summary results/summary.json       # a card of 140 GB, about 10 minutes
    python -m benchmarks.kernels.bench_moe --tiny                               # a check on a CPU, records nothing

Random bfloat16 weights, 8 adapters of rank 16 on attention and all experts (1.7 GB each, made here), batch 32, input
256, 64 decode steps. The engines (LoRA off, ours unmerged, ours with one adapter merged, stock SGLang with csgmv and
virtual experts) hold 60 to 135 GB each, so they run one after another; cases and times are ``bench_step``'s. LoRA off
runs first and last, and the faster one counts: a card may be slow for a while.
``overhead_vs_sglang`` is the larger, of decode and prefill, of our ratio less 1 over stock's. First of all the floor
is printed: the bytes that 8 adapters add to a step, over a copy's rate. A switch folds all experts of all layers in
one launch; its time is over that of copying as many bytes, and after each of 200 the weights' sums must be those that
a first merge left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.kernels.bench_step import ADAPTERS, Worker, measure
from benchmarks.kernels.bench_switch import build, copy_bandwidth, milliseconds, switch
from benchmarks.summary import RESULTS, package_versions, record
from vlora_sgl.kernels.merge import MergeTable

RANK = 16
ENGINES = {"off": 0, "ours16": RANK, "merged16": RANK, "stock16": RANK, "off_again": 0}
# Figure -> (engine, case, what is timed), over LoRA off.
FIGURES = {
    "decode8_over_off": ("ours16", "eight", "step"),
    "prefill8_over_off": ("ours16", "eight", "prefill"),
    "merged_over_off": ("merged16", "one", "step"),
    "base_over_off": ("ours16", "base", "step"),
}
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
}
TINY = {
    **SHAPE,
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def make_model(directory: Path, tiny: bool) -> Path:
    """Write configuration and tokenizer (and, if tiny, weights)."""
    import transformers

    from tests.support.tiny_random import VOCABULARY_TEXT
    from tools.tiny.build import build_tokenizer

    tokenizer = build_tokenizer(VOCABULARY_TEXT)
    config = transformers.Qwen3MoeConfig(**(TINY if tiny else SHAPE), architectures=["Qwen3MoeForCausalLM"])
    config.dtype = torch.float32 if tiny else torch.bfloat16
    config.eos_token_id = tokenizer.eos_token_id
    if tiny:
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def linears(sizes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(in, out) of every linear of a layer, by its path below it; experts' each."""
    hidden, inner, head = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["head_dim"]
    q, kv = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
    found = {"self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv)}
    found["self_attn.o_proj"] = (q, hidden)
    for expert in range(sizes["num_experts"]):
        at = f"mlp.experts.{expert}"
        found |= {
            f"{at}.gate_proj": (hidden, inner),
            f"{at}.up_proj": (hidden, inner),
            f"{at}.down_proj": (inner, hidden),
        }
    return found


def make_adapters(root: Path, sizes: dict[str, Any]) -> None:
    """Random adapters with keys for single experts, which SGLang reads, too; they differ in one matrix."""
    block = torch.randn(1 << 20).mul_(0.01).to(torch.bfloat16)

    def drawn(*shape: int) -> torch.Tensor:
        return block[: shape[0] * shape[1]].view(shape).clone()

    tensors = {
        f"base_model.model.model.layers.{layer}.{path}.lora_{side}.weight": drawn(*shape)
        for layer in range(sizes["num_hidden_layers"])
        for path, (inner, outer) in linears(sizes).items()
        for side, shape in (("A", (RANK, inner)), ("B", (outer, RANK)))
    }
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets, "bias": "none"}
    first = next(iter(tensors))
    for i in range(ADAPTERS):
        directory = root / f"adapter{i}"
        directory.mkdir(parents=True)
        tensors[first] = torch.randn(tensors[first].shape).mul(0.01).to(torch.bfloat16)
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(config))


def step_bytes(sizes: dict[str, Any], rows: int) -> float:
    """Bytes of adapters that a decode step of so many rows reads at most: of the experts that its rows choose."""
    own = linears(sizes)
    attention = sum(RANK * sum(shape) for path, shape in own.items() if "experts" not in path)
    expert = sum(RANK * sum(shape) for path, shape in own.items() if path.startswith("mlp.experts.0."))
    chosen = min(rows * sizes["num_experts_per_tok"], ADAPTERS * sizes["num_experts"])
    return 2.0 * sizes["num_hidden_layers"] * (ADAPTERS * attention + chosen * expert)


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios over LoRA off, and ours less 1 over stock's less 1."""
    found = {(row["engine"], row["case"]): row for row in rows}
    offs = [row for (engine, _), row in found.items() if engine.startswith("off")]
    if not offs:
        return {}
    off = {what: min(row[what] for row in offs) for what in ("step_ms", "prefill_ms")}
    over = {
        name: found[engine, case][f"{what}_ms"] / off[f"{what}_ms"]
        for name, (engine, case, what) in FIGURES.items()
        if (engine, case) in found
    }
    stock, ours = found.get(("stock16", "eight")), found.get(("ours16", "eight"))
    if stock and ours:
        shares = [(ours[what] / off[what] - 1) / (stock[what] / off[what] - 1) for what in ("step_ms", "prefill_ms")]
        over["overhead_vs_sglang"] = max(shares)
    return over


def run_engines(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Every engine's rows; one that fails is left out with a message and the end of its log."""
    rows: list[dict[str, Any]] = []
    sizes = TINY if args.tiny else SHAPE
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        directory = Path(scratch)
        make_model(directory / "model", args.tiny)
        make_adapters(directory / f"rank{RANK}", sizes)
        for number, (name, rank) in enumerate(ENGINES.items()):
            if name in args.skip:
                continue
            worker = Worker.start(name, rank, number, args, directory)
            try:
                if worker.wait(deadline - time.monotonic()) != "ready":
                    print(f"{name} did not start\n{(directory / f'{name}.log').read_text()[-3000:]}", flush=True)
                    continue
                rows += measure({name: worker}, args, deadline)
            finally:
                worker.stop()
        shutil.rmtree(directory / f"rank{RANK}")
    return rows


def switches(tiny: bool, count: int) -> dict[str, float]:
    """Of all experts: the share of a copy's rate that a switch reaches, and tensors that differed after ``count``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = TINY if tiny else SHAPE
    experts, inner, hidden = sizes["num_experts"], sizes["moe_intermediate_size"], sizes["hidden_size"]
    layout = {"gate_up_proj": ((inner,) * (2 * experts), hidden), "down_proj": ((hidden,) * experts, inner)}
    targets = build(sizes["num_hidden_layers"], layout, 2, RANK, device)
    table = MergeTable(targets)
    weights = list({target.weight._base.data_ptr(): target.weight._base for target in targets}.values())

    def sums() -> torch.Tensor:
        return torch.stack([weight.view(torch.int64).sum() for weight in weights])

    def to(slot: int) -> None:
        switch(table, table.groups, 0 if slot < 0 else RANK, slot)

    expected = {}
    for slot in (-1, 0, 1):
        to(-1)
        to(slot)
        expected[slot] = sums()
    ms = milliseconds(lambda i: to(i % 2), 3 if tiny else 20, device)
    share = table.nbytes(table.groups) / (ms / 1e3) / copy_bandwidth(device, 1 << (20 if tiny else 32))
    choose, differed = random.Random(3), 0
    for _ in range(count):
        slot = choose.randrange(-1, 2)
        to(slot)
        differed += int((sums() != expected[slot]).sum())
    print(f"a switch of {table.nbytes(table.groups) / 2e9:.1f} GB takes {ms:.2f} ms, {share:.3f} of a copy's rate")
    return {"switch_bandwidth_share": share, "mismatches": float(differed)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what bench_step's workers ask for besides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=580.0, help="seconds after which no engine is asked any more")
    parser.add_argument("--attention", help="--attention-backend of all; by default SGLang's choice")
    parser.add_argument("--skip", nargs="*", default=[], choices=[*ENGINES, "switches"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model; nothing is recorded")
    parser.add_argument("--scratch", type=Path, help="where 14 GB of adapters go meanwhile")
    parser.add_argument("--summary", type=Path, help="where the figures go")
    parser.add_argument("--rows", type=Path, default=RESULTS / "kernels" / "moe.json")
    args = parser.parse_args(argv)
    args.fast_paths, args.tp, args.quantization = "auto", 1, None
    return args


def main() -> None:
    args = parse()
    deadline = time.monotonic() + args.limit
    sizes = TINY if args.tiny else SHAPE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = copy_bandwidth(device, 1 << (20 if args.tiny else 32))
    floor = 1e3 * step_bytes(sizes, args.batch) / rate
    print(f"floor of 8 adapters in a step: {step_bytes(sizes, args.batch) / 1e9:.2f} GB, {floor:.2f} ms", flush=True)
    figures = {} if "switches" in args.skip else switches(args.tiny, 20 if args.tiny else 200)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engines want all of it
    rows = run_engines(args, deadline)
    figures |= figures_of(rows)
    for name, value in figures.items():
        print(f"moe.{name} {value:.3f}")
    if args.tiny:
        return
    about = {"card": torch.cuda.get_device_name(0), "versions": package_versions(), "floor_ms": floor}
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text(json.dumps({**about, "figures": figures, "rows": rows}, indent=1) + "\n")
    for name, value in figures.items() if args.summary else ():
        higher = name == "switch_bandwidth_share"
        unit = "count" if name == "mismatches" else "ratio"
        record(f"moe.{name}", value, unit, higher, summary=args.summary)


if __name__ == "__main__":
    main()
