"""What eight bits cost the embedded model's adapters: exact matches on their own test pictures.

    python -m benchmarks.serving.bench_quantised [--blocks] [--summary FILE]      # a CPU, a few minutes
    python -m benchmarks.serving.bench_quantised --adapters [--summary FILE]      # adapters in e4m3 instead

The model's decoder is quantised to FP8, with a scale for each row or for 128 x 128 elements. An adapter answers beside
those weights (transformers and PEFT on what they mean), and folded into them as the engine's reference folds. The
figure is the most that an adapter loses, in points; the losses that the engine would show are printed beside it.

With ``--adapters`` the model is as it is, and an adapter answers with its own factors and with those that a server
with ``--vlora-adapter-weights fp8`` has; its heads too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving.bench_tiny import Reference
from benchmarks.summary import record
from tests.support.eight_bits import rounded
from tools.tiny import domains
from vlora_sgl.generate.datasets import read_jsonl, write_jsonl
from vlora_sgl.kernels.merge.folded import fold_reference
from vlora_sgl.models import tiny
from vlora_sgl.scaled import E4M3, Scaled, quantise

ADAPTERS = ("counting", "digits", "photos", "surfaces")
"""Those that start at the first token: others are never merged."""
EVERY = ("actions", *ADAPTERS)


def quantise_decoder(model: Any, blocks: bool) -> dict[str, Scaled]:
    """Give the linears of a model's decoder FP8 weights; returns those by the linears' names."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj") and "visual" not in name:
            shape = module.weight.shape
            whole = blocks and not shape[0] % 128 and not shape[1] % 128
            found[name] = quantise(module.weight.data, (128, 128) if whole else (1, shape[1]), E4M3)
            module.weight.data = found[name].wide()
    return found


@torch.no_grad()
def fold(adapted: Any, weights: dict[str, Scaled]) -> float:
    """Fold a PEFT model's adapter into its decoder; returns the loss, as ``/lora_adapters`` shows it."""
    losses = []
    for name, module in adapted.get_base_model().named_modules():
        if name in weights:
            a, b = (getattr(module, kind)["default"].weight for kind in ("lora_A", "lora_B"))
            scale = module.scaling["default"]
            folded = fold_reference(weights[name], a, b, scale).wide()
            exact = weights[name].wide().double() + scale * (b.double() @ a.double())
            losses.append(float((folded.double() - exact).norm() / exact.norm()))
            module.base_layer.weight.data = folded
    return max(losses)


def measure(name: str, data: Path, blocks: bool, every: int = 1) -> tuple[float, float, float]:
    """Accuracy of an adapter beside FP8 weights and folded into them, and the fold's loss."""
    from peft import PeftModel
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from vlora_sgl.generate.trainer import Prepared, exact_match

    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.path(), dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(tiny.path(), use_fast=False)
    data.mkdir(exist_ok=True)
    write_jsonl(data / "test.jsonl", domains.DOMAINS[name]()[2][::every])
    examples = Prepared(model, processor, read_jsonl(data / "test.jsonl"))
    weights = quantise_decoder(model, blocks)
    adapted: Any = PeftModel.from_pretrained(model, tiny.adapters()[name]).eval()
    beside = float(np.mean(exact_match(adapted, processor, examples)))
    lost = fold(adapted, weights)
    with adapted.disable_adapter():
        folded = float(np.mean(exact_match(adapted, processor, examples)))
    return beside, folded, lost


def measure_adapter(name: str, data: Path) -> list[float]:
    """Points that rounding an adapter's factors costs: of its answers, and of each head by its own metric."""
    examples = read_jsonl(data / "test.jsonl")
    own = Reference(name)
    other = Reference(name, rounded(tiny.adapters()[name], tiny.path(), data / "rounded", torch.float32))
    before, after = (float(np.mean(one.right(examples))) for one in (own, other))
    points = [100 * (before - after)]
    print(f"{name}: {before:.4f} with its factors, {after:.4f} with them in e4m3", flush=True)
    for head in own.heads.values():
        targets = own.targets(head, examples)
        before, after = (head.metric(one.answers(head, examples), targets) for one in (own, other))
        points.append(100 * (before - after))
        print(f"{name}, {head.name}: {head.metric_name} {before:.4f} and {after:.4f}", flush=True)
    return points


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all, and record the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", action="store_true", help="scales of 128 x 128 elements")
    parser.add_argument("--adapters", action="store_true", help="round adapters instead of the base")
    parser.add_argument("--summary", type=Path, help="where the figure goes")
    args = parser.parse_args(argv)
    points: list[float] = []
    if args.adapters:
        with tempfile.TemporaryDirectory() as scratch:
            domains.prepare(Path(scratch), sorted({domains.ADAPTERS[name][0] for name in EVERY}))
            for name in EVERY:
                points += measure_adapter(name, Path(scratch) / domains.ADAPTERS[name][0])
        if args.summary:
            record("fp8.adapters.accuracy_loss_points", max(points), "points", False, summary=args.summary)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in ADAPTERS:
            beside, folded, lost = measure(name, Path(scratch) / name, args.blocks)
            points.append(100 * (beside - folded))
            print(f"{name}: {beside:.4f} beside, {folded:.4f} folded, loss {lost:.4f}", flush=True)
    if args.summary:
        name = f"fp8.folded_accuracy_loss_points{'.blocks' if args.blocks else ''}"
        record(name, max(points), "points", False, summary=args.summary)


if __name__ == "__main__":
    main()
