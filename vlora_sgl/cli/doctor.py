"""``vlora doctor``: what this machine has, what will be used, what is missing, and how to get it.

Nothing is imported to find out: versions are read from what is installed, and a GPU is asked by its driver's tool.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from vlora_sgl.cli.commands import default_url
from vlora_sgl.cli.result import Result, table
from vlora_sgl.platforms.cpu import has_accelerator

PACKAGE = "vlora-sgl"
LEAST_GIB = 4.0
"""Of memory, for the embedded model on a CPU with all of its processes."""
LEAST_SHM_MIB = 64
PACKAGES = ("torch", "triton", "transformers", "peft", "safetensors", "aiohttp")
OPTIONAL = {
    "av": "video files in programs: pip install 'vlora-sgl[video]'",
    "onnxruntime": "ONNX teachers for vlora generate: pip install onnxruntime",
}
ROOT = Path(__file__).parents[1]

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: fine, worth knowing, or in the way.
        what: that was looked at.
        found: there.
        then: what it means, or how to get it.
    """

    state: State
    what: str
    found: str
    then: str = ""


def doctor(args: Namespace) -> Result:
    """All findings; status 1 if something is in the way."""
    found = [*_software(), *_accelerators(), *_machine()]
    rows = [[one.state, one.what, one.found, one.then] for one in found]
    missing = any(one.state == "missing" for one in found)
    last = "something is missing: see above" if missing else "ready: vlora serve"
    text = table(rows, ["", "what", "found", "so"]) + f"\n\n{last}"
    return Result({"ready": not missing, "findings": [asdict(one) for one in found]}, text, int(missing))


def _software() -> Iterator[Finding]:
    at = sys.version_info
    fine = (3, 11) <= at < (3, 13)
    yield Finding("ok" if fine else "missing", "Python", platform.python_version(), "" if fine else "use 3.11 or 3.12")
    pinned, sglang = _pinned("sglang"), _version("sglang")
    right = sglang is not None and (pinned is None or sglang == pinned)
    advice = "" if right else f"pip install sglang=={pinned}"
    yield Finding("ok" if right else "missing", "sglang", sglang or "none", advice)
    for name in PACKAGES:
        one = _version(name)
        optional = name == "triton" and platform.system() != "Linux"
        state: State = "ok" if one else "note" if optional else "missing"
        yield Finding(state, name, one or "none", "" if one else f"pip install {name}")
    for name, why in OPTIONAL.items():
        one = _version(name)
        yield Finding("ok" if one else "note", name, one or "none", "" if one else why)
    model = ROOT / "models" / "tiny" / "model" / "config.json"
    there = model.is_file()
    advice = "vlora serve answers at once" if there else "this checkout has no weights; serve a model of yours"
    yield Finding("ok" if there else "note", "embedded model", "yes" if there else "no", advice)


def _accelerators() -> Iterator[Finding]:
    cards = _nvidia()
    for name, memory, driver in cards:
        tiles = ROOT / "kernels" / "tiling_tables"
        known = any(_plain(name) in _plain(path.name) for path in tiles.glob("*.json")) if tiles.is_dir() else False
        advice = (
            "tiles measured for it" if known else "tiles of the nearest card; search your own: docs/design/atmm.md"
        )
        yield Finding("ok" if known else "note", "GPU", f"{name}, {memory}, driver {driver}", advice)
    if cards:
        flashinfer = _version("flashinfer-python")
        advice = "" if flashinfer else "pip install 'vlora-sgl[gpu]'"
        yield Finding("ok" if flashinfer else "missing", "flashinfer", flashinfer or "none", advice)
        yield Finding("ok", "will be used", "Triton kernels, CUDA graphs", "")
        return
    if has_accelerator():
        yield Finding("note", "GPU", "a device, but nvidia-smi does not answer", "check the driver")
    advice = "good for the embedded model and for tests; a GPU for more"
    yield Finding("note", "will be used", "the CPU: torch matmuls, no CUDA graphs", advice)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok" if cores > 1 else "note", "cores", str(cores), "" if cores > 1 else "two start faster")
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        enough = memory >= LEAST_GIB
        advice = "" if enough else "little for an engine"
        yield Finding("ok" if enough else "note", "memory", f"{memory:.0f} GiB", advice)
    shared = shutil.disk_usage("/dev/shm").free / 2**20 if os.path.isdir("/dev/shm") else None
    if shared is not None:
        enough = shared >= LEAST_SHM_MIB
        advice = "" if enough else "images travel through it: docker run --shm-size 1g"
        yield Finding("ok" if enough else "note", "/dev/shm", f"{shared:.0f} MiB free", advice)
    url = urlsplit(default_url(None))
    free = _is_free(url.hostname or "127.0.0.1", url.port or 80)
    yield Finding("ok" if free else "note", "address", url.geturl(), "free" if free else "somebody listens: vlora ps")


def _version(package: str) -> str | None:
    """The installed version, of a package that can also be found."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pinned(package: str) -> str | None:
    """The version that this package asks for."""
    try:
        asked = requires(PACKAGE) or ()
    except PackageNotFoundError:  # a checkout that is not installed
        return None
    return next((one.partition("==")[2] for one in asked if one.startswith(f"{package}==")), None)


def _nvidia() -> list[list[str]]:
    """Name, memory and driver of every card."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == 3] if answer.returncode == 0 else []


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) != 0
