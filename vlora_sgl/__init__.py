"""vlora_sgl: one large multimodal model, many LoRA adapters, served together.

Public names are imported when first used, so ``import vlora_sgl`` costs nothing and a client needs no engine.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that has it.
_EXPORTS = {
    "function": "vlora_sgl.lang.api",
    "gen": "vlora_sgl.lang.api",
    "select": "vlora_sgl.lang.api",
    "image": "vlora_sgl.lang.api",
    "video": "vlora_sgl.lang.api",
    "system": "vlora_sgl.lang.api",
    "user": "vlora_sgl.lang.api",
    "assistant": "vlora_sgl.lang.api",
    "adapter": "vlora_sgl.lang.api",
    "classify": "vlora_sgl.lang.api",
    "count": "vlora_sgl.lang.api",
    "detect": "vlora_sgl.lang.api",
    "Runtime": "vlora_sgl.lang.endpoint",
    "Engine": "vlora_sgl.engine",
    "VLoraArgs": "vlora_sgl.server_args",
    "VLoraError": "vlora_sgl.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
