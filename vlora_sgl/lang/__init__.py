"""The language: programs over images and adapters (V-LoRA, section 4.1), on a server or an engine in this process."""

from vlora_sgl.lang import prompts
from vlora_sgl.lang.api import (
    Function,
    adapter,
    assistant,
    caption,
    classify,
    count,
    detect,
    function,
    gen,
    ground,
    image,
    select,
    set_default_backend,
    system,
    user,
    video,
)
from vlora_sgl.lang.endpoint import Endpoint, EngineEndpoint, Runtime
from vlora_sgl.lang.interpreter import BatchRun, ProgramState, StateGroup
from vlora_sgl.lang.values import Box, Boxes, Count, Label

__all__ = [
    "BatchRun",
    "Box",
    "Boxes",
    "Count",
    "Endpoint",
    "EngineEndpoint",
    "Function",
    "Label",
    "ProgramState",
    "Runtime",
    "StateGroup",
    "adapter",
    "assistant",
    "caption",
    "classify",
    "count",
    "detect",
    "function",
    "gen",
    "ground",
    "image",
    "prompts",
    "select",
    "set_default_backend",
    "system",
    "user",
    "video",
]
