"""Head requests on the way in: whether the head exists, before the request enters the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlora_sgl.errors import HeadError
from vlora_sgl.heads.store import DESCRIPTION_FILE, KINDS, AdapterDescription, read_description

HEAD_KEY = "vlora_head"
"""Where a request names its head in ``sampling_params.custom_params``, and where ``meta_info`` has the answer."""


def check_head_requests(obj: Any, adapters: Mapping[str, Any]) -> None:
    """Check every head that a generate request (or a batch of them) names, and ask for one token.

    Args:
        obj: SGLang's ``GenerateReqInput``, normalised.
        adapters: what was ever loaded, by name, each with its ``lora_path``.
    Raises:
        HeadError: a head that its adapter does not have, with the heads it has; or a dense head without an image.
    """
    parameters = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    if not any(head_of(one) for one in parameters):
        return
    for one in [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]:
        name = head_of(one.sampling_params)
        if name is None:
            continue
        if one.lora_path is None:
            raise HeadError(f"head {name!r}: the base model has no heads; name an adapter that has")
        adapter = adapters.get(one.lora_path)
        if adapter is None:
            continue  # an unknown adapter is reported as such
        description = describe(adapter.lora_path)
        kind = description.heads[description.head_named(name, None, one.lora_path)]["kind"]
        if KINDS[kind].features == "image_tokens" and not one.image_data:
            raise HeadError(f"head {name!r} of adapter {one.lora_path!r} reads an image, and the request has none")
        one.sampling_params["max_new_tokens"] = 1


def head_of(parameters: Any) -> str | None:
    """The head that a request's sampling parameters name."""
    custom = parameters.get("custom_params") if isinstance(parameters, dict) else None
    return custom.get(HEAD_KEY) if isinstance(custom, dict) else None


def describe(directory: str) -> AdapterDescription:
    """An adapter's description, read again only when its file has changed."""
    path = Path(directory) / DESCRIPTION_FILE
    return _describe(directory, path.stat().st_mtime_ns if path.is_file() else None)


@lru_cache(maxsize=1024)
def _describe(directory: str, changed: int | None) -> AdapterDescription:
    return read_description(directory) if Path(directory).is_dir() else AdapterDescription()


def answer_text(answer: Mapping[str, Any]) -> str:
    """A head's answer as the text of a completion: the label, the count, or the boxes as JSON."""
    if answer["kind"] == "classify":
        return str(answer["label"])
    if answer["kind"] == "count":
        return str(answer["count"])
    return json.dumps([{key: box[key] for key in ("label", "box")} for box in answer["boxes"]])
