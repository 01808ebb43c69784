"""What goes wrong while a request is read is the request's fault, whatever SGLang makes of it.

SGLang refuses with ``ValueError`` what it foresees. Its schemas look into values before their types are checked, its
routes turn bodies into prompts, and its processors into ids and pixels, and what they do not foresee ends as a 500.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vlora_sgl.errors import RequestError, VLoraError

logger = logging.getLogger(__name__)

UNFORESEEN = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RecursionError)
"""What a reader that trusts its input raises; memory, files and devices are not the request's fault."""
MEDIA = "An exception occurred while loading"
"""How SGLang's error begins where a video or a sound cannot be opened."""
READERS = frozenset({"_convert_to_internal_request", "_convert_to_chat_completion_request", "_process_messages"})
"""SGLang's functions that turn a body into a prompt."""
LINE = 300


@contextmanager
def refusing_what_cannot_be_read() -> Iterator[None]:
    """Around a request's tokenization.

    Raises:
        RequestError: it ended with one of ``UNFORESEEN``, or with a video or sound that cannot be opened; the log says
            where.
    """
    try:
        yield
    except VLoraError:
        raise
    except (*UNFORESEEN, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, UNFORESEEN) and not str(error).startswith(MEDIA):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        logger.warning("a request cannot be read: %s (%s:%s)", in_line(error), where.filename, where.lineno)
        raise RequestError(f"the prompt and what came with it cannot be read: {in_line(error)}") from None


def is_of_the_request(error: BaseException | None) -> bool:
    """Whether an exception that reached a route is the client's fault: a refusal, or raised while a body was read."""
    if isinstance(error, ValueError):
        return True
    return isinstance(error, UNFORESEEN) and any(
        frame.f_code.co_name in READERS or frame.f_globals.get("__name__", "").startswith("pydantic.")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def in_line(error: BaseException) -> str:
    """An error in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LINE]
