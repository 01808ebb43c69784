"""Fits a cost table to an iteration log: the seconds of iterations as a sum of a few products (``PhaseCosts``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy.optimize import nnls

from vlora_sgl.core import AdapterId, JsonDict
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_table import CostTable, Groups, PhaseCosts, lora_work

COLUMNS = ("fixed", "per_token", "per_context", "lora_fixed", "lora_per_slot", "lora_per_pair", "lora_per_undo")
SWITCHES = ("merge", "unmerge")
PHASES = ("decode", "prefill")
OUTLIER = 0.35
"""Stretches further than this from the fit, relatively, are not counted in its error: compilation, stalls."""

FEWEST = 20
"""Fewest iterations of a phase that a fit is made from."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A table and how well it describes the log it came from.

    Attributes:
        table: the costs.
        error: phase -> total of ``|fitted - measured|`` over total measured, of the stretches kept (``stretches``).
        total: phase -> fitted over measured seconds, of all stretches.
        kept: phase -> (stretches kept, stretches in the log).
    """

    table: CostTable
    error: dict[str, float]
    total: dict[str, float]
    kept: dict[str, tuple[int, int]]


def features(prefill: bool, groups: Groups, context: float, before: AdapterId, merged: AdapterId) -> list[float]:
    """What an iteration multiplies the coefficients by: ``COLUMNS`` of decode, those of prefill, and ``SWITCHES``."""
    pairs, slots, undone = lora_work(groups, merged)
    switched = before != merged
    own = [
        1.0,
        float(sum(groups.values())),
        float(context),
        float(pairs > 0),
        float(slots),
        float(pairs),
        float(undone),
    ]
    nothing = [0.0] * len(own)
    switches = [float(switched and merged is not None), float(switched and merged is None)]
    return [*(nothing + own if prefill else own + nothing), *switches]


def coefficients(table: CostTable) -> np.ndarray:
    """Those of a table, float64 ``[len(features)]``: what ``features`` is multiplied by to give its seconds."""
    found = []
    for costs in (table.decode, table.prefill):
        whole = replace(
            costs,
            fixed=costs.fixed + costs.lora_enabled,
            per_token=costs.per_token + costs.lora_enabled_per_token,
        )
        found += [getattr(whole, name) for name in COLUMNS]
    return np.array([*found, table.merge, table.unmerge])


def with_coefficients(table: CostTable, found: np.ndarray, provenance: str) -> CostTable:
    """A table of these coefficients; a switch that costs nothing by them keeps the table's."""
    decode, prefill = (
        PhaseCosts(**dict(zip(COLUMNS, map(float, found[at : at + len(COLUMNS)]), strict=True)))
        for at in (0, len(COLUMNS))
    )
    merge, unmerge = map(float, found[-len(SWITCHES) :])
    return replace(
        table,
        decode=decode,
        prefill=prefill,
        merge=merge or table.merge,
        unmerge=unmerge or table.unmerge,
        provenance=provenance,
    )


def stretches(rows: Sequence[JsonDict]) -> list[list[JsonDict]]:
    """The log in pieces whose seconds are what they took: a decode, or a run of prefills with the decode before it.

    Where launches overlap with computation, an iteration's result waits while the host prepares the next one. A decode
    costs the host little, a prefill with images much: it shows up in the seconds of the iteration before.
    """
    found: list[list[JsonDict]] = []
    for row in rows:
        if row["prefill"] and found:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def fit(rows: Sequence[JsonDict], like: CostTable, provenance: str) -> Fit:
    """The coefficients >= 0 of the least absolute relative errors.

    Args:
        rows: an iteration log.
        like: names of device, model and operator; what the log cannot tell (loads, switches it never made) is its.
        provenance: where the log is from.

    Raises:
        ConfigError: too few iterations of a phase.
    """
    for phase in PHASES:
        count = sum(row["prefill"] is (phase == "prefill") for row in rows)
        if count < FEWEST:
            raise ConfigError(f"the log holds {count} {phase} iterations; a fit needs {FEWEST}")
    parts = [part for part in stretches(rows) if sum(row["seconds"] for row in part) > 0]
    matrix = np.array([np.sum([_features_of(row) for row in part], axis=0) for part in parts])
    seconds = np.array([sum(row["seconds"] for row in part) for part in parts])
    found = least_absolute(matrix / seconds[:, None], np.ones(len(parts)))
    fitted = matrix @ found
    good = abs(fitted / seconds - 1) < OUTLIER
    error, total, kept = {}, {}, {}
    for phase in PHASES:
        mine = np.array([part[-1]["prefill"] is (phase == "prefill") for part in parts])
        told = mine & good
        error[phase] = float(abs(fitted - seconds)[told].sum() / max(seconds[told].sum(), 1e-9))
        total[phase] = float(fitted[mine].sum() / seconds[mine].sum())
        kept[phase] = (int(told.sum()), int(mine.sum()))
    return Fit(with_coefficients(like, found, provenance), error, total, kept)


def _features_of(row: JsonDict) -> list[float]:
    groups = {adapter or None: tokens for adapter, tokens in row["groups"].items()}
    return features(row["prefill"], groups, row["context"], row["before"], row["merged"])


def least_absolute(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 of the least sum of absolute errors, by reweighted least squares: stalls hardly move it."""
    scale = np.linalg.norm(matrix, axis=0)  # the columns differ by many orders of magnitude
    scaled = matrix / np.where(scale, scale, 1)
    weight = np.ones(len(target))
    for _ in range(30):
        found = nnls(scaled * weight[:, None], target * weight)[0]
        weight = 1 / np.sqrt(np.maximum(abs(scaled @ found - target), 1e-4))
    return found / np.where(scale, scale, 1)


def describe(fitted: Fit) -> str:
    """The table and its quality, for people."""
    lines = []
    for phase in PHASES:
        costs = {name: value for name, value in asdict(getattr(fitted.table, phase)).items() if value}
        terms = ", ".join(f"{name} {1e6 * value:.3g}" for name, value in costs.items())
        kept, seen = fitted.kept[phase]
        lines.append(
            f"{phase}: {terms} us; error {fitted.error[phase]:.1%} over {kept} of {seen} stretches, "
            f"all of them {fitted.total[phase]:.3f} of the measured time"
        )
    lines.append(f"merge {1e3 * fitted.table.merge:.2f} ms, unmerge {1e3 * fitted.table.unmerge:.2f} ms")
    return "\n".join(lines)
