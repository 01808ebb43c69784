"""Loads that wear a server out, one function each, with what every single answer must be.

The end-to-end tests run them for seconds, ``make soak`` for minutes.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import requests
from safetensors.torch import load_file, save_file

from tests.conftest import Server

TIMEOUT_S = 60
"""A request that takes longer is lost."""
TOKENS = 8
WEIGHTS = "adapter_model.safetensors"
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


def question(number: int, words: int = 270) -> str:
    """A prompt of some 300 tokens, different from its first word on for every number."""
    text = " ".join(f"{(number + word) % 6} cat" if word % 7 else "red green blue" for word in range(words // 2))
    return f"<|im_start|>user\n{number} {text}<|im_end|>\n<|im_start|>assistant\n"


# Lives of adapters, over HTTP


def post(server: Server, route: str, **body: Any) -> requests.Response:
    """POST a JSON body."""
    return requests.post(f"{server.url}/{route}", json=body, timeout=TIMEOUT_S)


def load(server: Server, name: str, path: Path, **more: Any) -> requests.Response:
    """Load an adapter under a name."""
    return post(server, "load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def reload(server: Server, name: str, path: Path | None = None) -> requests.Response:
    """Put another content behind a name."""
    return post(server, "reload_lora_adapter", lora_name=name, lora_path=None if path is None else str(path))


def unload(server: Server, name: str) -> requests.Response:
    """Unload an adapter."""
    return post(server, "unload_lora_adapter", lora_name=name)


def adapters(server: Server) -> dict[str, dict[str, Any]]:
    """What ``/lora_adapters`` says, by name."""
    rows = requests.get(f"{server.url}/lora_adapters", timeout=TIMEOUT_S).json()["adapters"]
    return {row["name"]: row for row in rows}


def answer(server: Server, text: str, name: str | None) -> list[int]:
    """Greedy tokens."""
    return list(server.generate(text=text, lora_path=name, sampling_params=GREEDY)["output_ids"])


def stream(server: Server, text: str, name: str | None, **more: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer; closing the iterator hangs up. Raises on any status but 200."""
    body = {"text": text, "lora_path": name, "sampling_params": {**GREEDY, **more}, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S, stream=True) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


# Cold and switching latency


