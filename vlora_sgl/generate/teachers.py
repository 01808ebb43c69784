"""Small models as teachers: their answers about unlabelled images become training data (V-LoRA, section 4.2.1).

A teacher is a function from a list of RGB images to as many answers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ConfigError, MissingDependencyError
from vlora_sgl.generate.tasks import TaskKind, box_text
from vlora_sgl.images import open_image

Answer = str | Sequence[tuple[str, Sequence[float]]]
Teacher = Callable[[list[Image.Image]], Sequence[Answer]]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_teacher(settings: JsonDict, kind: TaskKind, question: str) -> Teacher:
    """The teacher that a configuration describes.

    Args:
        settings: ``python: module:function | file.py:function``; or ``pipeline: task, model: dir``; or ``onnx: file``
            or ``torchvision: architecture, weights: file`` with ``labels`` and optionally ``size``, ``mean``, ``std``.
        kind: of the task it answers.
        question: what is asked, for pipelines that read it.
    Raises:
        ConfigError: it cannot be loaded; the message says why.
        MissingDependencyError: the package that runs it is not installed.
    """
    if "python" in settings:
        return _python(str(settings["python"]))
    if "onnx" in settings:
        return _onnx(settings)
    if "torchvision" in settings:
        return _torchvision(settings)
    return _pipeline(settings, kind, question)


def label_images(teacher: Teacher, images: Sequence[Path], kind: TaskKind, batch_size: int = 64) -> list[str]:
    """One answer per image, as text.

    A teacher answers with a string, or for detection and referring expressions with a list of
    ``(label, (x1, y1, x2, y2))`` in fractions of the image.

    Raises:
        ConfigError: it gives another number of answers, or one that is neither.
    """
    answers: list[str] = []
    for start in range(0, len(images), batch_size):
        paths = images[start : start + batch_size]
        found = list(teacher([open_image(path) for path in paths]))
        if len(found) != len(paths):
            raise ConfigError(f"the teacher gave {len(found)} answers for {len(paths)} images")
        for path, answer in zip(paths, found, strict=True):
            if not isinstance(answer, str):
                try:
                    answer = " ".join(box_text(label, box) for label, box in answer) or f"no {kind.name}"
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{path}: the teacher's answer is no text and no boxes: {answer!r}") from error
            answers.append(answer)
    return answers


def _python(name: str) -> Teacher:
    module_name, _, function = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None and spec.loader is not None  # the suffix is .py
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        found = getattr(module, function)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"teacher {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"teacher {name} is a {type(found).__name__}, not a function")
    return found


def _prepare(settings: JsonDict) -> Callable[[list[Image.Image]], np.ndarray]:
    """Images as (N, 3, size, size) float32, normalised; ImageNet's statistics unless the settings say otherwise."""
    size = int(settings.get("size", 224))
    mean = np.asarray(settings.get("mean", IMAGENET_MEAN), np.float32)[:, None, None]
    std = np.asarray(settings.get("std", IMAGENET_STD), np.float32)[:, None, None]

    def prepare(images: list[Image.Image]) -> np.ndarray:
        arrays = [np.asarray(i.resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255 for i in images]
        return (np.stack(arrays).transpose(0, 3, 1, 2) - mean) / std

    return prepare


def _labels(settings: JsonDict, what: str) -> list[str]:
    labels = settings.get("labels")
    if not isinstance(labels, list) or not labels:
        raise ConfigError(f"a {what} teacher needs labels, the names of its outputs in order")
    return [str(label) for label in labels]


def _onnx(settings: JsonDict) -> Teacher:
    labels, prepare = _labels(settings, "onnx"), _prepare(settings)
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime", f"the teacher {settings['onnx']}") from error
    session = onnxruntime.InferenceSession(str(settings["onnx"]), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def answer(images: list[Image.Image]) -> list[str]:
        scores = session.run(None, {name: prepare(images)})[0]
        return [labels[i] for i in scores.reshape(len(images), -1).argmax(1)]

    return answer


def _torchvision(settings: JsonDict) -> Teacher:
    import torch
    import torchvision

    labels, prepare = _labels(settings, "torchvision"), _prepare(settings)
    if "weights" not in settings:
        raise ConfigError(f"teacher torchvision {settings['torchvision']}: weights must name a file with a state dict")
    try:
        model = torchvision.models.get_model(settings["torchvision"], weights=None, num_classes=len(labels))
        model.load_state_dict(torch.load(settings["weights"], map_location="cpu", weights_only=True))
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"teacher torchvision {settings['torchvision']}: {error}") from error
    model.eval()

    def answer(images: list[Image.Image]) -> list[str]:
        with torch.no_grad():
            return [labels[i] for i in model(torch.from_numpy(prepare(images))).argmax(1).tolist()]

    return answer


def _pipeline(settings: JsonDict, kind: TaskKind, question: str) -> Teacher:
    import transformers

    task = str(settings["pipeline"])
    make: Callable[..., Any] = transformers.pipeline
    try:
        run = make(task, model=str(settings["model"]))
    except KeyError as error:
        raise ConfigError(f"teacher pipeline {task}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"teacher pipeline {task} of {settings.get('model')}: {error}") from error

    def answer(images: list[Image.Image]) -> list[Answer]:
        if task == "image-classification":
            return [rows[0]["label"] for rows in run(images, top_k=1)]
        if task == "visual-question-answering":
            return [run(image=image, question=question, top_k=1)[0]["answer"] for image in images]
        if task == "object-detection":
            return [[_fractions(row, image) for row in run(image)] for image in images]
        return [rows[0]["generated_text"] for rows in run(images)]

    if kind.name == "detection" and task != "object-detection":
        raise ConfigError(f"teacher pipeline {task} finds no objects; object-detection does")
    return answer


def _fractions(row: JsonDict, image: Image.Image) -> tuple[str, tuple[float, float, float, float]]:
    box = row["box"]
    width, height = image.size
    return row["label"], (box["xmin"] / width, box["ymin"] / height, box["xmax"] / width, box["ymax"] / height)
