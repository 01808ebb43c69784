"""Rows whose adapters rescale and shift a linear's output (DoRA, trained biases), against the float64 row loop."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_atmm import SHAPES, check, tiles
from tests.support.interpreter import CUDA, DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import (
    Vectors,
    atmm,
    atmm_linear,
    atmm_reference,
    atmm_silu_and_mul,
    atmm_silu_reference,
    make_routing,
)

# name: slots with vectors, and groups as (rows, pairs); what no group names is base-only. Slots by their place in a
# shape's list: 0 is plain or not, -1 the last.
ROUTINGS: dict[str, Any] = {
    "all-forms": (9, {0}, [([0, 5], [(0, 1.0)]), ([1, 2, 8], [(-1, 1.0)]), ([3], [])]),
    "two-of-them": (20, {0, -1}, [(range(0, 9), [(0, 1.0)]), (range(10, 20), [(-1, 1.0)])]),
    "one-taken-out": (
        21,
        {-1},
        [(range(0, 12), [(0, 1.0), (-1, -1.0)]), (range(12, 18), [(-1, -1.0)]), ([18, 20], [])],
    ),
    "one-applied-and-one-taken-out": (7, {0, -1}, [(range(3), [(0, 1.0), (-1, -1.0)]), ([4], [(-1, -1.0)])]),
    "one-row": (1, {-1}, [([0], [(-1, 1.0)])]),
    "plain-rows-only": (5, {-1}, [(range(4), [(0, 1.0)])]),
}
INTERPRETED_SHAPES = ("qkv-unequal-odd-ranks", "gate-up-ragged")
BIAS = pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])


def make_case(shape: str, routing: str, dtype: torch.dtype, dense: bool) -> Any:
    """Poisoned pools and vectors: whatever no row may read is NaN."""
    k, offsets, r, ranks, scalings = SHAPES[shape]
    rows, vectored, named = ROUTINGS[routing]
    last = len(ranks) - 1
    vectored = {last if s < 0 else s for s in vectored}
    groups = [
        (np.array(list(t), dtype=np.int32), tuple((last if s < 0 else s, w) for s, w in pairs)) for t, pairs in named
    ]
    rest = sorted(set(range(rows)) - {t for t_, _ in groups for t in t_.tolist()})
    groups.append((np.array(rest, dtype=np.int32), ()))
    torch.manual_seed(0)
    parts, n = len(offsets) - 1, offsets[-1]
    a = torch.full((len(ranks), parts * r, k), float("nan"))
    b = torch.full((len(ranks), n, r), float("nan"))
    every = torch.full((len(ranks), 3 * n + 5), float("nan"))  # a slot's of all linears lie behind each other
    vectors = every[:, n : 3 * n].view(len(ranks), 2, n)
    for s, rank in enumerate(ranks):
        a[s, : parts * rank] = torch.randn(parts * rank, k) * k**-0.5
        b[s, :, :rank] = torch.randn(n, rank)
        if s in vectored:
            vectors[s, 0] = (0.5 + torch.rand(n)) * torch.randn(n).sign()
            vectors[s, 1] = torch.randn(n)
    x, w, bias = torch.randn(rows, k), torch.randn(n, k) * k**-0.5, 3 * torch.randn(n)
    tensors = [t.to(DEVICE, dtype) for t in (x, w, bias, a, b)]
    table = make_routing(groups, rows, ranks, scalings, DEVICE, dense=dense, block=16, vectored=vectored)
    return *tensors, every.to(DEVICE)[:, n : 3 * n].view(len(ranks), 2, n), groups, table, vectored, shape


def exact(y: Any, case: Any, bias: Any, silu: bool = False) -> torch.Tensor:
    x, _, _, a, b, vectors, groups, _, vectored, shape = case
    _, offsets, _, ranks, scalings = SHAPES[shape]
    given = Vectors(vectors.cpu(), None if bias is None else bias.cpu())
    reference = atmm_silu_reference if silu else atmm_reference
    numbers = (groups, ranks, scalings, offsets, given, vectored)
    return reference(y.cpu(), x.cpu(), a.cpu(), b.cpu(), *numbers).to(DEVICE)


def run_case(shape: str, routing: str, dtype: torch.dtype, dense: bool, table: Any, has_bias: bool) -> None:
    case = make_case(shape, routing, dtype, dense)
    x, w, bias, a, b, vectors, groups, route, vectored, _ = case
    bias, offsets = bias if has_bias else None, SHAPES[shape][1]
    base = torch.nn.functional.linear(x, w, bias)
    wanted = exact(base, case, bias)
    changed = {t for rows, pairs in groups if any(s in vectored for s, _ in pairs) for t in rows.tolist()}
    without = exact(base, (*case[:-2], (), shape), bias)
    moved = (wanted - without).abs().amax(1) > 0.1
    assert {t for t in range(len(x)) if moved[t]} == changed, (
        "vectors must change the rows that have them, and no others"
    )
    # torch's own error: the same in its dtype, row by row
    own = torch.stack([exact(base[None, t].to(dtype), only(case, t), bias)[0].to(dtype) for t in range(len(x))])
    out = base.clone()
    atmm(out, x, a, b, route, offsets, table, Vectors(vectors, bias))
    check(out, wanted, own)
    plain = make_routing(groups, len(x), *SHAPES[shape][3:], DEVICE, dense=dense, block=16)
    rest = [t for t in range(len(x)) if t not in changed]
    others = atmm(base.clone(), x, a, b, plain, offsets, table)[rest]
    # In 32 bits a GPU's compiler fuses the last addition with a product where vectors leave it none to come after.
    close = torch.finfo(dtype).eps if CUDA and dtype is torch.float32 else 0.0
    torch.testing.assert_close(out[rest], others, rtol=4 * close, atol=4 * close, msg="other rows keep their bits")
    full = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    out = atmm_linear(x, w, bias, a, b, route, offsets, table, vectors)
    check(out, exact(full, case, bias), own)


def only(case: Any, t: int) -> Any:
    """The case with one row of it alone."""
    x, w, bias, a, b, vectors, groups, route, vectored, shape = case
    pairs = next(pairs for rows, pairs in groups if t in rows)
    return x[None, t], w, bias, a, b, vectors, [(np.zeros(1, np.int32), pairs)], route, vectored, shape


@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the path of a plain CPU")
def test_torch_path(shape: str, routing: str, dtype: torch.dtype, has_bias: bool) -> None:
    run_case(shape, routing, dtype, True, None, has_bias)


@kernels
@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("family", ["dense", "grouped"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, routing: str, family: str, split: int, dtype: Any, has_bias: bool) -> None:
    if not CUDA and ((dtype is torch.float16) != (split == 3) or has_bias != (split == 3)):
        pytest.skip("each dtype with one split under the interpreter, for time")
    if not CUDA and (shape not in INTERPRETED_SHAPES or list(ROUTINGS).index(routing) % 2 != (split == 3)):
        pytest.skip("two shapes, with half of the routings in either dtype, for time")
    if not CUDA and (list(SHAPES).index(shape) + list(ROUTINGS).index(routing) // 2) % 2 != (family == "dense"):
        pytest.skip("either family with half of the routings of every shape, for time")
    run_case(shape, routing, dtype, family == "dense", tiles(split), has_bias)


@kernels
@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", ["gate-up-ragged", *(["ranks-of-whole-groups"] if CUDA else [])])
def test_kernel_of_the_activation(shape: str, routing: str, dtype: Any, has_bias: bool) -> None:
    if not CUDA and list(ROUTINGS).index(routing) % 2 == has_bias:
        pytest.skip("every routing with or without a bias under the interpreter, for time")
    case = make_case(shape, routing, dtype, False)
    x, w, bias, a, b, vectors, groups, route, vectored, _ = case
    bias, offsets = bias if has_bias else None, SHAPES[shape][1]
    base = torch.nn.functional.linear(x, w, bias)
    out = atmm_silu_and_mul(base, x, a, b, route, offsets, vectors=Vectors(vectors, bias))
    own = torch.stack([exact(base[None, t], only(case, t), bias, True)[0].to(dtype) for t in range(len(x))])
    check(out, exact(base, case, bias, True), own)
    plain = make_routing(groups, len(x), *SHAPES[shape][3:], DEVICE, dense=False, block=16)
    rest = [t for t in range(len(x)) if t not in rows_with(groups, vectored)]
    assert torch.equal(out[rest], atmm_silu_and_mul(base, x, a, b, plain, offsets)[rest])


def rows_with(groups: Any, vectored: Any) -> set[int]:
    return {t for rows, pairs in groups if any(s in vectored for s, _ in pairs) for t in rows.tolist()}


@starter
def test_kernels_interpreted() -> None:
    assert passed_interpreted(__file__) > 15


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["dense", "grouped"])
def test_graph_replay_equals_eager_bit_for_bit(family: str) -> None:
    x, w, bias, a, b, vectors, _, route, _, shape = make_case(
        "qkv-unequal-odd-ranks", "one-applied-and-one-taken-out", torch.bfloat16, family == "dense"
    )
    offsets, table = SHAPES[shape][1], tiles(3)
    eager = atmm_linear(x, w, bias, a, b, route, offsets, table, vectors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atmm_linear(x, w, bias, a, b, route, offsets, table, vectors)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.parametrize(
    "pairs",
    [((0, 0.5),), ((0, 1.0), (1, 1.0)), ((0, -1.0), (1, -1.0))],
    ids=["half-a-slot", "two-applied", "two-taken-out"],
)
def test_vectors_are_applied_whole_and_alone(pairs: Any) -> None:
    with pytest.raises(ValueError, match="whole and alone"):
        make_routing([(np.arange(2, dtype=np.int32), pairs)], 2, [4, 4], [1.0, 1.0], "cpu", vectored={0, 1})


def test_vectors_that_do_not_fit_are_refused() -> None:
    route = make_routing([(np.arange(2, dtype=np.int32), ((0, 1.0),))], 2, [4], [1.0], "cpu", vectored={0})
    operands = torch.zeros(2, 6), torch.zeros(2, 8), torch.zeros(1, 4, 8), torch.zeros(1, 6, 4), route, (0, 6)
    with pytest.raises(ValueError, match=r"float32 \[1, 2, 6\].*\(1, 2, 5\)"):
        atmm(*operands, vectors=Vectors(torch.zeros(1, 2, 5)))
