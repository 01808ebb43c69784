"""Fits a cost table to an iteration log: the seconds of iterations as a sum of a few products (``PhaseCosts``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vlora_sgl.core import AdapterId
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.cost_table import CostTable, Groups, PhaseCosts, lora_work

COLUMNS = ("fixed", "per_token", "per_context", "lora_fixed", "lora_per_slot", "lora_per_pair", "lora_per_undo")
SWITCHES = ("merge", "unmerge")
OUTLIER = 0.35
"""Iterations further than this from the fit, relatively, are not counted in its error: compilation, stalls."""

FEWEST = 20
"""Fewest iterations of a phase that a fit is made from."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A table and how well it describes the log it came from.

    Attributes:
        table: the costs.
        error: phase -> total of ``|fitted - measured|`` over total measured, of the iterations kept.
        total: phase -> fitted over measured seconds, of all iterations.
        kept: phase -> (iterations kept, iterations in the log).
    """

    table: CostTable
    error: dict[str, float]
    total: dict[str, float]
    kept: dict[str, tuple[int, int]]


def features(row: Mapping[str, Any]) -> list[float]:
    """One row of the design matrix: what each of ``COLUMNS`` and ``SWITCHES`` is multiplied by."""
    groups: Groups = {adapter or None: tokens for adapter, tokens in row["groups"].items()}
    folded: AdapterId = row["folded"]
    pairs, slots, undone = lora_work(groups, folded)
    switched = row["before"] != folded
    return [
        1.0,
        float(sum(groups.values())),
        float(row["context"]),
        float(pairs > 0),
        float(slots),
        float(pairs),
        float(undone),
        float(switched and folded is not None),
        float(switched and folded is None),
    ]


def fit(rows: Sequence[Mapping[str, Any]], like: CostTable, provenance: str) -> Fit:
    """The coefficients >= 0 of the least absolute relative errors.

    Args:
        rows: an iteration log.
        like: names of device, model and operator; what the log cannot tell (loads, switches it never made) is its.
        provenance: where the log is from.

    Raises:
        ConfigError: too few iterations of a phase.
    """
    phases: dict[str, PhaseCosts] = {}
    switches: dict[str, float] = {}
    error, total, kept = {}, {}, {}
    for phase, prefill in (("decode", False), ("prefill", True)):
        mine = [row for row in rows if row["prefill"] is prefill and row["seconds"] > 0]
        if len(mine) < FEWEST:
            raise ConfigError(f"the log holds {len(mine)} {phase} iterations; a fit needs {FEWEST}")
        matrix = np.array([features(row) for row in mine])
        seconds = np.array([row["seconds"] for row in mine])
        found = least_absolute(matrix / seconds[:, None], np.ones(len(mine)))
        good = abs(matrix @ found / seconds - 1) < OUTLIER
        fitted = matrix @ found
        error[phase] = float(abs(fitted - seconds)[good].sum() / max(seconds[good].sum(), 1e-9))
        total[phase] = float(fitted.sum() / seconds.sum())
        kept[phase] = (int(good.sum()), len(mine))
        phases[phase] = PhaseCosts(**dict(zip(COLUMNS, map(float, found), strict=False)))
        for name, value in zip(SWITCHES, found[len(COLUMNS) :], strict=True):
            if value > 0:
                switches[name] = max(switches.get(name, 0.0), float(value))
    table = replace(
        like,
        prefill=phases["prefill"],
        decode=phases["decode"],
        merge=switches.get("merge", like.merge),
        unmerge=switches.get("unmerge", like.unmerge),
        provenance=provenance,
    )
    return Fit(table, error, total, kept)


def least_absolute(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 of the least sum of absolute errors, by reweighted least squares: stalls hardly move it."""
    weight = np.ones(len(target))
    for _ in range(30):
        found = nonnegative(matrix * weight[:, None], target * weight)
        weight = 1 / np.sqrt(np.maximum(abs(matrix @ found - target), 1e-4))
    return found


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with every coefficient >= 0: the most negative one is set to zero until none is left."""
    active = np.asarray(matrix.any(axis=0))
    found = np.zeros(matrix.shape[1])
    while active.any():
        scale = np.linalg.norm(matrix[:, active], axis=0)
        solution = np.linalg.lstsq(matrix[:, active] / scale, target, rcond=1e-10)[0] / scale
        if (solution >= 0).all():
            found[active] = solution
            break
        active[np.flatnonzero(active)[(solution * scale).argmin()]] = False
    return found


def describe(fitted: Fit) -> str:
    """The table and its quality, for people."""
    lines = []
    for phase in ("decode", "prefill"):
        costs = {name: value for name, value in asdict(getattr(fitted.table, phase)).items() if value}
        terms = ", ".join(f"{name} {1e6 * value:.3g}" for name, value in costs.items())
        kept, seen = fitted.kept[phase]
        lines.append(
            f"{phase}: {terms} us; error {fitted.error[phase]:.1%} over {kept} of {seen} iterations, "
            f"all of them {fitted.total[phase]:.3f} of the measured time"
        )
    lines.append(f"merge {1e3 * fitted.table.merge:.2f} ms, unmerge {1e3 * fitted.table.unmerge:.2f} ms")
    return "\n".join(lines)
