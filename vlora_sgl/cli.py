"""``vlora_sgl``: what one wants to know about adapters without starting a server.

``vlora_sgl adapters inspect DIR [--model DIR]`` says what an adapter holds, whether it would load, and what it costs;
``vlora_sgl adapters convert TRAINED INITIAL OUTPUT`` makes plain LoRA of one whose initialisation changed the base.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import VLoraError
from vlora_sgl.server_args import SLOT_UNIT

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if all is well, 1 if the adapter would be refused."""
    parser = argparse.ArgumentParser(prog="vlora_sgl", description="Tools for V-LoRA adapters.")
    groups = parser.add_subparsers(required=True, metavar="GROUP")
    adapters = groups.add_parser("adapters", help="look into adapter directories")
    commands = adapters.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="what is in it, would it load, what would it cost")
    inspect.add_argument("directory", type=Path, help="a PEFT adapter directory")
    inspect.add_argument("--model", type=Path, help="directory of the base model, to check shapes and depth against")
    inspect.add_argument("--json", action="store_true", help="print the report as JSON")
    inspect.set_defaults(run=_inspect)
    convert = commands.add_parser("convert", help="PiSSA, OLoRA, CorDA or LoRA-GA to plain LoRA")
    convert.add_argument("trained", type=Path, help="the adapter")
    convert.add_argument("initial", type=Path, help="the adapter as it was saved before training")
    convert.add_argument("output", type=Path, help="where the plain adapter goes; must not be there")
    convert.set_defaults(run=_convert)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except VLoraError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


def _inspect(args: argparse.Namespace) -> None:
    report = inspect_adapter(args.directory, args.model)
    print(json.dumps(report, indent=2) if args.json else _render(report))


def _convert(args: argparse.Namespace) -> None:
    from vlora_sgl.lora.convert import convert

    convert(args.trained, args.initial, args.output)
    print(f"{args.output} is plain LoRA of rank {inspect_adapter(args.output)['max_rank']}")


def inspect_adapter(directory: Path, model: Path | None = None) -> JsonDict:
    """The load report of ``directory``, with its cost on ``model`` where one is given: host and device memory, the
    latter in the smallest slot that holds it (``--vlora-slot-ranks``).

    Raises:
        AdapterError: it would be refused.
        ConfigError: ``model`` is no model directory.
    """
    from vlora_sgl.lora.checkpoint import read_adapter
    from vlora_sgl.lora.layout import BaseLayout

    layout = BaseLayout.from_directory(model) if model else None
    report = read_adapter(directory, layout).report
    answer = {**report.to_dict(), "checked_against": str(model) if model else None}
    if model and layout:
        width = _model_width(model)
        answer["slot_rank"] = -(-report.max_rank // SLOT_UNIT) * SLOT_UNIT
        answer["slot_bytes"] = width * sum(
            answer["slot_rank"] * (out + inner)
            for name, (out, inner) in layout.shapes.items()
            if name.rpartition(".")[2] in report.modules
        )
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
    if "slot_bytes" in report:
        size = f"{report['slot_bytes'] / 2**20:.1f} MiB"
        rows["device slot"] = f"{size} in one of rank {report['slot_rank']}, in proportion in a larger one"
    lines = [f"{label + ':':13}{value}" for label, value in rows.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


if __name__ == "__main__":
    sys.exit(main())
