"""Who fetches whose weight; the instruction itself; and on a GPU that a captured step with it gives the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl.kernels.devices import is_hopper
from vlora_sgl.kernels.prefetch import CHUNK, THREADS, prefetch_kernel
from vlora_sgl.model_executor.weight_prefetch import ORDER, WeightPrefetch, install


def layers(count: int, plain: bool = True) -> list[dict[str, Any]]:
    def linear(number: int) -> Any:
        return SimpleNamespace(base_layer=SimpleNamespace(weight=torch.full((2, 2), float(number))), fusible=plain)

    return [
        {f"model.layers.{at}.block.{name}": linear(4 * at + i) for i, name in reversed(list(enumerate(ORDER)))}
        for at in range(count)
    ]


def test_every_linear_fetches_the_one_that_runs_next_and_the_last_joins() -> None:
    found = layers(3)
    assert install(found, 100, None) == 12
    ahead = {name: module.ahead for layer in found for name, module in layer.items()}
    following = {name: None if one.weight is None else float(one.weight[0, 0]) for name, one in ahead.items()}
    order = [f"model.layers.{at}.block.{name}" for at in range(3) for name in ORDER]
    assert [following[name] for name in order] == [*map(float, range(1, 12)), None]


def test_other_layers_are_left_alone() -> None:
    quantised = layers(2, plain=False)
    assert install(quantised, 100, None) == 0
    assert install([{"model.layers.0.mlp.experts": SimpleNamespace()}], 100, None) == 0
    assert not hasattr(quantised[0]["model.layers.0.block.o_proj"], "ahead")


def test_the_kernel_is_one_bulk_prefetch_a_thread() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"start": "*i8", "chunks": "i32", "CHUNK": "constexpr", "THREADS": "constexpr"}
    source = ASTSource(prefetch_kernel, kinds, constexprs={"CHUNK": CHUNK, "THREADS": THREADS})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    assert text.count("cp.async.bulk.prefetch.L2.global") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and is_hopper(torch.device("cuda"))), reason="needs a Hopper GPU")
def test_a_captured_chain_gives_what_it_gives_without() -> None:
    weights = [torch.randn(2048, 2048, device="cuda") / 45 for _ in range(5)]
    side, x = torch.cuda.Stream(), torch.randn(8, 2048, device="cuda")
    ahead = [WeightPrefetch(weight, 1 << 23, side) for weight in weights[1:]] + [WeightPrefetch(None, 0, side)]

    def chain(fetch: bool) -> torch.Tensor:
        y = x
        for weight, one in zip(weights, ahead, strict=True):
            y = torch.tanh(y @ weight)
            if fetch:
                one.fetch()
        return y

    expected = chain(fetch=False)
    assert torch.equal(chain(fetch=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(fetch=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
