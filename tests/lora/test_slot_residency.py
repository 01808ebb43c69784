"""Slots: who is evicted, and what is counted."""

from __future__ import annotations

from vlora_sgl.lora.slot_residency import SlotResidency


def filled(*uids: str) -> SlotResidency:
    """Slots used in this order."""
    slots = SlotResidency(memory=4)
    for uid in uids:
        slots.mark_used(uid)
    return slots


def test_the_least_recently_used_of_the_unneeded_goes_first() -> None:
    slots = filled("a", "b", "c", "a")
    slots.want(["b"])
    assert slots.select_victim({"a", "b", "c"}) == "c"
    slots.want([])
    assert slots.select_victim({"a", "b", "c"}) == "b"


def test_among_the_needed_the_last_needed_goes_and_the_base_only_at_last() -> None:
    slots = filled("a", "b", "c")
    slots.want(["b", None, "c", "a"])
    assert slots.select_victim({"a", "b", "c", None}) == "a"
    assert slots.select_victim({"b", "c", None}) == "c"
    assert slots.select_victim({None}) is None


def test_thrash_is_counted_apart_from_first_loads() -> None:
    slots = filled("a", "b")
    assert (slots.hits, slots.misses, slots.reloads) == (0, 2, 0)
    for uid in "abab":  # one slot too few: each use evicts what the next one needs
        victim = slots.select_victim({"a", "b"} - {uid})
        assert victim is not None
        slots.remove(victim)
        slots.mark_used(victim)
    assert (slots.misses, slots.evictions, slots.reloads) == (6, 4, 4)


def test_a_load_ahead_is_no_use_of_what_it_loads_nor_of_what_it_keeps() -> None:
    slots = filled("a", "b")
    with slots.before_use():
        for uid in (None, "a", "c"):
            slots.mark_used(uid)
    assert (slots.hits, slots.misses, slots.ahead, slots.loads["c"]) == (0, 2, 1, 1)
    assert list(slots.resident) == ["a", "b", "c"], "a is still the least recently used"
    slots.mark_used("c")
    assert (slots.hits, slots.misses) == (1, 2)
