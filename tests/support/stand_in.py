"""Classes that pass for one of SGLang's."""

from __future__ import annotations

from vlora_sgl import _sgl


def passing_for(name: str, *bases: type) -> type:
    """An empty class that ``_sgl.is_a`` takes for the one that ``_sgl.NAMES`` has under ``name``."""
    module, _, qualname = _sgl.NAMES[name].partition(":")
    return type(qualname, bases, {"__module__": module})
