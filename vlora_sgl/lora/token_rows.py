"""PEFT's ``trainable_token_indices``: rows of the vocabulary that an adapter has for its own.

What is saved is the new rows; ``vocabulary.as_lora`` makes LoRA of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import AdapterError, quoted
from vlora_sgl.lora.layout import EMBEDDING_MODULES, BaseLayout, canonical_name

KEY = re.compile(r"^(?P<path>.+)\.token_adapter\.trainable_tokens_delta$")
EMBEDDING, HEAD = EMBEDDING_MODULES


@dataclass(frozen=True)
class TokenRows:
    """New rows of one layer: token ids, and [n, hidden]."""

    ids: tuple[int, ...]
    rows: torch.Tensor


def token_rows(found: Mapping[str, torch.Tensor], config: JsonDict, layout: BaseLayout | None) -> dict[str, TokenRows]:
    """An adapter's new rows by layer, ``embed_tokens`` or ``lm_head``.

    Args:
        found: the tensors that match ``KEY``.
        config: ``adapter_config.json``.

    Raises:
        AdapterError: they do not fit the configuration or the base model.
    """
    given = config.get("trainable_token_indices") or {}
    tables = given if isinstance(given, dict) else {EMBEDDING: given}
    wanted = {canonical_name(layer): ids for layer, ids in tables.items()}
    rows: dict[str, TokenRows] = {}
    for key, tensor in found.items():
        match = KEY.match(key)
        assert match is not None
        name = canonical_name(match["path"])
        if name not in EMBEDDING_MODULES or name not in wanted:
            raise AdapterError(f"{key}: trainable_token_indices={quoted(given)} names no such layer")
        rows[name] = TokenRows(_ids(wanted[name], layout), tensor)
        expected = (len(rows[name].ids), tensor.shape[-1] if layout is None else layout.shapes[EMBEDDING][0])
        if tensor.shape != expected:
            raise AdapterError(f"{key}: expected {list(expected)}, a row for each token, got {list(tensor.shape)}")
    if lacking := wanted.keys() - rows:
        raise AdapterError(f"trainable_token_indices names {lacking.pop()}, and its rows are not in the weights")
    return rows


def _ids(given: object, layout: BaseLayout | None) -> tuple[int, ...]:
    most = 2**31 if layout is None else layout.shapes[EMBEDDING][1]
    fit = isinstance(given, list) and all(type(one) is int and 0 <= one < most for one in given)
    if not isinstance(given, list) or not fit or len(set(given)) != len(given):
        raise AdapterError(f"trainable_token_indices must list different tokens below {most}; got {quoted(given)}")
    return tuple(given)
