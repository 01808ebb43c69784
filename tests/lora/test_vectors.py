"""DoRA's factors, and biases, of SGLang's linears: computed from what is served, merged and taken out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_context, get_parallel
from torch import nn

from vlora_sgl import _sgl
from vlora_sgl.errors import AdapterError
from vlora_sgl.kernels.merge import BiasTarget, MergeTable, MergeTarget
from vlora_sgl.lora import vectors as module_of_vectors
from vlora_sgl.lora.backend import AtmmBackend
from vlora_sgl.lora.layers import wrap_layer
from vlora_sgl.lora.stacking import OutputVectors
from vlora_sgl.lora.vectors import SlotVectors

SLOTS, RANK, HIDDEN, WIDTH = 3, 4, 24, 40
SCALE = 0.5
NAMES = ("layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj")


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_sgl, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    if not torch.cuda.is_available():
        make = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *data, pin_memory=False, **how: make(*data, **how))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with get_context().override_server_args(), get_parallel().override(tp_size=1, tp_rank=0), torch.no_grad():
        yield


def make_layers() -> dict[str, Any]:
    """gate_up and down with biases, wrapped, by full name."""
    torch.manual_seed(0)
    backend = AtmmBackend(SLOTS, torch.device("cpu"))
    backend.marks_rows = True
    bases = (
        _sgl.MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], bias=True),
        _sgl.RowParallelLinear(WIDTH, HIDDEN, bias=True),
    )
    layers = {}
    for name, base in zip(NAMES, bases, strict=True):
        nn.init.normal_(base.weight, std=base.weight.shape[1] ** -0.5)
        nn.init.normal_(base.bias)
        layer = layers[f"model.{name}"] = wrap_layer(_sgl.get_lora_layer, base, backend)
        (n, k), parts = base.weight.shape, len(getattr(base, "output_sizes", [0]))
        layer.set_lora_info(torch.full((SLOTS, parts * RANK, k), torch.nan), torch.full((SLOTS, n, RANK), torch.nan))
    return layers


def make_adapter(layers: dict[str, Any], **vectors: OutputVectors) -> Any:
    """Factors of both linears, in the pool's layout, and these vectors."""
    torch.manual_seed(1)
    weights = {}
    for name, layer in zip(NAMES, layers.values(), strict=True):
        parts, (n, k) = len(layer.columns) - 1, layer.base_layer.weight.shape
        weights[f"{name}.lora_A.weight"] = torch.randn(parts * RANK, k) * k**-0.5
        weights[f"{name}.lora_B.weight"] = torch.randn(n, RANK)
    found = {name: vectors[name.rsplit(".", 1)[1]] for name in NAMES if name.rsplit(".", 1)[1] in vectors}
    return SimpleNamespace(
        config=SimpleNamespace(r=RANK),
        scaling=SCALE,
        layers=[SimpleNamespace(weights=weights)],
        output_vectors=found,
        form="vectors",
        vectors=None,
        unmergeable=None,
    )


def everything(layers: dict[str, Any]) -> dict[str, OutputVectors]:
    """DoRA of gate alone (up keeps its rows' norms) and of down; a bias of B; a bias in the base model's place."""
    torch.manual_seed(2)
    magnitude = torch.cat([0.5 + torch.rand(WIDTH), torch.full((WIDTH,), torch.nan)])
    bias = torch.cat([torch.full((WIDTH,), torch.nan), torch.randn(WIDTH)])
    return {
        "gate_up_proj": OutputVectors(magnitude, None, bias),
        "down_proj": OutputVectors(0.5 + torch.rand(HIDDEN), torch.randn(HIDDEN), None),
    }


def fill(layers: dict[str, Any], adapter: Any, slot: int) -> SlotVectors:
    table = SlotVectors([layers], SLOTS, torch.device("cpu"))
    table.table.fill_(torch.nan)
    table.attach(adapter)
    table.load(slot, adapter)
    for name, layer in zip(NAMES, layers.values(), strict=True):
        weights = adapter.layers[0].weights
        a, b = (weights[f"{name}.lora_{side}.weight"] for side in "AB")
        layer.a[slot], layer.b[slot] = a, b
    return table


