"""The kinds of vision tasks: what each is asked with, how it is measured, and which head can answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlora_sgl.lang import prompts

BOX_SCALE = 1000
"""Boxes are written in thousandths of the image's width and height, as Qwen-VL and the paper do."""


@dataclass(frozen=True)
class TaskKind:
    """One kind of task.

    Attributes:
        name: as in a configuration.
        metrics: names of metrics that fit; the first is the default.
        prompt: the question for a target ("cars"), from the templates that serving uses.
        needs: the setting or row key that the prompt is made from, ``None`` if none.
        head: kind of the vision head that can replace the language head, ``None`` if its answers are open text.
        closed: whether an answer must be one of a set of labels.
    """

    name: str
    metrics: tuple[str, ...]
    prompt: Callable[[str], str]
    needs: str | None = None
    head: str | None = None
    closed: bool = False


TASKS: dict[str, TaskKind] = {
    kind.name: kind
    for kind in (
        TaskKind("vqa", ("vqa_score", "top1"), lambda target: target, needs="question"),
        TaskKind("captioning", ("cider",), lambda _: prompts.CAPTION),
        TaskKind("referring", ("precision_at_50",), prompts.ground, needs="target"),
        TaskKind("detection", ("f1",), prompts.detect, needs="target"),
        TaskKind("classification", ("top1",), lambda target: target, needs="question", head="classify", closed=True),
        TaskKind("counting", ("top1", "vqa_score"), prompts.count, needs="target", head="count", closed=True),
        TaskKind("video", ("top1",), lambda _: prompts.ACTION, head="classify", closed=True),
    )
}


def box_text(label: str, box: Sequence[float]) -> str:
    """One object as the model writes it (appendix C); ``box`` is x1, y1, x2, y2 as fractions of the image."""
    x1, y1, x2, y2 = (round(value * BOX_SCALE) for value in box)
    return f"<ref>{label}</ref><box>({x1},{y1}),({x2},{y2})</box>"
