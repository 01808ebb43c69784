"""Synthetic traffic: when requests arrive, for which adapter, how long; and what they say, for a real server.

The simulator and the HTTP replay draw from the same traces, so that one can be checked against the other.
"""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.apis import IMAGE_MARK
from vlora_sgl.core import AdapterId, ServiceClass

IMAGE_SIDE = 224
IMAGE_TOKENS = (IMAGE_SIDE // 28) ** 2
"""Tokens of one image in the benchmark's models (14-pixel patches, merged two by two)."""

IMAGE_POOL = 64
"""Distinct images of a replay: frames that several questions are about, as in retrieval, come again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A named distribution of traffic.

    Attributes:
        arrivals: ``poisson``; ``azure`` (gamma gaps with a coefficient of variation of 2, and a rate that swings by
            half over an hour, like the Azure LLM inference trace of 2023); or ``bursts`` (on a fifth of the time).
        rate: requests per second, on average.
        adapters: how many there are.
        skew: share of the requests that go to the hottest; the others share the rest by Zipf's law (exponent 1).
        turns: seconds for which one adapter is the hottest, before the next takes its place; 0: it stays so.
        base: share of requests, outside the hottest, to the base model.
        prompt: mean prompt length, tokens (log-normal, the images' tokens included).
        output: mean output length, tokens (log-normal).
        prompt_sigma: of the logarithm of the prompt's length.
        output_sigma: of the logarithm of the output's length.
        images: images in every prompt.
        realtime: share of requests of class ``realtime``, each with ``deadline`` seconds.
        deadline: their deadline.
        seed: of everything random.
    """

    arrivals: str = "azure"
    rate: float = 8.0
    adapters: int = 8
    skew: float = 0.6
    turns: float = 0.0
    base: float = 0.0
    prompt: float = 400.0
    output: float = 100.0
    prompt_sigma: float = 0.6
    output_sigma: float = 0.8
    images: int = 0
    realtime: float = 0.0
    deadline: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class Arrival:
    """One request of a trace."""

    at: float
    adapter: AdapterId
    prompt: int
    output: int
    service: ServiceClass = ServiceClass.INTERACTIVE
    deadline: float | None = None


def trace(load: Workload, seconds: float) -> Iterator[Arrival]:
    """The arrivals of ``seconds`` of ``load``, in order."""
    rng = random.Random(load.seed)
    tail = [1 / k for k in range(1, load.adapters)]
    total = sum(tail) or 1.0
    cumulative: list[float] = []
    for weight in tail:
        cumulative.append((cumulative[-1] if cumulative else 0.0) + weight / total)

    def pick() -> AdapterId:
        if load.adapters == 0:
            return None
        hot = int(now / load.turns) % load.adapters if load.turns else 0
        if load.adapters == 1 or rng.random() < load.skew:
            return f"a{hot}"
        if rng.random() < load.base:
            return None
        u, low, high = rng.random(), 0, len(cumulative) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if cumulative[middle] < u else (low, middle)
        return f"a{low + (low >= hot)}"

    def length(mean: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    now = 0.0
    while True:
        rate = load.rate
        if load.arrivals == "azure":
            rate *= 1 + 0.5 * math.sin(2 * math.pi * now / 3600)
            gap = rng.gammavariate(0.25, 4 / rate)
        elif load.arrivals == "bursts":
            gap = rng.expovariate(5 * rate)
            if int((now + gap) / 2) % 5 != 0:
                # Off: move to the next on-phase of two seconds in ten.
                gap = (math.floor((now + gap) / 10) + 1) * 10 - now + rng.expovariate(5 * rate)
        else:
            gap = rng.expovariate(rate)
        now += gap
        if now > seconds:
            return
        adapter = pick()
        real = rng.random() < load.realtime
        service = ServiceClass.REALTIME if real else ServiceClass.BATCH if load.realtime else ServiceClass.INTERACTIVE
        yield Arrival(
            now,
            adapter,
            length(load.prompt, load.prompt_sigma, 8000),
            length(load.output, load.output_sigma, 2000) if not real else max(1, round(load.output / 10)),
            service,
            load.deadline if real else None,
        )


RETRIEVAL = Workload(prompt=256, output=220, prompt_sigma=0.3, output_sigma=0.3, images=1)
"""Visual retrieval (V-LoRA, section 6.1): a question about an image, answered in sentences."""

VIDEO = Workload(prompt=6 * IMAGE_TOKENS + 32, output=7, prompt_sigma=0.0, output_sigma=0.2, images=6)
"""Video analytics: six frames and a closed question, answered in a few tokens, or by a head."""


class Speaker:
    """Turns arrivals into ``/generate`` bodies: random one-token words and images from a pool, all seeded.

    Args:
        model: directory with the tokenizer.
        seed: of words and images.
        spelled: tokens of text that stand for an image, for a model that sees none; 0 for one that does.
        mark: how a prompt marks an image.
    """

    def __init__(self, model: Path, seed: int = 0, spelled: int = 0, mark: str = IMAGE_MARK) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = {token: str(tokenizer.decode([token])) for token in set(tokenizer.get_vocab().values())}
        alone = {token: text for token, text in sorted(texts.items()) if text.startswith(" ") and text[1:].isalpha()}
        self.words = {t: text for t, text in alone.items() if tokenizer.encode(text, add_special_tokens=False) == [t]}
        self._spelled, self._mark = spelled, mark
        self._random = random.Random(seed)
        self._images = [picture(seed + i) for i in range(IMAGE_POOL)]

    def ids(self, tokens: int) -> list[int]:
        """Random token ids."""
        return self._random.choices(list(self.words), k=tokens)

    def body(self, arrival: Arrival, images: int, head: str | None = None) -> dict[str, Any]:
        """One request; with a head it is answered by it, in one pass."""
        words = max(1, arrival.prompt - images * (IMAGE_TOKENS + 2)) + images * self._spelled
        images = 0 if self._spelled else images
        text = "".join(self.words[t] for t in self.ids(words))
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": arrival.output}
        if head is not None:
            sampling |= {"max_new_tokens": 1, "custom_params": {"vlora_head": head}}
        body: dict[str, Any] = {
            "text": self._mark * images + text,
            "sampling_params": sampling,
            "lora_path": arrival.adapter,
            "stream": True,
        }
        if images:
            body["image_data"] = self._random.sample(self._images, images)
        return body


def picture(seed: int) -> str:
    """A smooth random image as a data URL: bare base64 of a JPEG starts with a slash, like a path."""
    from PIL import Image

    rng = random.Random(seed)
    small = Image.frombytes("RGB", (8, 8), rng.randbytes(192))
    buffer = io.BytesIO()
    small.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).save(buffer, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def without_adapters(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same traffic for a server that has none."""
    return [Arrival(a.at, None, a.prompt, a.output, a.service, a.deadline) for a in arrivals]
