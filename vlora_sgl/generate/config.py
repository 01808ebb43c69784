"""The configuration of a run: a YAML file read into frozen dataclasses; its faults are reported at once, by line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.datasets import SPLITS
from vlora_sgl.generate.tasks import TASKS, TaskKind
from vlora_sgl.generate.trainer import LoraSettings

ORDERS = ("given", "random", "search")
SOURCES = ("splits", "train", "folder", "huggingface", "images")
TEACHERS = ("python", "onnx", "pipeline", "torchvision")


@dataclass(frozen=True)
class DataSet:
    """One data set of one task, as configured.

    Attributes:
        name: of the data set; letters, digits, ``_`` and ``-``.
        task: kind of task, a key of ``TASKS``.
        floor: least accuracy on new data that every adapter which learnt this data set must keep, in (0, 1].
        metric: how accuracy is measured; by default the task's own.
        question: what is asked of every image, where rows bring no question.
        target: what to count, detect or find, for the task's prompt.
        labels: the closed set of answers; by default those of the training split.
        data: where the data lie (docs/generate.md).
        split: shares of train, validation and test, for sources that are not split.
        teacher: the model that labels ``data.images``.
        steps: optimizer steps for this data set, in place of the run's.
        where: ``file:line`` of its entry, for messages.
    """

    name: str
    task: str
    floor: float
    metric: str
    data: Mapping[str, str]
    question: str | None = None
    target: str | None = None
    labels: tuple[str, ...] | None = None
    split: tuple[float, float, float] = (0.7, 0.15, 0.15)
    teacher: Mapping[str, Any] | None = None
    steps: int | None = None
    where: str = field(default="", compare=False)

    @property
    def kind(self) -> TaskKind:
        """The task's kind."""
        return TASKS[self.task]


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        base: directory (or hub name) of the base model; ``tiny`` is the embedded one.
        output: where adapters, report and ledger go.
        datasets: what to learn.
        lora: how an adapter learns one of them.
        confidence: that a floor counts as kept with, in [0.5, 1): a one-sided lower bound of the validation accuracy
            must reach it (``floors.bar``). With 0.5 the accuracy itself must.
        order: ``given`` or ``random`` for the paper's fusion in that order, ``search`` for ours.
        extra: more trainings that the search may take; by default three per data set.
        probe: share of a full training that a probing run of the search takes; 0 for no probing.
        rehearsal: share of each earlier data set that is trained again with the next one.
        heads: train a vision head with every adapter; only data sets of one task type share an adapter then.
        curve: also train on past the floors, to show where fusion starts to hurt.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of everything random.
    """

    base: str
    output: Path
    datasets: tuple[DataSet, ...]
    lora: LoraSettings = field(default_factory=LoraSettings)
    confidence: float = 0.95
    order: str = "search"
    extra: int | None = None
    probe: float = 0.2
    rehearsal: float = 0.0
    heads: bool = False
    curve: bool = False
    device: str = "auto"
    seed: int = 0

    @property
    def digest(self) -> str:
        """Identity of everything that decides what a training gives.

        Floors, their confidence and orders only decide which trainings are made.
        """
        values = dataclasses.asdict(self)
        for name in ("output", "device", "curve", "extra", "order", "confidence"):
            values.pop(name)
        for entry in values["datasets"]:
            entry.pop("where")
            entry.pop("floor")
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_config(path: str | Path) -> RunConfig:
    """Read a run's configuration; paths in it are relative to the file.

    Raises:
        ConfigError: every fault of the file, one a line, each as ``file:line: what is wrong``.
    """
    config, faults = parse_config(path)
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def parse_config(path: str | Path) -> tuple[RunConfig, list[str]]:
    """The configuration as far as it can be read, and its faults; with faults, it is for checking its data only.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(tree, _Section):
        raise ConfigError(f"{path}:1: expected a mapping with base, output and datasets")
    reader = _Reader(path)
    return reader.run(tree), reader.faults


