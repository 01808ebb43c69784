"""The embedded default: a small Qwen2.5-VL that answers simple visual questions, with adapters (see MODEL_CARD.md).

Nothing in the engine knows it; it is an ordinary model directory and ordinary PEFT directories.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def path() -> Path:
    """The model's directory, as ``--model-path`` takes it."""
    return _HERE / "model"


def adapters() -> dict[str, Path]:
    """Name -> PEFT directory of the adapters that come with the model, in alphabetical order."""
    return {p.parent.name: p.parent for p in sorted((_HERE / "adapters").glob("*/adapter_config.json"))}


def routed() -> Path:
    """The directory of a learned routed adapter over the adapters that start at the first token (docs/routed.md)."""
    return _HERE / "routed"
