"""Adapters on the input embedding and the LM head: their part of every row, against a loop over rows in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlora_sgl.kernels.atmm import make_routing
from vlora_sgl.kernels.atmm.row_routing import Run, groups_of
from vlora_sgl.lora.backend import AtmmBackend, Batch, GraphTables
from vlora_sgl.lora.vocabulary import cut, embed, embed_in_graph, seen_by_head

SLOTS, RANK, VOCABULARY, WIDTH = 4, 6, 40, 10
RANKS, SCALINGS = [6, 3, 0, 5], [0.5, 2.0, 0.0, 1.5]
RUNS: list[Run] = [(((0, 1.0),), 2), ((), 1), (((1, 0.5), (3, -1.0)), 3), (((3, 1.0),), 1), (((0, 1.0),), 1)]
ROWS = sum(rows for _, rows in RUNS)


def factors(out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a [S, R, inner] and b [S, out, R], zero past each slot's rank."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(SLOTS, RANK, inner, generator=generator)
    b = torch.randn(SLOTS, out, RANK, generator=generator)
    for slot, rank in enumerate(RANKS):
        a[slot, rank:], b[slot, :, rank:] = 0, 0
    return a, b


def exact(y: torch.Tensor, columns: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row by row; ``columns(slot, row)`` is A times the row's input."""
    wanted, row = y.double().clone(), 0
    for pairs, rows in RUNS:
        for _ in range(rows):
            for slot, weight in pairs:
                wanted[row] += weight * SCALINGS[slot] * (b[slot].double() @ columns(slot, row))
            row += 1
    return wanted


def test_embeddings_get_each_rows_adapters_eagerly_and_in_a_graph() -> None:
    a, b = factors(WIDTH, VOCABULARY)
    ids, y = torch.arange(ROWS) * 7 % VOCABULARY, torch.randn(ROWS, WIDTH)
    wanted = exact(y, lambda slot, row: a[slot, :, ids[row]].double(), a, b)
    routing = make_routing(groups_of(RUNS)[0], ROWS, RANKS, SCALINGS, "cpu")
    found = y.clone()
    embed(found, ids, a, b, routing)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[2], y[2]), "a base row is not touched"

    tables = GraphTables(16, range(SLOTS), torch.device("cpu"), both=True)
    graph = tables.refresh(RUNS, RANKS, SCALINGS)
    replayed = y.clone()
    embed_in_graph(replayed, ids, a, b, graph.gates)
    torch.testing.assert_close(replayed.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[ROWS], [3, 3, 2], [1] * ROWS])
def test_a_prefills_logits_get_the_adapters_of_the_rows_that_the_head_sees(
    chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlora_sgl import _sgl

    backend: Any = AtmmBackend(max_loras_per_batch=SLOTS, device=torch.device("cpu"), server_args=None)
    a, b = factors(VOCABULARY, WIDTH)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, VOCABULARY + 3)  # padded, as SGLang's vocabulary is
    wanted = exact(y[:, :VOCABULARY], lambda slot, row: a[slot].double() @ x[row].double(), a, b)
    whole = make_routing([(np.arange(50, dtype=np.int32), ())], 50, RANKS, SCALINGS, "cpu")
    backend.batch_info = Batch(whole, in_graph=False, head_runs=RUNS)
    found, first = y.clone(), 0
    with _sgl.envs.SGLANG_LOGPROB_CHUNK_SIZE.override(chunks[0]):
        for number, rows in enumerate(chunks):
            backend._lm_head_pass_idx = number if len(chunks) > 1 else None
            part = slice(first, first + rows)
            backend.add_to_logits(found[part], x[part], a, b, (0, VOCABULARY))
            first += rows
    torch.testing.assert_close(found[:, :VOCABULARY].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[:, VOCABULARY:], y[:, VOCABULARY:])
    backend._lm_head_pass_idx = None
    with pytest.raises(RuntimeError, match="was to see"):
        backend.add_to_logits(torch.cat([y, y]), torch.cat([x, x]), a, b, (0, VOCABULARY))
    backend.batch_info.head_runs = []
    backend.add_to_logits(untouched := y.clone(), x, a, b, (0, VOCABULARY))
    assert torch.equal(untouched, y)


@pytest.mark.parametrize(
    ("log_probabilities", "starts", "seen"),
    [
        (None, (), [("x", 1), (None, 1), ("y", 1)]),
        ([0, 2, 1], (), [("x", 4), (None, 1), ("y", 2)]),
        ([0, 2, 1], (12, 0, 1 << 40), [(None, 2), ("x", 2), (None, 1), (None, 2)]),
        (None, (14, 0, 0), [(None, 1), (None, 1), ("y", 1)]),
    ],
)
def test_what_a_prefills_head_sees(log_probabilities: Any, starts: Any, seen: Any) -> None:
    batch: Any = SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_extend=lambda: True, is_target_verify=lambda: False, is_draft_extend_v2=lambda: False
        ),
        return_logprob=log_probabilities is not None,
        extend_seq_lens_cpu=[4, 3, 3],
        extend_prefix_lens_cpu=[10, 0, 5],
        extend_logprob_start_lens_cpu=log_probabilities,
        batch_size=3,
        lora_ids=["x", None, "y"],
    )
    assert list(seen_by_head(batch, starts) or ()) == seen
    batch.forward_mode.is_extend = lambda: False
    assert seen_by_head(batch, ()) is None


@pytest.mark.parametrize("first", range(ROWS + 1))
def test_runs_are_cut_where_a_chunk_begins_and_ends(first: int) -> None:
    flat = [pairs for pairs, rows in RUNS for _ in range(rows)]
    for count in range(ROWS - first + 1):
        found = cut(RUNS, first, count)
        assert [pairs for pairs, rows in found for _ in range(rows)] == flat[first : first + count]
