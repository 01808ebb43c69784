"""What a request asks and what its client is told: in and out of SGLang's fields, and nothing else changed there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vlora_sgl.core import InferenceMode, RequestParams, ServiceClass, Version
from vlora_sgl.errors import RequestError
from vlora_sgl.request import RequestState, show, tell


@pytest.mark.parametrize(
    "params",
    [
        RequestParams(),
        RequestParams(head="kind"),
        RequestParams(service=ServiceClass.REALTIME, deadline=0.25, trace=True),
        RequestParams("find", ServiceClass.BATCH, 2.0),
        RequestParams(deadline=2.0, due=1234.5),
    ],
)
def test_what_is_asked_comes_back_as_it_went(params: RequestParams) -> None:
    sampling = params.added_to({"temperature": 0, "custom_params": {"a": 1}})
    assert RequestParams.of(sampling) == RequestParams.of(SimpleNamespace(**sampling)) == params
    assert sampling["temperature"] == 0 and sampling["custom_params"]["a"] == 1, "others' keys stay"
    assert RequestParams.from_custom_params(params.to_custom_params()) == params
    assert RequestParams.of(None) == RequestParams.of({}) == RequestParams()


def test_its_keys() -> None:
    given = {"vlora_head": "h", "vlora_class": "realtime", "vlora_deadline_ms": 250, "vlora_trace": True}
    assert RequestParams.from_custom_params(given) == RequestParams("h", ServiceClass.REALTIME, 0.25, True)
    assert RequestParams("h", ServiceClass.REALTIME, 0.25, True).to_custom_params() == given
    assert RequestParams().to_custom_params() == {}


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("vlora_class", ["soon", 3, ["batch"]], "vlora_class must be one of realtime, interactive, batch; got "),
        ("vlora_deadline_ms", [0, -1, "1", True, float("inf")], "vlora_deadline_ms must be a positive number of mill"),
        ("vlora_head", [3, ["kind"]], "vlora_head must be the name of a head; got "),
        ("vlora_trace", ["yes", 1], "vlora_trace must be true or false; got "),
        ("vlora_due", ["soon", -1], "vlora_due is written by the engine; got "),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(key: str, wrong: list[Any], message: str) -> None:
    for value in wrong:
        with pytest.raises(RequestError, match=message) as refused:
            RequestParams.from_custom_params({key: value})
        assert repr(value) in str(refused.value)
    with pytest.raises(RequestError, match="custom_params must be an object"):
        RequestParams.of({"custom_params": ["vlora_head"]})


def row(outputs: int = 0, trace: bool = False, **answer: Any) -> Any:
    state = RequestState(RequestParams(trace=trace), answer=answer)
    return SimpleNamespace(output_ids=[0] * outputs, vlora=state, told=[])


def step(rows: list[Any], mode: InferenceMode | None = InferenceMode.MERGED) -> None:
    """One step as SGLang collects it: an entry for each token of every row, if the step has entries."""
    output = SimpleNamespace(customized_info=None)
    tell(rows, output, mode)
    for req, entry in zip(rows, (output.customized_info or {}).get("vlora", ()), strict=False):
        req.told.append(entry)
    for req in rows:
        req.output_ids.append(0)


def shown(req: Any, name: str | None = "A", versions: Sequence[Version] = ()) -> Any:
    meta_info = {"id": "x"} | ({"vlora": req.told} if req.told else {})
    assert show(meta_info, name, versions) == meta_info["vlora"] and meta_info["id"] == "x"
    return meta_info["vlora"]


def test_a_client_is_told_once_and_always_in_one_dict() -> None:
    reuse, head = {"cached_tokens": 3}, {"kind": "count", "count": 2}
    plain, traced, headed = row(reuse=reuse), row(trace=True, reuse=reuse), row(reuse=reuse, head=head)
    step([plain, traced, headed])
    step([plain, traced], InferenceMode.UNMERGED)
    step([plain])
    assert shown(plain) == {"adapter": "A", "reuse": reuse}
    assert shown(traced) == {"adapter": "A", "modes": ["merged", "unmerged"], "reuse": reuse}
    assert shown(headed, None) == {"adapter": None, "reuse": reuse, "head": head}
    assert shown(row(), "B") == {"adapter": "B"}
    assert shown(row(), "B@3", [("B", 3)]) == {"adapter": "B", "version": 3}
    both = shown(row(), '{"A": 0.5, "B@3": 2}', [("B", 3), ("A", 1)])
    assert both == {"adapter": None, "adapters": {"A": 0.5, "B@3": 2.0}, "versions": ["A@1", "B@3"]}
    assert headed.vlora.answer == {"reuse": reuse, "head": head}


def test_after_a_retraction_the_first_token_has_been_told_already() -> None:
    req = row(outputs=3, trace=True, reuse={"cached_tokens": 3})
    step([req])
    assert req.told == [{"mode": "merged"}], "one mode for each token, no second reuse"


def test_a_step_that_tells_nobody_anything_is_left_alone() -> None:
    output = SimpleNamespace(customized_info={"theirs": [1]})
    tell([row(outputs=1, reuse={})], output, InferenceMode.MERGED)
    assert output.customized_info == {"theirs": [1]}
    tell([row(reuse={})], output, None)
    assert output.customized_info == {"theirs": [1], "vlora": [{"reuse": {}}]}
    tell([row(reuse={})], None, None)  # an embedding's result has none


def test_without_adapters_a_trace_has_no_modes() -> None:
    req = row(trace=True)
    step([req], None)
    assert shown(req, None) == {"adapter": None}
