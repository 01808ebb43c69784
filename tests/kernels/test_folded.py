"""Folding adapters into FP8 against float64: the Triton kernel (interpreted here) and the CPU path."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.hopper import ptx
from tests.support.interpreter import DEVICE, INTERPRETED, kernels, passed_interpreted, starter
from vlora_sgl.kernels.merge import MergeTable
from vlora_sgl.kernels.merge.folded import WORDS, FoldTable, FoldTarget, _fold_kernel, fold_reference, loss
from vlora_sgl.scaled import E4M3, FULL, Scaled, quantise, refit, spread

SLOTS, MAX_RANK = 3, 136
OPERATIONS = 18
"""Tests of the kernel itself."""


@starter
def test_the_kernel_passes_under_the_interpreter() -> None:
    assert passed_interpreted(__file__, "compiled") == OPERATIONS


@pytest.fixture(
    params=[
        pytest.param("compiled", marks=kernels),
        pytest.param("torch", marks=pytest.mark.skipif(INTERPRETED, reason="the kernel runs here")),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the operation runs: the kernel, on a GPU or interpreted, or torch on a CPU."""
    return torch.device(DEVICE if request.param == "compiled" else "cpu")


def stack(
    widths: tuple[int, ...],
    k: int,
    group: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    blocks: bool = False,
    update: float = 1.0,
) -> list[FoldTarget]:
    """Targets of one (stacked) linear; noise in every slot, past every rank too. The last row is 0, and its scale."""
    n, c = sum(widths), len(widths)
    block = (128, 128) if blocks else (1, k)
    values = torch.randn(n, k, device=device) * torch.logspace(-2, 2, n, device=device)[:, None]
    base = quantise(values, block, E4M3)
    if not blocks:
        base.weight.view(torch.uint8)[-1] = 0
        base.scale[-1] = 0
    weight = Scaled(base.weight.clone(), base.scale.clone(), block)
    size = update * torch.logspace(-2, 2, n, device=device)[:, None] / MAX_RANK**0.5
    lora_a = torch.randn(SLOTS, c * MAX_RANK, k, device=device).to(dtype)
    lora_b = (torch.randn(SLOTS, n, MAX_RANK, device=device) * size).to(dtype)
    targets, row = [], 0
    for index, width in enumerate(widths):
        rows = slice(row, row + width)
        own = (lora_a, lora_b[:, rows], index)
        targets.append(FoldTarget(f"{group}[{index}]", group, weight.rows(rows), base.rows(rows), *own))
        row += width
    return targets


def table(device: torch.device, dtype: torch.dtype = torch.float32, update: float = 1.0) -> FoldTable:
    """A qkv stack of unequal slices with scales of rows, ragged against the tiles, and two with scales of blocks."""
    torch.manual_seed(5)
    return FoldTable(
        [
            *stack((70, 20, 23), 150, "qkv", device, dtype, update=update),
            *stack((128, 256), 200, "gate_up", device, dtype, blocks=True, update=update),
            *stack((33,), 37, "down", device, dtype, blocks=True, update=update),
        ]
    )


