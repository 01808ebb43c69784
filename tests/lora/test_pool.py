"""Slots of unequal ranks: who fits, who goes where, what they cost, and that they keep out of each other's memory."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl import _sgl
from vlora_sgl.errors import ConfigError
from vlora_sgl.lora.pool import SizedPool, fits, place
from vlora_sgl.server_args import VLoraArgs, split_argv

CAPACITIES = (0, 16, 16, 32, 64)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [((64, 32, 16, 4), True), ((64, 64), False), ((8, 8, 8), True), ((33, 33), False), ((1,) * 6, False), ((), True)],
)
def test_adapters_fit_if_each_finds_a_slot_by_rank(ranks: tuple[int, ...], expected: bool) -> None:
    assert fits([0, *ranks], CAPACITIES) is expected


def test_an_adapter_goes_to_the_smallest_empty_slot_then_to_the_least_needed() -> None:
    assert place({None: 0, "a": 8}, {0: None}, CAPACITIES, max) == {"a": 1}
    assert place({None: 0, "b": 8}, {0: None, 1: "a", 2: "c"}, CAPACITIES, max) == {"b": 3}
    full = {0: None, 1: "a", 2: "c", 3: "d", 4: "e"}
    assert place({None: 0, "b": 8}, full, CAPACITIES, max) == {"b": 2}
    assert place({None: 0, "b": 40}, full, CAPACITIES, max) == {"b": 4}


def test_a_small_adapter_makes_way_for_a_large_one() -> None:
    held = {0: None, 1: "a", 2: "b", 3: "c", 4: "d"}
    moves = place({None: 0, "c": 8, "d": 8, "big": 64}, held, CAPACITIES, max)
    assert moves["big"] == 4
    assert moves["d"] in (1, 2, 3)


def test_whatever_fits_is_placed_without_evicting_anybody_wanted() -> None:
    pick = random.Random(0)
    held: dict[int, Any] = {0: None}
    placed = moved = 0
    ranks = {f"{rank}.{i}": rank for rank in (4, 8, 16, 32, 64) for i in range(3)}
    for _ in range(3000):
        some = pick.sample(sorted(ranks), pick.randrange(1, 5))
        wanted: dict[str | None, int] = {None: 0, **{name: ranks[name] for name in some}}
        if not fits(wanted.values(), CAPACITIES):
            with pytest.raises(ValueError, match="do not fit slots of ranks"):
                place(wanted, held, CAPACITIES, min)
            continue
        before = {uid: slot for slot, uid in held.items()}
        moves = place(wanted, held, CAPACITIES, min)
        moved += sum(uid in before for uid in moves)
        after = {slot: uid for slot, uid in held.items() if slot not in moves.values() and uid not in moves}
        after.update({slot: uid for uid, slot in moves.items()})
        assert wanted.keys() <= set(after.values()), "somebody wanted lost their slot"
        assert all(uid is None or ranks[uid] <= CAPACITIES[slot] for slot, uid in after.items())
        assert len(set(after.values())) == len(after)
        held, placed = after, placed + 1
    assert placed > 1000 and moved > 50


def test_ranks_are_multiples_of_what_the_kernels_pad_to() -> None:
    ours, rest = split_argv(["--vlora-slot-ranks", "64", "16", "16", "--port", "1"])
    assert ours.slot_ranks == (64, 16, 16) and rest == ["--port", "1"]
    with pytest.raises(ConfigError, match="multiples of 16"):
        VLoraArgs(slot_ranks=(64, 8))


@pytest.fixture
def pool() -> SizedPool:
    """A pool for two layers with stacked and plain projections."""
    config = SimpleNamespace(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, num_hidden_layers=2,
        vocab_size=64,
    )  # fmt: skip
    model = torch.nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    return SizedPool(
        (64, 16, 16), base_hf_config=config, max_loras_per_batch=4, dtype=torch.float32, tp_size=1, tp_rank=0,
        attn_tp_size=1, target_modules={"qkv_proj", "down_proj"}, base_model=model, eviction_policy="lru",
        lora_added_tokens_size=0,
    )  # fmt: skip


def test_slots_cost_their_own_ranks_and_the_base_models_nothing(pool: SizedPool) -> None:
    assert pool.ranks == (0, 16, 16, 64) and pool.places == [0, 0, 1, 2]
    for name, parts, k, n in (("qkv_proj", 3, 32, 64), ("down_proj", 1, 48, 32)):
        for a, b in zip(pool.A_buffer[name], pool.B_buffer[name], strict=True):
            assert a.shape == (3, parts * 64, k) and b.shape == (3, n, 64)
            assert a.untyped_storage().nbytes() == 4 * 96 * parts * k
            assert b.untyped_storage().nbytes() == 4 * 96 * n


def test_a_slot_is_written_and_cleared_without_touching_its_neighbours(pool: SizedPool) -> None:
    def own(slot: int) -> list[torch.Tensor]:
        begin, rank = pool.places[slot], pool.ranks[slot]
        return [pool.A_buffer["qkv_proj"][0][begin, : 3 * rank], pool.B_buffer["qkv_proj"][0][begin, :, :rank]]

    for slot in (1, 2, 3):
        for tensor in own(slot):
            tensor.fill_(slot)
    assert all(bool((tensor == slot).all()) for slot in (1, 2, 3) for tensor in own(slot)), "slots overlap"
    pool.uid_to_buffer_id["x"], pool.buffer_id_to_uid[2] = 2, "x"
    pool.eviction_policy.mark_used("x")
    assert pool.remove_lora("x") == 2 and pool.buffer_id_to_uid[2] == _sgl.EMPTY_SLOT
    assert not any(bool(tensor.any()) for tensor in own(2))
    assert all(bool((tensor == slot).all()) for slot in (1, 3) for tensor in own(slot))
