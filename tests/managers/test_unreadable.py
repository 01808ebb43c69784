"""What SGLang's readers make of a request that they did not expect is a refusal; other failures stay what they are."""

from __future__ import annotations

import logging

import pytest

from vlora_sgl.errors import ImageError, RequestError, UnknownAdapterError
from vlora_sgl.managers.unreadable import UNFORESEEN, refusing_what_cannot_be_read


@pytest.mark.parametrize("kind", [*UNFORESEEN, KeyError, IndexError, ZeroDivisionError])
def test_what_a_trusting_reader_raises_is_a_refusal_in_one_line(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(RequestError) as caught, refusing_what_cannot_be_read():
        raise kind("a\nb" * 1000)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 and kind.__name__ in str(caught.value)
    (record,) = caplog.records
    assert record.exc_info is None and "test_unreadable.py" in record.getMessage()


@pytest.mark.parametrize(
    "error", [ImageError("x"), UnknownAdapterError("x", ()), OSError("x"), MemoryError(), RuntimeError("x")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refusing_what_cannot_be_read():
        raise error
    assert caught.value is error
