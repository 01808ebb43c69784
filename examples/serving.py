"""What every example needs: a model with adapters, and a server for it unless one is running already."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

import vlora_sgl as vlora

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Model:
    """A model on disk with its adapters; ``trained`` is False for random weights, whose answers mean nothing."""

    path: Path
    adapters: dict[str, Path]
    trained: bool


@dataclass(frozen=True)
class Served:
    """A backend for programs, the adapters it has, and whether the model is the embedded one."""

    backend: vlora.Runtime
    adapters: tuple[str, ...]
    embedded: bool
    trained: bool


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that choose what is served."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="use this running server instead of starting one")
    parser.add_argument("--model-path", help="serve this model instead of the embedded one")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME[=DIR]",
        help="with --model-path: load it; with --url: use these instead of all that are loaded",
    )
    return parser


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[Served]:
    """The server that the options ask for; one started here ends with the block."""
    if options.url:
        backend = vlora.Runtime(options.url)
        model = embedded_model()
        embedded = model is not None and Path(backend.model_info["model_path"]) == model.path
        yield Served(backend, tuple(options.adapter or backend.adapters()), embedded, trained=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if options.model_path:
            adapters = {name: Path(path) for name, _, path in (text.partition("=") for text in options.adapter)}
            model = Model(Path(options.model_path), adapters, trained=True)
        else:
            model = embedded_model() or random_model(Path(scratch))
        with server(model, Path(scratch) / "server.log") as url:
            yield Served(vlora.Runtime(url), tuple(model.adapters), not options.model_path, model.trained)


def embedded_model() -> Model | None:
    """The model that comes with the package, or None in a checkout without its weights."""
    try:
        from vlora_sgl.models import tiny
    except ImportError:
        return None
    if not (tiny.path() / "config.json").is_file():
        return None
    return Model(tiny.path(), dict(tiny.adapters()), trained=True)


def random_model(directory: Path) -> Model:
    """A tiny model and two adapters with random weights, made here. They show that everything runs, and say so."""
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_random import make_adapter, make_model

    print("No trained model in this checkout: serving RANDOM weights, so the answers are gibberish.", flush=True)
    path = make_model(directory / "model")
    adapters = {name: make_adapter(directory / name, path, seed) for seed, name in enumerate("AB", start=1)}
    return Model(path, adapters, trained=False)


@contextmanager
def server(model: Model, log: Path, *flags: str) -> Iterator[str]:
    """The address of a server of its own, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vlora_sgl.launch_server", "--model-path", str(model.path), "--port", str(port)]
    if model.adapters:
        command += ["--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in model.adapters.items())]
        command += ["--max-loras-per-batch", str(min(len(model.adapters), 8))]
    command += flags
    print(f"Starting {model.path.name} with adapters {', '.join(model.adapters) or 'none'} ...", flush=True)
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() - begin > 300:
                raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)
        print(f"Ready after {time.monotonic() - begin:.0f} s.\n", flush=True)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False
