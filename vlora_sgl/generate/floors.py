"""What a validation split can say about a floor: the accuracy that it must show before the floor counts as kept.

A validation accuracy is a sample. One that lies on the floor is as likely to come from an adapter below it as from one
above; of several packings the luckiest is taken, so floors would break on other data more often than not. A floor
counts as kept where the lower confidence bound of the validation accuracy reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def bar(floor: float, examples: float, confidence: float) -> float:
    """Least accuracy on ``examples`` whose one-sided lower confidence bound is at least ``floor``.

    The bound is Wilson's (1927): the inversion of the score test, ``floor + z sqrt(floor (1 - floor) / examples)``. It
    is made for proportions. A mean of any scores between 0 and 1 varies at most as much as a proportion of the same
    mean, so for those it errs on the safe side.

    Args:
        floor: in (0, 1].
        examples: independent ones, above 0; need not be whole.
        confidence: in [0.5, 1); 0.5 compares with the floor itself, as the paper does.
    Returns:
        an accuracy; above 1 if so few examples cannot show the floor, however they are answered. The floor 1 asks for
        every answer and for no number of examples.
    """
    return floor + _deviations(confidence) * math.sqrt(floor * (1 - floor) / examples)


def examples_needed(floor: float, confidence: float) -> int:
    """Fewest examples that can show ``floor`` at all, if every one of them is answered."""
    if floor == 1:
        return 1
    return max(1, math.ceil(_deviations(confidence) ** 2 * floor / (1 - floor) - 1e-9))


def independent_examples(weights: Sequence[float]) -> float:
    """How many equal examples have a mean that varies as much as the mean with these weights does (Kish, 1965)."""
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def _deviations(confidence: float) -> float:
    """Standard deviations below which a normal variable lies with this probability."""
    return NormalDist().inv_cdf(confidence)