class _Section(dict[str, Any]):
    """A YAML mapping that knows the lines of itself and of its keys."""

    line: int
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    pass


def _section(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Any:
    section = _Section()
    section.line, section.lines = node.start_mark.line + 1, {}
    yield section
    for key, value in node.value:
        name = str(loader.construct_object(key, deep=True))
        section[name] = loader.construct_object(value, deep=True)
        section.lines[name] = key.start_mark.line + 1


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _section)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []

    def fault(self, line: int, message: str) -> None:
        self.faults.append(f"{self.path}:{line}: {message}")

    def get(
        self, section: _Section, key: str, kind: type | tuple[type, ...], default: Any = dataclasses.MISSING
    ) -> Any:
        """A value of the right type; a missing or mistyped one is a fault, and ``None`` comes back."""
        if key not in section or section[key] is None:
            if default is dataclasses.MISSING:
                self.fault(section.line, f"{key} is missing")
                return None
            return default
        value = section[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("mapping" if k is dict else k.__name__ for k in kinds)
            self.fault(section.lines[key], f"{key} must be a {wanted}, got {value!r}")
            return None
        return value

    def within(
        self, section: _Section, key: str, value: float | None, low: float, high: float, ends: str = "[]"
    ) -> float | None:
        """The value; one outside the interval is a fault, and ``None`` comes back. Round ``ends`` lie outside."""
        closed = [end for end, bracket in ((low, "["), (high, "]")) if bracket in ends]
        if value is None or low < value < high or value in closed:
            return value
        interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
        self.fault(section.lines.get(key, section.line), f"{key} must lie in {interval}, got {value:g}")
        return None

    def known(self, section: _Section, keys: Sequence[str], what: str) -> None:
        for key in section:
            if key not in keys:
                self.fault(section.lines[key], f"{what} has no setting {key!r}; it has {', '.join(keys)}")

    def one_of(self, section: _Section, key: str, value: str | None, known: Sequence[str]) -> None:
        if value is not None and value not in known:
            self.fault(section.lines.get(key, section.line), f"{key} must be one of {', '.join(known)}, got {value!r}")

    def run(self, tree: _Section) -> RunConfig:
        self.known(tree, [f.name for f in dataclasses.fields(RunConfig)], "a run")
        base, output = self.get(tree, "base", str), self.get(tree, "output", str)
        order = self.get(tree, "order", str, "search")
        self.one_of(tree, "order", order, ORDERS)
        device = self.get(tree, "device", str, "auto")
        self.one_of(tree, "device", device, ("auto", "cpu", "cuda"))
        probe, rehearsal = self.get(tree, "probe", float, 0.2), self.get(tree, "rehearsal", float, 0.0)
        self.within(tree, "probe", probe, 0, 1)
        self.within(tree, "rehearsal", rehearsal, 0, 1)
        confidence = self.get(tree, "confidence", float, RunConfig.confidence)
        confidence = self.within(tree, "confidence", confidence, 0.5, 1, ends="[)")
        extra = self.get(tree, "extra", int, None)
        heads, curve = self.get(tree, "heads", bool, False), self.get(tree, "curve", bool, False)
        seed = self.get(tree, "seed", int, 0)
        lora = self.lora(self.get(tree, "lora", dict, None))
        entries = self.get(tree, "datasets", list)
        datasets: list[DataSet | None] = []
        seen: dict[str, str] = {}
        for number, entry in enumerate(entries or [], 1):
            if not isinstance(entry, _Section):
                self.fault(tree.lines["datasets"], f"data set {number} must be a mapping, got {entry!r}")
                continue
            item = self.dataset(entry, heads)
            datasets.append(item)
            name = entry.get("name")
            if name in seen:
                self.fault(entry.line, f"the name {name!r} is taken at {seen[name]}")
            elif isinstance(name, str):
                seen[name] = f"{self.path}:{entry.line}"
        if entries is not None and not entries:
            self.fault(tree.lines["datasets"], "there is no data set")
        if base is not None and base != "tiny" and ("/" in base or base.startswith(".")):
            base = str(self.resolve(base))
            if not Path(base).is_dir() and Path(tree["base"]).is_absolute() | tree["base"].startswith("."):
                self.fault(tree.lines["base"], f"base: no such directory: {base}")
        return RunConfig(
            base=base or "tiny",
            output=self.resolve(output or "."),
            datasets=tuple(item for item in datasets if item is not None),
            lora=lora,
            confidence=confidence or RunConfig.confidence,
            order=order,
            extra=extra,
            probe=probe,
            rehearsal=rehearsal,
            heads=heads,
            curve=curve,
            device=device,
            seed=seed,
        )

    def lora(self, section: _Section | None) -> LoraSettings:
        if section is None:
            return LoraSettings()
        fields = {f.name: f for f in dataclasses.fields(LoraSettings) if f.name != "seed"}
        self.known(section, list(fields), "lora")
        values: dict[str, Any] = {}
        for name in fields.keys() & section.keys():
            default = fields[name].default
            kind = {"targets": list, "activate": str}.get(name, type(default))
            value = self.get(section, name, kind)
            if name in ("rank", "alpha", "batch_size", "learning_rate") and value is not None and value <= 0:
                self.fault(section.lines[name], f"{name} must be above 0, got {value:g}")
            values[name] = tuple(value) if name == "targets" and value is not None else value
        if "activate" in values:
            self.one_of(section, "activate", values["activate"], ("after_image",))
        return LoraSettings() if self.faults else LoraSettings(**values)

    def dataset(self, section: _Section, heads: bool | None) -> DataSet | None:
        self.known(section, [f.name for f in dataclasses.fields(DataSet) if f.name != "where"], "a data set")
        name = self.get(section, "name", str)
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            self.fault(section.lines["name"], f"a name is letters, digits, _ and -; got {name!r}")
        task = self.get(section, "task", str)
        self.one_of(section, "task", task, list(TASKS))
        kind = TASKS.get(task or "")
        floor = self.within(section, "floor", self.get(section, "floor", float), 0, 1, ends="(]")
        metric = self.get(section, "metric", str, kind.metrics[0] if kind else "")
        if kind is not None:
            if metric is not None and metric not in kind.metrics:
                fits = ", ".join(kind.metrics)
                self.fault(section.lines["metric"], f"metric {metric!r} does not measure {task}; {fits} would")
            if heads and kind.head is None:
                self.fault(section.lines["task"], f"no head answers {task}: set heads to false")
            if heads and metric not in (None, "top1"):
                self.fault(section.line, f"a head's answers are measured by top1, not by {metric}")
        labels = self.get(section, "labels", list, None)
        if labels is not None and len({str(label) for label in labels}) != len(labels):
            self.fault(section.lines["labels"], "labels must be distinct")
        split = self.get(section, "split", list, [0.7, 0.15, 0.15])
        numbers = [x for x in split or [] if isinstance(x, int | float) and x > 0]
        if split is not None and (len(split) != 3 or len(numbers) != 3 or abs(sum(numbers) - 1) > 1e-6):
            self.fault(section.lines["split"], f"split must be three shares above 0 that sum to 1, got {split!r}")
        data = self.data(section)
        teacher = self.teacher(section, data)
        steps = self.get(section, "steps", int, None)
        if steps is not None and steps < 1:
            self.fault(section.lines["steps"], f"steps must be at least 1, got {steps}")
        question, target = self.get(section, "question", str, None), self.get(section, "target", str, None)
        if kind is not None and data is not None and not ("question" in section or "target" in section):
            unlabelled = bool({"folder", "images"} & data.keys())
            if kind.needs and unlabelled:
                self.fault(section.line, f"{task} on images without rows needs a {kind.needs}")
        if data is None or kind is None or not isinstance(name, str) or (teacher is None and "teacher" in section):
            return None  # its data cannot be checked either
        return DataSet(
            name=name,
            task=task,
            floor=floor or 1.0,
            metric=metric or kind.metrics[0],
            data=data,
            question=question,
            target=target,
            labels=tuple(str(label) for label in labels) if labels is not None else None,
            split=(numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else DataSet.split,
            teacher=teacher,
            steps=steps,
            where=f"{self.path}:{section.line}",
        )

    def data(self, section: _Section) -> dict[str, str] | None:
        data = self.get(section, "data", dict)
        if data is None:
            return None
        sources = [source for source in SOURCES if source in data]
        if len(sources) != 1:
            self.fault(section.lines["data"], f"data needs exactly one of {', '.join(SOURCES)}")
            return None
        allowed = {
            "splits": ["splits"],
            "train": ["train", "validation", "test"],
            "folder": ["folder"],
            "huggingface": ["huggingface", "image", "question", "answer"],
            "images": ["images", "validation", "test"],
        }[sources[0]]
        self.known(data, allowed, "data")
        result, whole = {}, True
        for key in allowed:
            value = self.get(data, key, str, None)
            if value is None:
                continue
            if key in ("image", "question", "answer"):
                result[key] = value
                continue
            found = self.resolve(value)
            if not (found.is_file() if key in SPLITS else found.is_dir()):
                self.fault(data.lines[key], f"{key}: no such {'file' if key in SPLITS else 'directory'}: {found}")
                whole = False
            result[key] = str(found)
        if not whole:
            return None
        if "splits" in result:
            found = Path(result["splits"])
            files = {split: found / f"{split}.jsonl" for split in SPLITS}
            if found.is_dir() and not files["train"].is_file():
                self.fault(data.lines["splits"], f"splits: {found} has no train.jsonl")
                return None
            return {split: str(path) for split, path in files.items() if path.is_file()}
        return result

    def teacher(self, section: _Section, data: Mapping[str, str] | None) -> dict[str, Any] | None:
        teacher = self.get(section, "teacher", dict, None)
        if data is not None and (teacher is not None) != ("images" in data):
            self.fault(section.line, "a teacher labels data.images: give both or neither")
        if teacher is None:
            return None
        kinds = [kind for kind in TEACHERS if kind in teacher]
        if len(kinds) != 1:
            self.fault(section.lines["teacher"], f"a teacher is exactly one of {', '.join(TEACHERS)}")
            return None
        kind = kinds[0]
        self.known(
            teacher,
            {
                "python": ["python"],
                "onnx": ["onnx", "labels", "size", "mean", "std"],
                "pipeline": ["pipeline", "model"],
                "torchvision": ["torchvision", "weights", "labels", "size", "mean", "std"],
            }[kind],
            f"a {kind} teacher",
        )
        result = dict(teacher)
        for key in ("onnx", "weights", "model"):
            if key in result and ("/" in str(result[key]) or "." in str(result[key])):
                result[key] = str(self.resolve(str(result[key])))
                if not Path(result[key]).exists():
                    self.fault(teacher.lines[key], f"{key}: no such file: {result[key]}")
        if kind == "python":
            module, _, function = str(result["python"]).rpartition(":")
            if not module or not function.isidentifier():
                self.fault(
                    teacher.lines["python"],
                    f"python must be MODULE:FUNCTION or FILE.py:FUNCTION, got {result['python']!r}",
                )
            elif module.endswith(".py"):
                if not self.resolve(module).is_file():
                    self.fault(teacher.lines["python"], f"python: no such file: {self.resolve(module)}")
                result["python"] = f"{self.resolve(module)}:{function}"
        return result

    def resolve(self, value: str) -> Path:
        return (self.path.parent / value).resolve()
