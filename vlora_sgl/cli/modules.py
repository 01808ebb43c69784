"""Commands whose work is another program of this package: they hand their arguments on as they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

SEVERAL = ("--replicas", "--ray")
"""Flags of a cluster."""


def serve(argv: Sequence[str]) -> NoReturn:
    """Become the server, or the cluster if there are to be several. The first argument may be the model."""
    flags = list(argv)
    if flags and not flags[0].startswith("-"):
        flags = ["--model-path", *flags]
    elif not any(flag.partition("=")[0] in ("--model-path", "--model", "--config") for flag in flags):
        flags = [*embedded(), *flags]
    many = any(flag.partition("=")[0] in SEVERAL for flag in flags)
    _become("vlora_sgl.launch_cluster" if many else "vlora_sgl.launch_server", flags)


def embedded() -> list[str]:
    """The flags that serve the embedded model with all its adapters, each in a slot."""
    from vlora_sgl.models import tiny

    adapters = tiny.adapters()
    flags = ["--model-path", str(tiny.path()), "--served-model-name", "tiny", "--enable-cache-report"]
    flags += ["--enable-metrics", "--max-loras-per-batch", str(len(adapters) + 1)]
    return [*flags, "--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]


def generate(argv: Sequence[str]) -> int:
    """See ``vlora_sgl.generate``."""
    from vlora_sgl.generate.__main__ import main

    return main(argv)


def export(argv: Sequence[str]) -> int:
    """See ``vlora_sgl.export``."""
    from vlora_sgl.export.run import main

    return main(argv)


def profile(argv: Sequence[str]) -> NoReturn:
    """See ``vlora_sgl.measure_costs``."""
    _become("vlora_sgl.measure_costs", argv)


def _become(module: str, argv: Sequence[str]) -> NoReturn:
    """Run a module as ``python -m`` does: what starts an engine is the main module of its process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])
