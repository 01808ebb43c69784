"""Adapters that come to slots beside the steps: no step reads one before it is whole, none loses one that it reads.

The same code runs on a CPU, where a copy is complete when it is asked for. Steps are stand-ins that take long and read
whole slots; the pool and the manager's way to it are real.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lora.test_packed import KINDS, make_adapter, make_modules, make_pool, matrices
from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.lora.arrivals import Arrivals
from vlora_sgl.lora.manager import VLoraManager
from vlora_sgl.lora.row_routing import RowRouting
from vlora_sgl.lora.slot_residency import SlotResidency

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]
LONG = 100_000_000
"""Cycles that a stream sleeps: about 50 ms."""


@pytest.fixture
def forward() -> Iterator[Any]:
    """The stream that steps run on, where there is a GPU."""
    if not torch.cuda.is_available():
        yield None
        return
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        yield torch.cuda.current_stream()
    torch.cuda.synchronize()


def make_manager(device: str, sized: bool = False, ranks: dict[str, int] | None = None) -> Any:
    """A manager with three slots beside the base model's, and adapters a to h."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made: Any = VLoraManager.__new__(VLoraManager)
    made.residency = SlotResidency(memory=4)
    made.memory_pool = make_pool(sized, device=device, residency=made.residency)
    ranks = ranks or dict.fromkeys("abcdefgh", 16)
    made.loras = {
        uid: make_adapter(rank, tuple(KINDS), (0, 1), seed=seed) for seed, (uid, rank) in enumerate(ranks.items())
    }
    for uid, adapter in made.loras.items():
        adapter.uid, adapter.scaling = uid, 1.0
        adapter.config.target_modules = ["all"]
    made.lora_refs = {uid: SimpleNamespace(pinned=False) for uid in ranks}
    made.lora_modules, made.embed_tokens_module, made.lm_head_module = make_modules(), None, None
    made.max_loras_per_batch, made.max_lora_rank, made.plan = 4, 64, BatchPlan((), InferenceMode.UNMERGED)
    made._store = SimpleNamespace(holders=lambda adapters: set(adapters), pinned=[])
    made.pending_lora_load_events = {}
    made._arrivals = Arrivals(torch.device(device), made.pending_lora_load_events)
    made._rows = RowRouting(made.memory_pool, made.loras, {}, made._arrivals)
    made.fetch_new_loras({None})
    return made


def slot(manager: Any, uid: str, rank: int = 16) -> list[torch.Tensor]:
    """What a step reads of an adapter, behind the wait that the routing makes."""
    place = manager.memory_pool.places[manager._rows.slot_of(uid)]
    return [m[place, :rank] if m.shape[2] != 64 else m[place, :, :rank] for m in matrices(manager.memory_pool)]


def digest(parts: list[torch.Tensor]) -> torch.Tensor:
    """One number of all that a step reads, on its device."""
    return torch.stack([part.double().nan_to_num(1e9).abs().sum() for part in parts]).sum()


def digests_alone(manager: Any) -> dict[str, float]:
    """Of every adapter, in a slot with nothing else going on."""
    found = {}
    for uid, adapter in manager.loras.items():
        manager.fetch_new_loras({uid})
        found[uid] = digest(slot(manager, uid, adapter.config.r)).item()
    assert len(set(found.values())) == len(found), "the adapters must differ"
    return found


