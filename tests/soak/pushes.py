"""A trainer that pushes version after version of one adapter from memory, while clients stream its answers."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests
from safetensors.torch import load_file, save

from tests.conftest import Server
from tests.soak import phases

NAME, TOKENS = "pushed", 24


@dataclass
class Pushed:
    """What came of it.

    Attributes:
        versions: pushed.
        answers: by the number of the version that they say to be of.
        wrong: answers that are not that version's, in words, and what did not succeed.
        memory: resident MB, at the start and after each tenth of the pushes.
    """

    versions: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def body(content: Path, number: int) -> dict[str, tuple[str, bytes]]:
    """The parts of a push: an adapter's files, with one weight a little different for every number."""
    tensors = load_file(content / phases.WEIGHTS)
    tensors[min(tensors)][0, 0] += number * 1e-7
    files = {phases.WEIGHTS: save(tensors), "adapter_config.json": (content / "adapter_config.json").read_bytes()}
    return {name: (name, data) for name, data in files.items()}


def push(server: Server, route: str, name: str, content: Path, number: int = 0, key: str = "") -> requests.Response:
    """Send an adapter in a body."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data, files = {"lora_name": name}, body(content, number)
    return requests.post(f"{server.url}/{route}", data=data, files=files, headers=headers, timeout=phases.TIMEOUT_S)


def run(server: Server, contents: Sequence[Path], versions: int, streams: int = 4) -> Pushed:
    """Push versions, whose contents take turns, while as many clients stream.

    Args:
        contents: adapters that answer differently.

    Raises:
        AssertionError: they do not.
    """
    prompts = [phases.question(number, words=30) for number in range(4)]
    expected = quiet_answers(server, contents, prompts)
    done, found, lock = threading.Event(), Pushed(), threading.Lock()

    def listen(first: int) -> None:
        for turn in itertools.count(first):
            if done.is_set():
                return
            prompt = prompts[turn % len(prompts)]
            try:
                last = [*phases.stream(server, prompt, NAME, max_new_tokens=TOKENS)][-1]
                number, ids = last["meta_info"]["vlora"]["version"], last["output_ids"]
                right = expected[(number - 1) % len(contents), prompt]
            except Exception as error:
                number, ids, right = 0, [], f"an answer: {error!r}"
            with lock:
                found.answers[number] += 1
                if ids != right:
                    found.wrong.append(f"version {number}: got {ids}, expected {right}")

    push(server, "load_lora_adapter", NAME, contents[0]).raise_for_status()
    threads = [threading.Thread(target=listen, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2, versions + 1):
            if (number - 2) % max(1, versions // 10) == 0:
                found.memory.append(phases.memory_mb(server.process.pid))
            reply = push(server, "reload_lora_adapter", NAME, contents[(number - 1) % len(contents)], number)
            if reply.status_code != 200 or reply.json()["version"] != number:
                found.wrong.append(f"push {number}: {reply.status_code} {reply.text[:300]}")
            found.versions = number
    finally:
        done.set()
        for thread in threads:
            thread.join()
        found.memory.append(phases.memory_mb(server.process.pid))
        phases.unload(server, NAME).raise_for_status()
    return found


def quiet_answers(
    server: Server, contents: Sequence[Path], prompts: Sequence[str]
) -> Mapping[tuple[int, str], list[int]]:
    """Each content's answers to the prompts, alone and cold."""
    expected: dict[tuple[int, str], list[int]] = {}
    for number, content in enumerate(contents):
        push(server, "load_lora_adapter", NAME, content).raise_for_status()
        for prompt in prompts:
            server.flush()
            expected[number, prompt] = [*phases.stream(server, prompt, NAME, max_new_tokens=TOKENS)][-1]["output_ids"]
        phases.unload(server, NAME).raise_for_status()
    for prompt in prompts:
        answers = {tuple(expected[number, prompt]) for number in range(len(contents))}
        assert len(answers) == len(contents), "the contents must change the answer"
    return expected
