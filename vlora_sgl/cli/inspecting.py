"""``vlora inspect``: what an adapter holds, whether it would load, what it would cost.

``vlora convert``: a plain adapter of one whose initialisation changed the base.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from vlora_sgl.cli.result import Result
from vlora_sgl.core import JsonDict
from vlora_sgl.server_args import SLOT_UNIT

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def inspect(args: Namespace) -> Result:
    """The report.

    Raises:
        AdapterError: it would be refused.
        ConfigError: ``--model`` is no model directory.
    """
    report = inspect_adapter(args.directory, args.model)
    return Result(report, _render(report))


def convert(args: Namespace) -> Result:
    """The plain adapter that was written.

    Raises:
        AdapterError: it cannot be made.
    """
    from vlora_sgl.lora.convert import convert

    convert(args.trained, args.initial, args.output)
    report = inspect_adapter(args.output)
    return Result(report, f"{args.output} is plain LoRA of rank {report['max_rank']}")


def inspect_adapter(directory: Path, model: Path | None = None) -> JsonDict:
    """The load report of ``directory``, with its cost on ``model`` where one is given: host and device memory, the
    latter in the smallest slot that holds it (``--vlora-slot-ranks``), and in a slot of the vision tower's.

    Raises:
        AdapterError: it would be refused.
        ConfigError: ``model`` is no model directory.
    """
    from vlora_sgl.lora.checkpoint import read_adapter
    from vlora_sgl.lora.layout import BaseLayout, is_tower, kind_of

    layout = BaseLayout.from_directory(model) if model else None
    adapter = read_adapter(directory, layout)
    answer = {**adapter.report.to_dict(), "checked_against": str(model) if model else None}
    for tower, slot in ((False, "slot"), (True, "tower_slot")):
        modules = {name: pair for name, pair in adapter.modules.items() if is_tower(name) is tower}
        if model and layout and modules:
            rank = -(-max(pair.rank for pair in modules.values()) // SLOT_UNIT) * SLOT_UNIT
            kinds = {*map(kind_of, modules)}
            elements = sum(rank * sum(shape) for name, shape in layout.shapes.items() if kind_of(name) in kinds)
            answer |= {f"{slot}_rank": rank, f"{slot}_bytes": _model_width(model) * elements}
    return answer


def _model_width(model: Path) -> int:
    """Bytes of one weight in the dtype the model is served in."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config") or {}
    names = (table.get(key) for table in (config, text) for key in ("dtype", "torch_dtype"))
    return _DTYPE_BYTES.get(next((name for name in names if name), "bfloat16"), 2)


def _render(report: JsonDict) -> str:
    rows = {
        "adapter": report["path"],
        "would load": f"yes, on {report['checked_against']}"
        if report["checked_against"]
        else "yes (no --model given)",
        "tensors": f"{report['tensors']}, all matched",
        "modules": ", ".join(f"{kind} x{n}" for kind, n in report["modules"].items()),
        "layers": str(report["layers"]),
        "rank": ", ".join(f"{rank} (x{n})" for rank, n in report["ranks"].items()),
        "scale": ", ".join(f"{scale:g} (x{n})" for scale, n in report["scales"].items()),
        "key prefix": ", ".join(prefix or "(none)" for prefix in report["prefixes"]),
        "heads": ", ".join(f"{name} {list(shape)}" for name, shape in report["heads"].items()) or "none",
        "host memory": f"{report['nbytes'] / 2**20:.1f} MiB",
        "digest": report["digest"],
    }
    for label, slot in (("device slot", "slot"), ("tower slot", "tower_slot")):
        if f"{slot}_bytes" in report:
            size = f"{report[f'{slot}_bytes'] / 2**20:.1f} MiB"
            rows[label] = f"{size} in one of rank {report[f'{slot}_rank']}, in proportion in a larger one"
    lines = [f"{label + ':':13}{value}" for label, value in rows.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])
