"""The status of what went wrong in OpenAI's and Anthropic's routes: 400 where it is the request's fault.

SGLang catches every exception there; what it does not foresee is a 500, and Anthropic's routes forget refusals too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException

from vlora_sgl.managers.unreadable import in_line, is_of_the_request

INTERNAL = 500
ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def openai_error(
    original: Callable[..., Any],
    self: Any,
    message: str,
    err_type: str = "BadRequestError",
    status_code: int = 400,
    param: str | None = None,
) -> Any:
    """Wraps ``OpenAIServingBase.create_error_response``, which is called where the exception is caught."""
    error = sys.exc_info()[1]
    if status_code == INTERNAL and error is not None and is_of_the_request(error):
        return original(self, f"the request cannot be read: {in_line(error)}", "BadRequest", 400, param)
    return original(self, message, err_type, status_code, param)


def anthropic_error(
    original: Callable[..., Any],
    self: Any,
    status_code: int,
    error_type: str,
    message: str,
    exception_name: str | None = None,
) -> Any:
    """Wraps ``AnthropicServing._error_response``, which is called where the exception is caught."""
    error = sys.exc_info()[1]
    if status_code != INTERNAL or error is None:
        return original(self, status_code, error_type, message, exception_name)
    if isinstance(error, HTTPException):
        kind = ANTHROPIC.get(
            error.status_code, "api_error" if error.status_code >= INTERNAL else "invalid_request_error"
        )
        return original(self, error.status_code, kind, str(error.detail))
    if is_of_the_request(error):
        return original(self, 400, "invalid_request_error", in_line(error))
    return original(self, status_code, error_type, message, exception_name)
