"""The fit finds the costs that an iteration log was made from, and says so when it cannot."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_fit import describe, fit, least_absolute
from vlora_sgl.managers.policies.cost_table import shipped

COSTS = shipped()["atmm"]


def log(noise: float, count: int = 2000, stalls: float = 0.0) -> list[dict[str, Any]]:
    """Random iterations that take what ``COSTS`` says, give or take."""
    rng, rows, before = random.Random(1), [], None
    for _ in range(count):
        prefill = rng.random() < 0.3
        merged = rng.choice([before, before, before, None, "a", "b"])
        names = rng.sample([None, "a", "b", "c", "d"], rng.randint(1, 5))
        groups = {name: rng.randint(1, 900 if prefill else 9) for name in names}
        context = 0.0 if prefill else rng.uniform(100, 800) * sum(groups.values())
        seconds = (COSTS.prefill if prefill else COSTS.decode).seconds(groups, context, merged)
        seconds += COSTS.switch_seconds(before, merged)
        seconds *= rng.gauss(1.0, noise) * (20 if rng.random() < stalls else 1)
        named = {name or "": tokens for name, tokens in groups.items()}
        rows.append(
            {
                "prefill": prefill,
                "groups": named,
                "context": context,
                "before": before,
                "merged": merged,
                "seconds": seconds,
            }
        )
        before = merged
    return rows


def test_exact_costs_are_found_again() -> None:
    empty = replace(COSTS, merge=0.0, unmerge=0.0)
    found = fit(log(noise=0.0), empty, "test")
    for phase in ("prefill", "decode"):
        want, got = getattr(COSTS, phase), getattr(found.table, phase)
        for name in want.__slots__:
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-3, abs=1e-9), (phase, name)
    assert found.table.merge == pytest.approx(COSTS.merge, rel=1e-3)
    assert found.table.unmerge == pytest.approx(COSTS.unmerge, rel=1e-3)
    assert max(found.error.values()) < 1e-6
    assert "decode: fixed 6.05e+03" in describe(found)


def test_noise_and_stalls_move_the_costs_little() -> None:
    found = fit(log(noise=0.03, stalls=0.02), COSTS, "test")
    for phase, groups in (("decode", {"a": 8, "b": 8, None: 8}), ("prefill", {"a": 500, "c": 900})):
        for merged in (None, "a"):
            want = getattr(COSTS, phase).seconds(groups, 0, merged)
            assert getattr(found.table, phase).seconds(groups, 0, merged) == pytest.approx(want, rel=0.05)
    assert 0.01 < found.error["decode"] < 0.05
    assert found.kept["decode"][0] < found.kept["decode"][1], "the stalls are left out"


def test_a_prefill_that_keeps_the_host_is_found_in_the_iteration_before() -> None:
    """With overlapping launches a result waits while the host prepares the next iteration."""
    rows = log(noise=0.0)
    for before, row in pairwise(rows):
        if row["prefill"]:
            late = 0.9 * row["seconds"]
            before["seconds"], row["seconds"] = before["seconds"] + late, row["seconds"] - late
    found = fit(rows, COSTS, "test").table.prefill
    for groups in ({"a": 500, "c": 900}, {None: 64}):
        assert found.seconds(groups, 0, None) == pytest.approx(COSTS.prefill.seconds(groups, 0, None), rel=0.02)


def test_too_short_a_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode iterations; a fit needs"):
        fit(log(noise=0.0, count=10), COSTS, "test")


def test_coefficients_are_never_below_zero() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.uniform(0, 1, (50, 3))
    found = least_absolute(matrix, matrix @ np.array([2.0, 0.0, 3.0]) - 0.5 * matrix[:, 1])
    assert (found >= 0).all() and found[1] == 0
