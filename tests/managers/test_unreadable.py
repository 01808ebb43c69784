"""What SGLang's readers make of a request that they did not expect is a refusal; other failures stay what they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from vlora_sgl.errors import ImageError, RequestError, UnknownAdapterError
from vlora_sgl.managers.unreadable import MEDIA, UNFORESEEN, is_of_the_request, refusing_what_cannot_be_read


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


def test_an_error_raised_while_a_body_is_read_is_the_requests_and_another_is_not() -> None:
    class Schema(BaseModel):
        value: int

        @model_validator(mode="before")
        @classmethod
        def look(cls, values: Any) -> Any:
            return values.get("value")  # as some of SGLang's do

    def caught(call: Callable[[], object]) -> Exception:
        try:
            call()
        except Exception as error:
            return error
        raise AssertionError

    def _convert_to_internal_request() -> None:
        raise TypeError("of the body")

    def elsewhere() -> None:
        raise TypeError("a fault of ours")

    assert is_of_the_request(caught(lambda: Schema.model_validate([])))
    assert is_of_the_request(caught(_convert_to_internal_request))
    assert is_of_the_request(ValueError("x"))
    assert not is_of_the_request(caught(elsewhere)) and not is_of_the_request(OSError("x"))


def test_a_video_that_cannot_be_opened_is_a_refusal() -> None:
    with pytest.raises(RequestError, match="No module named"), refusing_what_cannot_be_read():
        raise RuntimeError(f"{MEDIA} VIDEO data at index 0: No module named 'decord'")
