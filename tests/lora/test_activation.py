"""Between gate_up and its activation: what the linear leaves is added there, and never lost.

SGLang's own MLP on a CPU; its kernels run under Triton's interpreter, in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.interpreter import CUDA, INTERPRETED, passed_interpreted, starter
from vlora_sgl import _sgl
from vlora_sgl.kernels.atmm import atmm_silu_reference
from vlora_sgl.kernels.atmm.row_routing import groups_of
from vlora_sgl.lora.layers import AtmmSiluAndMul, DeferredAdapters, pair_activations, wrap_layer

HIDDEN, WIDTH, RANK, ROWS = 32, 40, 16, 70
RANKS, SCALINGS = [16, 5, 8, 0], [0.5, 2.0, 1.0, 0.0]
RUNS = [(((0, 1.0),), 30), ((), 10), (((1, 1.0), (2, -1.0)), ROWS - 40)]


class Through(nn.Module):
    """down_proj's place, so that the MLP returns its activations."""

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return x, None


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What SGLang's layers ask for when they are built."""
    from sglang.srt.runtime_context import get_context, get_parallel

    if not CUDA:  # as platforms.torch_cpu: SGLang's layers pin without asking
        make = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *data, pin_memory=False, **how: make(*data, **how))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with get_context().override_server_args(), get_parallel().override(tp_size=1, tp_rank=0), torch.no_grad():
        yield


def make_mlp(family: str) -> Any:
    """An MLP with a wrapped gate_up, on a backend that has seen no batch."""
    from vlora_sgl.lora.backend import AtmmBackend

    torch.manual_seed(0)
    mlp = getattr(_sgl, family)(HIDDEN, WIDTH, "silu")
    mlp.down_proj = Through()
    nn.init.normal_(mlp.gate_up_proj.weight, std=HIDDEN**-0.5)
    mlp.gate_up_proj = wrap_layer(_sgl.get_lora_layer, mlp.gate_up_proj, AtmmBackend(4, torch.device("cpu")))
    mlp.gate_up_proj.set_lora_info(torch.randn(4, 2 * RANK, HIDDEN) / 4, torch.randn(4, 2 * WIDTH, RANK) / 4)
    return mlp


def pair(model: nn.Module, count: int) -> None:
    places = pair_activations(model)
    assert len(places) == count
    for place in places:
        place.put()


def route(mlp: Any, runs: list[Any], **options: Any) -> None:
    mlp.gate_up_proj.lora_backend.route(runs, RANKS, SCALINGS, **options)


def exact(mlp: Any, x: torch.Tensor, runs: list[Any]) -> torch.Tensor:
    linear, (groups, _) = mlp.gate_up_proj, groups_of(runs)
    base = x.double() @ linear.base_layer.weight.double().T
    return atmm_silu_reference(base, x, linear.a, linear.b, groups, RANKS, SCALINGS, linear.offsets)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_mlp_interpreted")
