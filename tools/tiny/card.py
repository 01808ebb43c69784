"""``python -m tools.tiny.card``: writes MODEL_CARD.md from the training logs; no figure is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlora_sgl.models import tiny

HERE = tiny.path().parent
LOG, OTHER_LOG = "train_log.json", "train_log.other_seed.json"

INTRODUCTION = """# The embedded model

A Qwen2.5-VL of 8.7 M parameters (text 6 x 256, vision 6 x 192, bfloat16 on disk) that answers simple questions about
112 x 112 pictures, with LoRA adapters (rank 8, the language model's seven projections) and vision heads. It is for
laptops, demonstrations and tests of truth; it knows nothing of the world beyond what is listed here.

Made by `python -m tools.tiny.train` from procedural scenes (`tools/tiny/scenes.py`) and, for the adapters, from
pictures that ship with scikit-learn and scikit-image (`tools/tiny/domains.py`; the pictures are read from those
packages and are not redistributed; china.jpg and flower.jpg are CC BY 2.0, the others as listed by scikit-image).
"""
LIMITS = """
A head is compared with the decoded answer of the same adapter on the same pictures. `after_image` adapters leave the
image's tokens to the base, so that all of them share its keys and values; compare their rows with those of the same
domain.

Nothing was chosen on a test split: the number of steps is fixed, and a closed-set head keeps its trained weights only
where they beat the LM head's own rows on the validation split by more than chance. Known limits: unseen
means an unseen triple of color, shape and background; every pair of color and shape was seen. The base was taught to
repeat the adapters' answer words, not what they mean, so part of an adapter's gain is knowing which words answer its
question. There is no adapter for faces: the base, which knows yes and no, tells most of them by itself. Test tiles of
photos and surfaces come from the same photographs as the training tiles, without overlap. Small test splits are noisy:
one of 100 surfaces is a point.
"""


def render(log: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """The card of the model that ``log`` tells of.

    Args:
        other: the log of a run with another seed, which shows how far the figures can be reproduced.
    """
    settings, steps = log["settings"], log["pretraining"][-1]
    minutes = log["minutes"]
    second = f" The last column is a second run, seed {other['settings']['seed']}." if other else ""
    lines = [
        INTRODUCTION,
        f"Trained on one {log['card']} with torch {log['versions']['torch']}: {settings['steps']} steps of "
        f"{settings['batch_size']} scenes ({minutes['pretraining']:.1f} minutes; final answer loss "
        f"{steps['answer_loss']}), seed {settings['seed']}; then steps of 32 examples for each adapter, with the same "
        f"seed. {LOG} has the curve.{second}",
        "",
        "## Base, on unseen combinations",
        "",
        "Greedy exact match, each question alone. Test scenes are made of combinations of color, shape and "
        "background, and of digit and font, that were never drawn for training. Chance is the commonest answer; "
        "blind is the same model without the image.",
        "",
        "| question | accuracy | chance | blind | questions | second run |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in log["base"].items():
        blind = f"{row['blind']:.3f}" if "blind" in row else "-"
        again = f"{other['base'][kind]['accuracy']:.3f}" if other else "-"
        lines.append(
            f"| {kind} | {row['accuracy']:.3f} | {row['chance']:.3f} | {blind} | {row['questions']:.0f} | {again} |"
        )
    lines += [
        "",
        "## Adapters and heads, on test images of their domain",
        "",
        "| adapter | starts | base | decoded answer | second run | heads | test | train | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(log.get("adapters", {}).items()):
        heads = "; ".join(f"{head}: {one['metric']} {one['value']:.3f}" for head, one in row["heads"].items())
        again = f"{other['adapters'][name]['adapter']:.3f}" if other and name in other.get("adapters", {}) else "-"
        starts, made = row["invocation"] or "first token", row.get("steps", settings["adapter_steps"])
        lines.append(
            f"| {name} | {starts} | {row['base']:.3f} | {row['adapter']:.3f} | {again} | {heads} "
            f"| {row['examples']['test']} | {row['examples']['train']} | {made} |"
        )
    if "routed" in log:
        lines += _routed_section(log["routed"])
    return "\n".join([*lines, LIMITS])


def _routed_section(report: dict[str, Any]) -> list[str]:
    """The section on the learned routed adapter; ``report`` is what ``generate.token_router.make_routed`` returns."""
    return [
        "",
        "## A learned routed adapter over these adapters, on the same test images",
        "",
        f"`routed/` gives every token one of {len(report['usage'])} adapters ({report['settings']['steps']} steps, "
        f"it was never told the domains). The oracle is the best single adapter; the routed adapter is "
        f"{report['routed_minus_oracle_points']:+.2f} points from it on average; its choice where the answer starts "
        f"agrees with the domain by an adjusted Rand index of {report['adjusted_rand']:.3f}.",
        "",
        "| domain | base | routed | oracle | share of all tokens of its adapter |",
        "|---|---|---|---|---|",
        *(
            f"| {d} | {report['base'][d]:.3f} | {report['routed'][d]:.3f} | {report['oracle'][d]:.3f} "
            f"| {report['usage'][d]:.3f} |"
            for d in report["routed"]
        ),
    ]


def of_directory(directory: Path) -> str:
    """The card of a directory with the training logs."""
    other = directory / OTHER_LOG
    return render(
        json.loads((directory / LOG).read_text()), json.loads(other.read_text()) if other.is_file() else None
    )


if __name__ == "__main__":
    (HERE / "MODEL_CARD.md").write_text(of_directory(HERE))
