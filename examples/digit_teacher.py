"""A small model as a teacher: a support vector machine that reads handwritten digits in 8 x 8 pixels.

It learns from 500 digits of scikit-learn's set; examples/generate-demo.yaml lets it label 1,000 others.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

OWN_DIGITS = 500  # the first ones; the demo's images are cut from the others


@cache
def classifier():
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    data = load_digits()
    return SVC(gamma=0.001, C=10).fit(data.data[:OWN_DIGITS], data.target[:OWN_DIGITS])


def read_digits(images: list[Image.Image]) -> list[str]:
    """The digit on each picture, as text."""
    small = [np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), np.float32) for image in images]
    return [str(digit) for digit in classifier().predict(np.stack(small).reshape(len(images), -1) / 15.9)]
