"""Reads what a configuration names into checked splits of examples; all faults are reported at once."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError, MissingDependencyError
from vlora_sgl.generate.config import DataSet, RunConfig, parse_config
from vlora_sgl.generate.datasets import (
    IMAGE_SUFFIXES,
    SPLITS,
    Example,
    Located,
    boxes_of,
    check_images,
    read_image_folder,
    read_rows,
    write_jsonl,
)
from vlora_sgl.generate.floors import bar, examples_needed, independent_examples
from vlora_sgl.generate.processes import processes_of
from vlora_sgl.generate.scores import read_boxes
from vlora_sgl.generate.tasks import box_text
from vlora_sgl.generate.teachers import label_images, load_teacher
from vlora_sgl.images import open_image


@dataclass(frozen=True)
class LoadedSet:
    """A data set, ready to be learnt.

    Attributes:
        spec: as configured.
        splits: examples of train, validation and test.
        labels: the closed set of answers, ``None`` for open ones.
        teacher: its answers about the test images, ``None`` without one.
    """

    spec: DataSet
    splits: Mapping[str, tuple[Example, ...]]
    labels: tuple[str, ...] | None
    teacher: tuple[str, ...] | None = None

    @property
    def evidence(self) -> float:
        """How many independent examples the validation split counts as.

        Its size; for F1, which counts objects, that of images which bring as many as they do alike.
        """
        examples = self.splits["validation"]
        if self.spec.metric != "f1":
            return len(examples)
        return independent_examples([max(1, len(read_boxes(e.answer))) for e in examples])

    def bar(self, confidence: float) -> float:
        """Least validation accuracy that shows the floor with ``confidence``."""
        return bar(self.spec.floor, self.evidence, confidence)

    @property
    def fingerprint(self) -> str:
        """Identity of what is learnt and measured; images count by their path and size."""
        state = hashlib.sha256()
        for split in SPLITS:
            for example in self.splits[split]:
                sizes = [path.stat().st_size for path in example.images]
                state.update(
                    repr((split, [*map(str, example.images)], sizes, example.question, example.answer)).encode()
                )
        return state.hexdigest()[:16]


def load_run(path: str | Path) -> tuple[RunConfig, list[LoadedSet]]:
    """Read a configuration and its data. Nothing is trained before this returns.

    Raises:
        ConfigError: everything that is wrong with the file or any data set, one fault a line, with file and line.
    """
    config, faults = parse_config(path)
    return config, load_datasets(config, faults)


def load_datasets(config: RunConfig, faults: Sequence[str] = ()) -> list[LoadedSet]:
    """Read, check and where needed label every data set of a run.

    Args:
        config: the run.
        faults: what is known to be wrong; then the data are checked, and all is raised.
    Raises:
        ConfigError: every fault, one a line.
    """
    # Data that are copied and teachers' answers are written once; the other processes find them.
    with processes_of(config).main_process_first():
        return _load_all(config, list(faults))


def _load_all(config: RunConfig, faults: list[str]) -> list[LoadedSet]:
    loaded: list[LoadedSet] = []
    for spec in config.datasets:
        before = len(faults)
        rows = _read(spec, config, faults)
        labels = _check(spec, rows, config.heads, faults, whole=len(faults) == before)
        one = LoadedSet(spec, {s: tuple(e for _, e in found) for s, found in rows.items()}, labels)
        if len(faults) == before:
            _check_evidence(one, config.confidence, faults)
        loaded.append(one)
    if not faults:  # teachers come last: they may be slow, and a fault elsewhere should not wait for them
        loaded = [_taught(one, config) if one.spec.teacher else one for one in loaded]
        for one in loaded:
            if one.spec.teacher:
                said = {s: [(str(e.images[0]), e) for e in examples] for s, examples in one.splits.items()}
                _check(replace(one.spec, labels=one.labels), said, config.heads, faults, whole=True)
                _check_evidence(one, config.confidence, faults)
    if faults:
        raise ConfigError("\n".join(faults))
    return loaded


def question_of(spec: DataSet, row: Mapping[str, object]) -> str:
    """What is asked about a row's images: its own question, its target in the task's prompt, or the data set's.

    Raises:
        ValueError: none of them is given.
    """
    if "question" in row:
        return str(row["question"])
    if "target" in row:
        return spec.kind.prompt(str(row["target"]))
    if spec.question is not None:
        return spec.question
    if spec.kind.needs is not None and spec.target is None:
        raise ValueError(f"no question: {spec.task} needs a {spec.kind.needs} in the row or the data set")
    return spec.kind.prompt(spec.target or "")


def _read(spec: DataSet, config: RunConfig, faults: list[str]) -> dict[str, list[Located]]:
    """The rows of each split, as far as they can be read."""
    before = len(faults)
    rng = random.Random(f"{config.seed} {spec.name}")
    rows: dict[str, list[Located]] = {}
    if "train" in spec.data:
        for split in SPLITS:
            if split in spec.data:
                rows[split] = _read_rows(spec, Path(spec.data[split]), faults)
    elif "folder" in spec.data:
        try:
            rows["train"] = [
                (str(e.images[0]), e) for e in read_image_folder(spec.data["folder"], question_of(spec, {}))
            ]
        except ConfigError as error:
            faults.append(str(error))
        for where, example in rows.get("train", []):
            check_images(where, example.images, faults)
    elif "huggingface" in spec.data:
        rows = _read_huggingface(spec, config.output / "data" / spec.name, faults)
    else:
        folder = Path(spec.data["images"])
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        question = question_of(spec, {})
        rows["train"] = [(str(path), Example((path,), question, "")) for path in found]
        for where, example in rows["train"]:
            check_images(where, example.images, faults)
        for split in SPLITS[1:]:
            if split in spec.data:
                rows[split] = _read_rows(spec, Path(spec.data[split]), faults)
    if len(faults) > before:
        return rows
    _split_off(spec, rows, rng, faults)
    for split in SPLITS:
        if not rows[split]:
            faults.append(f"{spec.where}: {spec.name}: the {split} split is empty")
    return rows


def _split_off(spec: DataSet, rows: dict[str, list[Located]], rng: random.Random, faults: list[str]) -> None:
    """Make the splits that are missing out of the training split, label by label, at random.

    A label has an example in each split, or is a fault: what no split has cannot be learned, or not be measured.
    """
    shares = dict(zip(SPLITS, spec.split, strict=True))
    missing = [split for split in SPLITS[1:] if split not in rows]
    if not missing:
        return
    whole = sum(shares[split] for split in ("train", *missing))
    groups: dict[str, list[Located]] = {}
    for located in rows["train"]:
        groups.setdefault(located[1].answer if spec.kind.closed else "", []).append(located)
    rows.update({split: [] for split in ("train", *missing)})
    for label, group in groups.items():
        if label and len(group) <= len(missing):
            splits = " and ".join(", ".join(("train", *missing)).rsplit(", ", 1))
            faults.append(
                f"{spec.where}: {spec.name}: label {label!r} has {len(group)}; {splits} need an example each"
            )
        rng.shuffle(group)
        start = 0
        for split in missing:
            take = max(round(len(group) * shares[split] / whole), int(bool(label and shares[split])))
            rows[split] += group[start : start + take]
            start += take
        rows["train"] += group[start:]


def _read_rows(spec: DataSet, path: Path, faults: list[str]) -> list[Located]:
    """Rows of a JSONL file; its faults are added with their lines."""
    before = len(faults)
    found = read_rows(path, partial(_example, spec), faults)
    if not found and len(faults) == before:
        faults.append(f"{path}:1: {spec.name}: the split is empty")
    return found


def _example(spec: DataSet, row: JsonDict, images: tuple[Path, ...]) -> Example:
    boxes = boxes_of(row)
    answers = [str(answer) for answer in row.get("answers", ())]
    if "answer" in row:
        answers.insert(0, str(row["answer"]))
    elif boxes:
        answers.insert(0, " ".join(box_text(label, box) for label, box in boxes))
    if not answers or not answers[0].strip():
        raise ValueError("the answer is empty" if "answer" in row else "neither answer, answers nor boxes")
    # The answer to learn is the one that most annotators gave; ties go to the first.
    best = max(answers, key=answers.count)
    references = tuple(answers[1:] if "answer" in row and "answers" in row else answers)
    return Example(
        images, question_of(spec, row), best, boxes=boxes, references=references if len(answers) > 1 else ()
    )


def _check(
    spec: DataSet, rows: Mapping[str, Sequence[Located]], heads: bool, faults: list[str], whole: bool
) -> tuple[str, ...] | None:
    """Check answers against the closed set of labels, and return that set.

    Args:
        whole: all rows could be read; if not, only labels that the configuration gives are a set to check against.
    """
    if spec.labels is None and not (spec.kind.closed and whole):
        return None
    labels = spec.labels or tuple(sorted({e.answer for _, e in rows["train"] if e.answer}))
    for located in rows.values():
        for where, example in located:
            if labels and example.answer and example.answer not in labels:
                shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
                faults.append(f"{where}: {spec.name}: the answer {example.answer!r} is outside the labels {shown}")
            elif heads and spec.kind.head == "count" and example.answer and not example.answer.isdecimal():
                faults.append(f"{where}: {spec.name}: a counting head needs numbers, got {example.answer!r}")
    return labels or None


def _check_evidence(one: LoadedSet, confidence: float, faults: list[str]) -> None:
    """A floor that the validation split cannot show, however good the adapter, is a fault."""
    spec = one.spec
    if one.bar(confidence) > 1:
        faults.append(
            f"{spec.where}: {spec.name}: no accuracy on {one.evidence:.4g} validation examples shows the floor "
            f"{spec.floor:g} with confidence {confidence:g}: expected at least "
            f"{examples_needed(spec.floor, confidence)} examples, a lower floor or a lower confidence"
        )


def _read_huggingface(spec: DataSet, out: Path, faults: list[str]) -> dict[str, list[Located]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", f"{spec.where}: reading {spec.data['huggingface']}") from error
    directory = spec.data["huggingface"]
    try:
        stored = datasets.load_from_disk(directory)
    except (FileNotFoundError, ValueError, OSError) as error:
        faults.append(f"{spec.where}: {directory} is no data set on disk: {error}")
        return {}
    parts = dict(stored) if isinstance(stored, datasets.DatasetDict) else {"train": stored}
    names = {key: spec.data.get(key, default) for key, default in (("image", "image"), ("answer", "label"))}
    rows: dict[str, list[Located]] = {}
    for split, part in parts.items():
        if split not in SPLITS:
            continue
        absent = [column for column in names.values() if column not in part.column_names]
        if absent:
            faults.append(
                f"{spec.where}: {directory}: {split} has no column {', '.join(absent)}; it has {part.column_names}"
            )
            continue
        feature = part.features[names["answer"]]
        say: Callable[[int], str] = feature.int2str if hasattr(feature, "int2str") else str
        asked = spec.data.get("question")
        pictures = []
        for number, row in enumerate(part):
            try:
                question = question_of(spec, {"question": row[asked]} if asked else {})
                pictures.append(([open_image(row[names["image"]])], question, say(row[names["answer"]])))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                faults.append(f"{directory}: row {number} of {split}: {error}")
        path = out / f"{split}.jsonl"
        write_jsonl(path, pictures)
        rows[split] = _read_rows(spec, path, faults)
    if "train" not in parts:
        faults.append(f"{spec.where}: {directory} has no train split; it has {', '.join(parts)}")
    return rows


def _taught(one: LoadedSet, config: RunConfig) -> LoadedSet:
    """Put the teacher's answers where there are none, and note what it says about the test images."""
    spec = one.spec
    assert spec.teacher is not None
    store = config.output / "teacher" / f"{spec.name}.json"
    images = [e.images[0] for split in SPLITS for e in one.splits[split]]
    key = [*map(str, images), json.dumps(dict(spec.teacher), sort_keys=True)]
    known = json.loads(store.read_text()) if store.exists() else {}
    if known.get("key") != key:
        question = one.splits["train"][0].question
        teacher = load_teacher(dict(spec.teacher), spec.kind, question)
        bar = tqdm(images, desc=f"teacher of {spec.name}", unit="image")
        answers = label_images(lambda batch: (bar.update(len(batch)), teacher(batch))[1], images, spec.kind)
        bar.close()
        known = {"key": key, "answers": answers}
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(known))
    said = iter(known["answers"])
    answers_of = {split: [next(said) for _ in one.splits[split]] for split in SPLITS}
    splits = {
        split: tuple(
            replace(e, answer=e.answer or answer)
            for e, answer in zip(one.splits[split], answers_of[split], strict=True)
        )
        for split in SPLITS
    }
    labels = one.labels
    if spec.kind.closed and spec.labels is None:
        labels = tuple(sorted({e.answer for e in splits["train"]} | set(answers_of["test"])))
    return LoadedSet(spec, splits, labels, tuple(answers_of["test"]))
