"""The configuration of a run: a YAML file read into frozen dataclasses; its faults are reported at once, by line.

Pydantic checks every setting against the type that its field is declared with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError, ValidationInfo

from vlora_sgl.errors import ConfigError
from vlora_sgl.generate.datasets import SPLITS
from vlora_sgl.generate.tasks import TASKS, TaskKind
from vlora_sgl.generate.trainer import LoraSettings

ORDERS = ("given", "random", "search")
DEVICES = ("auto", "cpu", "cuda")


def _must(rule: str, holds: Callable[[Any], Any]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"must {rule}")
        return value

    return AfterValidator(check)


def _one_of(names: Collection[str]) -> AfterValidator:
    return _must(f"be one of {', '.join(names)}", names.__contains__)


def _shares(value: Any) -> Any:
    shares = value if isinstance(value, tuple) else ()
    numbers = [x for x in shares if isinstance(x, int | float) and x > 0]
    if not (len(shares) == len(numbers) == 3 and abs(sum(numbers) - 1) < 1e-6):
        raise ValueError("must be three shares above 0 that sum to 1")
    return value


def _resolved(value: str, info: ValidationInfo) -> Path:
    """Where a path leads from the file's directory, which is the validation's context."""
    assert isinstance(info.context, Path)
    return (info.context / value).resolve()


def _path(what: str, there: Callable[[Path], bool], word: bool = False) -> AfterValidator:
    """A path relative to the file; with ``word``, a plain word stays what it is: the teacher's library knows it."""

    def check(value: str, info: ValidationInfo) -> str:
        found = _resolved(value, info)
        if word and "/" not in value and "." not in value:
            return value
        if not there(found):
            raise FileNotFoundError(f"no such {what}: {found}")
        return str(found)

    return AfterValidator(check)


def _function(value: str, info: ValidationInfo) -> str:
    module, _, function = value.rpartition(":")
    if not module or not function.isidentifier():
        raise ValueError("must be MODULE:FUNCTION or FILE.py:FUNCTION")
    if module.endswith(".py"):
        module = str(_resolved(module, info))
        if not Path(module).is_file():
            raise FileNotFoundError(f"no such file: {module}")
    return f"{module}:{function}"


_NAME = _must("be letters, digits, _ and -", re.compile(r"[A-Za-z0-9_-]+").fullmatch)
_TEXTS = BeforeValidator(lambda value: tuple(map(str, value)) if isinstance(value, tuple) else value)
_DISTINCT = _must("be distinct", lambda names: len(set(names)) == len(names))
_SHARES = BeforeValidator(_shares)
_FILE = Annotated[str, _path("file", Path.is_file)]
_DIRECTORY = Annotated[str, _path("directory", Path.is_dir)]
_WEIGHTS = Annotated[str, _path("file", Path.exists, word=True)]
Share = Annotated[float, _must("lie in [0, 1]", lambda share: 0 <= share <= 1)]

