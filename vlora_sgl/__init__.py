"""vlora_sgl: one large multimodal model, many LoRA adapters, served together.

Public names are imported when first used, so ``import vlora_sgl`` costs nothing and a client needs no engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    # What an editor and a type checker see; at run time __getattr__ below gives the same.
    from vlora_sgl.engine import Engine as Engine
    from vlora_sgl.errors import VLoraError as VLoraError
    from vlora_sgl.lang import Box as Box
    from vlora_sgl.lang import Boxes as Boxes
    from vlora_sgl.lang import Count as Count
    from vlora_sgl.lang import Label as Label
    from vlora_sgl.lang import ProgramState as ProgramState
    from vlora_sgl.lang import Runtime as Runtime
    from vlora_sgl.lang import adapter as adapter
    from vlora_sgl.lang import assistant as assistant
    from vlora_sgl.lang import caption as caption
    from vlora_sgl.lang import classify as classify
    from vlora_sgl.lang import count as count
    from vlora_sgl.lang import detect as detect
    from vlora_sgl.lang import function as function
    from vlora_sgl.lang import gen as gen
    from vlora_sgl.lang import ground as ground
    from vlora_sgl.lang import image as image
    from vlora_sgl.lang import prompts as prompts
    from vlora_sgl.lang import select as select
    from vlora_sgl.lang import set_default_backend as set_default_backend
    from vlora_sgl.lang import system as system
    from vlora_sgl.lang import user as user
    from vlora_sgl.lang import video as video
    from vlora_sgl.server_args import VLoraArgs as VLoraArgs

_LANG = (
    "Box Boxes Count Label ProgramState Runtime adapter assistant caption classify count detect function gen ground "
    "image prompts select set_default_backend system user video"
)

# Public name -> the module that has it.
_EXPORTS = {
    **dict.fromkeys(_LANG.split(), "vlora_sgl.lang"),
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
