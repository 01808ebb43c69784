"""What the serving benchmarks ask an engine, and how long answers take: alone, together, in streams, without end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.serving.apis import IMAGE_MARK
from vlora_sgl import _sgl

QUESTION = "What is in this picture? How many objects are there? Describe the image in one word."
TOKEN_EDGE = 28
"""Pixels along the edge of an image token."""


@dataclass(frozen=True)
class Answer:
    """One answer: seconds until it was complete, and its ``meta_info``."""

    seconds: float
    meta_info: dict[str, Any]


class Client:
    """Asks one engine (ours or stock SGLang's), from its own event loop.

    Args:
        engine: an ``Engine``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._number = itertools.count()

    def ask(self, *requests: dict[str, Any], hold: bool = False) -> list[Answer]:
        """Send requests together; wait for all.

        Args:
            requests: arguments of ``Engine.generate``.
            hold: keep the scheduler still until it has all of them, and count from there. Tokenizing and preprocessing
                images, which happen one after the other in another process, are then no part of the times.
        """
        return self.engine.loop.run_until_complete(self._ask(requests, hold))

    async def _ask(self, requests: Sequence[dict[str, Any]], hold: bool) -> list[Answer]:
        manager = self.engine.tokenizer_manager
        names = [f"benchmark-{next(self._number)}" for _ in requests]
        if hold:
            manager._dispatch_to_scheduler(_sgl.PauseGenerationReqInput(mode="in_place"))
        start = time.perf_counter()
        tasks = [asyncio.ensure_future(self._one(r, n)) for r, n in zip(requests, names, strict=True)]
        if hold:
            try:
                while not (all(map(self._sent, names)) or any(task.done() for task in tasks)):
                    await asyncio.sleep(0.001)
                await manager.get_internal_state()  # it answers behind the requests: all are in its queue
            finally:
                start = time.perf_counter()
                # With the allocator's cache: to fill it again would be part of the times.
                manager._dispatch_to_scheduler(_sgl.ContinueGenerationReqInput(torch_empty_cache=False))
        return [Answer(end - start, meta_info) for end, meta_info in await asyncio.gather(*tasks)]

    def _sent(self, name: str) -> bool:
        state = self.engine.tokenizer_manager.rid_to_state.get(name)
        return state is not None and state.dispatched

    async def _one(self, request: dict[str, Any], name: str) -> tuple[float, dict[str, Any]]:
        answer = await self.engine.async_generate(**request, rid=name)
        return time.perf_counter(), answer["meta_info"]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and leave the CUDA allocator its own: to fill that again would be part of the times.

        ``Engine.flush_cache`` empties both. A scheduler that is not idle does nothing, and only the next answers show
        it: each of them has cached tokens then.
        """
        time.sleep(0.05)  # an answer comes before its batch is put away
        self.engine.collective_rpc("flush_cache", empty_cache=False)

    def saturate(self, make: Callable[[int], dict[str, Any]], workers: int, seconds: float) -> float:
        """Answers per second with ``workers`` requests under way at any time, from when each worker has one behind it.

        Args:
            make: the n-th request.
            seconds: how long answers are counted; no answer in that time counts up to the next ones.
        """
        numbers, ends = itertools.count(), []

        async def work() -> None:
            while len(ends) < workers or time.perf_counter() < ends[workers - 1] + seconds:
                number = next(numbers)
                ends.append((await self._one(make(number), f"saturate-{next(self._number)}"))[0])

        async def run() -> float:
            await asyncio.gather(*(work() for _ in range(workers)))
            start = ends[workers - 1]
            counted = sum(start < end <= start + seconds for end in ends)
            return counted / seconds if counted else (len(ends) - workers) / (max(ends) - start)

        return self.engine.loop.run_until_complete(run())

    def drain(
        self, make: Callable[[int], dict[str, Any]], count: int, workers: int, done: Callable[[], Any] = lambda: None
    ) -> None:
        """Answer ``count`` requests, the n-th being ``make(n)``, with ``workers`` under way at any time."""
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await self._one(make(number), f"drain-{next(self._number)}")
                done()

        async def run() -> None:
            await asyncio.gather(*(work() for _ in range(workers)))

        self.engine.loop.run_until_complete(run())

    def stream(self, make: Callable[[int], dict[str, Any]], streams: int, seconds: int) -> list[float]:
        """Latencies of streams that send one request a second each, evenly spread, however long answers take."""

        async def one(number: int, start: float) -> float:
            due = start + number / streams
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            return (await self._one(make(number), f"stream-{next(self._number)}"))[0] - due

        async def run() -> list[float]:
            start = time.perf_counter()
            return await asyncio.gather(*(one(number, start) for number in range(streams * seconds)))

        return self.engine.loop.run_until_complete(run())


def images(tokens: int) -> Iterator[Image.Image]:
    """Square images of ``tokens`` image tokens, no two alike, so that no cache knows one.

    Raises:
        ValueError: ``tokens`` is no square number.
    """
    edge = round(tokens**0.5)
    if edge * edge != tokens:
        raise ValueError(f"a square image has a square number of tokens, not {tokens}")
    noise = np.random.default_rng().integers(0, 256, (edge * TOKEN_EDGE, edge * TOKEN_EDGE, 3), dtype=np.uint8)
    while True:
        noise[0, :4] = np.random.default_rng().integers(0, 256, (4, 3), dtype=np.uint8)
        yield Image.fromarray(noise)


def prompt(images: int, text: str = QUESTION) -> str:
    """A user's turn with images."""
    return f"<|im_start|>user\n{IMAGE_MARK * images}{text}<|im_end|>\n<|im_start|>assistant\n"


def request(
    pictures: Sequence[Image.Image], adapter: str | None, tokens: int, head: str | None = None, text: str = QUESTION
) -> dict[str, Any]:
    """A question about images: ``tokens`` generated tokens, or a head's answer."""
    parameters: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    if head is not None:
        parameters["custom_params"] = {"vlora_head": head}
    return {
        "prompt": prompt(len(pictures), text),
        "image_data": list(pictures) or None,
        "lora_path": adapter,
        "sampling_params": parameters,
    }
