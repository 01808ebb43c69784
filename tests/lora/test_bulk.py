"""Passes over many tensors: in order, on many threads, the first fault first; digests that tell contents apart."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlora_sgl.heads.store import AdapterDescription
from vlora_sgl.lora import bulk
from vlora_sgl.lora.adapter import content_digest
from vlora_sgl.lora.bulk import digest, digests, each, is_finite, joined

COUNTS = (1, 2, 16)


@pytest.fixture(params=COUNTS, ids=lambda count: f"threads{count}")
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bulk, "threads", lambda: request.param)
    return int(request.param)


def test_results_come_in_the_order_of_the_items(many: int) -> None:
    assert each(lambda item: item * item, range(1000)) == [item * item for item in range(1000)]
    assert each(str, []) == []


def test_as_many_threads_work_as_are_asked_for(many: int) -> None:
    together = threading.Barrier(many)
    each(lambda _: together.wait(timeout=30), range(many))  # none goes on before all have come


def test_the_first_fault_of_the_items_is_raised(many: int) -> None:
    def work(item: int) -> int:
        if item in (40, 41, 700):
            raise ValueError(str(item))
        return item

    for _ in range(20):
        with pytest.raises(ValueError, match=r"^40$"):
            each(work, range(1000))


def test_operations_on_many_threads_take_one_thread_each(many: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = each(lambda _: torch.get_num_threads(), range(100))
        assert set(inside) == ({2} if many == 1 else {1})
        assert torch.get_num_threads() == 2
        assert each(lambda _: threading.active_count(), [0]) == [threading.active_count()], "no thread stays"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_value_anywhere_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((1,), (7, 5), (64, 129)):
        tensor = torch.randn(shape).to(dtype)
        assert is_finite(tensor) and is_finite(tensor.T if tensor.dim() == 2 else tensor)
        for value, place in itertools.product((torch.nan, torch.inf, -torch.inf), {0, tensor.numel() // 2, -1}):
            spoiled = tensor.clone()
            spoiled.view(-1)[place] = value
            assert not is_finite(spoiled)
    assert not is_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))
    assert is_finite(torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)), "though its sum is not"
    assert is_finite(torch.empty(0, 8, dtype=dtype))


def test_digests_tell_labels_types_shapes_and_bytes_apart() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    changed = tensor.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(torch.inf))
    others: list[dict[str, torch.Tensor | None]] = [
        {"b": tensor},
        {"a": tensor.view(4, 3)},
        {"a": tensor.view(torch.int32)},
        {"a": tensor.bfloat16()},
        {"a": changed},
        {"a": tensor[:2], "b": tensor[2:]},
        {"a": tensor[:2], "c": tensor[2:]},
        {"a": tensor, "b": tensor[:0]},
        {"a": -0.0 * tensor},
        {"a": 0.0 * tensor},
    ]
    assert len({digest({"a": tensor}), *map(digest, others)}) == len(others) + 1
    assert digest({"a": tensor.clone(), "b": None}) == digest({"a": tensor})
    assert digest({"a": tensor.T.contiguous().T}) == digest({"a": tensor}), "however it lies in memory"


def test_digests_of_names_do_not_depend_on_their_order(many: int) -> None:
    torch.manual_seed(1)
    named: dict[str, dict[str, torch.Tensor | None]] = {str(i): {"A": torch.randn(4, i + 1)} for i in range(50)}
    turned = dict(reversed(named.items()))
    assert joined(digests(named)) == joined(digests(turned)) == joined({k: digest(v) for k, v in named.items()})
    swapped = {**named, "3": named["4"], "4": named["3"]}
    assert joined(digests(swapped)) != joined(digests(named))
    assert joined({"a": "1", "b": "2"}) != joined({"a": "12", "b": ""})


def adapter(**changes: Any) -> Any:
    config = SimpleNamespace(hf_config={"r": 4, "target_modules": ["q_proj"]})
    return SimpleNamespace(**{"scaling": 2.0, "config": config, "content": "c", "tower": None, **changes})


def test_content_is_weights_scale_configuration_and_invocation() -> None:
    plain = AdapterDescription()
    others = [
        adapter(content="d"),
        adapter(scaling=1.0),
        adapter(config=SimpleNamespace(hf_config={"r": 8, "target_modules": ["q_proj"]})),
        adapter(tower=SimpleNamespace(digest="c")),
    ]
    found = [content_digest(one, plain) for one in (adapter(), *others)]
    found.append(content_digest(adapter(), AdapterDescription(invocation=(1, 2))))
    assert len(set(found)) == len(found)
    assert content_digest(adapter(), plain) == found[0]


def test_content_of_an_adapter_that_came_as_tensors_is_what_it_holds() -> None:
    def held(*groups: dict[str, torch.Tensor]) -> Any:
        one = adapter(layers=[SimpleNamespace(weights=group) for group in groups], embedding_layers={})
        one.added_tokens_embeddings = {}
        del one.content
        return content_digest(one, AdapterDescription())

    a, b = torch.ones(2, 3), torch.zeros(3, 2)
    assert held({"a": a, "b": b}) == held({"b": b.clone(), "a": a.clone()})
    assert (
        len({held({"a": a, "b": b}), held({"a": a}, {"b": b}), held({"a": b, "b": a}), held({"a": a + 1, "b": b})})
        == 4
    )
