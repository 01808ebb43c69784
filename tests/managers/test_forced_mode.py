"""The mode of a batch, from hand-written rows."""

from __future__ import annotations

import pytest

from vlora_sgl.core import AdapterId, InferenceMode
from vlora_sgl.managers.forced_mode import choose_mode

UNMERGED, MERGED, MIXTURE = InferenceMode


def choose(rows: str, forced: str = "auto", merged: AdapterId = None) -> tuple[InferenceMode, AdapterId]:
    """``rows``: a letter per row, ``-`` for the base; adapter x cannot be merged."""
    return choose_mode([None if c == "-" else c for c in rows], forced, merged, lambda adapter: adapter != "x")


@pytest.mark.parametrize(
    ("rows", "mode", "merged"),
    [
        ("aaaa", MERGED, "a"),
        ("aaab", MIXTURE, "a"),
        ("aa--", UNMERGED, None),  # exactly half is not over half
        ("aa-", MIXTURE, "a"),
        ("----", UNMERGED, None),
        ("abcd", UNMERGED, None),
        ("xxxx", UNMERGED, None),
        ("xxxa", UNMERGED, None),
        ("xaaa", MIXTURE, "a"),
    ],
)
def test_auto(rows: str, mode: InferenceMode, merged: AdapterId) -> None:
    assert choose(rows) == (mode, merged)


def test_a_forced_mixture_keeps_what_is_merged_under_base_rows() -> None:
    assert choose("--", "mixture", merged="a") == (MIXTURE, "a")
    assert choose("--", "mixture") == (UNMERGED, None)
    assert choose("aa", "mixture") == (MIXTURE, "a")


def test_a_forced_merge_serves_mixed_batches_too() -> None:
    assert choose("bb", "merged", merged="a") == (MERGED, "b")
    assert choose("abb-", "merged") == (MIXTURE, "b")


def test_forced_unmerged_never_merges() -> None:
    assert choose("aaaa", "unmerged", merged="a") == (UNMERGED, None)


def test_ties_go_to_the_merged_adapter_then_to_the_lower_id() -> None:
    assert choose("ab", "mixture", merged="b")[1] == "b"
    assert choose("ba", "mixture")[1] == "a"