def first_token_seconds(server: Server, names: Sequence[str], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Time to the first token, by the tier in which the request found its adapter.

    Args:
        names: more of them than the server has slots, asked for at random, each time with a new prompt.
    """
    pick, seconds = random.Random(seed), defaultdict(list)
    for number in range(rounds):
        name = pick.choice(names)
        tier = adapters(server)[name]["residency"]
        text = question(1000 + number)
        start = time.perf_counter()
        chunks = stream(server, text, name, max_new_tokens=1)
        next(chunks)
        seconds[tier].append(time.perf_counter() - start)
        for _ in chunks:
            pass
    return seconds


def longest_gap(chunks: Iterator[Any]) -> tuple[int, float]:
    """How many chunks a stream had, and the longest time between two, in seconds."""
    count, longest, last = 0, 0.0, None
    for _ in chunks:
        now = time.perf_counter()
        count, longest, last = count + 1, max(longest, now - last if last is not None else 0.0), now
    return count, longest


# Churn


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        outcomes: count by kind.
        faults: what should not have been, in words.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def check(self, kind: str, found: Any, allowed: Sequence[Any]) -> None:
        """Count an answer; it is a fault unless it is one of those allowed."""
        self.outcomes[kind] += 1
        if found not in allowed:
            self.faults.append(f"{kind}: got {found}, expected one of {list(allowed)}")


@dataclass(frozen=True)
class Churn:
    """Clients that ask, half of them streaming and three in ten hanging up, while an operator changes adapters.

    Attributes:
        expected: adapter (``None`` is the base) -> for each prompt, its answer on a quiet server.
        prompts: what is asked.
        coming: a name that is loaded, replaced and unloaded all the time, between ``contents``.
        contents: directories of adapters, keys of ``expected`` too.
        bad: a directory whose adapter must be refused.
    """

    server: Server
    expected: Mapping[str | None, Sequence[list[int]]]
    prompts: Sequence[str]
    coming: str
    contents: Mapping[str, Path]
    bad: Path

    def run(self, seconds: float, clients: int, seed: int = 0) -> Tally:
        """Go on for some seconds; then everything must have ended. A request that got no answer is a fault."""
        tally, stop = Tally(), threading.Event()
        threads = [
            threading.Thread(target=self._guard, args=(work, random.Random(f"{seed} {index}"), tally, stop))
            for index, work in enumerate([self._operate, *[self._ask] * clients])
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join(timeout=2 * TIMEOUT_S)
            if thread.is_alive():
                tally.faults.append("stuck: a client did not get its answer")
        return tally

    @staticmethod
    def _guard(work: Any, pick: random.Random, tally: Tally, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                work(pick, tally)
            except (requests.RequestException, AssertionError, ValueError, KeyError) as error:
                tally.faults.append(f"lost: {error!r}"[:300])

    def _ask(self, pick: random.Random, tally: Tally) -> None:
        fixed = [name for name in self.expected if name not in self.contents]
        name = pick.choice([*fixed, self.coming])
        number = pick.randrange(len(self.prompts))
        wanted = [self.expected[one][number] for one in (self.contents if name == self.coming else (name,))]
        text, kind = self.prompts[number], pick.random()
        if kind < 0.3:
            self._hang_up(pick, tally, text, name)
        elif kind < 0.6:
            chunks = [*self._stream(text, name, tally)]
            if chunks:
                tally.check("streamed", chunks[-1]["output_ids"], wanted)
        elif kind < 0.9:
            reply = post(self.server, "generate", text=text, lora_path=name, sampling_params=GREEDY)
            if not self._is_gone(reply.status_code, name, tally):
                assert reply.status_code == 200, reply.text
                tally.check("answered", reply.json()["output_ids"], wanted)
        else:  # all adapters at once: more than there are slots
            rows = [*fixed, *fixed]
            replies = self.server.generate(
                text=[text] * len(rows), lora_path=rows, sampling_params=GREEDY, timeout=TIMEOUT_S
            )
            for one, row in zip(rows, replies, strict=True):
                tally.check("in a batch", row["output_ids"], [self.expected[one][number]])

    def _stream(self, text: str, name: str | None, tally: Tally, **more: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from stream(self.server, text, name, **more)
        except requests.HTTPError as error:
            if error.response is None or not self._is_gone(error.response.status_code, name, tally):
                raise

    def _is_gone(self, status: int, name: str | None, tally: Tally) -> bool:
        gone = status == 404 and name == self.coming
        tally.outcomes["unknown, as it should be"] += gone
        return gone

    def _hang_up(self, pick: random.Random, tally: Tally, text: str, name: str | None) -> None:
        tally.outcomes["hung up"] += 1
        if pick.random() < 0.5:
            chunks = self._stream(text, name, tally, max_new_tokens=200)
            for _ in range(pick.randrange(4)):
                next(chunks, None)
            chunks.close()
            return
        body = {"text": text, "lora_path": name, "sampling_params": {**GREEDY, "max_new_tokens": 200}}
        with contextlib.suppress(requests.Timeout):
            requests.post(f"{self.server.url}/generate", json=body, timeout=pick.uniform(0.01, 0.5))

    def _operate(self, pick: random.Random, tally: Tally) -> None:
        here = adapters(self.server)
        path = self.contents[pick.choice([*self.contents])]
        if self.coming not in here:
            reply = load(self.server, self.coming, path)
        elif pick.random() < 0.3:
            reply = unload(self.server, self.coming)
        elif pick.random() < 0.8:
            reply = reload(self.server, self.coming, path)
        else:
            pinned = not here[self.coming]["pinned"]
            reply = post(self.server, "pin_lora_adapter", lora_name=self.coming, pinned=pinned)
        tally.check("operated", reply.status_code, [200])
        tally.check("refused", load(self.server, "bad", self.bad).status_code, [400])
        time.sleep(pick.uniform(0, 0.3))


def quiet_answers(
    server: Server, prompts: Sequence[str], contents: Mapping[str, Path], fixed: Sequence[str]
) -> dict[str | None, list[list[int]]]:
    """Each adapter's and the base model's answers to each prompt, one request at a time, cold. They must differ."""
    names = [None, *fixed, *contents]
    for name, path in contents.items():
        load(server, name, path).raise_for_status()
    expected: dict[str | None, list[list[int]]] = {name: [] for name in names}
    for text in prompts:
        server.flush()
        for name in names:
            expected[name].append(answer(server, text, name))
    for name in contents:
        unload(server, name).raise_for_status()
    for column in zip(*expected.values(), strict=True):
        assert len({tuple(ids) for ids in column}) == len(names), "the adapters must change the answers"
    return expected


def users_left(server: Server, patience_s: float = 30) -> dict[str, int]:
    """Adapters that still have users once everybody has had time to leave."""
    deadline = time.monotonic() + patience_s
    while True:
        left = {name: row["users"] for name, row in adapters(server).items() if row["users"]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


# Memory


def memory_mb(pid: int) -> float:
    """Resident memory of a process and all its descendants, and what is taken of the first CUDA device.

    The least of three readings: a process that starts another has its memory counted twice for a moment.
    """
    readings = []
    for _ in range(3):
        readings.append(_memory_now(pid))
        time.sleep(0.05)
    return min(readings)


def _memory_now(pid: int) -> float:
    import torch

    free, size = torch.cuda.mem_get_info(0) if torch.cuda.is_available() else (0, 0)
    total, todo = (size - free) // 1024, [pid]
    while todo:
        one = todo.pop()
        try:
            status = Path(f"/proc/{one}/status").read_text()
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:
            continue  # it has ended
        if "VmRSS:" in status:  # else it has ended, and its parent has not looked yet
            total += int(status.partition("VmRSS:")[2].split()[0])
    return total / 1024


def load_use_unload(
    server: Server, source: Path, work: Path, cycles: int, sample_every: int, seconds: float = float("inf")
) -> list[float]:
    """Load a new adapter under a new name from a new directory, ask it once, unload it: again and again.

    Args:
        seconds: stop at the next sample after so long.

    Returns:
        Resident memory in MB at the start and after every ``sample_every`` cycles.
    """
    end = time.monotonic() + seconds
    tensors = load_file(source / WEIGHTS)
    some = sorted(tensors)[0]
    config = (source / "adapter_config.json").read_text()
    samples = [memory_mb(server.process.pid)]
    for cycle in range(cycles):
        directory = work / f"cycle-{time.monotonic_ns()}"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(config)
        tensors[some][0, 0] = cycle / 1000
        save_file(tensors, directory / WEIGHTS)
        load(server, directory.name, directory).raise_for_status()
        answer(server, question(cycle, words=60), directory.name)
        unload(server, directory.name).raise_for_status()
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        if (cycle + 1) % sample_every == 0:
            samples.append(memory_mb(server.process.pid))
            if time.monotonic() > end:
                break
    return samples


def growth_per_1000(samples: Sequence[float], every: int) -> float:
    """Slope of memory over cycles, robust against a single jump: the median over all pairs (Theil-Sen), MB."""
    slopes = [(b - a) / (j - i) for i, a in enumerate(samples) for j, b in enumerate(samples) if j > i]
    return float(statistics.median(slopes)) / every * 1000


def tiers_in_ms(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians and spread, for people."""
    return ", ".join(
        f"{tier} {1000 * np.median(found):.1f} ms (p90 {1000 * np.quantile(found, 0.9):.1f}, n={len(found)})"
        for tier, found in sorted(seconds.items())
    )
