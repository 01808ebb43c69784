"""Kernels where there is no GPU: under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support import quick_interpreter

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="kernels: run by a starter in its file, and on a GPU")
starter = pytest.mark.skipif(CUDA or INTERPRETED, reason="starts the interpreter run where there is no GPU")


if INTERPRETED:
    quick_interpreter.quicken()


def passed_interpreted(file: str, select: str = "test_kernel") -> int:
    """Run the tests of ``file`` that ``select`` names under the interpreter; how many passed, and none failed.

    Triton reads TRITON_INTERPRET when a kernel is defined, hence a process of its own.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        file,
        "-k",
        select,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0
