"""The mode of a batch as it stands: a pure function of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from vlora_sgl.core import AdapterId, InferenceMode


def choose_mode(
    adapters: Sequence[AdapterId],
    forced: str,
    merged: AdapterId,
    mergeable: Callable[[str], bool],
) -> tuple[InferenceMode, AdapterId]:
    """Mode and merged adapter for a batch of these rows.

    ``auto``: merged if all rows are one adapter's; mixture around an adapter that has over half of the rows; else
    unmerged. The base model is an adapter too: where its rows are most, the weights are best left the base model's.
    ``merged`` and ``mixture`` merge the largest mergeable group whatever its size (for debugging); without one they
    keep what is merged, so that base rows run on merged weights.

    Args:
        adapters: the adapter of every row.
        forced: ``auto`` or a mode's name.
        merged: the adapter merged now.
        mergeable: whether an adapter may be merged.
    """
    counts = Counter(a for a in adapters if a is not None and mergeable(a))
    # Ties go to what is merged already, then to the lower id: every rank of a tensor-parallel group decides alike.
    largest = max(counts, key=lambda a: (counts[a], a == merged, [-ord(c) for c in a]), default=None)
    if forced == InferenceMode.UNMERGED:
        largest = None
    elif forced == "auto":
        if largest is not None and 2 * counts[largest] <= len(adapters):
            largest = None
    elif largest is None:
        largest = merged
    if largest is None:
        return InferenceMode.UNMERGED, None
    pure = all(a == largest for a in adapters)
    return (InferenceMode.MERGED if pure and forced != InferenceMode.MIXTURE else InferenceMode.MIXTURE), largest
