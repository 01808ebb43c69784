"""Head requests on the way in: whether the head exists, before the request enters the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlora_sgl._sgl_types import LoRARef
from vlora_sgl.combined import is_combined
from vlora_sgl.core import JsonDict, RequestParams
from vlora_sgl.errors import HeadError
from vlora_sgl.heads.store import DESCRIPTION_FILE, KINDS, AdapterDescription, read_description


def check_head_requests(obj: Any, asked: Sequence[RequestParams], adapters: Mapping[str, LoRARef]) -> None:
    """Check every head that a generate request (or a batch of them) names, and ask for one token.

    Args:
        obj: SGLang's ``GenerateReqInput``, normalised.
        asked: what it asks of us, or each row of it.
        adapters: what was ever loaded, by name, each with its ``lora_path``.
    Raises:
        HeadError: a head that its adapter does not have, with the heads it has; or a dense head without an image.
    """
    if not any(params.head for params in asked):
        return
    rows = [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]
    for one, params in zip(rows, asked, strict=False):  # of n samples each, the first are the rows
        name = params.head
        if name is None:
            continue
        if one.lora_path is None:
            raise HeadError(f"head {name!r}: the base model has no heads; name an adapter that has")
        if is_combined(one.lora_path):
            raise HeadError(f"head {name!r}: several adapters as one have no heads; name the adapter that has it")
        adapter = adapters.get(one.lora_path)
        if adapter is None:
            continue  # an unknown adapter is reported as such
        description = describe(adapter.lora_path)
        kind = description.heads[description.head_named(name, None, one.lora_path)]["kind"]
        if KINDS[kind].features == "image_tokens" and not one.image_data:
            raise HeadError(f"head {name!r} of adapter {one.lora_path!r} reads an image, and the request has none")
        one.sampling_params["max_new_tokens"] = 1


def describe(directory: str) -> AdapterDescription:
    """An adapter's description, read again only when its file has changed."""
    path = Path(directory) / DESCRIPTION_FILE
    return _describe(directory, path.stat().st_mtime_ns if path.is_file() else None)


@lru_cache(maxsize=1024)
def _describe(directory: str, changed: int | None) -> AdapterDescription:
    return read_description(directory) if Path(directory).is_dir() else AdapterDescription()


def answer_text(answer: JsonDict) -> str:
    """A head's answer as the text of a completion: the label, the count, or the boxes as JSON."""
    if answer["kind"] == "classify":
        return str(answer["label"])
    if answer["kind"] == "count":
        return str(answer["count"])
    return json.dumps([{key: box[key] for key in ("label", "box")} for box in answer["boxes"]])
