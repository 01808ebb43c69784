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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from benchmarks.serving.apis import BASE, GENERATE, IMAGE_MARK, OPENAI
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
    "vllm": System("vllm", "vLLM's OpenAI server"),
}

WORDS_FOR_AN_IMAGE = {"7b": 256, "3b": 256, "llava-7b": 576, "qwen3vl-8b": 196}
"""Tokens of text that stand for an image where a language model is alone. Of an image of LLaVA-1.5, 336 pixels wide,
there are as many; of the others' images there are 64, whose encoder costs what the rest of the text does."""
DEFAULT = "default"
"""``Deployment.attention``: every server chooses by itself."""


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
        attention: ``--attention-backend`` of all of SGLang's servers, or ``DEFAULT``.
        words: tokens of text that stand for an image; 0 where the model takes images.
        mark: how a prompt marks an image.
        vllm_python: the Python that has vLLM.
        more: flags that SGLang's servers and ours have besides.
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
    attention: str = "triton"
    words: int = 0
    mark: str = IMAGE_MARK
    vllm_python: str = sys.executable
    more: tuple[str, ...] = ()

    def log(self, server: str) -> Path:
        """The iteration log of one server."""
        return self.out / f"iterations-{server}.jsonl"

    def flags(self, server: str) -> list[str]:
        """What SGLang's command line takes, but for the port."""
        flags = ["--model-path", str(self.model), "--max-running-requests", str(self.max_batch)]
        flags += ["--log-level", "warning", "--skip-server-warmup"]
        flags += ["--enable-multimodal"] if self.sees else []
        if not self.tiny:
            flags += ["--load-format", "dummy", "--chunked-prefill-size", "8192"]
        if on_gpu():
            flags += [] if self.attention == DEFAULT else self.backends()
            flags += ["--max-total-tokens", "65536"]
            flags += ["--mem-fraction-static", "0.85" if not self.tiny else "0.3"]
            flags += ["--cuda-graph-bs-decode", *map(str, graph_sizes(self.max_batch))]
        elif server != "ours":
            flags += cpu_flags(set(flags))
        if server != "off":
            flags += ["--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in self.adapters.items())]
            flags += ["--max-loras-per-batch", str(self.slots + 1), "--max-lora-rank", str(self.rank)]
        return flags

    def backends(self) -> list[str]:
        """Flags of backends that are not left to the servers."""
        vision = {"triton": "triton_attn"}.get(self.attention, self.attention)
        flags = ["--attention-backend", self.attention, "--sampling-backend", "pytorch"]
        return flags + (["--mm-attention-backend", vision] if self.sees else [])

    def vllm(self, port: int) -> list[str]:
        """The command line of vLLM's server, with the settings that the others have and no more."""
        flags = ["serve", str(self.model), "--port", str(port), "--served-model-name", BASE]
        flags += ["--max-num-seqs", str(self.max_batch), "--max-model-len", "8192"]
        flags += ["--gpu-memory-utilization", "0.3"]  # others may be up
        flags += [] if self.tiny else ["--load-format", "dummy"]
        flags += ["--limit-mm-per-prompt", '{"image": 6}'] if self.sees else []
        flags += ["--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in self.adapters.items())]
        flags += ["--max-loras", str(self.slots), "--max-cpu-loras", str(len(self.adapters))]
        return [self.vllm_python, "-m", "vllm.entrypoints.cli.main", *flags, "--max-lora-rank", str(self.rank)]

    def command(self, server: str, port: int) -> list[str]:
        """The command line of one server."""
        if server == "vllm":
            return self.vllm(port)
        flags = [*self.flags(server), "--port", str(port)]
        if server == "ours":
            module, more = "vlora_sgl.launch_server", ["--vlora-iteration-log", str(self.log(server))]
            more += ["--vlora-policy", self.policy] if self.policy is not None else []
        else:
            module = "benchmarks.serving.stock"
            backend = server if on_gpu() else "torch_native"  # neither csgmv nor triton runs on a CPU
            more = ["--lora-backend", backend] if server != "off" else []
        return [sys.executable, "-m", module, *flags, *more, *self.more]


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
        self.name, self.deployment, self.log = name, deployment, deployment.out / f"{name}.log"
        self.api = OPENAI if name == "vllm" else GENERATE
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                deployment.command(name, port),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(name, deployment),
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
        route = "/flush_cache?timeout=30" if self.api is GENERATE else "/reset_prefix_cache"
        requests.post(self.url + route, timeout=60).raise_for_status()

    def state(self) -> dict[str, Any]:
        """What a server of ours says about itself; nothing for the others."""
        if self.api is not GENERATE:
            return {}
        states = requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"]
        return dict(states[0].get("vlora", {}))

    def generate(self, body: Mapping[str, Any]) -> Any:
        """The parsed answer to a body of ``/generate``; a list of them, one a row, from a server without that."""
        if self.api is GENERATE:
            return self._post(body)
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        rows = [
            {**body, "input_ids": ids, "lora_path": name} for ids, name in zip(body["input_ids"], names, strict=True)
        ]
        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(self._post, rows))

    def _post(self, body: Mapping[str, Any]) -> Any:
        asked = self.api.body(body)
        reply = requests.post(self.url + self.api.route(asked), json=asked, timeout=300)
        reply.raise_for_status()
        return reply.json()

    def stop(self) -> None:
        """End the whole group."""
        end_group(self.process, 10.0)


def environment(name: str, deployment: Deployment) -> dict[str, str]:
    """Variables of a server's process; vLLM's Python has packages of its own, and not ours."""
    if name == "vllm":
        # Else it has no route to empty its prefix cache by.
        return {**os.environ, "PYTHONPATH": "", "VLLM_SERVER_DEV_MODE": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, LOG_VARIABLE: str(deployment.log(name))}


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
    shape: str = "7b",
    language: bool = False,
) -> Deployment:
    """Write a model and random adapters, of these ranks in turn and with a head each, and say how to serve them.

    Args:
        shape: a key of ``SHAPES``.
        language: the language model alone.
    """
    from benchmarks.serving import shape7b
    from vlora_sgl.heads import ClassifyHead, save_heads

    sees = not language
    model = (shape7b.make_model if sees else shape7b.make_language_model)(scratch / "model", tiny, shape)
    text = json.loads((model / "config.json").read_text())
    hidden = text.get("text_config", text)["hidden_size"]
    paths = {}
    for first, rank in enumerate(ranks):
        paths |= shape7b.make_adapters(scratch, model, [f"a{n}" for n in range(first, adapters, len(ranks))], rank)
    for path in paths.values():
        save_heads(path, [ClassifyHead("answer", hidden, list("abcdefghij"))])
    out.mkdir(parents=True, exist_ok=True)
    words = 0 if sees else WORDS_FOR_AN_IMAGE[shape]
    mark = shape7b.SHAPES[shape].mark
    return Deployment(model, paths, slots, max(ranks), max_batch, tiny, sees, out, words=words, mark=mark)
