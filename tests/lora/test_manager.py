"""What the LoRA manager refuses to merge: asked beforehand, and nothing changes by asking."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.errors import RequestError, UnknownAdapterError
from vlora_sgl.heads.store import AdapterDescription
from vlora_sgl.kernels.atmm.row_routing import dense_slots
from vlora_sgl.lora.manager import VLoraManager
from vlora_sgl.lora.store import AdapterStore, DescribedAdapter


class Merger:
    """Merges all that is loaded but one."""

    merged = None

    def refusal(self, adapter: str) -> str | None:
        if adapter not in "abcd":
            raise UnknownAdapterError(adapter, "abcd")
        return "it has weights for lm_head" if adapter == "d" else None


def manager(slots: int = 3, pinned: str = "", routes_rows: bool = True, slot_ranks: tuple[int, ...] = ()) -> Any:
    made = VLoraManager.__new__(VLoraManager)
    refs = {uid: SimpleNamespace(pinned=uid in pinned, lora_name=f"name-{uid}") for uid in "abcdr"}
    adapters = {uid: SimpleNamespace(config=SimpleNamespace(r=16 if uid == "a" else 64)) for uid in "abcd"}
    store = AdapterStore(
        adapters,
        {},
        refs,
        builder=Any,
        device=Any,
        slots=slots,
        slot_ranks=slot_ranks,
        roots=(),  # type: ignore[arg-type]
    )
    for uid, invocation in (("a", None), ("b", None), ("c", None), ("d", "after_image"), ("r", None)):
        store.described[uid] = DescribedAdapter(AdapterDescription(invocation=invocation), {}, f"digest-{uid}")
    store.routed["r"] = SimpleNamespace(members=("b", "c"))  # type: ignore[assignment]
    made.__dict__.update(
        _store=store,
        _merger=Merger(),
        _routes_rows=routes_rows,
        lora_refs=refs,
        max_loras_per_batch=slots,
        num_pinned_loras=len(pinned),
        memory_pool=SimpleNamespace(max_loras_per_batch=slots),
    )
    return made


@pytest.mark.parametrize(
    ("options", "merged", "adapters", "reason"),
    [
        ({}, None, ["a", "d"], None),
        ({}, "a", ["a", "a"], None),
        ({}, "a", ["a", "b", None], None),
        ({}, "d", ["d"], "lm_head"),
        ({}, "r", ["r"], "routed adapter"),
        ({}, '{"a": 0.5, "b": 0.5}', ["a"], "several adapters"),
        ({}, "a", ['{"a": 0.5, "b": 0.5}'], None),
        ({}, "a", ['{"b": 0.5, "c": 0.5}'], "no slot"),
        ({"slots": 4}, "a", ['{"b": 0.5, "c": 0.5}'], None),
        ({}, "a", ["b", "c"], "no slot"),
        ({}, "a", ["r"], "no slot"),  # its members need two
        ({"slots": 4}, "a", ["r"], None),
        ({"pinned": "b"}, "a", ["a"], None),
        ({"pinned": "b"}, "a", ["c"], "no slot"),
        ({"slot_ranks": (16, 64)}, "a", ["b"], None),
        ({"slot_ranks": (16, 64)}, "b", ["c"], "no slot"),
        ({"routes_rows": False}, "a", ["a"], None),
        ({"routes_rows": False}, "a", ["a", None], "--lora-backend atmm"),
    ],
)
def test_a_merge_that_cannot_be_is_refused_with_its_reason(
    options: dict[str, Any], merged: str | None, adapters: list[str | None], reason: str | None
) -> None:
    one = manager(**options)
    for _ in range(2):
        found = one.refuses(merged, adapters)
        assert found is None if reason is None else reason in found
    assert one.plan.merged_adapter is None


def test_an_adapter_that_is_not_loaded_is_no_refusal() -> None:
    with pytest.raises(UnknownAdapterError):
        manager().refuses("x", ["x"])


def test_a_plan_is_taken_as_it_is() -> None:
    one, plan = manager(), BatchPlan(("1",), InferenceMode.MERGED, "a", (7,))
    assert one.set_plan(plan) is None and one.plan is plan


AB, BA = '{"a": 0.5, "b": 2.0}', '{"b": 2.0, "a": 0.5}'


def test_several_adapters_as_one_have_one_content_whatever_they_are_called() -> None:
    one = manager()
    assert one.description_of("a") is one.described["a"] and not one.combines
    digest = one.description_of(AB).digest
    assert one.combines and one.description_of(BA).digest == digest
    one.described["c"] = one.described["a"]  # the same content, loaded twice
    assert one.description_of('{"c": 0.5, "b": 2.0}').digest == digest
    others = ['{"a": 2.0, "b": 0.5}', '{"a": 0.5, "b": 2.5}', '{"a": 0.5}', '{"b": 2.0}']
    assert len({digest, *(one.description_of(other).digest for other in others)}) == 5
    one.described["c"] = one.described["d"]
    assert one.description_of('{"d": 0.5, "c": 0.5}').description.invocation == "after_image"


@pytest.mark.parametrize(
    ("options", "combined", "reason"),
    [
        ({}, '{"a": 0.5, "d": 0.5}', "'name-a', 'name-d' cannot be combined: they start at different places"),
        ({}, '{"a": 0.5, "r": 0.5}', "a routed adapter cannot be combined"),
        ({}, '{"a": 0.5, "b": 0.5, "c": 0.5}', "need 3 slots at once"),
        ({"pinned": "c"}, AB, "need 3 slots at once"),
        ({"pinned": "b"}, AB, None),
        ({"slot_ranks": (16, 64)}, AB, None),
        ({"slot_ranks": (16, 64)}, '{"b": 0.5, "c": 0.5}', "hold its adapter's rank"),
        ({"routes_rows": False}, AB, "--lora-backend atmm"),
    ],
)
def test_adapters_that_cannot_be_combined_are_refused_by_name(
    options: dict[str, Any], combined: str, reason: str | None
) -> None:
    one = manager(**options)
    if reason is None:
        one.description_of(combined)
        return
    with pytest.raises(RequestError, match=reason):
        one.description_of(combined)


@pytest.mark.parametrize(
    ("slots", "rank", "more"),
    [(4, 64, False), (16, 64, False), (17, 64, True), (64, 33, True), (32, 32, False), (33, 32, True), (64, 8, True)],
)
def test_a_pool_of_many_slots_has_one_decode_graph_more(slots: int, rank: int, more: bool) -> None:
    one, few = manager(slots=slots), SimpleNamespace(routing=SimpleNamespace(gates="gates"))
    one.lora_backend = SimpleNamespace(most_dense=dense_slots(rank))
    assert one.decode_variants == (("lora", "lora_many") if more else ("lora",))
    many = SimpleNamespace(routing=SimpleNamespace(gates=None))
    for prepared, variant in ((None, "nolora"), (few, "lora"), (many, "lora_many" if more else "lora")):
        one.lora_backend.batch_info = prepared
        assert one.prepared_variant() == variant
    assert manager(slots=slots, routes_rows=False).decode_variants == ("lora",)
