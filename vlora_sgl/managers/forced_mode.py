"""The mode of a batch under ``--vlora-mode MODE`` (for debugging): a pure function of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from vlora_sgl.core import AdapterId, InferenceMode


def forced_mode(
    adapters: Sequence[AdapterId],
    forced: InferenceMode,
    merged: AdapterId,
    mergeable: Callable[[str], bool],
) -> tuple[InferenceMode, AdapterId]:
    """Mode and merged adapter for a batch of these rows.

    ``merged`` and ``mixture`` merge the largest mergeable group whatever its size; without one they keep what is
    merged, so that base rows run on merged weights.

    Args:
        adapters: the adapter of every row.
        forced: the mode asked for.
        merged: the adapter merged now.
        mergeable: whether an adapter may be merged.
    """
    counts = Counter(a for a in adapters if a is not None and mergeable(a))
    # Ties go to what is merged already, then to the lower id: every rank of a tensor-parallel group decides alike.
    largest = max(counts, key=lambda a: (counts[a], a == merged, [-ord(c) for c in a]), default=merged)
    if forced == InferenceMode.UNMERGED or largest is None:
        return InferenceMode.UNMERGED, None
    pure = all(a == largest for a in adapters)
    return (InferenceMode.MERGED if pure and forced == InferenceMode.MERGED else InferenceMode.MIXTURE), largest
