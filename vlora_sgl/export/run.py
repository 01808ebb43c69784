"""Merges a hot adapter into its base model, for any engine: ``python -m vlora_sgl.export``.

::

    python -m vlora_sgl.export --model DIR --hot A --cold B C --out DIR

writes the merged base to ``OUT`` (same files, dtype and sharding) and, below ``OUT/adapters``, what each cold adapter
becomes on it, plus ``base``, which gives the original model back. Stopped halfway, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from vlora_sgl.errors import ConfigError, VLoraError
from vlora_sgl.export.delta import compress, delta_modules, write_adapter
from vlora_sgl.export.merge import merge_shard, shards_of, stored_tensors, targets_in
from vlora_sgl.export.trace import rank_choices, read_trace
from vlora_sgl.export.verify import verify_export
from vlora_sgl.heads.store import read_description
from vlora_sgl.lora.checkpoint import AdapterWeights, LoraPair, read_adapter
from vlora_sgl.lora.experts import is_expert
from vlora_sgl.lora.exported import BASE_DELTA, FORMAT, MANIFEST, UNFINISHED
from vlora_sgl.lora.layout import EMBEDDING_MODULES, BaseLayout, is_tower
from vlora_sgl.names import check_names

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".part"}
_HEAD_FILES = ("vlora_adapter.json", "vlora_heads.safetensors")


@dataclass(frozen=True)
class ExportPlan:
    """One export.

    Attributes:
        model: directory of the base model.
        hot: name of the adapter to merge.
        adapters: name -> directory, the hot one among them.
        out: where to write.
        compress: rank to compress delta adapters to, ``None`` for the exact sum of ranks.
        exact_ranks: write each module's own rank (``rank_pattern``) instead of one padded rank.
        samples: weights to verify at the end.
    """

    model: Path
    hot: str
    adapters: Mapping[str, Path]
    out: Path
    compress: int | None = None
    exact_ranks: bool = False
    samples: int = 16


@dataclass
class ExportReport:
    """What was written: the rank of each adapter, the relative error of each compression (all modules together, and
    the worst module), and the verified error (1.0 is the bound)."""

    ranks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    verified: float = 0.0


def export(plan: ExportPlan, progress: bool = True) -> ExportReport:
    """Carries out ``plan``. Holds the hot adapter and one other at a time in memory.

    Raises:
        ConfigError: the base cannot be merged into (quantised, not in safetensors), an adapter's invocation start does
            not survive it, or ``out`` holds something else.
        AdapterError: an adapter cannot be read.
        ExportMismatchError: what was written does not compute what PEFT does on the original.
    """
    shards = shards_of(plan.model)
    layout = BaseLayout.from_directory(plan.model)
    hot = read_adapter(plan.adapters[plan.hot], layout)
    _check_mergeable(plan, hot, shards, layout)
    for name, path in plan.adapters.items():
        _check_invocation(name, path)
        # A cold one that cannot be read, or exported, should not cost a merge first.
        _check_form(name, hot if name == plan.hot else read_adapter(path, layout))
    _begin(plan, hot)
    _merge(plan, shards, hot, layout, progress)
    _copy_side_files(plan.model, plan.out)
    report = ExportReport()
    report.verified = verify_export(plan.model, plan.out, layout, hot.modules, {}, plan.samples)
    for name in (*(n for n in plan.adapters if n != plan.hot), BASE_DELTA):
        cold = read_adapter(plan.adapters[name], layout) if name in plan.adapters else None
        _write_delta(plan, name, cold, hot, layout, report)
    report.ranks[plan.hot] = _write_identity(plan, hot, layout)
    for name, path in plan.adapters.items():
        _copy_heads(path, plan.out / "adapters" / name)
    _finish(plan, hot, report)
    return report


def _write_delta(
    plan: ExportPlan,
    name: str,
    cold: AdapterWeights | None,
    hot: AdapterWeights,
    layout: BaseLayout,
    report: ExportReport,
) -> None:
    """Writes what an adapter (``None``: the original base) becomes on the merged base, reads it back and checks it."""
    own: Mapping[str, LoraPair] = {} if cold is None else cold.modules
    delta, dropped = delta_modules(own, hot.modules), {}
    if plan.compress is not None:
        smaller = compress(delta, plan.compress)
        delta, dropped, report.errors[name] = smaller.modules, smaller.dropped, (smaller.error, smaller.worst)
    directory = plan.out / "adapters" / name
    report.ranks[name] = write_adapter(
        directory,
        delta,
        layout,
        str(plan.out),
        exact_ranks=plan.exact_ranks,
        saved=None if cold is None else cold.saved,
        task_type=None if cold is None else cold.config.raw.get("task_type"),
    )
    written = read_adapter(directory, layout).modules
    error = verify_export(plan.model, plan.out, layout, own, written, plan.samples, dropped, name)
    report.verified = max(report.verified, error)


def _write_identity(plan: ExportPlan, hot: AdapterWeights, layout: BaseLayout) -> int:
    """Writes an adapter of the hot one's name that changes nothing, to ask any engine for, and to carry the heads."""
    # Not of the vision tower, if it can be: an adapter that has weights there shares no images with others.
    name, pair = min(hot.modules.items(), key=lambda module: is_tower(module[0]))
    zero = LoraPair(torch.zeros_like(pair.a[:1]), torch.zeros_like(pair.b[:, :1]), 1.0)
    task_type = hot.config.raw.get("task_type")
    directory = plan.out / "adapters" / plan.hot
    return write_adapter(directory, {name: zero}, layout, str(plan.out), saved=hot.saved, task_type=task_type)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if the export was written and verified."""
    parser = argparse.ArgumentParser(prog="python -m vlora_sgl.export", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model (safetensors)")
    parser.add_argument("--hot", help="adapter to merge: a directory or NAME=DIR; without it --trace chooses")
    parser.add_argument("--cold", nargs="*", default=[], help="the other adapters: directories or NAME=DIR")
    parser.add_argument("--out", type=Path, required=True, help="where to write the merged base and adapters/")
    parser.add_argument("--compress", type=int, metavar="RANK", help="compress delta adapters to this rank (SVD)")
    parser.add_argument(
        "--exact-ranks", action="store_true", help="one rank per module (rank_pattern), no zero padding"
    )
    parser.add_argument("--trace", type=Path, help="JSONL of requests, to see or choose what to merge")
    parser.add_argument("--samples", type=int, default=16, help="weights to verify at the end")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    args = parser.parse_args(argv)
    try:
        given = list(dict.fromkeys(map(_named, [*([args.hot] if args.hot else []), *args.cold])))
        check_names(given, source="--hot and --cold")
        adapters = dict(given)
        if BASE_DELTA in adapters:
            raise ConfigError(f"{BASE_DELTA!r} names the delta that gives the base back; rename that adapter")
        hot = _named(args.hot)[0] if args.hot else None
        if args.trace:
            hot = _choose(args.trace, adapters, hot, sys.stderr if args.json else sys.stdout)
        if hot is None:
            raise ConfigError("nothing to merge: give --hot, or a --trace in which merging an adapter pays")
        plan = ExportPlan(args.model, hot, adapters, args.out, args.compress, args.exact_ranks, args.samples)
        report = export(plan)
    except VLoraError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"out": str(args.out), "hot": hot, **asdict(report)}, indent=2))
        return 0
    print(f"{args.out}: {hot} merged; verified against PEFT to {report.verified:.2f} of the rounding bound")
    for name, rank in report.ranks.items():
        note = " (changes nothing: the merged adapter's name and heads)" if name == hot else ""
        if name in report.errors:
            note = ", relative error {:.2e}, worst module {:.2e}".format(*report.errors[name])
        print(f"  adapters/{name}: rank {rank}{note}")
    return 0


def _named(argument: str) -> tuple[str, Path]:
    name, separator, path = argument.partition("=")
    if not separator:
        name, path = Path(argument).name, argument
    return name, Path(path)


def _choose(trace: Path, adapters: Mapping[str, Path], hot: str | None, out: TextIO) -> str | None:
    ranks = {name: read_adapter(path).report.max_rank for name, path in adapters.items()}
    choices = rank_choices(read_trace(trace), ranks)
    print("expected extra cost per token over the base linears:", file=out)
    for choice in choices:
        print(f"  merge {choice.hot or 'nothing':20} {choice.cost:7.4f}   ({choice.share:.0%} of tokens)", file=out)
    return hot or choices[0].hot


def _check_mergeable(plan: ExportPlan, hot: AdapterWeights, shards: list[Path], layout: BaseLayout) -> None:
    for name in EMBEDDING_MODULES:
        if name in hot.modules:
            raise ConfigError(f"{plan.hot} adapts {name}, which may be tied and is not merged; serve it as cold")
    found = {part for s in shards for _, _, _, part in targets_in(stored_tensors(s), hot.modules, layout)}
    missing = sorted(set(hot.modules) - found)
    if missing:
        raise ConfigError(f"{plan.model}: no weight for {missing[0]} ({len(missing)} modules of {plan.hot} in all)")


def _check_form(name: str, adapter: AdapterWeights) -> None:
    if adapter.token_rows:
        raise ConfigError(f"adapter {name!r}: trainable_token_indices cannot be exported")
    if (expert := next(filter(is_expert, adapter.modules), None)) is not None:
        raise ConfigError(f"adapter {name!r} has weights for experts ({expert}), which cannot be exported")
    if adapter.form is not None:
        raise ConfigError(
            f"{name} has {adapter.form}: with them neither a delta nor what gives the base back is of low rank; "
            "serve it on the original base"
        )


def _check_invocation(name: str, path: Path) -> None:
    invocation = read_description(path).invocation
    if invocation is not None:
        raise ConfigError(
            f"{name} starts at {invocation!r}: the tokens before that run on the base model, which a merged base is "
            "not; serve it unmerged"
        )


def _state(plan: ExportPlan, hot: AdapterWeights) -> dict[str, object]:
    return {
        "format": FORMAT,
        "model": str(plan.model.resolve()),
        "hot": {"name": plan.hot, "digest": hot.report.digest},
    }


def _begin(plan: ExportPlan, hot: AdapterWeights) -> None:
    """Claims ``out``, or recognises an earlier run of the same merge to go on from."""
    state, path = _state(plan, hot), plan.out / UNFINISHED
    if plan.out.resolve() == plan.model.resolve():
        raise ConfigError("--out must not be the base model's own directory")
    if path.is_file():
        if json.loads(path.read_text()) != state:
            raise ConfigError(f"{plan.out} holds another unfinished export; remove it or choose another --out")
        return
    if plan.out.is_dir() and any(plan.out.iterdir()):
        raise ConfigError(f"{plan.out} is not empty")
    plan.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state, indent=2))


def _merge(plan: ExportPlan, shards: list[Path], hot: AdapterWeights, layout: BaseLayout, progress: bool) -> None:
    total = sum(shard.stat().st_size for shard in shards)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"merging {plan.hot}", disable=not progress) as bar:
        for shard in shards:
            target = plan.out / shard.name
            if not target.is_file():
                merge_shard(shard, target, hot.modules, layout)
            bar.update(shard.stat().st_size)


def _copy_side_files(model: Path, out: Path) -> None:
    for path in model.iterdir():
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES:
            shutil.copyfile(path, out / path.name)


def _copy_heads(adapter: Path, target: Path) -> None:
    for name in _HEAD_FILES:
        if (adapter / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(adapter / name, target / name)


def _finish(plan: ExportPlan, hot: AdapterWeights, report: ExportReport) -> None:
    manifest = {
        **_state(plan, hot),
        "adapters": {name: f"adapters/{name}" for name in report.ranks},
        "ranks": report.ranks,
        "compression_errors": {name: error for name, (error, _) in report.errors.items()},
        "verified": report.verified,
    }
    (plan.out / MANIFEST).write_text(json.dumps(manifest, indent=2))
    (plan.out / UNFINISHED).unlink()


if __name__ == "__main__":
    sys.exit(main())