@pytest.mark.parametrize("family", ["LlamaMLP", "Qwen2MLP"])
@pytest.mark.parametrize("batch", ["eager", "graph", "decode"])
def test_mlp_adds_in_the_activation_what_gate_up_left(
    runtime: None, family: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = make_mlp(family)
    backend = mlp.gate_up_proj.lora_backend
    rows, runs = (3, [(((0, 1.0),), 2), ((), 1)]) if batch == "decode" else (ROWS, RUNS)
    x = torch.randn(rows, HIDDEN)
    route(mlp, runs)
    unfused = mlp(x)
    pair(nn.Sequential(mlp), 1)
    pair(nn.Sequential(mlp), 0)
    calls = []
    real = backend.silu_and_mul
    monkeypatch.setattr(backend, "silu_and_mul", lambda *operands: calls.append(1) or real(*operands))
    route(mlp, runs, prefill_tokens=96 if batch == "graph" else None)
    if batch == "graph":  # its rows past the batch are base rows
        backend.batch_info.routing = backend.prefill_tables[96].routing(96)
        out, padded = mlp(torch.cat([x, torch.randn(26, HIDDEN)])).split([rows, 26])
        assert torch.isfinite(padded).all()
    else:
        out = mlp(x)
    assert len(calls) == (batch != "decode")
    assert (unfused - mlp.act_fn.base_layer(x @ mlp.gate_up_proj.base_layer.weight.T)).abs().max() > 0.1
    torch.testing.assert_close(out, unfused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.double(), exact(mlp, x, runs), rtol=1e-4, atol=1e-5)
    backend.reset_batch_state()
    assert torch.equal(mlp(x), mlp.act_fn.base_layer(x @ mlp.gate_up_proj.base_layer.weight.T))


@pytest.mark.skipif(not INTERPRETED, reason="run by test_mlp_interpreted")
def test_mlp_of_an_encoder_adds_in_its_activation_what_gate_up_left(runtime: None) -> None:
    """Its input has three dimensions, and its gate_up a bias; the slots are the vision tower's."""
    from vlora_sgl.lora.tower_routing import TowerBackend

    torch.manual_seed(0)
    mlp = _sgl.Qwen2_5_VLMLP(HIDDEN, WIDTH, bias=True, hidden_act="silu")
    mlp.down_proj, base = Through(), mlp.gate_up_proj
    nn.init.normal_(base.weight, std=HIDDEN**-0.5)
    nn.init.normal_(base.bias)
    mlp.gate_up_proj = wrap_layer(_sgl.get_lora_layer, base, TowerBackend(4, torch.device("cpu")))
    mlp.gate_up_proj.set_lora_info(torch.randn(4, 2 * RANK, HIDDEN) / 4, torch.randn(4, 2 * WIDTH, RANK) / 4)
    x, linear = torch.randn(1, ROWS, HIDDEN), mlp.gate_up_proj
    pair(nn.Sequential(mlp), 1)
    route(mlp, RUNS)
    y = x[0].double() @ base.weight.double().T + base.bias
    groups, _ = groups_of(RUNS)
    wanted = atmm_silu_reference(y, x[0], linear.a, linear.b, groups, RANKS, SCALINGS, linear.offsets)
    torch.testing.assert_close(mlp(x)[0].double(), wanted, rtol=1e-4, atol=1e-5)
    route(mlp, [((), ROWS)])
    plain = mlp(x)
    assert plain.shape == (1, ROWS, WIDTH) and (plain[0] - wanted).abs().max() > 0.1
    assert torch.equal(plain, mlp.act.base_layer(base(x)[0]))


@pytest.mark.skipif(not INTERPRETED, reason="run by test_mlp_interpreted")
def test_mlp_never_loses_what_was_left(runtime: None) -> None:
    mlp = make_mlp("Qwen2MLP")
    pair(mlp, 1)
    route(mlp, RUNS)
    x = torch.randn(ROWS, HIDDEN)
    y, _ = mlp.gate_up_proj(x)
    for other in (y.clone(), y[:-1], y * 2):
        with pytest.raises(RuntimeError, match="given another tensor"):
            mlp.act_fn(other)
    with pytest.raises(RuntimeError, match="never added"):
        mlp.gate_up_proj(x)
    route(mlp, [((), 1)])
    with pytest.raises(RuntimeError, match="never added"):
        mlp.gate_up_proj(x[:1])
    route(mlp, RUNS)
    torch.testing.assert_close(mlp.act_fn(y).double(), exact(mlp, x, RUNS), rtol=1e-4, atol=1e-5)
    assert torch.equal(mlp.act_fn(y), mlp.act_fn.base_layer(y)), "taken once"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_replay_follows_refreshed_tables() -> None:
    from vlora_sgl.kernels.atmm import atmm_silu_and_mul, make_routing
    from vlora_sgl.kernels.tiling import Tile, TilingTable
    from vlora_sgl.lora.backend import GraphTables

    class OneTile(TilingTable):
        def lookup(self, key: int) -> Tile:
            return Tile(64, 64, 32, 1, 4, 2, run=2)

    options, offsets, rows = {"device": "cuda", "dtype": torch.bfloat16}, (0, 200, 400), 300
    a, b = torch.randn(4, 32, 64, **options), torch.randn(4, 400, 16, **options)
    x, y, table = torch.randn(rows, 64, **options), torch.randn(rows, 400, **options), OneTile({})
    tables = GraphTables(rows, range(4), torch.device("cuda"), 64)
    tables.refresh([((), rows)], RANKS, SCALINGS)
    view = tables.routing(rows)
    atmm_silu_and_mul(y, x, a, b, view, offsets, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atmm_silu_and_mul(y, x, a, b, view, offsets, table)
    whole = [(((2, 1.0),), rows)]
    for runs in [RUNS, whole, [*RUNS, ((), 100), (((0, 0.5), (1, -1.0)), rows - ROWS - 100)], RUNS]:
        used = sum(count for _, count in runs)
        tables.refresh(runs, RANKS, SCALINGS)
        out.fill_(float("nan"))
        graph.replay()
        fresh = make_routing(groups_of(runs)[0], used, RANKS, SCALINGS, "cuda", block=64, dense=False)
        assert torch.equal(out[:used], atmm_silu_and_mul(y[:used], x[:used], a, b, fresh, offsets, table))
        assert torch.isfinite(out).all()


@starter
def test_mlp_interpreted() -> None:
    assert passed_interpreted(__file__, "test_mlp") == 8


def test_an_mlp_that_does_more_between_the_two_is_left_alone(runtime: None) -> None:
    class Scaled(_sgl.Qwen2MLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.gate_up_proj(x)
            return self.act_fn(y.mul_(2))

    mlp = make_mlp("Qwen2MLP")
    mlp.__class__ = Scaled
    pair(mlp, 0)
    assert not isinstance(mlp.act_fn, AtmmSiluAndMul)


def test_what_was_deferred_is_for_one_tensor() -> None:
    deferred, y = DeferredAdapters(), torch.zeros(2, 4)
    assert deferred.take(y) is None
    deferred.leave(y, (1, 2))
    with pytest.raises(RuntimeError, match=r"\(2, 4\).*another tensor \(4, 2\)"):
        deferred.take(y.view(4, 2))
    assert deferred.take(y.view(2, 4)) == (1, 2) and deferred.take(y) is None
