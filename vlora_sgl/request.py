"""One request inside the engine: the state that our parts of the scheduler share, and what the client is told of it.

The scheduler puts a ``RequestState`` on each request of SGLang's when it arrives, as ``req.vlora``; it is the one
attribute of ours there. What it tells rides with the request's output tokens, one entry each (SGLang's
``customized_info``), and the front of the engine makes one dict of the entries: ``meta_info["vlora"]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlora_sgl.combined import is_combined, parts
from vlora_sgl.core import InferenceMode, RequestParams, Version
from vlora_sgl.names import versioned

KEY = "vlora"


@dataclass(slots=True)
class RequestState:
    """What our parts know of one request.

    Attributes:
        params: what it asks.
        adapter: its adapter as the LoRA manager describes it; ``None`` for the base model.
        identity: who computes its KV (``mem_cache.identity.CacheIdentity``); ``None`` where SGLang's cache serves.
        head: what it wants from a head (``heads.worker.HeadRequest``); ``None`` if it generates.
        reuse_limit: it takes no more than this many tokens from the prefix cache; ``None`` is no limit.
        answer: what the client is told with the first token: ``reuse``, ``head``.
    """

    params: RequestParams
    adapter: Any = None
    identity: Any = None
    head: Any = None
    reuse_limit: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def invocation_start(self) -> int:
        """First prompt position that runs with its adapter."""
        return 0 if self.identity is None else self.identity.invocation_start


def tell(reqs: Sequence[Any], output: Any, mode: InferenceMode | None) -> None:
    """Let the tokens of a step carry what their clients are told; nothing, where nobody is told anything.

    Args:
        reqs: the rows, before SGLang adds their tokens.
        output: SGLang's output of the step's logits processor.
        mode: how the step ran, ``None`` without adapters; told where the request asked for a trace.
    """
    told = []
    for req in reqs:
        entry = {} if req.output_ids else dict(req.vlora.answer)
        if req.vlora.params.trace and mode is not None:
            entry["mode"] = str(mode)
        told.append(entry or None)
    if output is not None and any(told):
        output.customized_info = {**(output.customized_info or {}), KEY: told}


def show(meta_info: dict[str, Any], adapter: str | None, versions: Sequence[Version] = ()) -> dict[str, Any]:
    """Put what the tokens carried into one dict of ``meta_info``: ``adapter``, ``version``, and ``modes``, ``reuse``,
    ``head``.

    Where several adapters answered as one, ``adapter`` is ``None``, ``adapters`` has their scales and ``versions``
    their names with the numbers.

    Args:
        meta_info: an answer's, changed in place.
        adapter: the name of the adapter that served as it was asked for, ``None`` for the base model.
        versions: of what served.
    Returns:
        the dict.
    """
    shown: dict[str, Any] = {"adapter": adapter}
    if is_combined(adapter):
        shown = {"adapter": None, "adapters": dict(parts(str(adapter)))}
        shown |= {"versions": sorted(versioned(*one) for one in versions)} if versions else {}
    elif adapter is not None and len(versions) == 1:
        ((shown["adapter"], shown["version"]),) = versions
    told: list[Mapping[str, Any]] = [entry for entry in meta_info.get(KEY) or () if entry]
    if any("mode" in entry for entry in told):
        shown["modes"] = [entry["mode"] for entry in told]
    for entry in told[:1]:
        shown |= {name: value for name, value in entry.items() if name != "mode"}
    meta_info[KEY] = shown
    return shown
