"""Looking up a prefix: our radix cache against SGLang's, on the same tree of 1,000 prefixes of 4,096 tokens.

::

    python -m benchmarks.serving.bench_match --summary results/summary.json     # a minute of one core, no GPU

``reuse.match_cost_vs_sglang``: time of a match in our tree over one in SGLang's, of the dearest kind of request: the
base model's, without an image; an ordinary adapter's; or an activated adapter's with an image, whose key we rewrite.
SGLang's key has the adapter in its ``extra_key``, as its scheduler writes it. Each prefix is looked up in both trees
in turn, by a request with token ids of its own, so that whatever else the machine does hits both alike; the ratio is
of the medians over all look-ups. What both do once when a request arrives is no part of it: for us that is the
rewriting, some 10 us for 4,096 tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.summary import record
from vlora_sgl import _sgl
from vlora_sgl.core import RequestParams
from vlora_sgl.mem_cache.identity import AdapterContent, CacheIdentity, ImageSpan
from vlora_sgl.mem_cache.radix_cache import VLoraRadixCache
from vlora_sgl.request import RequestState

Identify = Callable[[array], CacheIdentity]
LookUp = Callable[[array], Any]
"""What a tree's ``match_prefix`` is given for a prompt."""

IMAGE = ImageSpan(16, 1040, "an image")
KINDS: dict[str, tuple[AdapterContent | None, tuple[ImageSpan, ...]]] = {
    "text": (None, ()),
    "adapter": (AdapterContent("a", None), ()),
    "activated adapter, image": (AdapterContent("b", "after_image"), (IMAGE,)),
}


class NoPool:
    """Stands for the memory pools, which a look-up does not touch."""

    device = "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="look-ups of each prefix")
    parser.add_argument("--prefixes", type=int, default=1000)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--summary", type=Path, required=True)
    args = parser.parse_args()
    ratios = {}
    for kind, seconds in match_seconds(args.repeats, args.prefixes, args.length).items():
        ours, theirs = (statistics.median(seconds[name]) for name in ("ours", "sglang"))
        ratios[kind] = ours / theirs
        print(f"{kind}: {ours * 1e6:.1f} us, SGLang's {theirs * 1e6:.1f} us, ratio {ratios[kind]:.3f}")
    record("reuse.match_cost_vs_sglang", max(ratios.values()), "ratio", False, summary=args.summary)


def match_seconds(repeats: int, prefixes: int, length: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every look-up, by kind of request, for ``ours`` and ``sglang``."""
    generator = torch.Generator().manual_seed(0)
    prompts = [array("q", torch.randint(0, 150_000, (length,), generator=generator).tolist()) for _ in range(prefixes)]
    found = {}
    for kind, (adapter, images) in KINDS.items():
        ours, theirs = make_cache(VLoraRadixCache), make_cache(_sgl.RadixCache)
        extra_key = None if adapter is None else "0f3a" * 8
        identify = partial(ours.identify, salt=None, adapter=adapter, images=images)
        for prompt in prompts:
            with ours.keys_of(identify(prompt)):
                ours.insert(_sgl.InsertParams(key=_sgl.RadixKey(prompt), value=torch.arange(length)))
            theirs.insert(_sgl.InsertParams(key=_sgl.RadixKey(prompt, extra_key), value=torch.arange(length)))

        def our_look_up(prompt: array, identify: Identify = identify) -> Any:
            identity = identify(prompt)
            req = SimpleNamespace(vlora=RequestState(RequestParams(), identity=identity))
            return _sgl.MatchPrefixParams(key=_sgl.RadixKey(prompt, identity.key), req=req)

        def their_look_up(prompt: array, extra_key: str | None = extra_key) -> Any:
            return _sgl.MatchPrefixParams(key=_sgl.RadixKey(prompt, extra_key))

        sides: dict[str, tuple[Any, LookUp]] = {"ours": (ours, our_look_up), "sglang": (theirs, their_look_up)}
        found[kind] = _time(prompts, sides, repeats)
    return found


def _time(prompts: list[array], sides: dict[str, tuple[Any, LookUp]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            order = list(sides.items()) if repeat % 2 else list(reversed(sides.items()))
            for prompt in prompts:
                for name, (cache, look_up) in order:
                    params = look_up(array("q", prompt))
                    start = time.perf_counter()
                    result = cache.match_prefix(params)
                    seconds[name].append(time.perf_counter() - start)
                    assert len(result.device_indices) == len(prompt)
    finally:
        gc.enable()
    return seconds


def make_cache(kind: Any) -> Any:
    """An empty tree of one of the two kinds."""
    return kind(_sgl.CacheInitParams(False, NoPool(), NoPool(), 1))


if __name__ == "__main__":
    main()
