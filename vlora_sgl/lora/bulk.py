"""Passes over all of an adapter's weights, hundreds of megabytes, on as many threads as there are cores.

What they do in torch and hashlib lets other threads of Python run. A load is such a pass after the other, and whoever
asked for it waits for them, so the threads of each end with it: none lie idle between loads, nor are lost in a fork.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MOST_THREADS = 16
"""More would wait for the memory, which a few cores keep busy, and for each other's turns in Python."""

T = TypeVar("T")
R = TypeVar("R")


def threads() -> int:
    """How many a pass takes: the cores that this process may use, and no more than ``MOST_THREADS``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


def each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of every item, in their order, on many threads.

    Raises:
        Exception: what the first of the items raises whose work does.
    """
    found: dict[int, R] = {}
    failed: dict[int, Exception] = {}
    left = iter(range(len(items)))  # shared: whoever is free takes the next

    def take() -> None:
        for i in left:
            try:
                found[i] = work(items[i])
            except Exception as error:
                failed[i] = error
            if failed:  # all items before it have been taken
                return

    more = min(threads(), len(items)) - 1
    if more < 1:
        take()
    else:
        with _one_thread_an_operation(), ThreadPoolExecutor(more, "adapter") as pool:
            for _ in range(more):
                pool.submit(take)
            take()
    if failed:
        raise failed[min(failed)]
    return [found[i] for i in range(len(items))]


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """Torch's operations on threads that begin meanwhile take no more threads, each of them as many as cores."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_matrix(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Matrices as the rows of one, where they lie so in memory already; a view."""
    first = parts[0]
    storage, after = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != after or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return None
        after += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride()) if len(parts) > 1 else first


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum that is finite says so in one reading; one may overflow, too."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


Contents = Mapping[tuple[object, ...], str]
"""SHA-256 of the bytes of tensors, by ``place``."""


def content(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    # Of the functions that nobody can find two contents for, it is the one that processors have instructions for.
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's bytes lie: two that are alive and have this in common have the same."""
    lies = True if tensor.is_contiguous() else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return tensor.data_ptr(), tensor.nbytes, lies


def digest(tensors: Mapping[str, torch.Tensor | None], contents: Contents | None = None) -> str:
    """Digest of some tensors: of their labels, types, shapes and bytes. Those that are ``None`` do not count.

    Args:
        contents: of those that are known.
    """
    known = contents or {}
    parts = [
        (label, str(tensor.dtype), tuple(tensor.shape), known.get(place(tensor)) or content(tensor))
        for label, tensor in tensors.items()
        if tensor is not None
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def digests(
    named: Mapping[str, Mapping[str, torch.Tensor | None]], contents: Contents | None = None
) -> dict[str, str]:
    """``digest`` of the tensors of each name, by name."""
    known = dict(contents or {})
    tensors = [one for some in named.values() for one in some.values() if one is not None]
    new = {where: one for one in tensors if (where := place(one)) not in known}
    known.update(zip(new, each(content, list(new.values())), strict=True))
    return {name: digest(some, known) for name, some in named.items()}


def joined(digests: Mapping[str, str]) -> str:
    """One digest of many by name, in whatever order they come."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
