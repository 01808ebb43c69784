"""Several adapters as one: what is one, its text, and that equal sums have one identity."""

from __future__ import annotations

import json
import math
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora_sgl.combined import LARGEST, MOST, are_scales, canonical, is_combined, members, parts, written
from vlora_sgl.core import adapters_in, row_pairs
from vlora_sgl.errors import RequestError
from vlora_sgl.names import check_adapter_name

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: not is_combined(name))
SCALES = st.dictionaries(NAMES, st.floats(-LARGEST, LARGEST), min_size=1, max_size=MOST)

WRONG: dict[str, Any] = {
    "nothing": {},
    "null": None,
    "a list": ["a"],
    "a name": "a",
    "too many": dict.fromkeys("abcde", 0.1),
    "too large": {"a": LARGEST * 1.01},
    "too small": {"a": -LARGEST * 1.01},
    "infinite": {"a": math.inf},
    "no number": {"a": math.nan},
    "a boolean": {"a": True},
    "text": {"a": "0.5"},
    "no scale": {"a": None},
    "beyond any word": {"a": 10**400},
    "without a name": {"": 0.5},
    "nested": {'{"a": 1}': 0.5},
    "a number for a name": {3: 0.5},
}


@given(SCALES)
def test_the_text_says_what_was_given(scales: dict[str, float]) -> None:
    text = written(scales)
    assert dict(parts(text)) == scales
    assert is_combined(text) == (len(scales) > 1 or set(scales.values()) != {1.0})


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_combination_is_refused_with_what_one_is(name: str) -> None:
    assert not are_scales(WRONG[name])
    with pytest.raises(RequestError, match=f"an object of 1 to {MOST} adapters' names, each with a scale") as caught:
        written(WRONG[name])
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{:", '{"a":', '{"a": 1}x', '{"a": NaN}', "{" * 6000 + ":", '{"a": ' + "[" * 10**5, '{"a": {"b": 1}}']
)
def test_a_text_that_only_looks_like_one_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="adapters must be"):
        parts(text)


@given(st.text())
def test_no_adapter_has_a_combinations_name(name: str) -> None:
    try:
        check_adapter_name(name)
    except ValueError:
        return
    assert not is_combined(name) and parts(name) == ((name, 1.0),) and list(members([name, None])) == [name, None]


@given(SCALES, st.sampled_from([0, 0.0, -0.0]))
def test_equal_sums_are_one(scales: dict[str, float], nothing: float) -> None:
    one = canonical(scales.items())
    assert all(canonical(order) == one for order in permutations(scales.items()))
    assert canonical([*scales.items(), ("unused\0", nothing)]) == one
    left = {name: scale for name, scale in scales.items() if scale}
    assert one is None if not left else dict(parts(str(one))) == left


def test_one_adapter_at_scale_one_is_that_adapter_and_none_at_all_the_base() -> None:
    assert written({"a": 1}) == written({"a": 1.0}) == canonical([("a", 1.0), ("b", 0.0)]) == "a"
    assert canonical([("a", 0.0)]) is None


@given(SCALES, st.data())
def test_a_row_applies_its_scales_whatever_is_merged(scales: dict[str, float], data: st.DataObject) -> None:
    """With the merged adapter's own 1 in the weights, the sum over a row's pairs is what was asked."""
    adapter = canonical(scales.items())
    merged = data.draw(st.sampled_from([None, "merged\0", *scales]))
    total = dict(row_pairs(adapter, merged))
    assert len(total) <= MOST + 1 and all(total.values())
    assert total.keys() <= adapters_in([adapter], merged)
    if merged is not None:
        total[merged] = total.get(merged, 0.0) + 1
    for name in total.keys() | scales.keys():
        assert total.get(name, 0.0) == pytest.approx(scales.get(name, 0.0), abs=1e-12)


def test_the_text_is_json_for_any_name() -> None:
    assert json.loads(written({'a"b': 0.5, "ü": 2})) == {'a"b': 0.5, "ü": 2}
