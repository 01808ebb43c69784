"""Which adapter to merge: the expected cost of each choice on a trace of requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlora_sgl.errors import ConfigError

# Extra time of a decode step over the base linears alone, as ``FIXED + PER_RANK * rank`` of a row's adapter. Fitted to
# 1.235 at rank 64 and 1.08 at rank 16 (7B, 32 rows, 8 adapters, H100 80GB, 2026-11-28).
FIXED = 0.028
PER_RANK = 0.0032


@dataclass(frozen=True)
class Choice:
    """The expected extra cost per token, relative to the base linears, if ``hot`` is merged (``None``: nothing is)."""

    hot: str | None
    cost: float
    share: float


def read_trace(path: Path) -> Counter[str | None]:
    """Tokens per adapter of a JSONL trace; ``None`` is the base model.

    A row names its adapter in ``adapter``, ``lora_path`` or ``model`` (``base:adapter``) and may say how many
    ``prompt_tokens`` and ``output_tokens`` it had; without both it counts as one token.

    Raises:
        ConfigError: a line is not a JSON object, or there are none.
    """
    tokens: Counter[str | None] = Counter()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = row.get("adapter", row.get("lora_path"))
            if name is None and ":" in str(row.get("model", "")):
                name = str(row["model"]).partition(":")[2]
            tokens[name] += int(row.get("prompt_tokens", 0)) + int(row.get("output_tokens", 0)) or 1
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a request: {error}") from None
    if not tokens:
        raise ConfigError(f"{path}: no requests")
    return tokens


def rank_choices(tokens: Mapping[str | None, int], ranks: Mapping[str, int]) -> list[Choice]:
    """Every choice, the cheapest first: a merged adapter is free, and its rank is added to everyone else's.

    Raises:
        ConfigError: the trace names an adapter that ``ranks`` lacks.
    """
    unknown = [name for name in tokens if name is not None and name not in ranks]
    if unknown:
        raise ConfigError(f"the trace names adapters that were not given: {', '.join(map(str, unknown))}")
    total = sum(tokens.values())
    choices = []
    for hot in (None, *ranks):
        cost = 0.0
        for name, count in tokens.items():
            rank = 0 if name == hot else ranks.get(name or "", 0) + ranks.get(hot or "", 0)
            cost += count / total * (FIXED + PER_RANK * rank if rank else 0.0)
        choices.append(Choice(hot, cost, tokens.get(hot, 0) / total))
    return sorted(choices, key=lambda choice: choice.cost)
