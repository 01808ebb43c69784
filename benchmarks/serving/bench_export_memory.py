"""Peak memory of merging one shard, over the shard's size: ``bake.peak_memory_over_shard``.

A shard of two large bf16 matrices is made on disk and merged; the peak of resident memory (``VmHWM``, reset
first) above what the process held before is divided by the size of the file. Linux only. Recorded with ``--record``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.summary import record
from vlora_sgl.export.merge import merge_shard
from vlora_sgl.lora.checkpoint import LoraPair
from vlora_sgl.lora.layout import BaseLayout

RANK = 64
INNER = 4096


def resident(key: str) -> int:
    """Bytes of a memory line of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}")


def peak_over_shard(megabytes: int) -> float:
    """Merges a shard of about ``megabytes`` MiB; peak growth of resident memory over the shard's size."""
    rows = megabytes * (1 << 20) // (2 * INNER * 2)
    names = [f"layers.0.self_attn.{leaf}" for leaf in ("q_proj", "o_proj")]
    layout = BaseLayout.from_modules([(name, (rows, INNER), ()) for name in names], {})
    pair = LoraPair(torch.randn(RANK, INNER), torch.randn(rows, RANK), 0.5)
    with tempfile.TemporaryDirectory() as directory:
        shard = Path(directory, "model.safetensors")
        save_file({f"model.{name}.weight": torch.zeros(rows, INNER, dtype=torch.bfloat16) for name in names}, shard)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = resident("VmRSS")
        merged = merge_shard(shard, Path(directory, "out.safetensors"), dict.fromkeys(names, pair), layout)
        if merged != set(names):
            raise RuntimeError(f"merged {merged}, expected {names}")
        return (resident("VmHWM") - before) / shard.stat().st_size


def main() -> None:
    """Prints the figure, and records it with ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512, help="size of the shard")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/summary.json")
    args = parser.parse_args()
    ratio = peak_over_shard(args.megabytes)
    print(f"peak memory over a {args.megabytes} MiB shard: {ratio:.3f}")
    if args.record:
        record("bake.peak_memory_over_shard", round(ratio, 4), "ratio", higher_is_better=False)


if __name__ == "__main__":
    main()
