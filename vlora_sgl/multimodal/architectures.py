"""Models of which SGLang has another implementation, or a part: which class serves them, and reads their images.

Asked for by name, so that a process imports what its model needs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from vlora_sgl.multimodal import gemma3

LLAVA = "vlora_sgl.multimodal.llava"

MODELS = {"LlavaForConditionalGeneration": f"{LLAVA}:Llava", "LlavaLlamaForCausalLM": f"{LLAVA}:LlavaOriginal"}
"""Architecture -> our class, which makes SGLang's object where it does not serve a configuration itself."""


def get_model_architecture(original: Callable[..., Any], model_config: Any) -> tuple[type, str]:
    """Wraps SGLang's: the class of a model, and its architecture's name."""
    found, name = original(model_config)
    return (pkgutil.resolve_name(MODELS[name]) if name in MODELS else found), name


def get_mm_processor(original: Callable[..., Any], hf_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps SGLang's: what reads the images of a model's requests, without what only passes them on to it."""
    named = hf_config.architectures or ()
    if MODELS.keys().isdisjoint(named):
        found = original(hf_config, *args, **kwargs)
        found = getattr(found, "inner", found)
        return gemma3.processor_of(found, hf_config, args[0])
    return pkgutil.resolve_name(f"{LLAVA}:processor_of")(original, hf_config, *args, **kwargs)
