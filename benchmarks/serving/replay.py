"""Replays a trace through a server's HTTP, request by request at its time, and sums up what came back."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# SGLang brings it; of ours, only this benchmark uses it.
import aiohttp

from benchmarks.serving.apis import GENERATE, Api, chunk_of
from benchmarks.serving.simulate import mean, quantile

TIMEOUT_S = 120


@dataclass(slots=True)
class Outcome:
    """One request, seconds since the replay's start.

    Attributes:
        due: when it was to be sent.
        first: when its first token came; 0 if none did.
        last: when it ended.
        tokens: output tokens.
        prompt: prompt tokens, as the server counts them.
        cached: of those, how many the prefix cache had.
        gaps: between its chunks (a chunk is one token unless the client lags).
        error: why it failed; empty if it did not.
    """

    due: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str = ""


async def send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], start: float, due: float, api: Api = GENERATE
) -> Outcome:
    """Wait until ``due``, post one streaming request, and read it to its end."""
    asked, outcome, final = api.body(body), Outcome(due), b""
    await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
    try:
        async with session.post(url + api.route(asked), json=asked) as response:
            if response.status != 200:
                outcome.error = f"{response.status}: {(await response.text())[:200]}"
                return outcome
            async for line in response.content:
                now = time.perf_counter() - start
                if not line.startswith(b"data: {"):
                    continue
                final = line
                if not api.is_token(line):
                    continue
                if not outcome.first:
                    outcome.first = now
                else:
                    outcome.gaps.append(now - outcome.last)
                outcome.last = now
        reply = chunk_of(final)
        if "error" in reply:
            outcome.error = str(reply["error"])[:200]
            return outcome
        outcome.tokens, outcome.prompt, outcome.cached = api.counts(reply)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def replay(url: str, requests: Sequence[tuple[float, dict[str, Any]]], api: Api = GENERATE) -> list[Outcome]:
    """Send every ``(due, body)`` at its time, whatever the server does meanwhile (an open loop).

    Args:
        api: how the server is asked; bodies are ``/generate``'s all the same.
    """
    # Servers close idle connections after 5 s, by default; a request that meets that is none of theirs to lose.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    # A chunk repeats the whole text so far; the default line limit is too short for long answers.
    session = aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), read_bufsize=2**20
    )
    async with session:
        start = time.perf_counter() + 0.05
        return await asyncio.gather(*(send(session, url, body, start, due, api) for due, body in requests))


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Latencies in seconds since a request was due; the paper's token latency is their sum over all tokens."""
    good = [o for o in outcomes if not o.error]
    failed = [o.error for o in outcomes if o.error]
    latencies = [o.last - o.due for o in good]
    tokens = sum(o.tokens for o in good)
    gaps = [gap for o in good for gap in o.gaps]
    firsts = [o.first - o.due for o in good]
    tpots = [(o.last - o.first) / (o.tokens - 1) for o in good if o.tokens > 1]
    span = max((o.last for o in good), default=0.0)
    return {
        "requests": len(good),
        "failed": len(failed),
        "first_error": failed[0] if failed else "",
        "tokens": tokens,
        "span": span,
        "token_latency": sum(latencies) / max(1, tokens),
        "mean_latency": statistics.fmean(latencies) if latencies else 0.0,
        "p99_latency": quantile(latencies, 0.99),
        **{f"ttft_p{p}": quantile(firsts, p / 100) for p in (50, 90, 99)},
        **{f"itl_p{p}": quantile(gaps, p / 100) for p in (50, 90, 99)},
        "ttft": mean(firsts),
        "tpot": mean(tpots),
        "tpot_p99": quantile(tpots, 0.99),
        "tokens_per_second": tokens / span if span else 0.0,
        "requests_per_second": len(good) / span if span else 0.0,
        "cached_share": sum(o.cached for o in good) / max(1, sum(o.prompt for o in good)),
    }
