"""Time until an adapter of a 7B model has gone from host memory to its slot, through our pool and through SGLang's.

    python -m benchmarks.kernels.bench_load [--dry-run] [--summary FILE]

``--dry-run`` runs tiny shapes, on the CPU if there is no GPU, and records nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.kernels.bench_switch import Shapes, shapes
from benchmarks.summary import SUMMARY, record
from vlora_sgl import _sgl
from vlora_sgl.lora.packed import PackedPool

RANKS = (16, 64)
PARTS = {"qkv_proj": 3, "gate_up_proj": 2}


def make_pool(
    layout: Shapes, layers: int, heads: int, device: torch.device
) -> tuple[PackedPool, list[dict[str, Any]]]:
    """Two slots of rank 64 beside the base model's, and the layers that read them."""
    (hidden, kv, _), _ = layout["qkv_proj"]
    config = SimpleNamespace(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads * kv // hidden,
        intermediate_size=layout["down_proj"][1], num_hidden_layers=layers,
    )  # fmt: skip
    model: Any = torch.nn.Linear(1, 1, device=device)
    model.config = config
    pool = PackedPool(
        base_hf_config=config, max_loras_per_batch=3, dtype=torch.bfloat16, tp_size=1, tp_rank=0, attn_tp_size=1,
        max_lora_rank=max(RANKS), target_modules=set(layout), base_model=model, eviction_policy="lru",
        lora_added_tokens_size=0,
    )  # fmt: skip
    # What SGLang's layers do on one rank: A as it is, the parts of B put together.
    modules = {
        kind: SimpleNamespace(
            slice_lora_a_weights=lambda a: a,
            slice_lora_b_weights=lambda b, n=n: torch.concat(b.split(n)) if len(n) > 1 else b,
        )
        for kind, (n, _) in layout.items()
    }
    return pool, [{f"layers.{i}.{kind}": module for kind, module in modules.items()} for i in range(layers)]


def make_adapter(layout: Shapes, layers: int, rank: int, pinned: bool) -> Any:
    """Random weights on all linear layers."""

    def matrix(*shape: int) -> torch.Tensor:
        found = torch.randn(*shape, dtype=torch.bfloat16)
        return found.pin_memory() if pinned else found

    held = []
    for i in range(layers):
        weights = {}
        for kind, (n, k) in layout.items():
            weights[f"layers.{i}.{kind}.lora_A.weight"] = matrix(PARTS.get(kind, 1) * rank, k)
            weights[f"layers.{i}.{kind}.lora_B.weight"] = matrix(sum(n), rank)
        held.append(SimpleNamespace(weights=weights, pinned_weights={}))
    return SimpleNamespace(uid="x", config=SimpleNamespace(r=rank), layers=held, embedding_layers={})


def milliseconds(load: Callable[[int], None], repeats: int, device: torch.device) -> float:
    """Median time of a load into slot 1 or 2, in turn, from the call until the device is done."""
    times = []
    for i in range(repeats + 4):
        start = time.perf_counter()
        load(1 + i % 2)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, nothing recorded")
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.dry_run:
        parser.error("needs a GPU; try --dry-run")
    layout, layers, heads = (shapes(64, 16, 128), 2, 4) if args.dry_run else (shapes(3584, 512, 18944), 28, 28)
    pool, modules = make_pool(layout, layers, heads, device)
    for rank in RANKS:
        adapter = make_adapter(layout, layers, rank, device.type == "cuda")
        times = {}
        for pool_class in (_sgl.LoRAMemoryPool, PackedPool):  # this order: ours takes the weights into its own buffer

            def load(slot: int, adapter: Any = adapter, pool_class: Any = pool_class) -> None:
                pool_class.load_lora_weight_to_buffer(pool, "x", slot, adapter, modules, None, None)

            times[pool_class] = milliseconds(load, 20, device)
        ours, sglang = times[PackedPool], times[_sgl.LoRAMemoryPool]
        megabytes = 2e-6 * adapter.packed.buffer.numel()
        print(f"rank {rank}: {megabytes:.1f} MB in {ours:.2f} ms ({megabytes / ours:.1f} GB/s), SGLang {sglang:.2f}")
        if not args.dry_run:
            record(f"load.r{rank}_ms", ours, "ms", False, summary=args.summary)


if __name__ == "__main__":
    main()
