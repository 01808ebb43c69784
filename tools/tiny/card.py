"""``python -m tools.tiny.card``: writes MODEL_CARD.md from the training logs; no figure is typed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from vlora_sgl.models import tiny

LOG, OTHER_LOG = "train_log.json", "train_log.other_seed.json"


def of_directory(directory: Path) -> str:
    """The card of a directory with the training logs: of the run, and of one with another seed, if there is one."""
    log, again = json.loads((directory / LOG).read_text()), directory / OTHER_LOG
    other = json.loads(again.read_text()) if again.is_file() else {}
    settings, routed = log["settings"], log["routed"]
    trained = {name: row.get("card", log["card"]) for name, row in log["adapters"].items()}
    elsewhere = {name: where for name, where in trained.items() if where != log["card"]}
    others = "".join(f" {name} was trained later, on a {where.upper()}." for name, where in sorted(elsewhere.items()))
    towers = " ".join(
        f"So with {name}, which has weights for the vision tower and its projector, too."
        for name, row in sorted(log["adapters"].items())
        if row.get("tower")
    )
    second = f" The last column is a second run, seed {other['settings']['seed']}." if other else ""
    base = _table(
        "question | accuracy | chance | blind | questions | second run",
        (
            (kind, row["accuracy"], row["chance"], row.get("blind"), int(row["questions"]),
             other.get("base", {}).get(kind, {}).get("accuracy"))
            for kind, row in log["base"].items()
        ),
    )  # fmt: skip
    adapters = _table(
        "adapter | starts | base | decoded answer | second run | heads | test | train | steps",
        (
            (name, row["invocation"] or "first token", row["base"], row["adapter"],
             other.get("adapters", {}).get(name, {}).get("adapter"),
             "; ".join(f"{head}: {one['metric']} {one['value']:.3f}" for head, one in row["heads"].items()),
             row["examples"]["test"], row["examples"]["train"], row["steps"])
            for name, row in sorted(log["adapters"].items())
        ),
    )  # fmt: skip
    usage = _table(
        "domain | base | routed | oracle | share of all tokens of its adapter",
        ((d, *(routed[column][d] for column in ("base", "routed", "oracle", "usage"))) for d in routed["routed"]),
    )
    return f"""# The embedded model

A Qwen2.5-VL of 8.7 M parameters (text 6 x 256, vision 6 x 192, bfloat16 on disk) that answers simple questions about
112 x 112 pictures, with LoRA adapters (rank 8, the language model's seven projections) and vision heads. It is for
laptops, demonstrations and tests of truth; it knows nothing of the world beyond what is listed here.

Made by `python -m tools.tiny.train` from procedural scenes (`tools/tiny/scenes.py`) and, for the adapters, from
pictures that ship with scikit-learn and scikit-image (`tools/tiny/domains.py`; the pictures are read from those
packages and are not redistributed; china.jpg and flower.jpg are CC BY 2.0, the others as listed by scikit-image).

Trained on one {log["card"]} with torch {log["versions"]["torch"]}: {settings["steps"]} steps of \
{settings["batch_size"]} scenes ({log["minutes"]["pretraining"]:.1f} minutes; final answer loss \
{log["pretraining"][-1]["answer_loss"]}), seed {settings["seed"]}; then steps of 32 examples for each adapter, with \
the same seed. {LOG} has the curve.{others}{second}

## Base, on unseen combinations

Greedy exact match, each question alone. Test scenes are made of combinations of color, shape and background, and of \
digit and font, that were never drawn for training. Chance is the commonest answer; blind is the same model without \
the image.

{base}

## Adapters and heads, on test images of their domain

{adapters}

## A learned routed adapter over these adapters, on the same test images

`routed/` gives every token one of {len(routed["usage"])} adapters ({routed["settings"]["steps"]} steps, it was never \
told the domains). The oracle is the best single adapter; the routed adapter is \
{routed["routed_minus_oracle_points"]:+.2f} points from it on average; its choice where the answer starts agrees with \
the domain by an adjusted Rand index of {routed["adjusted_rand"]:.3f}.

{usage}

A head is compared with the decoded answer of the same adapter on the same pictures. `after_image` adapters leave the
image's tokens to the base, so that all of them share its keys and values; compare their rows with those of the same
domain. {towers}

Nothing was chosen on a test split: the number of steps is fixed, and a closed-set head keeps its trained weights only
where they beat the LM head's own rows on the validation split by more than chance. Known limits: unseen
means an unseen triple of color, shape and background; every pair of color and shape was seen. The base was taught to
repeat the adapters' answer words, not what they mean, so part of an adapter's gain is knowing which words answer its
question. There is no adapter for faces: the base, which knows yes and no, tells most of them by itself. Test tiles of
photos and surfaces come from the same photographs as the training tiles, without overlap. Small test splits are noisy:
one of 100 surfaces is a point.
"""


def _table(titles: str, rows: Iterable[Iterable[str | float | None]]) -> str:
    """A Markdown table; fractions with three decimals, nothing as a dash."""
    cells = [["-" if c is None else f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [f"| {titles} |", "|---" * (titles.count("|") + 1) + "|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)


if __name__ == "__main__":
    here = tiny.path().parent
    (here / "MODEL_CARD.md").write_text(of_directory(here))
