"""Several rounds of questions about real photographs, by the base model and by two adapters.

Prints each answer with how much of its prompt came from the prefix cache: a later round of one adapter finds the
image there, another adapter's first round does not, because its keys and values of the image are its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from photographs import Photograph, photograph
from serving import Served, argument_parser, serving

import vlora_sgl as vlora


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
    """The questions: with known answers for the embedded model, in general terms for any other."""
    china, brick = photograph("china.jpg"), photograph("brick.png")
    if served.embedded and served.trained and {"photos", "surfaces"} <= set(served.adapters):
        show, material = "What does the photograph show?", "What material is this surface?"
        return [
            (china, [Round(None, show, "temple"), Round("photos", show, "temple"), Round("photos", show, "temple")]),
            (brick, [Round(None, material, "brick"), Round("surfaces", material, "brick"),
                     Round("photos", material), Round("surfaces", material, "brick")]),
        ]  # fmt: skip
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
    print(f"  {'adapter':<10}{'question':<34}{'answer':<22}{'reference':<12}{'prompt':>7}{'cached':>8}{'seconds':>9}")
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
            f"  {turn.adapter or 'base':<10}{turn.question:<34}{answer[:20]!r:<22}{mark:<12}"
            f"{information['prompt_tokens']:>7}{information['cached_tokens']:>8}{information['e2e_latency']:>9.2f}"
        )
    score = f"{right} of {total} as the reference; " if total else ""
    print(f"  {score}{len(rounds)} rounds in {time.monotonic() - begin:.1f} s\n")


def main() -> None:
    """Serve, ask, print."""
    with serving(argument_parser(__doc__ or "").parse_args()) as served:
        for picture, rounds in conversations(served):
            show(served, picture, rounds)


if __name__ == "__main__":
    main()
