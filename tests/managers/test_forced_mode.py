"""The mode of a batch, from hand-written rows."""

from __future__ import annotations

from vlora_sgl.core import AdapterId, InferenceMode
from vlora_sgl.managers.forced_mode import forced_mode

UNMERGED, MERGED, MIXTURE = InferenceMode


def choose(rows: str, forced: str, merged: AdapterId = None) -> tuple[InferenceMode, AdapterId]:
    """``rows``: a letter per row, ``-`` for the base; adapter x cannot be merged."""
    adapters = [None if c == "-" else c for c in rows]
    return forced_mode(adapters, InferenceMode(forced), merged, lambda adapter: adapter != "x")


def test_a_forced_mixture_keeps_what_is_merged_under_base_rows() -> None:
    assert choose("--", "mixture", merged="a") == (MIXTURE, "a")
    assert choose("--", "mixture") == (UNMERGED, None)
    assert choose("aa", "mixture") == (MIXTURE, "a")


def test_a_forced_merge_serves_mixed_batches_too() -> None:
    assert choose("bb", "merged", merged="a") == (MERGED, "b")
    assert choose("abb-", "merged") == (MIXTURE, "b")
    assert choose("xxa", "merged") == (MIXTURE, "a")
    assert choose("xx", "merged") == (UNMERGED, None)


def test_forced_unmerged_never_merges() -> None:
    assert choose("aaaa", "unmerged", merged="a") == (UNMERGED, None)


def test_ties_go_to_the_merged_adapter_then_to_the_lower_id() -> None:
    assert choose("ab", "mixture", merged="b")[1] == "b"
    assert choose("ba", "mixture")[1] == "a"
