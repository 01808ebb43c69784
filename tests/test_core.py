"""The shared nouns: invariants at birth, and the table of modes."""

from __future__ import annotations

from typing import Any

import pytest

from vlora_sgl.core import BatchPlan, InferenceMode, adapters_in, row_pairs
from vlora_sgl.errors import UnknownAdapterError, VLoraError


@pytest.mark.parametrize(
    ("adapter", "merged", "expected"),
    [
        (None, None, ()),
        ("x", None, (("x", 1.0),)),
        ("m", "m", ()),
        ("x", "m", (("x", 1.0), ("m", -1.0))),
        (None, "m", (("m", -1.0),)),
    ],
)
def test_row_pairs(adapter: str | None, merged: str | None, expected: Any) -> None:
    assert row_pairs(adapter, merged) == expected


@pytest.mark.parametrize(
    ("mode", "merged"),
    [(InferenceMode.UNMERGED, "m"), (InferenceMode.MERGED, None), (InferenceMode.MIXTURE, None)],
)
def test_a_plan_whose_merged_adapter_contradicts_its_mode_is_refused(mode: Any, merged: str | None) -> None:
    with pytest.raises(ValueError, match="does not go with"):
        BatchPlan((), mode, merged)


def test_adapters_in_counts_the_merged_one_and_not_the_base() -> None:
    assert adapters_in([None, "a", "a"], "m") == {"a", "m"}


def test_unknown_adapter_lists_what_is_loaded() -> None:
    error = UnknownAdapterError("c", ["b", "a"])
    assert isinstance(error, VLoraError) and error.http_status == 404
    assert str(error) == "no adapter named 'c'; loaded: a, b"
