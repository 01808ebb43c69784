"""Projection, rotation and store in one launch: the bits of three, under Triton's interpreter and on the GPU.

All operands are small whole numbers, whose sums are the same in any order: so the bits say what is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_atmm import FixedTable, behind_each_other
from tests.support.interpreter import CUDA, DEVICE, kernels, passed_interpreted, starter
from vlora_sgl.kernels.atmm import Rotation, atmm_linear, atmm_rotated, atmm_torch, launch, make_routing
from vlora_sgl.kernels.rotary import rotate_and_store, rotated_reference
from vlora_sgl.kernels.tiling import Tile

# heads of q, of k, width of a head, columns of each axis
SHAPES = {"grouped": (6, 2, 32, (4, 6, 6)), "one-kv-head": (3, 1, 64, (32, 0, 0)), "alike": (2, 2, 32, (16, 0, 0))}
# rows; (rows, pairs) as in test_atmm
ROUTINGS: dict[str, tuple[int, Any]] = {
    "one-row": (1, [([0], [(0, 1.0)])]),
    "base-rows-between": (7, [([1, 3], [(0, 1.0)]), ([0, 5], [(2, 1.0)])]),
    "two-slots-a-row": (18, [(range(0, 18, 2), [(0, 1.0), (1, -1.0)])]),
    "base-only": (3, []),
}
RANKS, SCALINGS, R, K = [16, 5, 16], [1.0, 0.5, 2.0], 16, 64


def table(block_n: int, split: int) -> FixedTable:
    return FixedTable(linear=Tile(16, block_n, 32, split, 4, 2), linear_shrink=Tile(16, 16, 32, split, 4, 2))


def case(shape: str, routing: str, dtype: torch.dtype, dense: bool = True) -> Any:
    """(x, weight, bias, a, b, routing, offsets) and a function that makes the rest of a call, caches of NaN in it."""
    heads, kv_heads, width, sections = SHAPES[shape]
    rows, named = ROUTINGS[routing]
    offsets = tuple(np.cumsum([0, heads * width, kv_heads * width, kv_heads * width]).tolist())
    groups = [(np.array(list(t), dtype=np.int32), tuple(pairs)) for t, pairs in named]
    rest = sorted(set(range(rows)) - {t for own, _ in groups for t in own.tolist()})
    groups.append((np.array(rest, dtype=np.int32), ()))
    torch.manual_seed(0)
    n, slots = offsets[-1], len(RANKS)
    shapes = (rows, K), (n, K), (n,), (slots, 3 * R, K), (slots, n, R)
    x, weight, bias, a, b = (torch.randint(-1, 2, size).to(DEVICE, dtype) for size in shapes)
    a, b, places = behind_each_other(a, b, RANKS, 3)
    routed = make_routing(groups, rows, RANKS, SCALINGS, DEVICE, dense=dense, places=places, block=16)
    angles = 6.0 * torch.rand(50, width // 2, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randint(50, (3, rows + 2), device=DEVICE)[:, :rows]
    at = torch.randperm(30)[:rows].to(DEVICE)

    def rotation() -> Rotation:
        room = torch.full((2, 30, kv_heads + 1, width), float("nan"), dtype=dtype, device=DEVICE)
        k_cache, v_cache = room[:, :, :kv_heads]  # slots apart
        return Rotation(cos_sin, positions, at, k_cache, v_cache, sections)

    return (x, weight, bias, a, b, routed, offsets), rotation


TILES = [(32, 1), (32, 2), (16, 2)]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
# Shapes, routings, tiles and dtypes in turn: under the interpreter each costs seconds.
CASES = [
    (shape, list(ROUTINGS)[(2 * i + j) % len(ROUTINGS)], *TILES[(i + j) % 3], DTYPES[j % len(DTYPES)])
    for i, shape in enumerate(SHAPES)
    for j in range(len(DTYPES))
]


@kernels
@pytest.mark.parametrize("shape, routing, block_n, split, dtype", CASES)
def test_kernel_leaves_the_bits_of_both(
    shape: str, routing: str, block_n: int, split: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, rotation = case(shape, routing, dtype)
    tiles, once, apart = table(block_n, split), rotation(), rotation()
    qkv = atmm_linear(*given, tiles)
    expected = rotate_and_store(qkv, *apart.operands)
    ran: list[str] = []

    def start(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        ran.append(kernel.__name__)
        kernel[grid](*args, **options)

    monkeypatch.setattr(launch.run_rotated, "__defaults__", (start,))
    q = atmm_rotated(*given, once, tiles)
    assert ran == ["dense_shrink_kernel", "dense_rotated_kernel"]
    assert q.is_contiguous() and q.shape == expected.shape
    for found, wanted in ((q, expected), (once.k_cache, apart.k_cache), (once.v_cache, apart.v_cache)):
        if CUDA:  # the compiler may contract a product and a sum in one and not in the other
            atol = 4 * torch.finfo(torch.float32).eps * wanted.nan_to_num().abs().max().item()
            torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=atol, equal_nan=True)
        else:
            assert torch.equal(found.nan_to_num(1e4), wanted.nan_to_num(1e4))
    x, weight, bias, *rest = (t.double() if isinstance(t, torch.Tensor) else t for t in given)
    exact = atmm_torch(torch.nn.functional.linear(x, weight, bias), x, *rest)
    heads = exact.unflatten(1, (-1, once.k_cache.shape[2]))
    count, kv_heads = q.shape[1] // once.k_cache.shape[2], once.k_cache.shape[1]
    turned = rotated_reference(heads[:, : count + kv_heads], once.cos_sin, once.positions, once.sections)
    unit = torch.finfo(dtype).eps
    tolerance = {"rtol": unit, "atol": 2 * unit * float(exact.abs().max())}
    for found, wanted in (
        (q.unflatten(1, (count, -1)), turned[:, :count]),
        (once.k_cache[once.places], turned[:, count:]),
        (once.v_cache[once.places], heads[:, count + kv_heads :]),
    ):
        torch.testing.assert_close(found.double(), wanted, **tolerance)
    others = torch.ones(30, dtype=torch.bool, device=DEVICE).index_fill(0, once.places, False)
    assert once.k_cache[others].isnan().all() and once.v_cache[others].isnan().all(), "no other slot is touched"


@kernels
@pytest.mark.parametrize("why", ["many-rows", "a-tile-of-two-heads"])
def test_kernel_is_left_to_two_launches_where_it_does_not_fit(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_rotated", lambda *_: pytest.fail("it was not left"))
    given, rotation = case("alike", "base-rows-between", torch.float32, dense=why != "many-rows")
    made, apart = rotation(), rotation()
    tiles = table(64 if why == "a-tile-of-two-heads" else 32, 1)
    q = atmm_rotated(*given, made, tiles)
    assert torch.equal(q, rotate_and_store(atmm_linear(*given, tiles), *apart.operands))
    assert torch.equal(made.k_cache.nan_to_num(1e4), apart.k_cache.nan_to_num(1e4))


@starter
def test_rotated_under_the_interpreter() -> None:
    assert passed_interpreted(__file__) == len(CASES) + 2
