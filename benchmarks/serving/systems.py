"""What is compared: servers that are started, and the settings under which one of them is another system."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from benchmarks.serving.stock import LOG_VARIABLE

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class System:
    """A row of the comparison.

    Attributes:
        server: key of the server it runs on.
        settings: what is set on that server before it is measured (``POST /set_internal_state``).
        says: what it stands for.
    """

    server: str
    says: str
    settings: Mapping[str, float] = field(default_factory=dict)


DLORA = "benchmarks.serving.policies.dlora:DLoraPolicy"
"""A running server takes a policy by import path only if it was started with it (``Deployment.policy``)."""


def _ours(policy: str, says: str) -> System:
    return System("ours", says, {f"vlora_policy:{policy}": 1, "vlora_mode:auto": 1})


SYSTEMS: dict[str, System] = {
    "cost": _ours("cost", "vlora_sgl, policy cost"),
    "vlora": _ours("vlora", "vlora_sgl, the paper's Algorithm 1"),
    "unmerged": _ours("unmerged", "vlora_sgl never merging: the policy of S-LoRA and Punica, on our operator"),
    "merged": _ours("merged", "vlora_sgl always merging, one adapter at a time"),
    "dlora": _ours(DLORA, "vlora_sgl with dLoRA's policy, on our operator and switch"),
    "csgmv": System("csgmv", "stock SGLang, csgmv"),
    "triton": System("triton", "stock SGLang, triton"),
    "off": System("off", "stock SGLang without LoRA; every request to the base model"),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What all servers of a run have in common.

    Attributes:
        model: the model's directory.
        adapters: directories by name.
        slots: adapters on the device at once; SGLang counts the base model as one more.
        rank: largest rank.
        max_batch: requests that run at once.
        tiny: a small model, on a CPU if there is no GPU.
        sees: whether the model takes images.
        out: where logs go.
        policy: that servers of ours start with; by default their own.
    """

    model: Path
    adapters: Mapping[str, Path]
    slots: int
    rank: int
    max_batch: int
    tiny: bool
    sees: bool
    out: Path
    policy: str | None = None

    def log(self, server: str) -> Path:
        """The iteration log of one server."""
        return self.out / f"iterations-{server}.jsonl"

    def flags(self, server: str) -> list[str]:
        """What SGLang's command line takes, but for the port."""
        flags = ["--model-path", str(self.model), "--max-running-requests", str(self.max_batch)]
        flags += ["--log-level", "warning", "--skip-server-warmup"]
        flags += ["--enable-multimodal"] if self.sees else []
        if not self.tiny:
            flags += ["--load-format", "dummy", "--dtype", "bfloat16", "--chunked-prefill-size", "8192"]
        if on_gpu():
            flags += ["--attention-backend", "triton"]
            flags += ["--mm-attention-backend", "triton_attn"] if self.sees else []
            flags += ["--sampling-backend", "pytorch", "--max-total-tokens", "65536"]
            flags += ["--mem-fraction-static", "0.85" if not self.tiny else "0.3"]
            flags += ["--cuda-graph-bs-decode", *map(str, graph_sizes(self.max_batch))]
        elif server != "ours":
            flags += cpu_flags(set(flags))
        if server != "off":
            flags += ["--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in self.adapters.items())]
            flags += ["--max-loras-per-batch", str(self.slots + 1), "--max-lora-rank", str(self.rank)]
        return flags

    def command(self, server: str, port: int) -> list[str]:
        """The command line of one server."""
        flags = [*self.flags(server), "--port", str(port)]
        if server == "ours":
            module, more = "vlora_sgl.launch_server", ["--vlora-iteration-log", str(self.log(server))]
            more += ["--vlora-policy", self.policy] if self.policy is not None else []
        else:
            module = "benchmarks.serving.stock"
            backend = server if on_gpu() else "torch_native"  # neither csgmv nor triton runs on a CPU
            more = ["--lora-backend", backend] if server != "off" else []
        return [sys.executable, "-m", module, *flags, *more]


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes with a decode graph of their own."""
    return [n for n in (1, 4, 8, 16, 24, 32, 48, 64, 96, 128) if n < max_batch] + [max_batch]


def on_gpu() -> bool:
    """Whether there is a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def cpu_flags(given: set[str]) -> list[str]:
    """What SGLang needs on a plain CPU."""
    from vlora_sgl.defaults import CPU_DEFAULTS

    flags: list[str] = []
    for name, value in CPU_DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        if flag not in given:
            flags += [flag] if value is True else [flag, str(value)]
    return flags


class Server:
    """A server process in a process group of its own, so that none of its children outlives it.

    Args:
        name: key of the server, for the log's name.
        deployment: what it serves.
    """

    def __init__(self, name: str, deployment: Deployment) -> None:
        self.name, self.log = name, deployment.out / f"{name}.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                deployment.command(name, port),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, LOG_VARIABLE: str(deployment.log(name))},
                start_new_session=True,
            )

    def wait(self, seconds: float) -> str:
        """Return once it answers, or the reason why it does not, with the end of its log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=20).status_code == 200:
                    return ""
            except requests.RequestException:
                pass
            time.sleep(0.5)
        state = f"ended with {self.process.returncode}" if self.process.poll() is not None else "did not answer"
        return f"server {self.name} {state} within {seconds:.0f} s:\n{self.log.read_text()[-3000:]}"

    def set(self, settings: Mapping[str, float]) -> None:
        """Change settings while it serves.

        Raises:
            RuntimeError: it refused.
        """
        if not settings:
            return
        reply = requests.post(f"{self.url}/set_internal_state", json={"server_args": dict(settings)}, timeout=60)
        if not all(reply.json()):
            raise RuntimeError(f"server {self.name} refused {dict(settings)}")

    def flush(self) -> None:
        """Empty the prefix cache."""
        requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()

    def state(self) -> dict[str, Any]:
        """What a server of ours says about itself; nothing for the others."""
        states = requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"]
        return dict(states[0].get("vlora", {}))

    def generate(self, body: Mapping[str, Any]) -> Any:
        """POST /generate; the parsed answer."""
        reply = requests.post(f"{self.url}/generate", json=body, timeout=300)
        reply.raise_for_status()
        return reply.json()

    def stop(self) -> None:
        """End the whole group."""
        end_group(self.process, 10.0)


def end_group(process: subprocess.Popen[Any], patience: float) -> None:
    """End a process that leads a group, and what it started: asked to first, killed after ``patience`` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_deployment(
    scratch: Path,
    out: Path,
    adapters: int,
    slots: int,
    ranks: Sequence[int],
    max_batch: int,
    tiny: bool,
    sees: bool = True,
) -> Deployment:
    """Write a model and random adapters, of these ranks in turn and with a head each, and say how to serve them."""
    from benchmarks.serving import shape7b
    from vlora_sgl.heads import ClassifyHead, save_heads

    model = (shape7b.make_model if sees else shape7b.make_language_model)(scratch / "model", tiny)
    text = json.loads((model / "config.json").read_text())
    hidden = text.get("text_config", text)["hidden_size"]
    paths = {}
    for first, rank in enumerate(ranks):
        paths |= shape7b.make_adapters(scratch, model, [f"a{n}" for n in range(first, adapters, len(ranks))], rank)
    for path in paths.values():
        save_heads(path, [ClassifyHead("answer", hidden, list("abcdefghij"))])
    out.mkdir(parents=True, exist_ok=True)
    return Deployment(model, paths, slots, max(ranks), max_batch, tiny, sees, out)