def bits(matrix: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    return matrix.weight.view(torch.uint8).clone(), matrix.scale.view(torch.int32).clone()


def same(one: Scaled, other: Scaled) -> bool:
    return all(map(torch.equal, bits(one), bits(other)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 40, MAX_RANK])
def test_a_fold_is_the_quantised_float64_sum(device: torch.device, dtype: torch.dtype, rank: int) -> None:
    fold = table(device, dtype)
    fold.merge(fold.groups, slot=1, rank=rank, scaling=0.37)
    for t in fold.targets:
        a, b = t.lora_a[1, t.slice_index * rank :][:rank], t.lora_b[1, :, :rank]
        expected = fold_reference(t.base, a, b, 0.37)
        assert not same(t.weight, t.base), t.name
        assert torch.equal(t.weight.scale, expected.scale), t.name
        exact = t.base.wide().double() + 0.37 * (b.double() @ a.double())
        # Half a step of e4m3: a sixteenth of the number, or 2^-10 of the scale below the normal ones; and float32's.
        step = spread(t.weight.scale, t.weight.block, exact.shape).double() * 2**-10
        terms = t.base.wide().double().abs() + 0.37 * b.double().abs() @ a.double().abs()
        slack = (rank + 3) * 2.0**-23 * terms
        assert ((t.weight.wide().double() - exact).abs() <= (exact.abs() * 2**-4).maximum(step) + slack).all(), t.name
        assert (t.weight.weight.float() == expected.weight.float()).float().mean() > 0.999


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("size", [1.0, 300.0, 1000.0])
def test_a_row_without_a_scale_gets_one(device: torch.device, blocks: bool, size: float) -> None:
    """Such a row is zeros; 300 fits into e4m3 with a scale of 1."""
    (target,) = stack((20,), 40, "down", device, blocks=blocks)
    target.base.weight.view(torch.uint8)[:] = 0
    target.base.scale[:] = 0
    target.lora_a[1, 0], target.lora_b[1, :, 0] = size, 1.0
    FoldTable([target]).merge(frozenset({"down"}), slot=1, rank=1, scaling=1.0)
    assert (target.weight.wide() - size).abs().max() <= size / 16
    assert same(target.weight, fold_reference(target.base, target.lora_a[1, :1], target.lora_b[1, :, :1], 1.0))


@pytest.mark.parametrize("where", ["nowhere", "at the start", "at the end"])
def test_rows_that_outgrow_their_scales_get_others(device: torch.device, where: str) -> None:
    """Rows so long that a program looks at its scales on the way."""
    torch.manual_seed(7)
    (target,) = stack((70,), 1300, "down", device, update=0.01)
    if where != "nowhere":
        target.lora_a[1, 0, slice(40) if where == "at the start" else slice(-40, None)] = 1e6
    FoldTable([target]).merge(frozenset({"down"}), slot=1, rank=8, scaling=0.5)
    a, b = target.lora_a[1, :8], target.lora_b[1, :, :8]
    expected = fold_reference(target.base, a, b, 0.5)
    assert torch.equal(target.weight.scale, expected.scale)
    assert (target.weight.weight.float() == expected.weight.float()).float().mean() > 0.999
    outgrown = (target.weight.scale > target.base.scale).float().mean()
    assert outgrown > 0.9 if where != "nowhere" else outgrown < 0.1


def test_the_scales_use_the_type_and_overflow_nowhere(device: torch.device) -> None:
    fold = table(device, update=30.0)
    fold.merge(fold.groups, slot=2, rank=16, scaling=1.0)
    for t in fold.targets:
        numbers = t.weight.weight.float().abs()
        # Of a row a bound is known, which its largest number may lie two powers of two below.
        assert numbers.isfinite().all() and numbers.max() > (224 if t.weight.block[0] > 1 else 56)
        powers = torch.log2(t.weight.scale / torch.where(t.base.scale > 0, t.base.scale, 1.0))
        assert torch.equal(powers, powers.round()) and powers.max() > 2


def test_what_an_adapter_does_not_change_keeps_its_bits(device: torch.device) -> None:
    """With a scale of zero, and with a B of zeros in one row: that row's numbers are its base's."""
    fold = table(device)
    for t in fold.targets:
        t.lora_b[1, 3] = 0
    fold.merge(fold.groups, slot=1, rank=16, scaling=0.5)
    for t in fold.targets:
        if t.weight.block[0] == 1:
            assert torch.equal(t.weight.weight[3].view(torch.uint8), t.base.weight[3].view(torch.uint8))
            assert torch.equal(t.weight.scale[3], t.base.scale[3])
    fold.merge(fold.groups, slot=1, rank=16, scaling=0.0)
    for t in fold.targets:
        assert torch.equal(t.weight.wide(), t.base.wide())


def test_restoring_is_bit_exact_and_nothing_lies_past_the_weights(device: torch.device) -> None:
    fold = table(device)
    before = [bits(t.weight) for t in fold.targets]
    fold.merge(frozenset({"qkv"}), slot=1, rank=16, scaling=0.5)
    assert all(same(t.weight, t.base) for t in fold.targets if t.group != "qkv")
    fold.restore(frozenset({"qkv"}))
    assert all(all(map(torch.equal, bits(t.weight), was)) for t, was in zip(fold.targets, before, strict=True))


def test_ten_thousand_switches_leave_every_bit() -> None:
    """Folds of random adapters, one after another and back, on one layer."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    targets = [*stack((24,), 24, "qkv", cpu), *stack((128,), 16, "down", cpu, blocks=True)]
    merge = MergeTable([], folded=FoldTable(targets))
    before, fresh = [bits(t.weight) for t in targets], {}
    operands = [{"slot": slot, "rank": rank, "scaling": 0.5} for slot in range(SLOTS) for rank in (1, 8, 16)]
    for index, operand in enumerate(operands):
        merge.restore(merge.groups)
        merge.merge(merge.groups, **operand)  # type: ignore[arg-type]
        fresh[index] = [bits(t.weight) for t in targets]
    rng = random.Random(0)
    for step in range(10_000):
        index = rng.randrange(-1, len(operands))
        merge.restore(merge.groups) if index < 0 else merge.merge(merge.groups, **operands[index])  # type: ignore[arg-type]
        if step % 500 == 0 or index < 0:
            wanted = before if index < 0 else fresh[index]
            assert all(all(map(torch.equal, bits(t.weight), was)) for t, was in zip(targets, wanted, strict=True))
    merge.restore(merge.groups)
    assert all(all(map(torch.equal, bits(t.weight), was)) for t, was in zip(targets, before, strict=True))


@pytest.mark.parametrize("update", [0.001, 0.1, 1.0, 30.0])
def test_the_loss_is_the_relative_error_of_outputs(update: float) -> None:
    torch.manual_seed(3)
    (target,) = stack((64,), 256, "o", torch.device("cpu"), update=update)
    a, b = target.lora_a[1, :16], target.lora_b[1, :, :16]
    found = float(loss(target, a, b, 1.0))
    exact = target.base.wide().double() + b.double() @ a.double()
    folded_weight = fold_reference(target.base, a, b, 1.0).wide().double()
    x = torch.randn(4096, 256, dtype=torch.float64)
    outputs = (x @ (folded_weight - exact).T).norm() / (x @ exact.T).norm()
    assert abs(found - float(outputs)) < 0.05 * found
    assert 0 < found < 2**-4  # half a step
    changed = float((b.double() @ a.double()).norm() / exact.norm())
    assert found <= 1.01 * changed  # what is smaller than a step is lost, and no more than that


def test_a_loss_is_none_where_nothing_is_lost() -> None:
    (target,) = stack((64,), 256, "o", torch.device("cpu"))
    assert float(loss(target, torch.zeros(4, 256), torch.zeros(64, 4), 1.0)) == 0.0


@pytest.mark.parametrize("factor", [2.0**-20, 0.9999999, 1.0, 1.0000001, 3.0, 2.0**20])
def test_old_scales_fit_by_powers_of_two(factor: float) -> None:
    values = torch.tensor([[448.0, -1.0, 0.0], [0.0, 0.0, 0.0]]) * factor
    found = refit(values, torch.tensor([[1.0], [0.25]]), (1, 3))
    assert 224 <= found.weight.float()[0, 0] <= 448 and found.scale[1] == 0.25
    assert torch.log2(found.scale[0]).frac() == 0


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 1.0), (FULL, 1.0), (FULL + 0.01, 2.0), (233.0, 1.0), (232.0, 0.5)]
)
def test_a_scale_stays_while_the_largest_is_rounded_no_further_than_others(largest: float, scale: float) -> None:
    found = refit(torch.tensor([[largest, 1.0]]), torch.ones(1, 1), (1, 2))
    assert found.scale.item() == scale
    assert abs(found.wide()[0, 0].item() - largest) <= 16 * scale


@pytest.mark.parametrize("blocked", [False, True])
def test_numbers_are_read_and_written_sixteen_at_a_time_on_hopper(blocked: bool) -> None:
    constants = {
        "words": WORDS, "ALIGN": 16, "BLOCKED": blocked, "NATIVE": True, "LIMIT": FULL, "PRECISION": "tf32",
        "BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_R": 64, "RANK_BLOCKS": 1, "STAGES": 3,
    }  # fmt: skip
    numbers = {"slot": "i32", "rank": "i32", "scaling": "fp32"}
    types = {"like": "*fp8e4nv", "table": "*i64", "tiles": "*i32", "longest": "*i32", **numbers}
    code = ptx(_fold_kernel, constants, types, 3, unknown=numbers)
    assert "wgmma" in code and "cvt.rn.satfinite.e4m3x2.f32" in code
    assert "st.global.v4.b32" in code and "st.global.b8" not in code and "ld.global.b8" not in code


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block": (64, 64)}, "128 x 128"),
        ({"weight": torch.zeros(4, 8)}, "float8_e4m3fn"),
        ({"scale": torch.ones(3, 1)}, "scales"),
    ],
)
def test_targets_that_do_not_fit_are_refused(change: dict[str, object], reason: str) -> None:
    base = quantise(torch.randn(4, 8), (1, 8), E4M3)
    with pytest.raises(ValueError, match=reason):
        FoldTarget("t", "g", base._replace(**change), base, torch.zeros(1, 2, 8), torch.zeros(1, 4, 2))  # type: ignore[arg-type]


def test_rows_that_cut_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="cut blocks of 128"):
        quantise(torch.randn(300, 128), (128, 128), E4M3).rows(slice(0, 100))
