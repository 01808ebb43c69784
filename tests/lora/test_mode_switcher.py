"""The switch never drifts: any sequence of modes leaves the bits a single fresh merge, or no merge, would leave."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from vlora_sgl.kernels.merge import MergeTable, MergeTarget, merge_reference
from vlora_sgl.lora.mode_switcher import MergeOperand, ModeSwitcher, base_copies

SHAPES = {"qkv_proj": (24, 8, 8), "o_proj": (24,), "gate_up_proj": (32, 32), "down_proj": (24,)}
K = 24
MAX_RANK = 8
ADAPTERS = 8


def build(dtype: torch.dtype = torch.bfloat16) -> ModeSwitcher:
    """Two small layers whose adapters differ in rank, scaling and targets (the same weights every time)."""
    torch.manual_seed(11)
    targets = []
    for layer in range(2):
        for group, slices in SHAPES.items():
            weight = torch.randn(sum(slices), K).to(dtype)
            weight[0, 0] = -0.0
            (base_weights,) = base_copies([weight], "device")
            lora_a = torch.randn(ADAPTERS, len(slices) * MAX_RANK, K).to(dtype)
            lora_b = torch.randn(ADAPTERS, sum(slices), MAX_RANK).to(dtype)
            row = 0
            for index, size in enumerate(slices):
                rows = slice(row, row + size)
                name = f"{layer}.{group}[{index}]"
                targets.append(
                    MergeTarget(name, group, weight[rows], base_weights[rows], lora_a, lora_b[:, rows], index)
                )
                row += size
    return ModeSwitcher(MergeTable(targets))


def operand(number: int) -> MergeOperand:
    groups = [set(SHAPES), {"qkv_proj", "o_proj"}, {"down_proj"}, {"gate_up_proj", "down_proj"}][number % 4]
    return MergeOperand(f"a{number}", number, 1 + number, 0.5 + 0.25 * number, frozenset(groups))


def bits(switcher: ModeSwitcher) -> list[torch.Tensor]:
    return [t.weight.clone().view(torch.int16) for t in switcher.table.targets]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices: handing them to other threads costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_ten_thousand_random_switches_leave_every_bit_as_a_fresh_merge_would() -> None:
    switcher = build()
    base_weights = bits(switcher)
    fresh = {}
    for number in range(ADAPTERS):
        alone = build()
        alone.merge(operand(number))
        fresh[number] = bits(alone)
        assert not same(fresh[number], base_weights)
    choose = random.Random(3)
    for step in range(10_000):
        number = choose.randrange(-1, ADAPTERS)
        if number < 0:
            switcher.restore()
        else:
            switcher.merge(operand(number))
        if step % 50 == 0:
            assert same(bits(switcher), base_weights if number < 0 else fresh[number]), f"step {step}"
    switcher.restore()
    assert same(bits(switcher), base_weights)


def test_merged_weights_are_the_rounded_float64_sum() -> None:
    switcher = build(torch.float32)
    for number in (5, 1, 4):
        switcher.merge(operand(number))
    wanted = operand(4)
    for t in switcher.table.targets:
        a, b = t.operands(wanted.slot, wanted.rank)
        torch.testing.assert_close(
            t.weight, merge_reference(t.base_weights, a, b, wanted.scaling), rtol=1e-6, atol=2e-5
        )


def test_each_kind_of_switch_is_counted_once_and_repeats_are_not() -> None:
    switcher = build()
    assert switcher.merged is None and not switcher.restore()
    assert switcher.merge(operand(1)) and switcher.merged == "a1"
    assert not switcher.merge(operand(1))
    assert switcher.merge(operand(2)) and switcher.restore()
    switches = switcher.state()["switches"]
    assert {kind: c["count"] for kind, c in switches.items()} == {"merge": 1, "direct": 1, "unmerge": 1}
    assert all(c["seconds"] > 0 for c in switches.values())


def test_base_weights_are_not_taken_from_merged_ones() -> None:
    switcher = build()
    switcher.merge(operand(0))
    with pytest.raises(RuntimeError, match="a0 is merged"):
        switcher.rebase()
    switcher.restore()
    for t in switcher.table.targets:
        t.weight.add_(1)
    updated = bits(switcher)
    switcher.rebase()
    switcher.merge(operand(0))
    switcher.restore()
    assert same(bits(switcher), updated)


def test_base_copies_share_one_allocation() -> None:
    weights = [torch.randn(4, 6), torch.randn(3, 5)]
    copies = base_copies(weights, "device")
    assert all(torch.equal(w, c) for w, c in zip(weights, copies, strict=True))
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
