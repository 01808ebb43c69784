"""Rows split where their adapter starts: every token keeps its place and gets its adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from vlora_sgl.lora.invocation import split_batch

ROW = st.tuples(
    st.sampled_from([None, "a", "b"]), st.integers(0, 9), st.integers(1, 9), st.one_of(st.just(0), st.integers(0, 20))
)


def batch_of(rows: list[Any]) -> SimpleNamespace:
    lengths = [length for _, _, length, _ in rows]
    return SimpleNamespace(
        lora_ids=[adapter for adapter, *_ in rows],
        batch_size=len(rows),
        extend_prefix_lens_cpu=[start for _, start, *_ in rows],
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )


@given(st.lists(ROW, min_size=1, max_size=6))
def test_every_token_gets_its_adapter(rows: list[Any]) -> None:
    batch = batch_of(rows)
    view = split_batch(batch, [invocation_start for *_, invocation_start in rows])
    wanted = [
        a if start + t >= invocation_start else None
        for a, start, length, invocation_start in rows
        for t in range(length)
    ]
    found = [a for a, n in zip(view.lora_ids, view.extend_seq_lens_cpu, strict=True) for _ in range(n)]
    assert found == wanted and all(view.extend_seq_lens_cpu)
    assert view.extend_seq_lens.tolist() == view.extend_seq_lens_cpu and view.batch_size == len(view.lora_ids)
    assert batch.lora_ids == [adapter for adapter, *_ in rows]  # the batch itself stays as SGLang made it


def test_a_batch_without_invocation_starts_is_passed_on() -> None:
    batch = batch_of([("a", 0, 3, 0), (None, 0, 2, 9)])
    assert split_batch(batch, [0, 9]) is batch
