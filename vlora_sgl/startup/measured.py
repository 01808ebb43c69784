"""Settings by measurement: of SGLang's choices, the one that was the fastest on a family of GPUs for a kind of model.

One table. What a user sets stays; where a row was measured, its setting is ours; everywhere else, as on every card and
for every model that nobody has measured, SGLang chooses. The start says in one line what was chosen and by whom, and
``/server_info`` says where it was measured (``chosen``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from vlora_sgl._sgl_types import ServerArgs
from vlora_sgl.core import JsonDict
from vlora_sgl.platforms.cpu import is_plain_cpu

HOPPER = "Hopper"
FAMILIES = {9: HOPPER}
"""By major compute capability."""

QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"

# Up to 512 tokens a prefill reads weights, whatever its size; beyond, steps of 64 and 128 compute at most an eighth
# for nothing. From 2,048 the host is ahead of the device anyway.
PREFILL_GRAPHS = [4, 8, 16, 32, 64, 96, *range(128, 1280, 64), *range(1280, 2049, 128)]

SAYS = {
    "attention_backend": "attention",
    "mm_attention_backend": "encoder attention",
    "sampling_backend": "sampling",
    "cuda_graph_bs_prefill": "graphs of prefills",
}
"""What can be measured, by field of ``ServerArgs``, and what the start's line calls it."""

USER, MEASURED, SGLANG, CPU = "user", "measured", "SGLang", "plain CPU"


@dataclass(frozen=True)
class Row:
    """A setting that was measured to be the fastest.

    Attributes:
        family: of GPUs, a value of ``FAMILIES``.
        architecture: of the model, as its configuration names it; ``None``: of any.
        field: of ``ServerArgs``, a key of ``SAYS``.
        value: the fastest.
        source: the card, the day and what was seen.
    """

    family: str
    architecture: str | None
    field: str
    value: object
    source: str


TABLE = (
    Row(HOPPER, None, "cuda_graph_bs_prefill", PREFILL_GRAPHS,
        "H200, 2026-11-28: a prefill of 30 tokens of a 7B model keeps the host busy for 11 ms in pieces"),
    Row(HOPPER, QWEN2_5_VL, "attention_backend", "fa3",
        "H200, 2026-11-29, bench_step: with 8 adapters 5.91 ms a step at input 256, as with triton; with base rows at "
        "input 3,072 6.45 against 6.76, and prefills 6 % shorter"),
    Row(HOPPER, QWEN2_5_VL, "mm_attention_backend", "triton_attn",
        "H200, 2026-11-29, bench_e2e --workload video --heads: p99 201 ms, against 652 with fa3; torch's attention "
        "stands in triton's place"),
)  # fmt: skip


def family() -> str | None:
    """The family of this machine's first GPU; ``None`` where there is none, or nothing was measured on its kind."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:  # AMD numbers its cards as NVIDIA does
        return None
    return FAMILIES.get(torch.cuda.get_device_capability()[0])


def architecture(model: str) -> str | None:
    """What a model's configuration says it is: of a directory, or of a name that transformers finds."""
    from transformers import PretrainedConfig

    with suppress(OSError, ValueError):  # SGLang will say what is wrong with it
        config, _ = PretrainedConfig.get_config_dict(model)
        return next(iter(config.get("architectures") or ()), None)
    return None


def rows(model: str) -> dict[str, Row]:
    """By field, the rows that are for this machine and this model; one for its architecture before one for any."""
    here = family()
    found = [row for row in TABLE if row.family == here]
    kind = architecture(model) if found and model else None
    found = [row for row in found if row.architecture in (None, kind)]
    return {row.field: row for row in sorted(found, key=lambda row: row.architecture is not None)}


def settings(model: str) -> JsonDict:
    """The measured settings for this machine and this model, by field of ``ServerArgs``."""
    return {field: row.value for field, row in rows(model).items()}


def chosen(server_args: ServerArgs, given: Collection[str]) -> JsonDict:
    """What was chosen and by whom, for people: ``gpu``, ``model`` and by field ``value``, ``by`` and ``measured``.

    Args:
        server_args: SGLang's, resolved.
        given: the fields that the user set.
    """
    import torch

    measured = rows(server_args.model_path)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found: JsonDict = {}
    for field in SAYS:
        value = _value(server_args, field)
        found[field] = {"value": value, **_reason(value, measured.get(field), field in given)}
    return {"gpu": gpu, "settings": found}


def _value(server_args: ServerArgs, field: str) -> object:
    if field == "cuda_graph_bs_prefill":
        graphs = server_args.cuda_graph_config.prefill
        return None if graphs.backend == "disabled" else graphs.bs
    return getattr(server_args, field)


def _reason(value: object, row: Row | None, given: bool) -> JsonDict:
    if given:
        return {"by": USER}
    if row is not None and value == row.value:
        return {"by": MEASURED, "measured": row.source}
    return {"by": CPU if is_plain_cpu() else SGLANG}


def line(found: Mapping[str, JsonDict]) -> str:
    """``chosen`` in one line."""
    parts = [f"{SAYS[field]} {_short(one['value'])}({one['by']})" for field, one in found["settings"].items()]
    return f"{found['gpu'] or 'CPU'}: {', '.join(parts)}"


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"to {max(value)} tokens " if value else "none "
    return "" if value is None else f"{value} "
