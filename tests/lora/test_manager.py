"""What the LoRA manager refuses to merge, before anything changes; and what it tells the backend of each batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlora_sgl import _sgl
from vlora_sgl.core import BatchPlan, InferenceMode
from vlora_sgl.errors import RequestError, UnknownAdapterError
from vlora_sgl.heads.store import AdapterDescription
from vlora_sgl.kernels.atmm.row_routing import dense_slots
from vlora_sgl.lora.backend import AtmmBackend
from vlora_sgl.lora.manager import VLoraManager
from vlora_sgl.lora.row_routing import RowRouting
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


class Weights(Merger):
    """What is merged is what the plan says."""

    def carry_out(self, merged: str | None) -> str | None:
        return merged


class Backend(AtmmBackend):
    """Counts the batches that it is told of."""

    told = 0

    def route(self, *batch: Any, **options: Any) -> None:
        self.told += 1
        super().route(*batch, **options)


def routing_manager() -> Any:
    made = manager(slots=4)
    for adapter in made._store._adapters.values():
        adapter.config.target_modules, adapter.scaling = ["q_proj"], 0.5
    made.memory_pool = SimpleNamespace(
        max_loras_per_batch=4, uid_to_buffer_id={None: 0, "a": 1, "b": 2}, buffer_id_to_uid=[None, "a", "b", None]
    )
    rows = RowRouting(made.memory_pool, made._store._adapters, {})
    made.__dict__.update(
        _rows=rows, _merger=Weights(), lora_backend=Backend(4, torch.device("cpu")), lm_head_module=None
    )
    made.max_bs_in_cuda_graph = 0
    return made


def step(*adapters: str | None, prefill: bool = False) -> Any:
    mode = _sgl.ForwardMode.EXTEND if prefill else _sgl.ForwardMode.DECODE
    lengths = torch.ones(len(adapters), dtype=torch.int32)
    return SimpleNamespace(
        lora_ids=list(adapters), batch_size=len(adapters), forward_mode=mode, extend_seq_lens_cpu=lengths
    )


def applied(made: Any, batch: Any) -> list[Any]:
    """The pairs of each row of a batch, once it is prepared."""
    made.prepare_lora_batch(batch)
    found: list[Any] = [()] * batch.batch_size
    for rows, pairs in made.lora_backend.batch_info.routing.groups if made.lora_backend.batch_info else ():
        for row in rows:
            found[row] = pairs
    return found


def test_decode_steps_of_the_same_rows_are_prepared_once() -> None:
    made = routing_manager()
    a, b = ((1, 1.0),), ((2, 1.0),)
    for _ in range(3):
        assert applied(made, step("a", None, "b")) == [a, (), b]
    assert made.lora_backend.told == 1
    assert applied(made, step("b", "b", prefill=True)) == [b, b]
    assert applied(made, step("a", None, "b")) == [a, (), b], "nothing is kept beyond a prefill"
    assert made.lora_backend.told == 3
    assert applied(made, step("a", "b")) == [a, b] and applied(made, step("b", "a")) == [b, a]
    assert made.lora_backend.told == 5
    made.plan = BatchPlan((), InferenceMode.MIXTURE, "a")
    assert applied(made, step("b", "a")) == [((2, 1.0), (1, -1.0)), ()]
    made.plan = BatchPlan((), InferenceMode.MERGED, "a")
    for _ in range(2):
        assert applied(made, step("a", "a")) == [(), ()] and made.lora_backend.batch_info is None
    made.plan = BatchPlan((), InferenceMode.UNMERGED)
    assert applied(made, step("b", "a")) == [b, a]
    made.memory_pool.uid_to_buffer_id.update(b=3)
    made.memory_pool.buffer_id_to_uid[:] = [None, "a", None, "b"]
    assert applied(made, step("b", "a")) == [((3, 1.0),), a], "it has another slot"


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=4),
            st.sampled_from([None, "a", "b"]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_a_batch_is_routed_as_if_it_were_the_first(batches: list[tuple[list[str | None], str | None, bool]]) -> None:
    made = routing_manager()
    for adapters, merged, prefill in batches:
        mode = InferenceMode.UNMERGED if merged is None else InferenceMode.MIXTURE
        made.plan = BatchPlan((), mode, merged)
        fresh = routing_manager()
        fresh.plan = made.plan
        batch = step(*adapters, prefill=prefill)
        assert applied(made, batch) == applied(fresh, batch)
