"""The programs of the end-to-end tests, and a main that runs them on an in-process engine and prints the results."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from PIL import Image

import vlora_sgl as vlora

IMAGE_TOKENS = (112 // 28) ** 2
"""Tokens of one picture: the model has one for every 28x28 pixels."""


def photograph(seed: int) -> Image.Image:
    """A smooth random picture of 112x112 pixels, another one for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((112, 112), Image.Resampling.BICUBIC)


@vlora.function
def conversation(s: vlora.ProgramState, image: Any, adapters: list[str | None]) -> None:
    """One round per adapter about the same image."""
    s += vlora.user(vlora.image(image) + "What is in this picture?")
    for number, name in enumerate(adapters):
        if number:
            s += vlora.user("What else?")
        s += vlora.assistant(vlora.gen(f"round{number}", 12, adapter=name, ignore_eos=True))


@vlora.function
def branches(s: vlora.ProgramState, image: Any, adapters: list[str | None]) -> None:
    """The same question to every adapter, in parallel."""
    s += vlora.user(vlora.image(image) + "What is in this picture?")
    forks = s.fork(len(adapters))
    for fork, name in zip(forks, adapters, strict=True):
        with vlora.adapter(name):
            fork += vlora.assistant(vlora.gen("answer", 12, ignore_eos=True))
    forks.join()


@vlora.function
def constrained(s: vlora.ProgramState, image: Any) -> None:
    """Every kind of constrained or chosen answer."""
    s += vlora.user(vlora.image(image) + "Answer with a single word.")
    s += vlora.assistant(vlora.gen("word", 8, regex="red|green|blue", adapter="A"))
    s += vlora.user("How many objects are there?")
    s += vlora.assistant(vlora.count("number"))
    s += vlora.assistant(vlora.gen("json", 8, json_schema={"enum": ["left", "right"]}))
    s += vlora.assistant(vlora.select("choice", ["yes", "no"], adapter="B"))
    s += vlora.assistant(vlora.classify("label", ["cat", "dog", "bird"], adapter="A"))
    s += vlora.user(vlora.prompts.ground("cup"))
    s += vlora.assistant(vlora.ground("boxes", "cup", 48))
    s += vlora.assistant(vlora.gen("samples", 4, n=2, ignore_eos=True))


@vlora.function
def watch(s: vlora.ProgramState, frames: Any, number: int) -> None:
    """Name what happens in a video."""
    s += vlora.user(vlora.video(frames, number) + vlora.prompts.ACTION)
    s += vlora.assistant(vlora.gen("action", 8, ignore_eos=True))


@vlora.function
def short(s: vlora.ProgramState, image: Any, name: str | None, question: str) -> None:
    """One short answer."""
    s += vlora.user(vlora.image(image) + question)
    s += vlora.assistant(vlora.gen("answer", 6, adapter=name, ignore_eos=True))


@vlora.function
def ask_head(s: vlora.ProgramState, image: Any, head: str) -> None:
    """A class by a vision head."""
    s += vlora.user(vlora.image(image) + "What is it?")
    s += vlora.assistant(vlora.classify("label", head=head, adapter="A"))


def all_results(backend: Any) -> list[dict[str, Any]]:
    """Variables of every program, in an order and on images that do not depend on the backend."""
    states = [
        conversation.run(photograph(11), ["A", "B", None], backend=backend),
        branches.run(photograph(12), [None, "A", "B"], backend=backend),
        constrained.run(photograph(13), backend=backend),
        watch.run([photograph(i) for i in range(3)], 3, backend=backend),
        *short.run_batch(
            [(photograph(i), name, "What?") for i in range(3) for name in ("A", "B", None)],
            backend=backend,
            num_threads=4,
        ),
    ]
    streamed = conversation.run(photograph(14), ["B"], backend=backend, stream=True)
    pieces = "".join(streamed.text_iter("round0"))
    return [*(state.variables() for state in states), {"streamed": pieces}]


def as_json(results: list[dict[str, Any]]) -> str:
    """Results as text that two processes can compare; boxes become their fields."""
    return json.dumps(results, default=dataclasses.asdict)


if __name__ == "__main__":
    model, *adapters = sys.argv[1:]
    engine = vlora.Engine(
        model_path=model, enable_lora=True, lora_paths=adapters, max_loras_per_batch=4, enable_cache_report=True
    )
    try:
        print(as_json(all_results(engine)))
    finally:
        engine.shutdown()