def wanted(layer: Any, adapter: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """``g (x W^T + s x A^T B^T) + b`` in float64, part by part."""
    weights, given = adapter.layers[0].weights, adapter.output_vectors.get(name, OutputVectors())
    a, b = (weights[f"{name}.lora_{side}.weight"].double() for side in "AB")
    bounds, outputs = layer.columns, []
    for part in range(len(bounds) - 1):
        rows = slice(bounds[part], bounds[part + 1])
        total = layer.base_layer.weight[rows].double()
        total = total + SCALE * b[rows] @ a[part * RANK : (part + 1) * RANK]
        factor, bias = torch.ones(len(total)).double(), layer.base_layer.bias[rows].double()
        if given.magnitude is not None:
            m = given.magnitude[rows].double()
            factor = torch.where(m.isnan(), 1.0, m / total.norm(dim=1))
        if given.bias is not None:
            bias = torch.where(given.bias[rows].isnan(), bias, given.bias[rows].double())
        added = 0.0 if given.added is None else given.added[rows].double()
        outputs.append(factor * (x.double() @ total.T) + bias + added)
    return torch.cat(outputs, 1)


def run(layer: Any, x: torch.Tensor, runs: Any, vectored: Any = (1,)) -> torch.Tensor:
    layer.lora_backend.route(runs, [0, RANK, 0], [0.0, SCALE, 0.0], vectored)
    layer.set_lora = True
    return layer(x)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plain", [True, False], ids=["fused", "apart"])
def test_rows_of_an_adapter_with_vectors(name: str, plain: bool) -> None:
    layers = make_layers()
    adapter = make_adapter(layers, **everything(layers))
    fill(layers, adapter, 1)
    layer = layers[f"model.{name}"]
    layer.fusible &= plain
    x = torch.randn(5, layer.base_layer.weight.shape[1])
    out = run(layer, x, [(((1, 1.0),), 3), ((), 2)])
    exact = wanted(layer, adapter, name, x)
    base = x @ layer.base_layer.weight.T + layer.base_layer.bias
    assert (exact[:3] - base[:3]).abs().max() > 0.3
    torch.testing.assert_close(out[:3].double(), exact[:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[3:], base[3:])


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_folds_them_in_and_other_rows_take_them_out(name: str) -> None:
    layers = make_layers()
    adapter = make_adapter(layers, **everything(layers))
    fill(layers, adapter, 1)
    layer = layers[f"model.{name}"]
    base, weight, bias = layer.base_layer, layer.base_layer.weight, layer.base_layer.bias
    x = torch.randn(6, weight.shape[1])
    exact, before = wanted(layer, adapter, name, x), x @ weight.T + bias
    kept = weight.detach().clone(), bias.detach().clone()
    bounds = layer.columns
    targets = [
        MergeTarget(name, name, weight.data[s:e], kept[0][s:e], layer.a, layer.b[:, s:e], i, layer.vectors[:, 0, s:e])
        for i, (s, e) in enumerate(pairwise(bounds))
    ]
    table = MergeTable(targets, biases=[BiasTarget(bias.data, kept[1], layer.vectors[:, 1])])
    table.merge([name], slot=1, rank=RANK, scaling=SCALE, vectors=1)
    torch.testing.assert_close((x @ base.weight.T + base.bias).double(), exact, rtol=1e-5, atol=1e-5)
    out = run(layer, x, [(((1, -1.0),), 4), ((), 2)])
    torch.testing.assert_close(out[:4], before[:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[4:].double(), exact[4:], rtol=1e-5, atol=1e-5)
    table.merge([name], slot=1, rank=RANK, scaling=SCALE)
    assert torch.equal(base.bias, kept[1]), "a merge of plain LoRA leaves no bias shifted"
    table.merge([name], slot=1, rank=RANK, scaling=SCALE, vectors=1)
    table.restore([name])
    assert torch.equal(base.weight, kept[0]) and torch.equal(base.bias, kept[1])


def test_the_parts_of_ranks_that_share_inputs_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """down_proj of two ranks: each scales its part by the norms of whole rows, and one of them shifts."""
    layers = make_layers()
    adapter = make_adapter(layers, **everything(layers))
    name = NAMES[1]
    whole = layers[f"model.{name}"]
    x = torch.randn(4, WIDTH)
    exact = wanted(whole, adapter, name, x)
    half, squares = WIDTH // 2, []

    def of_rank(rank: int, total: torch.Tensor | None) -> torch.Tensor:
        mine = make_layers()
        layer, columns = mine[f"model.{name}"], slice(rank * half, (rank + 1) * half)
        base = layer.base_layer
        base.weight = nn.Parameter(whole.base_layer.weight[:, columns].contiguous())
        base.bias = nn.Parameter(whole.base_layer.bias.clone())
        base.tp_rank, base.tp_size, base.reduce_results = rank, 2, False
        layer.set_lora_info(layer.a[:, :, columns].contiguous(), layer.b)
        part = make_adapter(mine, down_proj=adapter.output_vectors[name])
        factor = f"{name}.lora_A.weight"
        part.layers[0].weights = {**adapter.layers[0].weights}
        part.layers[0].weights[factor] = part.layers[0].weights[factor][:, columns].contiguous()

        def reduce(numbers: torch.Tensor) -> torch.Tensor:
            squares.append(numbers)
            return numbers if total is None else total

        monkeypatch.setattr(module_of_vectors, "sum_of_ranks", reduce)
        monkeypatch.setattr(module_of_vectors, "largest_of_ranks", lambda numbers: numbers)
        monkeypatch.setattr(_sgl, "get_tp_group", lambda: SimpleNamespace(world_size=2))
        fill(mine, part, 1)
        return run(layer, x[:, columns], [(((1, 1.0),), 4)])

    of_rank(0, None), of_rank(1, None)
    total = squares[0] + squares[1]
    torch.testing.assert_close((of_rank(0, total) + of_rank(1, total)).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("vectors", "reason"),
    [
        ({}, None),
        ({"down_proj": OutputVectors(torch.full((HIDDEN,), 1e-3))}, "1/16 to 16"),
        ({"down_proj": OutputVectors(torch.full((HIDDEN,), 1e3))}, "1/16 to 16"),
        ({"down_proj": OutputVectors(None, torch.full((HIDDEN,), 100.0))}, "too large beside"),
        ({"gate_up_proj": OutputVectors(None, torch.ones(2 * WIDTH))}, None),
    ],
    ids=["none", "tiny-factors", "huge-factors", "huge-bias", "small-bias"],
)
def test_what_would_cost_others_their_accuracy_is_never_merged(vectors: Any, reason: str | None) -> None:
    layers = make_layers()
    adapter = make_adapter(layers, **vectors)
    SlotVectors([layers], SLOTS, torch.device("cpu")).attach(adapter)
    assert (adapter.unmergeable is None) == (reason is None) and (reason or "") in (adapter.unmergeable or "")


def test_a_bias_where_the_base_has_none_is_never_merged() -> None:
    layers = make_layers()
    layers[f"model.{NAMES[1]}"].base_layer.bias = None
    adapter = make_adapter(layers, down_proj=OutputVectors(None, torch.ones(HIDDEN)))
    SlotVectors([layers], SLOTS, torch.device("cpu")).attach(adapter)
    assert "has none in the base model" in adapter.unmergeable


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    layers = make_layers()
    table = SlotVectors([layers], SLOTS, torch.device("cpu"))
    adapter = make_adapter(layers, **everything(layers))
    adapter.layers[0].weights[f"{NAMES[1]}.lora_B.weight"].zero_()
    layers[f"model.{NAMES[1]}"].base_layer.weight.data[3].zero_()
    with pytest.raises(AdapterError, match="is zero"):
        table.attach(adapter)
    adapter.output_vectors = {"layers.0.self_attn.o_proj": OutputVectors(torch.ones(3))}
    with pytest.raises(AdapterError, match=r"o_proj is no linear whose adapters can have vectors"):
        table.attach(adapter)
    quantised = layers[f"model.{NAMES[1]}"]
    quantised.base_layer.quant_method = object()
    with pytest.raises(AdapterError, match=r"down_proj: DoRA needs the base weight as a plain matrix"):
        table.attach(make_adapter(layers, down_proj=OutputVectors(torch.ones(HIDDEN))))
    quantised.base_layer.tp_size = 2  # of one rank in all
    with pytest.raises(AdapterError, match="data-parallel attention"):
        table.attach(make_adapter(layers, down_proj=OutputVectors(None, torch.ones(HIDDEN))))
