"""One run from configuration to adapters and report: load, pack, measure, write."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from vlora_sgl.core import JsonDict
from vlora_sgl.generate.config import DataSet, RunConfig
from vlora_sgl.generate.fusion import (
    Packing,
    fuse_by_search,
    fuse_greedily,
    packing_bound,
    past_the_floors,
)
from vlora_sgl.generate.learner import Learner
from vlora_sgl.generate.ledger import Ledger, Names
from vlora_sgl.generate.report import write_report
from vlora_sgl.generate.sources import LoadedSet
from vlora_sgl.heads.store import load_heads, read_description, save_heads

ADAPTERS = "adapters"


def run(config: RunConfig, datasets: Sequence[LoadedSet]) -> JsonDict:
    """Make the adapters of a configuration and its data, or finish a run that was interrupted.

    Returns:
        the report, as written to ``output/report.json`` (docs/generate.md).
    Raises:
        ConfigError: the output directory is of another run.
    """
    started = time.monotonic()
    learner = Learner(config, datasets)
    specs = [one.spec for one in datasets]
    digest = identity(config, datasets)
    bars = {one.spec.name: one.bar(config.confidence) for one in datasets}
    with learner.process.main_process_first():
        main = learner.process.is_main_process
        ledger = Ledger(_Told(learner, bars), bars, config.output / "ledger.jsonl", digest=digest, write=main)
    repeated = ledger.trainings
    packing: Packing = []
    bound, curves = 0, []
    for group in groups(specs, config.heads):
        packed = pack(group, ledger, config)
        if config.curve and len(group) > 1:
            packed, order = past_the_floors(packed, ledger)
            curves.append(order)
        packing += packed
        bound += packing_bound(group, ledger)
    measured = _measure(packing, datasets, learner, ledger)
    report: JsonDict = {
        "base": config.base,
        "digest": digest,
        "device": str(learner.process.device),
        "confidence": config.confidence,
        "order": config.order,
        "seed": config.seed,
        "heads": config.heads,
        "rehearsal": config.rehearsal,
        "adapters": [{"name": f"adapter-{i}", "datasets": list(s)} for i, s in enumerate(packing, 1)],
        "bound": bound,
        "trainings": ledger.trainings,
        "trainings_resumed": repeated,
        "steps": [{"datasets": list(s), "accuracy": a, "broken": ledger.broken(s)} for s, a in ledger.steps.items()],
        "probes": [{"datasets": list(s), "accuracy": a} for s, a in ledger.probes.items()],
        "curves": curves,
        "datasets": measured,
        "floors_broken": sum(row["accuracy"] < row["floor"] for row in measured),
    }
    if main:
        _write_adapters(packing, learner, report, config.output / ADAPTERS)
        report["seconds"] = round(time.monotonic() - started, 1)
        write_report(report, config.output)
    learner.process.wait_for_everyone()
    return report


def identity(config: RunConfig, datasets: Sequence[LoadedSet]) -> str:
    """What decides the outcome of trainings: configuration and data. A ledger belongs to one."""
    parts = [config.digest, *(one.fingerprint for one in datasets)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def pack(names: Sequence[str], ledger: Ledger, config: RunConfig) -> Packing:
    """Fuse data sets that may share adapters, in the configured order."""
    if config.order == "search":
        extra = 3 * len(names) if config.extra is None else config.extra
        return fuse_by_search(names, ledger, extra, probe=config.probe > 0 and len(names) > 2)
    if config.order == "random":
        names = random.Random(config.seed).sample(names, len(names))
    return fuse_greedily(names, ledger)


def groups(specs: Sequence[DataSet], heads: bool) -> list[list[str]]:
    """Names of the data sets that may share adapters: all, or with heads those of one task type (section 4.2.2)."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        found.setdefault(spec.task if heads else "", []).append(spec.name)
    return list(found.values())


class _Told:
    """A trainer that says what each step gave."""

    def __init__(self, learner: Learner, bars: dict[str, float]) -> None:
        self._learner, self._bars = learner, bars

    def fuse(self, sequence: Names) -> dict[str, float]:
        accuracy = self._learner.fuse(sequence)
        self._tell(sequence, accuracy, held=all(accuracy[name] >= self._bars[name] for name in sequence))
        return accuracy

    def probe(self, names: Names) -> dict[str, float]:
        accuracy = self._learner.probe(names)
        self._tell(names, accuracy, held=None)
        return accuracy

    def _tell(self, names: Names, accuracy: dict[str, float], held: bool | None) -> None:
        if self._learner.process.is_main_process:
            what = {None: "probed", True: "holds", False: "rolled back"}[held]
            shown = ", ".join(f"{name} {accuracy[name]:.3f}/{self._bars[name]:.3f}" for name in names)
            tqdm.write(f"{what}: {' + '.join(names)} (accuracy/needed: {shown})")


def _measure(packing: Packing, datasets: Sequence[LoadedSet], learner: Learner, ledger: Ledger) -> list[JsonDict]:
    """Accuracy of base, adapter and teacher on the test split, which no decision has seen, and what decided."""
    home = {name: (i, sequence) for i, sequence in enumerate(packing, 1) for name in sequence}
    with_adapter: dict[str, float] = {}
    for sequence in tqdm(packing, desc="test", unit="adapter"):
        with_adapter |= learner.measure(sequence, "test")
    return [
        {
            "name": one.spec.name,
            "task": one.spec.task,
            "metric": one.spec.metric,
            "floor": one.spec.floor,
            "adapter": f"adapter-{home[one.spec.name][0]}",
            "examples": {split: len(examples) for split, examples in one.splits.items()},
            "needed": ledger.floors[one.spec.name],
            "validation": ledger.steps[home[one.spec.name][1]][one.spec.name],
            "base": learner.measure_base(one.spec.name, "test"),
            "accuracy": with_adapter[one.spec.name],
            "teacher": learner.measure_teacher(one.spec.name),
        }
        for one in datasets
    ]


def _write_adapters(packing: Packing, learner: Learner, report: JsonDict, out: Path) -> None:
    """Directories that the server loads as they are, each with what was measured of it."""
    shutil.rmtree(out, ignore_errors=True)
    for entry, sequence in zip(report["adapters"], packing, strict=True):
        directory = out / entry["name"]
        shutil.copytree(learner.state(sequence), directory)
        said = read_description(directory)
        width = learner.model.get_output_embeddings().weight.shape[1]
        heads = load_heads(directory, width, description=said).values()
        measured = {
            row["name"]: {"metric": row["metric"], "test": row["accuracy"], "floor": row["floor"]}
            for row in report["datasets"]
            if row["adapter"] == entry["name"]
        }
        save_heads(directory, heads, said.invocation, said.prompt, measured)
