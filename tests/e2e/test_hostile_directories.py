"""Adapters' routes with names and directories that no adapter has: a 400 each, at once, and the server goes on."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import Server
from tests.soak import phases
from tests.test_files import KINDS

pytestmark = pytest.mark.e2e


def order(server: Server, what: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/{what}_lora_adapter", json=body, timeout=10)


def refused(server: Server, path: str) -> str:
    """Why a path is refused, which takes no time, and is told in one line of the log."""
    before, began = server.log.read_text(), time.monotonic()
    answer = order(server, "load", lora_name="hostile", lora_path=path)
    assert answer.status_code == 400 and time.monotonic() - began < 5, answer.text
    said = server.log.read_text().removeprefix(before)
    assert said.count(" was refused: ") == 1 and "Traceback" not in said
    return str(answer.json()["error_message"])


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "vlora_adapter.json"])
def test_files_that_are_none(server: Server, tmp_path: Path, file: str) -> None:
    for kind, (spoil, _) in KINDS.items():
        if kind == "no permission":
            continue
        directory = tmp_path / kind
        shutil.copytree(server.model.adapters["A"], directory)
        (directory / file).unlink(missing_ok=True)
        spoil(directory / file)
        assert file in refused(server, str(directory)), kind
    assert server.generate(text="x", lora_path="A")["text"]
    assert "hostile" not in requests.get(f"{server.url}/lora_adapters", timeout=30).text


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000, "a\0b", "~", "loop", "outer"])
def test_paths_that_name_no_adapter(server: Server, tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    shutil.copytree(server.model.adapters["A"], tmp_path / "outer" / "inner")
    reason = refused(server, f"{tmp_path}/{path}")
    assert path != "outer" or reason.endswith("one is in " + str(tmp_path / "outer" / "inner"))
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200


def test_every_way_out_of_a_request_gives_its_adapter_back_once(server: Server) -> None:
    long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    ways: dict[str, dict[str, Any]] = {
        "refused by its grammar": {"text": "x", "sampling_params": {"regex": "("}},
        "refused for its length": {"text": "cat " * 4000},
        "several answers": {"text": "x", "sampling_params": {"max_new_tokens": 2, "n": 3}},
        "a batch": {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 2}},
    }
    for way, body in ways.items():
        requests.post(f"{server.url}/generate", json={"lora_path": "A", **body}, timeout=60)
        assert phases.users_left(server) == {}, way

    def ask(**body: Any) -> int:
        return requests.post(
            f"{server.url}/generate", json={"lora_path": "A", "sampling_params": long, **body}, timeout=60
        ).status_code

    with ThreadPoolExecutor(8) as pool:  # what runs and what waits is aborted
        asked = [pool.submit(ask, text="x" * n) for n in range(1, 4)]
        asked += [pool.submit(ask, text=["x", "y"]), pool.submit(ask, text="x", sampling_params={**long, "n": 2})]
        asked.append(pool.submit(ask, text="x", stream=True))
        time.sleep(1)
        abort = {"abort_all": True}
        while not all(one.done() for one in asked):
            requests.post(f"{server.url}/abort_request", json=abort, timeout=30).raise_for_status()
            time.sleep(0.2)
    assert phases.users_left(server) == {}
