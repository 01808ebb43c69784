"""A small model as a teacher: a support vector machine that reads handwritten digits in 8 x 8 pixels.

It learns from 250 digits of scikit-learn's set; examples/generate-demo.yaml lets it label these, 847 others and
variants of both.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

OWN_DIGITS = 250  # the first ones; the demo's validation and test are of the last ones


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (1797, 8, 8), 0 to 16, and what they show, shuffled: the set is in the order of its writers."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.images[order], data.target[order]


@cache
def classifier():
    from sklearn.svm import SVC

    images, shown = digits()
    return SVC(gamma=0.001, C=10).fit(images[:OWN_DIGITS].reshape(OWN_DIGITS, -1), shown[:OWN_DIGITS])


def read_digits(images: list[Image.Image]) -> list[str]:
    """The digit on each picture, as text."""
    small = [np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), np.float32) for image in images]
    return [str(digit) for digit in classifier().predict(np.stack(small).reshape(len(images), -1) / 15.9)]
