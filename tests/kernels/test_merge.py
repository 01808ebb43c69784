"""Merging against float64: the Triton kernel (interpreted here, compiled where there is a GPU) and the CPU path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from vlora_sgl.kernels.merge import BiasTarget, MergeTable, MergeTarget, MergeTile, merge_reference, ulp_distance
from vlora_sgl.kernels.merge import kernel as merge_kernel

SLOTS, MAX_RANK = 3, 136  # wider than one block of the kernel's rank loop
DEVICES = ["interpreter", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the operation runs. ``interpreter``: the kernel itself, on CPU tensors."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield torch.device("cuda")
        return
    if request.param == "interpreter":
        for name in ("_merge_kernel", "factors_of"):
            monkeypatch.setattr(merge_kernel, name, InterpretedFunction(getattr(merge_kernel, name).fn))
    yield torch.device("cpu")


def stack(
    shape_of_slices: tuple[int, ...], k: int, group: str, device: torch.device, dtype: torch.dtype
) -> list[MergeTarget]:
    """The merge targets of one (stacked) linear layer, with noise in every slot, past every rank too."""
    n, c = sum(shape_of_slices), len(shape_of_slices)
    weight = torch.randn(n, k, device=device, dtype=torch.float64).to(dtype)
    lora_a = torch.randn(SLOTS, c * MAX_RANK, k, device=device).to(dtype)
    lora_b = torch.randn(SLOTS, n, MAX_RANK, device=device).to(dtype)
    base_weights, targets, row = weight.clone(), [], 0
    for index, size in enumerate(shape_of_slices):
        rows = slice(row, row + size)
        targets.append(
            MergeTarget(f"{group}[{index}]", group, weight[rows], base_weights[rows], lora_a, lora_b[:, rows], index)
        )
        row += size
    return targets


def table(device: torch.device, dtype: torch.dtype) -> MergeTable:
    """A qkv stack of unequal slices, ragged against the tiles, and a row-parallel projection."""
    torch.manual_seed(5)
    targets = [*stack((70, 20, 20), 48, "qkv", device, dtype), *stack((33,), 37, "down", device, dtype)]
    return MergeTable(targets, MergeTile(rows=16, columns=16, steps=2, warps=4, stages=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 16, 40, MAX_RANK])
def test_merge_is_the_rounded_float64_sum(device: torch.device, dtype: torch.dtype, rank: int) -> None:
    merge = table(device, dtype)
    merge.merge(merge.groups, slot=1, rank=rank, scaling=0.37)
    for t in merge.targets:
        a, b = t.operands(slot=1, rank=rank)
        expected = merge_reference(t.base_weights, a, b, 0.37)
        assert not torch.equal(t.weight, t.base_weights), t.name
        if dtype == torch.float16:
            # float32 accumulation is 13 bits finer than the result: only a sum beside a tie can round the other way.
            distance = ulp_distance(t.weight, expected)
            small = expected.abs() < 0.05  # where cancellation makes an ulp finer than the addends' error
            assert distance[~small].max() <= 1, t.name
        # |fl(sum) - sum| <= (r + 2) u sum|terms| of a float32 chain, plus the result's own rounding.
        bound = (rank + 2) * 2.0**-24 * (t.base_weights.double().abs() + 0.37 * b.double().abs() @ a.double().abs())
        exact = t.base_weights.double() + 0.37 * (b.double() @ a.double())
        assert ((t.weight.double() - exact).abs() <= bound + torch.finfo(dtype).eps / 2 * exact.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_with_factors_are_the_rounded_float64_product(device: torch.device, dtype: torch.dtype) -> None:
    """DoRA: the slot's own factors, NaN in every other's; plain merges and biases between."""
    plain = table(device, dtype)
    n = sum(t.weight.shape[0] for t in plain.targets)
    vectors = torch.full((SLOTS, 2, n), torch.nan, device=device)
    vectors[2] = 0.5 + torch.rand(2, n, device=device)
    bias = torch.randn(n, device=device).to(dtype)
    targets, at = [], 0
    for t in plain.targets:
        targets.append(replace(t, factors=vectors[:, 0, at : at + t.weight.shape[0]]))
        at += t.weight.shape[0]
    merge = MergeTable(targets, plain.tile, [BiasTarget(bias, bias.clone(), vectors[:, 1])])
    base = bias.clone()
    merge.merge(merge.groups, slot=1, rank=20, scaling=0.37, vectors=2)
    for t in merge.targets:
        a, b = t.operands(slot=1, rank=20)
        assert t.factors is not None
        expected = merge_reference(t.base_weights, a, b, 0.37, t.factors[2])
        without = merge_reference(t.base_weights, a, b, 0.37)
        assert (expected - without).abs().max() > 0.3
        torch.testing.assert_close(t.weight, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
    torch.testing.assert_close(bias, (base.double() + vectors[2, 1].double()).to(dtype))
    merge.merge(merge.groups, slot=1, rank=20, scaling=0.37)
    assert torch.equal(bias, base), "a plain merge leaves no bias shifted"
    plain.merge(plain.groups, slot=1, rank=20, scaling=0.37)
    for ours, theirs in zip(merge.targets, plain.targets, strict=True):
        assert torch.equal(ours.weight, theirs.weight), "and its weights are those of a table without factors"
    merge.merge(merge.groups, slot=1, rank=20, scaling=0.37, vectors=2)
    merge.restore(merge.groups)
    assert torch.equal(bias, base) and all(torch.equal(t.weight, t.base_weights) for t in merge.targets)


def test_a_merge_touches_only_its_groups(device: torch.device) -> None:
    merge = table(device, torch.float32)
    merge.merge(["down"], slot=0, rank=8, scaling=1.0)
    for t in merge.targets:
        assert torch.equal(t.weight, t.base_weights) == (t.group == "qkv"), t.name


def test_restore_is_bit_exact_even_for_negative_zero(device: torch.device) -> None:
    merge = table(device, torch.float32)
    merge.targets[0].base_weights[0, 0] = -0.0
    merge.merge(merge.groups, slot=2, rank=16, scaling=2.0)
    merge.restore(merge.groups)
    for t in merge.targets:
        assert torch.equal(t.weight.view(torch.int32), t.base_weights.view(torch.int32)), t.name


def test_a_second_merge_forgets_the_first(device: torch.device) -> None:
    merge, fresh = table(device, torch.float32), table(device, torch.float32)
    for slot in (0, 2, 1):
        merge.merge(merge.groups, slot=slot, rank=24, scaling=1.5)
    fresh.merge(fresh.groups, slot=1, rank=24, scaling=1.5)
    for ours, theirs in zip(merge.targets, fresh.targets, strict=True):
        assert torch.equal(ours.weight, theirs.weight), ours.name


def test_unaligned_shapes_drop_the_alignment_promise() -> None:
    assert table(torch.device("cpu"), torch.float32)._align == 1  # 37 columns
    aligned = MergeTable(stack((64,), 64, "o", torch.device("cpu"), torch.float32))
    assert aligned._align == 4


def test_refreshed_base_weights_are_what_restore_brings_back(device: torch.device) -> None:
    merge = table(device, torch.float32)
    updated = [torch.randn_like(t.weight) for t in merge.targets]
    for t, new in zip(merge.targets, updated, strict=True):
        t.weight.copy_(new)
    merge.refresh_base()
    merge.merge(merge.groups, slot=0, rank=4, scaling=1.0)
    merge.restore(merge.groups)
    assert all(torch.equal(t.weight, new) for t, new in zip(merge.targets, updated, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_warming_up_keeps_every_bit_and_compiles_what_merges_run() -> None:
    merge = table(torch.device("cuda"), torch.float16)
    before = [t.weight.clone() for t in merge.targets]
    for pool in {id(t.lora_a): t.lora_a for t in merge.targets}.values():
        pool.fill_(float("nan"))  # slots are not written before adapters come
    merge.warm_up(64)
    assert all(
        torch.equal(t.weight.view(torch.int16), w.view(torch.int16))
        for t, w in zip(merge.targets, before, strict=True)
    )
    compiled = sum(map(len, (cache[0] for cache in merge_kernel._merge_kernel.device_caches.values())))
    for slot, rank in ((0, 16), (1, 32), (2, 48), (1, 64)):
        merge.merge(merge.groups, slot=slot, rank=rank, scaling=1.0)
    assert sum(map(len, (cache[0] for cache in merge_kernel._merge_kernel.device_caches.values()))) == compiled


def test_nbytes_counts_one_read_and_one_write() -> None:
    merge = table(torch.device("cpu"), torch.float32)
    assert merge.nbytes(["down"]) == 2 * 4 * 33 * 37
    assert merge.nbytes(merge.groups) == 2 * 4 * (110 * 48 + 33 * 37)


def test_mismatched_shapes_are_refused_by_name() -> None:
    good = stack((8,), 16, "o", torch.device("cpu"), torch.float32)[0]
    with pytest.raises(ValueError, match=r"o_proj.*\(8, 16\)"):
        MergeTarget("o_proj", "o", good.weight, good.base_weights[:4], good.lora_a, good.lora_b)
    with pytest.raises(ValueError, match="one type"):
        MergeTarget("o_proj", "o", good.weight.half(), good.base_weights, good.lora_a, good.lora_b)
    with pytest.raises(ValueError, match="no merge targets in groups"):
        MergeTable([good]).restore(["gate"])


def test_ulp_distance_counts_representable_neighbours() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, -0.0])
    up = torch.nextafter(one, torch.tensor(float("inf")))
    assert ulp_distance(one, up).tolist() == [1, 1, 1, 1]
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])).item() == 0
