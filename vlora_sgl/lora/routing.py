"""From requests to the operator's row groups: which slots each row applies, in which mode, from which token on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vlora_sgl.core import AdapterId, Segment, row_pairs
from vlora_sgl.kernels.atmm import Group, Pairs

Run = tuple[Pairs, int]
"""``(pairs, n_rows)``: the next ``n_rows`` rows of the batch apply these ``(slot, weight)`` pairs."""


def segments_of(
    adapters: Sequence[AdapterId],
    lengths: Sequence[int],
    merged: AdapterId,
    slot_of: Callable[[str], int],
    invocation_starts: Sequence[int] | None = None,
) -> list[Segment]:
    """The segments of a batch, one or two per request (the design's table of modes).

    Args:
        adapters: the adapter of every request.
        lengths: rows of every request.
        merged: the adapter merged into the weights, or ``None``.
        slot_of: an adapter's pool slot; raises where it has none.
        invocation starts: for an adapter that is activated after a prefix (an image), how many of the request's rows
            come before: they run as base rows. 0 for every other request.
    """
    segments, start = [], 0
    for i, (adapter, length) in enumerate(zip(adapters, lengths, strict=True)):
        invocation_start = min(invocation_starts[i], length) if invocation_starts else 0
        for who, rows in ((None, invocation_start), (adapter, length - invocation_start)):
            if rows:
                pairs = tuple((slot_of(name), weight) for name, weight in row_pairs(who, merged))
                segments.append(Segment(start, start + rows, pairs))
                start += rows
    return segments


def runs_of(segments: Iterable[Segment]) -> list[Run]:
    """Segments in row order as runs; rows between them are base rows."""
    runs: list[Run] = []
    at = 0
    for segment in segments:
        if segment.start > at:
            runs.append(((), segment.start - at))
        runs.append((segment.pairs, segment.end - segment.start))
        at = segment.end
    return runs


def groups_of(runs: Iterable[Run]) -> tuple[list[Group], int]:
    """Rows that apply the same pairs, gathered from all over the batch; and the number of rows."""
    parts: dict[Pairs, list[np.ndarray]] = {}
    at = 0
    for pairs, count in runs:
        parts.setdefault(tuple(pairs), []).append(np.arange(at, at + count, dtype=np.int32))
        at += count
    return [(np.concatenate(rows), pairs) for pairs, rows in parts.items()], at
