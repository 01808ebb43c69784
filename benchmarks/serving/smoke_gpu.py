"""The end-to-end checks on a GPU, with CUDA graphs: ``python -m benchmarks.serving.smoke_gpu``.

Runs tests/e2e/test_serving.py, test_heads.py and test_prefix_sharing.py against a server with graphs of decode steps
and prefills: every row of a mixed batch (base, A, B, A) must have the greedy tokens of its single run, equal to
transformers + PEFT in float32 on the CPU but for near ties of the random model, and heads their answers; adapters come
to fewer slots than there are of them, on a stream of their own, while others run (tests/lora/test_arrivals.py,
test_lives.py).
``--attention-backend`` is Triton's, FlashAttention 3 (which has bfloat16 only) or flashinfer's. ``--modes`` adds every
inference mode, with adapters that are more than plain LoRA (DoRA, biases, activated), several as one, some on the
vocabulary and some in eight bits, adapters of the vision tower with graphs of the encoder, adapters whose numbers are
not finite in bfloat16, and two tensor-parallel ranks on two cards; ``--families`` a server for a tiny model of each
family (docs/models.md). Takes about two minutes, five with ``--modes``. Prints the card, the versions and the seconds;
exits with pytest's status.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from vlora_sgl._sgl import SGLANG_VERSION

SERVER_FLAGS = (
    "--dtype {dtype} --attention-backend {attention} --mm-attention-backend {vision} --sampling-backend pytorch "
    "--disable-fast-image-processor --cuda-graph-bs-decode 1 2 4 "
    "--cuda-graph-bs-prefill 4 8 16 32 64 128 256 512 1024 --mem-fraction-static 0.3 --max-total-tokens 65536"
)

FAMILIES = ["-m", "benchmarks.families", "--workers", "6"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks. Returns pytest's exit status, or 2 on a machine without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention-backend", default="triton", choices=("triton", "fa3", "flashinfer"))
    parser.add_argument("--dtype", default=None, choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--server-flags", default="", help="more flags for the server, in one string")
    parser.add_argument("--select", default="", help="pytest's -k: which of the checks to run")
    parser.add_argument("--modes", action="store_true", help="also check every inference mode, and two ranks")
    parser.add_argument("--families", action="store_true", help="then check a tiny model of each family, six at once")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    options = parser.parse_args(argv)
    fa3 = options.attention_backend == "fa3"
    dtype, vision = options.dtype or ("bfloat16" if fa3 else "float16"), "fa3" if fa3 else "triton_attn"
    flags = SERVER_FLAGS.format(dtype=dtype, attention=options.attention_backend, vision=vision)
    flags = f"{flags} {options.server_flags}".strip()
    # A GPU machine may lack pytest's plugins that pyproject.toml's options ask for.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "--tb=short", "tests/e2e/test_serving.py"]
    command += ["tests/e2e/test_heads.py", "tests/e2e/test_prefix_sharing.py", "tests/lora/test_arrivals.py"]
    command += ["tests/e2e/test_lives.py::test_more_adapters_than_slots_while_clients_hang_up"]
    modes = ("test_modes.py", "test_adapter_forms.py", "test_isolation.py", "test_tensor_parallel.py", "test_tower.py")
    names = (
        "test_combined.py::test_combined_rows_answer_as_peft_does_in_every_mode_and_company",
        "test_vocabulary.py",
        "test_eight_bits.py",
    )
    more = [*(f"tests/e2e/{name}" for name in (*modes, *names)), "tests/lora/test_tower.py"]
    command += more if options.modes else []
    command += ["-k", options.select] if options.select else []
    if options.dry_run:
        print(f"VLORA_TEST_SERVER_ARGS={flags!r}", *command, *(["&&", *FAMILIES] if options.families else []))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    print(f"card {torch.cuda.get_device_name()}, torch {torch.__version__}, sglang {SGLANG_VERSION}", flush=True)
    start = time.perf_counter()
    environment = {**os.environ, "VLORA_TEST_SERVER_ARGS": flags}
    status = subprocess.run(command, env=environment).returncode
    if options.families:
        status = status or subprocess.run([sys.executable, *FAMILIES], env=environment).returncode
    print(f"status {status} after {time.perf_counter() - start:.0f} s (server start included)")
    return status


if __name__ == "__main__":
    sys.exit(main())
