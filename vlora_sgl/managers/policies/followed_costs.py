"""A cost table that follows the machine while it serves: a slow fit to the iterations that were measured.

One rank measures. Each finished stretch (``cost_fit.stretches``) adds to sums. From these the coefficients are fitted
anew every ``EVERY`` stretches: least squares of relative errors, none below zero, each drawn towards its start, the
less the more has been seen of it. A stretch far off (compilation, a stall) counts less. What none told of stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from vlora_sgl.managers.policies.cost_fit import OUTLIER, PHASES, coefficients, features, with_coefficients
from vlora_sgl.managers.policies.cost_table import CostTable
from vlora_sgl.managers.policies.iteration_log import Iteration

EVERY = 256
"""Stretches between two fits."""
REMEMBERED = 8192
"""Stretches after which one counts a third of a new one."""
PRIOR = 2
"""Stretches with a coefficient in them that its starting value counts for."""


@dataclass(frozen=True, slots=True)
class CostUpdate:
    """What the rank that measures tells all ranks, itself included: the table of the next iterations.

    Attributes:
        table: the costs.
        error: phase -> median of ``|expected / measured - 1|`` of the last stretches.
    """

    table: CostTable
    error: dict[str, float]


class FollowedCosts:
    """Collects finished iterations (a sink of ``IterationTimes``) and fits a table to them now and then.

    Args:
        start: the table that the engine starts with.

    Attributes:
        error: phase -> by how much the table in use was off lately, relatively: the median over stretches.
    """

    def __init__(self, start: CostTable) -> None:
        self.start = start
        self.error: dict[str, float] = {}
        self._fits = 0
        self._start = self._found = coefficients(start)
        size = len(self._start)
        self._rows, self._seconds, self._prefill = np.zeros((EVERY, size)), np.zeros(EVERY), np.zeros(EVERY, bool)
        self._at = 0  # the stretch that is under way
        self._products, self._targets, self._counts = np.zeros((size, size)), np.zeros(size), np.zeros(size)
        self._update: CostUpdate | None = None

    def __call__(self, iteration: Iteration, seconds: float, end: float) -> None:
        """Take in one iteration."""
        if not iteration.prefill and self._seconds[self._at] > 0:
            self._at += 1
        if self._at == EVERY:
            self._fit()
        at, groups, context = self._at, iteration.groups, iteration.context
        self._rows[at] += features(iteration.prefill, groups, context, iteration.before, iteration.merged)
        self._seconds[at] += seconds
        self._prefill[at] |= iteration.prefill

    def take(self) -> CostUpdate | None:
        """The newest fit, once."""
        update, self._update = self._update, None
        return update

    def _fit(self) -> None:
        """Add the stretches to the sums and begin anew; fit the coefficients."""
        rows = self._rows / self._seconds[:, None]
        weights = self._weights(abs(rows @ self._found - 1))
        kept = 1 - EVERY / REMEMBERED
        self._products = kept * self._products + rows.T @ (weights[:, None] * rows)
        self._targets = kept * self._targets + weights @ rows
        self._counts = kept * self._counts + weights @ (rows > 0)
        self._at = 0
        for part in (self._rows, self._seconds, self._prefill):
            part[:] = 0
        self._found = self._solved()
        self._fits += 1
        source = f"{self.start.provenance} Followed since over {self._fits * EVERY} stretches of iterations."
        self._update = CostUpdate(with_coefficients(self.start, self._found, source), dict(self.error))

    def _weights(self, off: np.ndarray) -> np.ndarray:
        """How much each stretch counts, which was ``off`` by so much; float64 ``[EVERY]``."""
        limits = np.full(EVERY, OUTLIER)
        for phase, mine in zip(PHASES, (~self._prefill, self._prefill), strict=True):
            if mine.any():
                self.error[phase] = float(np.median(off[mine]))
                limits[mine] = max(OUTLIER, 2 * self.error[phase])
        return np.minimum(1.0, limits / np.maximum(off, 1e-9))

    def _solved(self) -> np.ndarray:
        told = np.flatnonzero(self._counts)
        scale = np.sqrt(np.diag(self._products)[told])  # the columns differ by many orders of magnitude
        drawn = PRIOR / self._counts[told]
        products = self._products[np.ix_(told, told)] / np.outer(scale, scale) + np.diag(drawn)
        targets = self._targets[told] / scale + drawn * scale * self._start[told]
        root = np.linalg.cholesky(products)
        found = self._start.copy()
        found[told] = nnls(root.T, np.linalg.solve(root, targets))[0] / scale
        return found
