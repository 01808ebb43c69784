"""Several rounds of questions about real photographs, by the base model and by two adapters.

Prints each answer with how much of its prompt came from the prefix cache: a later round of one adapter finds the
image there, another adapter's first round does not, because its keys and values of the image are its own.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from photographs import Photograph, photograph
from serving import Served, argument_parser, serving

import vlora_sgl as vlora

SERVED_AT = "http://127.0.0.1:30000"


@dataclass(frozen=True)
class Round:
    """A question to an adapter (None: the base model) and the right answer, if we know it."""

    adapter: str | None
    question: str
    reference: str | None = None


@vlora.function
def ask(s: vlora.ProgramState, image: str, rounds: Sequence[Round], max_tokens: int) -> None:
    """One conversation about one image; every round may be answered by another adapter."""
    s += vlora.user(vlora.image(image) + rounds[0].question)
    for number, turn in enumerate(rounds):
        if number:
            s += vlora.user(turn.question)
        with vlora.adapter(turn.adapter):
            s += vlora.assistant(vlora.gen(f"answer{number}", max_tokens))


def conversations(served: Served) -> list[tuple[Photograph, list[Round]]]:
    """Questions in general terms, for a model we know nothing of."""
    china = photograph("china.jpg")
    names: list[str | None] = [*served.adapters[:2], None]
    first, second = names[0], names[1 % len(names)]
    questions = [
        "What is in this picture?",
        "What color is the roof?",
        "How many people are there?",
        "Is it outdoors?",
    ]
    rounds = [Round(name, text) for name, text in zip([first, first, second, first], questions, strict=True)]
    return [(china, rounds)]


def show(served: Served, picture: Photograph, rounds: Sequence[Round]) -> None:
    """Run one conversation and print it as a table."""
    print(f"{picture.name} ({picture.credit})")
    print(f"  {'adapter':<10}{'question':<34}{'answer':<22}{'reference':<16}{'prompt':>7}{'cached':>8}{'seconds':>9}")
    begin = time.monotonic()
    state = ask.run(str(picture.path), rounds, 8, backend=served.backend, use_thread=False)
    right = total = 0
    for number, turn in enumerate(rounds):
        answer = state.get(f"answer{number}", str).strip()
        information = state.get_meta_info(f"answer{number}")
        mark = ""
        if turn.reference is not None:
            total += 1
            right += answer == turn.reference
            mark = f"{turn.reference} {'✓' if answer == turn.reference else '✗'}"
        print(
            f"  {turn.adapter or 'base':<10}{turn.question:<34}{answer[:20]!r:<22}{mark:<16}"
            f"{information['prompt_tokens']:>7}{information['cached_tokens']:>8}{information['e2e_latency']:>9.2f}"
        )
    score = f"{right} of {total} as the reference; " if total else ""
    print(f"  {score}{len(rounds)} rounds in {time.monotonic() - begin:.1f} s\n")


def held_out(adapters: Sequence[str], folder: Path, each: int = 3) -> list[tuple[str, Photograph, Round]]:
    """Test images of the embedded model's adapters, which none of them was trained on, with their answers.

    Adapters that a user has added have no test images here.
    """
    from tools.tiny.domains import ADAPTERS, DOMAINS

    chosen = []
    for name in (name for name in adapters if name in ADAPTERS):
        rows = [row for row in DOMAINS[ADAPTERS[name][0]]()[2] if len(row[0]) == 1]
        for number, (images, question, answer, *_) in enumerate(
            random.Random(name).sample(rows, min(each, len(rows)))
        ):
            path = folder / f"{name}-{number}.png"
            images[0].save(path)
            chosen.append(
                (name, Photograph(path.name, path, answer, "held-out test image"), Round(name, question, answer))
            )
    return chosen


def scene(folder: Path) -> tuple[Photograph, list[Round]]:
    """A drawn scene the embedded model never saw, and a conversation about it."""
    import numpy as np
    from PIL import Image

    from tools.tiny import scenes

    drawn = scenes.sample(1, np.random.default_rng(7), test=True, digit_share=0.0)
    path = folder / "scene.png"
    Image.fromarray(scenes.render(drawn)[0].permute(1, 2, 0).numpy()).save(path)
    kinds = ("count", "position", "shape", "pattern")
    asked = {kind: (q, a) for kind, q, a in scenes.questions(drawn, 0, random.Random(0), kinds)}
    return Photograph("scene.png", path, "shapes", "drawn here"), [
        Round(None, *asked[kind]) for kind in kinds if kind in asked
    ]


def embedded(served: Served) -> None:
    """The embedded model: one conversation with the base, then base against adapter on images neither has seen."""
    with tempfile.TemporaryDirectory() as scratch:
        show(served, *scene(Path(scratch)))
        print("Real images, base against adapter; 'cached' is of the adapter's second asking")
        print(f"  {'image':<21}{'question':<40}{'reference':<14}{'base':<22}{'adapter':<16}{'cached':>7}")
        right = {"base": 0, "adapter": 0}
        items = held_out(served.adapters, Path(scratch))
        for name, picture, turn in items:
            answers = {}
            for who in (None, name, name):
                alone = [Round(who, turn.question, turn.reference)]
                state = ask.run(str(picture.path), alone, 8, backend=served.backend, use_thread=False)
                answers[who or "base"] = state.get("answer0", str).strip()
            right["base"] += answers["base"] == turn.reference
            right["adapter"] += answers[name] == turn.reference
            mark = "✓" if answers[name] == turn.reference else "✗"
            cached = state.get_meta_info("answer0")["cached_tokens"]
            print(
                f"  {picture.name:<21}{turn.question:<40}{turn.reference:<14}{answers['base'][:20]!r:<22}"
                f"{answers[name][:12]!r:<14}{mark} {cached:>7}"
            )
        print(f"  base {right['base']} of {len(items)} right, adapters {right['adapter']} of {len(items)}\n")


def main() -> None:
    """Serve, ask, print."""
    options = argument_parser(__doc__ or "").parse_args()
    with serving(options) as served:
        if served.embedded and served.trained:
            embedded(served)
        else:
            for picture, rounds in conversations(served):
                show(served, picture, rounds)
    where = "" if options.url else "start a server with .venv/bin/vlora serve, then "
    print(f"To ask with pictures of your own, {where}open {options.url or SERVED_AT}/ui in a browser.")


if __name__ == "__main__":
    main()