def sleep(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(random.randrange(LONG // 20))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sized", [False, True], ids=["equal_slots", "sized_slots"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_read_whole_slots_whatever_comes_beside_them(device: str, sized: bool, seed: int, forward: Any) -> None:
    pick = random.Random(seed)
    ranks = {uid: pick.choice((8, 16, 64) if sized else (16,)) for uid in "abcdefgh"}
    manager = make_manager(device, sized, ranks)
    expected = digests_alone(manager)
    read: list[tuple[str, torch.Tensor]] = []
    ahead = 0
    for _ in range(120):
        held = set(manager.resident) - {None}
        # What the next step runs, of what is there or comes; sometimes of what nobody has brought.
        rows = set(pick.sample(sorted(held), pick.randint(0, len(held)))) or {pick.choice("abcdefgh")}
        for uid in pick.sample("abcdefgh", 3):
            if uid not in manager.resident and manager.fetch_ahead(uid, rows):
                ahead += 1
                assert rows & held <= manager.resident, "an adapter of the next step has lost its slot"
        if pick.random() < 0.3:
            rows |= set(manager.pending_lora_load_events) or rows  # those that are not there yet
        rows = set(sorted(rows)[: 1 if sized else 3])
        manager.fetch_new_loras(rows)
        sleep(device)
        read += [(uid, digest(slot(manager, uid, ranks[uid]))) for uid in rows]
    assert ahead > 30 and {uid for uid, _ in read} == set("abcdefgh")
    assert all(value.item() == expected[uid] for uid, value in read)


@pytest.mark.parametrize("sized", [False, True], ids=["equal_slots", "sized_slots"])
def test_an_adapter_comes_to_an_empty_slot_or_in_the_place_of_one_that_nobody_keeps(sized: bool) -> None:
    manager = make_manager("cpu", sized)
    assert all(manager.fetch_ahead(uid, set("abc")) for uid in "abc")
    assert not manager.fetch_ahead("d", set("abc")) and "d" not in manager.resident
    manager._store.pinned = ["b"]
    manager.lora_refs["b"].pinned = True
    assert not manager.fetch_ahead("d", set("ac")), "what is pinned is kept"
    assert manager.fetch_ahead("d", set("a")) and set(manager.resident) == {None, *"abd"}
    assert (manager.residency.ahead, manager.residency.misses, manager.residency.hits) == (4, 0, 0)
    manager.fetch_new_loras({"d"})
    assert (manager.residency.ahead, manager.residency.misses, manager.residency.hits) == (4, 0, 1)


def test_a_large_adapter_waits_for_a_large_slot() -> None:
    manager = make_manager("cpu", sized=True, ranks={"a": 64, "b": 64, "c": 16})
    assert manager.fetch_ahead("a", set()) and not manager.fetch_ahead("b", {"a"}) and manager.fetch_ahead("c", {"a"})
    assert (manager.load_share("a"), manager.load_share("c")) == (1.0, 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """The order of two streams, each rule shown with a copy that begins or ends late."""

    def test_what_a_running_step_reads_is_not_overwritten(self, forward: Any) -> None:
        manager = make_manager("cuda")
        expected = digests_alone(manager)
        manager.fetch_new_loras({*"abc"})
        torch.cuda._sleep(LONG)
        late = [digest(slot(manager, uid)) for uid in "abc"]  # launched, and read in 50 ms
        for uid in "def":
            assert manager.fetch_ahead(uid, set("def"))
        assert [one.item() for one in late] == [expected[uid] for uid in "abc"]

    def test_nothing_reads_a_slot_before_it_is_whole(self, forward: Any) -> None:
        manager = make_manager("cuda")
        expected = digests_alone(manager)
        with torch.cuda.stream(manager._arrivals._stream):
            torch.cuda._sleep(LONG)  # the link is busy
        assert manager.fetch_ahead("a", set()) or "a" in manager.resident
        event = manager.pending_lora_load_events.get("a")
        assert event is not None and not event.query()
        early = digest([m[manager.memory_pool.uid_to_buffer_id["a"], :16] for m in matrices(manager.memory_pool)])
        assert early.item() != expected["a"], "the copy must be late for this to show anything"
        assert digest(slot(manager, "a")).item() == expected["a"]

    def test_neither_the_host_nor_a_step_waits_for_a_copy_that_it_does_not_read(self, forward: Any) -> None:
        manager = make_manager("cuda")
        expected = digests_alone(manager)
        manager.fetch_new_loras({"a"})
        torch.cuda.synchronize()
        with torch.cuda.stream(manager._arrivals._stream):
            torch.cuda._sleep(10 * LONG)
        start = time.perf_counter()
        assert manager.fetch_ahead("b", {"a"}) or "b" in manager.resident
        manager.fetch_new_loras({"a"})
        assert digest(slot(manager, "a")).item() == expected["a"]
        assert time.perf_counter() - start < 0.2
        assert digest(slot(manager, "b")).item() == expected["b"]
        assert time.perf_counter() - start > 0.2, "the copy must have been late"

    def test_what_has_to_come_at_once_keeps_behind_what_comes_beside(self, forward: Any) -> None:
        manager = make_manager("cuda")
        expected = digests_alone(manager)
        manager.fetch_new_loras({"a", "b", "c"})
        with torch.cuda.stream(manager._arrivals._stream):
            torch.cuda._sleep(LONG)
        assert manager.fetch_ahead("d", {"b", "c"})
        manager.fetch_new_loras({"e", "f", "g"})  # one of them takes d's slot, whose copy has not begun
        assert {uid: digest(slot(manager, uid)).item() for uid in "efg"} == {uid: expected[uid] for uid in "efg"}
