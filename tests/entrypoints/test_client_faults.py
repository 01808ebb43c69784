"""OpenAI's and Anthropic's routes: a fault of the request is a 4xx wherever it is found, one of ours stays a 500."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import HTTPException

from vlora_sgl.entrypoints.client_faults import anthropic_error, openai_error


def _process_messages(error: Exception) -> None:
    raise error


def elsewhere(error: Exception) -> None:
    raise error


def said(*args: Any) -> tuple[Any, ...]:
    """What SGLang's function would be called with, less ``self``."""
    return args[1:]


CASES = [
    pytest.param(_process_messages, TypeError("x"), 400, id="of the body"),
    pytest.param(elsewhere, ValueError("x"), 400, id="a refusal"),
    pytest.param(elsewhere, TypeError("x"), 500, id="ours"),
    pytest.param(elsewhere, MemoryError("x"), 500, id="of the machine"),
]


@pytest.mark.parametrize(("raising", "error", "status"), CASES)
def test_whose_fault_it_is_decides_the_status(raising: Any, error: Exception, status: int) -> None:
    try:
        raising(error)
    except BaseException:
        assert openai_error(said, None, "Internal server error", "InternalServerError", 500)[2] == status
        assert anthropic_error(said, None, 500, "api_error", "Internal server error", "X")[0] == status


def test_anthropics_routes_keep_a_status_that_was_found() -> None:
    for status, kind in ((404, "not_found_error"), (400, "invalid_request_error"), (503, "api_error")):
        try:
            raise HTTPException(status, "why")
        except HTTPException:
            assert anthropic_error(said, None, 500, "api_error", "Internal server error", "X") == (status, kind, "why")
    assert anthropic_error(said, None, 500, "api_error", "x", None) == (500, "api_error", "x", None)