_TYPES = {"tuple": "list", "string": "str", "path": "str", "dict": "mapping"}
_IMAGES = {"labels": Any, "size": Any, "mean": Any, "std": Any}
SOURCES: dict[str, dict[str, Any]] = {
    "splits": {"splits": _DIRECTORY},
    "train": dict.fromkeys(SPLITS, _FILE),
    "folder": {"folder": _DIRECTORY},
    "huggingface": {"huggingface": _DIRECTORY, "image": str, "question": str, "answer": str},
    "images": {"images": _DIRECTORY, **dict.fromkeys(SPLITS[1:], _FILE)},
}
"""Where data may come from, and the settings of such ``data``."""
TEACHERS: dict[str, dict[str, Any]] = {
    "python": {"python": Annotated[str, AfterValidator(_function)]},
    "onnx": {"onnx": _WEIGHTS, **_IMAGES},
    "pipeline": {"pipeline": str, "model": _WEIGHTS},
    "torchvision": {"torchvision": str, "weights": _WEIGHTS, **_IMAGES},
}
"""Kinds of teachers, and their settings."""


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

    name: Annotated[str, _NAME]
    task: Annotated[str, _one_of(TASKS)]
    floor: Annotated[float, _must("lie in (0, 1]", lambda floor: 0 < floor <= 1)]
    data: Mapping[str, str]
    metric: str = ""
    question: str | None = None
    target: str | None = None
    labels: Annotated[tuple[str, ...], _TEXTS, _DISTINCT] | None = None
    split: Annotated[tuple[float, float, float], _SHARES] = (0.7, 0.15, 0.15)
    teacher: Mapping[str, Any] | None = None
    steps: Annotated[int, _must("be at least 1", lambda steps: steps >= 1)] | None = None
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.metric or self.kind.metrics[0])

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
    output: Annotated[Path, Strict(False)]
    datasets: tuple[DataSet, ...]
    lora: LoraSettings = field(default_factory=LoraSettings)
    confidence: Annotated[float, _must("lie in [0.5, 1)", lambda confidence: 0.5 <= confidence < 1)] = 0.95
    order: Annotated[str, _one_of(ORDERS)] = "search"
    extra: int | None = None
    probe: Share = 0.2
    rehearsal: Share = 0.0
    heads: bool = False
    curve: bool = False
    device: Annotated[str, _one_of(DEVICES)] = "auto"
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

    def values(self, section: _Section, types: Mapping[str, Any], what: str) -> dict[str, Any]:
        """The settings of a section that fit their types; a wrong or unknown one is a fault and left out."""
        values = {}
        for key, given in section.items():
            if key not in types:
                self.fault(section.lines[key], f"{what} has no setting {key!r}; it has {', '.join(types)}")
            elif given is not None:
                check = TypeAdapter(types[key], config=ConfigDict(strict=True))
                try:
                    tuples = tuple(given) if isinstance(given, list) else given
                    values[key] = check.validate_python(tuples, context=self.path.parent)
                except FileNotFoundError as error:
                    self.fault(section.lines[key], f"{key}: {error}")
                except ValidationError as error:
                    self.fault(section.lines[key], f"{key} {_rule(error)}, got {_shown(given)}")
        return values

    def fields(self, section: _Section, kind: type, what: str, **nested: Any) -> dict[str, Any]:
        """The same for the fields of a dataclass, of which some have another type in the file or None, if they are no
        settings; a missing one is a fault, too."""
        types = get_type_hints(kind, include_extras=True) | nested
        for item in dataclasses.fields(kind):
            if item.default is item.default_factory is MISSING and section.get(item.name) is None:
                self.fault(section.line, f"{item.name} is missing")
        return self.values(section, {name: hint for name, hint in types.items() if hint is not None}, what)

    def variant(self, section: _Section, key: str, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        """A mapping that must be one of ``kinds``, and have that one's settings only; ``None`` if it is faulty."""
        given, before = [kind for kind in kinds if kind in section[key]], len(self.faults)
        if len(given) != 1:
            self.fault(section.lines[key], f"{key} needs exactly one of {', '.join(kinds)}")
            return None
        values = self.values(section[key], kinds[given[0]], key)
        return values if len(self.faults) == before else None

    def run(self, tree: _Section) -> RunConfig:
        values = self.fields(tree, RunConfig, "a run", lora=dict, datasets=tuple)
        datasets: list[DataSet | None] = []
        seen: dict[str, str] = {}
        for number, entry in enumerate(values.pop("datasets", ()), 1):
            if not isinstance(entry, _Section):
                self.fault(tree.lines["datasets"], f"data set {number} must be a mapping, got {entry!r}")
                continue
            datasets.append(self.dataset(entry, values.get("heads", False)))
            name = entry.get("name")
            if name in seen:
                self.fault(entry.line, f"the name {name!r} is taken at {seen[name]}")
            elif isinstance(name, str):
                seen[name] = f"{self.path}:{entry.line}"
        if tree.get("datasets") == []:
            self.fault(tree.lines["datasets"], "there is no data set")
        given = base = values.pop("base", "tiny")
        if base != "tiny" and ("/" in base or base.startswith(".")):
            base = str((self.path.parent / base).resolve())
            if not Path(base).is_dir() and (Path(given).is_absolute() or given.startswith(".")):
                self.fault(tree.lines["base"], f"base: no such directory: {base}")
        values["lora"] = self.lora(tree["lora"]) if "lora" in values else LoraSettings()
        values["output"] = (self.path.parent / values.get("output", ".")).resolve()
        return RunConfig(base=base, datasets=tuple(item for item in datasets if item is not None), **values)

    def lora(self, section: _Section) -> LoraSettings:
        try:
            return LoraSettings(**self.fields(section, LoraSettings, "lora", seed=None))
        except ConfigError as error:
            self.fault(section.lines["activate"], str(error))
            return LoraSettings()

    def dataset(self, section: _Section, heads: bool) -> DataSet | None:
        values = self.fields(section, DataSet, "a data set", where=None, data=dict, teacher=dict)
        kind = TASKS.get(values.get("task", ""))
        if kind is not None:
            metric = values.get("metric", kind.metrics[0])
            if metric not in kind.metrics:
                fits = ", ".join(kind.metrics)
                self.fault(section.lines["metric"], f"metric {metric!r} does not measure {kind.name}; {fits} would")
            if heads and kind.head is None:
                self.fault(section.lines["task"], f"no head answers {kind.name}: set heads to false")
            if heads and metric != "top1":
                self.fault(section.line, f"a head's answers are measured by top1, not by {metric}")
        data = self.data(section) if "data" in values else None
        if data is not None and ("teacher" in section) != ("images" in data):
            self.fault(section.line, "a teacher labels data.images: give both or neither")
        teacher = self.variant(section, "teacher", TEACHERS) if "teacher" in values else None
        asked = "question" in section or "target" in section
        if data and kind and kind.needs and not asked and {"folder", "images"} & data.keys():
            self.fault(section.line, f"{kind.name} on images without rows needs a {kind.needs}")
        name = section.get("name")
        if data is None or kind is None or not isinstance(name, str) or (teacher is None and "teacher" in section):
            return None  # its data cannot be checked either
        given = {"name": name, "data": data, "teacher": teacher, "where": f"{self.path}:{section.line}"}
        return DataSet(**{"floor": 1.0} | values | given)

    def data(self, section: _Section) -> dict[str, str] | None:
        data = self.variant(section, "data", SOURCES)
        if data is None or "splits" not in data:
            return data
        files = {split: Path(data["splits"]) / f"{split}.jsonl" for split in SPLITS}
        if not files["train"].is_file():
            self.fault(section["data"].lines["splits"], f"splits: {data['splits']} has no train.jsonl")
            return None
        return {split: str(path) for split, path in files.items() if path.is_file()}


def _rule(error: ValidationError) -> str:
    """What a setting broke, in our words."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "greater_than":
        return f"must be above {first['ctx']['gt']:g}"
    kind = first["type"].removesuffix("_type")
    return f"must be a {_TYPES.get(kind, kind)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
