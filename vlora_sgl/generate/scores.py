"""How good answers are: each metric maps predictions and reference answers to a number between 0 and 1."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

References = Sequence[Sequence[str]]
"""The acceptable answers of each question."""

_NUMBERS = {
    **{"zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"},
    **{"six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"},
}
_REF = re.compile(r"<ref>(.*?)</ref>((?:\s*<box>\(\d+,\d+\),\(\d+,\d+\)</box>)+)")
_BOX = re.compile(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>")

Box = tuple[int, int, int, int]


def normalise(answer: str) -> str:
    """Lower case, digits for number words, no articles and no punctuation, as VQA evaluation compares answers."""
    words = re.sub(r"[^\w\s]", " ", answer.lower().replace("'", "")).split()
    return " ".join(_NUMBERS.get(word, word) for word in words if word not in ("a", "an", "the"))


def top1(predictions: Sequence[str], references: References) -> float:
    """Share of predictions that equal the (first) reference."""
    return _mean(float(p.strip() == r[0].strip()) for p, r in zip(predictions, references, strict=True))


def vqa_score(predictions: Sequence[str], references: References) -> float:
    """VQA accuracy: min(matches / 3, 1), averaged over leaving one annotator out; with one reference, a match."""

    def score(prediction: str, accepted: Sequence[str]) -> float:
        said, answers = normalise(prediction), [normalise(answer) for answer in accepted]
        if len(answers) == 1:
            return float(said == answers[0])
        enough = min(3, len(answers) - 1)
        subsets = (answers[:i] + answers[i + 1 :] for i in range(len(answers)))
        return _mean(min(1.0, others.count(said) / enough) for others in subsets)

    return _mean(score(p, r) for p, r in zip(predictions, references, strict=True))


def f1(predictions: Sequence[str], references: References, overlap: float = 0.5) -> float:
    """F1 of objects over all images: found means the same label and an overlap (IoU) of at least ``overlap``."""
    found = said = wanted = 0
    for prediction, accepted in zip(predictions, references, strict=True):
        guesses, targets = read_boxes(prediction), read_boxes(accepted[0])
        said, wanted = said + len(guesses), wanted + len(targets)
        # Best overlaps are matched first, each object once.
        pairs = sorted(
            ((iou(g[1], t[1]), i, j) for i, g in enumerate(guesses) for j, t in enumerate(targets) if g[0] == t[0]),
            reverse=True,
        )
        used: tuple[set[int], set[int]] = (set(), set())
        for value, i, j in pairs:
            if value >= overlap and i not in used[0] and j not in used[1]:
                used[0].add(i)
                used[1].add(j)
        found += len(used[0])
    return 2 * found / (said + wanted) if said + wanted else 1.0


def precision_at_50(predictions: Sequence[str], references: References) -> float:
    """Share of predictions whose first box overlaps the reference's by at least one half (IoU)."""

    def right(prediction: str, reference: str) -> bool:
        guess, target = _BOX.search(prediction), _BOX.search(reference)
        return guess is not None and target is not None and iou(_numbers(guess), _numbers(target)) >= 0.5

    return _mean(float(right(p, r[0])) for p, r in zip(predictions, references, strict=True))


def cider(predictions: Sequence[str], references: References) -> float:
    """CIDEr-D (Vedantam et al., 2015) divided by its maximum of 10.

    Mean over n-grams of 1 to 4 words of the clipped tf-idf cosine with each reference, damped by the gap in length.
    Written here because the maintained implementations bring a Java tokenizer or a dozen packages for 40 lines; words
    are split as ``normalise`` does, without stemming. Document frequencies are those of the references given.
    """
    if not predictions:
        raise ValueError("no predictions to measure")
    documents = [[normalise(text).split() for text in accepted] for accepted in references]
    total = 0.0
    for n in range(1, 5):
        frequency = Counter(g for texts in documents for g in {g for words in texts for g in _grams(words, n)})

        def weigh(
            words: list[str], n: int = n, frequency: Counter[tuple[str, ...]] = frequency
        ) -> dict[tuple[str, ...], float]:
            idf = {g: math.log(len(documents) / max(1, frequency[g])) for g in _grams(words, n)}
            return {g: count * idf[g] for g, count in Counter(_grams(words, n)).items()}

        for prediction, texts in zip(predictions, documents, strict=True):
            words = normalise(prediction).split()
            guess = weigh(words)
            for target_words in texts:
                target = weigh(target_words)
                dot = sum(min(guess[g], target[g]) * target[g] for g in guess.keys() & target.keys())
                norm = math.hypot(*guess.values()) * math.hypot(*target.values())
                gap = len(words) - len(target_words)
                total += dot / norm * math.exp(-(gap**2) / 72) / len(texts) if norm else 0.0
    return total / (4 * len(predictions))


METRICS: dict[str, Callable[[Sequence[str], References], float]] = {
    "top1": top1,
    "vqa_score": vqa_score,
    "f1": f1,
    "precision_at_50": precision_at_50,
    "cider": cider,
}


def read_boxes(text: str) -> list[tuple[str, Box]]:
    """The labelled boxes of an answer in appendix C's form."""
    return [
        (label.strip().lower(), _numbers(box)) for label, boxes in _REF.findall(text) for box in _BOX.finditer(boxes)
    ]


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes x1, y1, x2, y2."""
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = [max(0, x2 - x1) * max(0, y2 - y1) for x1, y1, x2, y2 in (a, b)]
    union = sum(areas) - width * height
    return width * height / union if union else 0.0


def _numbers(match: re.Match[str]) -> Box:
    x1, y1, x2, y2 = (int(value) for value in match.groups())
    return x1, y1, x2, y2


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    if not numbers:
        raise ValueError("no predictions to measure")
    return sum(numbers) / len(numbers)
